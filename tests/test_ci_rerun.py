"""The commands of a comment, run as the handler wrote them and judged by what they executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci.comment_parse import parse
from ci.comment_plan import Planner
from ci.comment_rights import TABLE, read_table
from ci.comment_tree import tree_in
from ci.register import register_cpu_ci
from ci.rerun import rerun_plan
from ci.runners import read
from harness.cli import main
from harness.usage import UserError
from tests.test_ci_plan import DAY

register_cpu_ci(est_time=25, stage="commit")

CPU = '["ubuntu-latest"]'
HEAD = "register_cpu_ci = lambda **_: None\nregister_cpu_ci(est_time=1, stage='commit', min_tests=2)\n"
GUARD = "\nif __name__ == '__main__':\n    unittest.main()\n"
SCRIPT = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): ...\n    def test_b(self): ...\n" + GUARD


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(f"{HEAD}def test_a(): ...\ndef test_b(): ...\n")
    (tmp_path / "tests" / "test_b.py").write_text(HEAD + SCRIPT)
    (tmp_path / "tests" / "test_c.py").write_text(f"{HEAD}import pytest\ndef test_c(): pytest.skip('later')\n")
    (tmp_path / "tests" / "test_none.py").write_text("def test_d(): ...\n")
    return tmp_path


def handled(tree: Path, comment: str) -> list[list[str]]:
    """The command lines that the handler makes of a comment."""
    table = read_table(TABLE.read_text())
    plan = Planner(tree_in(tree, table.folders), read(), table, DAY).plan(parse(comment).commands)
    assert [] == plan.refusals
    return [command for job in plan.dispatches for command in job.commands]


def test_as_the_handler_writes(tree: Path) -> None:
    """Whole files keep the floor of their registration, parts of files have none; the arguments are the handler's."""
    lines = handled(tree, "/rerun-test test_a.py::test_a test_b.py test_c.py")
    lines += handled(tree, "/rerun-test test_a.py test_b.py::T.test_a")
    plan = rerun_plan(json.dumps(lines), CPU, tree, read())
    assert [
        ("tests/test_a.py::test_a", ("-x",), False, 1),
        ("tests/test_c.py", ("-x",), False, 2),
        ("tests/test_b.py", ("-f",), True, 2),
        ("tests/test_a.py", ("-x",), False, 2),
        ("tests/test_b.py", ("T.test_a", "-f"), True, 1),
    ] == [
        (made.target, made.arguments, made.registration.is_script, made.registration.min_tests)
        for made in plan.parts[0]
    ]


def test_run(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All commands are run; one whose tests were all skipped fails, and so does the whole."""
    lines = handled(tree, "/rerun-test test_a.py::test_a test_b.py::T.test_b test_c.py")
    out = str(tree / "out")
    assert 1 == main(
        ["ci", "rerun", "--labels", CPU, "--commands", json.dumps(lines), "--root", str(tree), "--out", out]
    )
    results = [json.loads(line) for line in (tree / "out" / "results.jsonl").read_text().splitlines()]
    assert [
        ("tests/test_a.py", "pass", 1),
        ("tests/test_b.py", "pass", 1),
        ("tests/test_c.py", "vacuous", 0),
    ] == sorted(
        (line["file"], line["verdict"], line["attempts"][0]["counts"]["executed"])
        for line in results
        if line["kind"] == "file"
    )
    assert "1 vacuous" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["python3", "-c", "print(1)"], "expected arguments of"),
        (["python3", "-c", "evil", "-f"], "expected python3 -m pytest -x FILE"),
        (["bash", "tests/test_a.py", "-f"], "expected python3 -m pytest -x FILE"),
        (["python3", "-m", "pytest", "-x", "tests/test_a.py", "tests/test_b.py"], "expected python3 -m pytest"),
        (["python3", "-m", "pytest", "-x", "../tests/test_a.py"], "no file below"),
        (["python3", "-m", "pytest", "-x", "/etc/hosts"], "no file below"),
        (["python3", "-m", "pytest", "-x", "tests/test_z.py"], "no file below"),
        (["python3", "-m", "pytest", "-x", "tests/test_none.py"], "not registered on ubuntu-sglang"),
        ("python3", "expected arguments of"),
    ],
)
def test_refused(tree: Path, command: object, says: str) -> None:
    """What the handler does not write is not run."""
    with pytest.raises(UserError) as caught:
        rerun_plan(json.dumps([command]), CPU, tree, read())
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("commands", "labels", "says"),
    [("[]", CPU, "is empty"), ("{", CPU, "a list in JSON"), ("[]", '["gpu"]', "no runner has the labels")],
)
def test_wrong_lists(tree: Path, commands: str, labels: str, says: str) -> None:
    """Nothing to run, and a runner that is not there, are errors."""
    with pytest.raises(UserError, match=says):
        rerun_plan(commands, labels, tree, read())


def test_runner_of_the_files(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several runners with the same labels it is that of the files, and its install script is told."""
    head = "register_cpu_ci = lambda **_: None\n"
    other = "register_cpu_ci(est_time=1, stage='commit', runner='ubuntu-sglang')\n"
    (tree / "tests" / "test_other.py").write_text(f"{head}{other}def test_a(): ...\n")
    for name, script in (("test_a", ""), ("test_other", "ci/install_sglang.sh")):
        words = ["--commands", json.dumps(handled(tree, f"/rerun-test {name}.py")), "--root", str(tree), "--install"]
        assert 0 == main(["ci", "rerun", "--labels", CPU, *words])
        assert f"{script}\n" == capsys.readouterr().out
    both = handled(tree, "/rerun-test test_a.py") + handled(tree, "/rerun-test test_other.py")
    with pytest.raises(UserError, match="not registered on ubuntu-sglang"):
        rerun_plan(json.dumps(both), CPU, tree, read())

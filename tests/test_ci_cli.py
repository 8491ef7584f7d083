"""`kvshard ci`: plan, run and lint from the command line, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import cli as ci_cli
from ci.leases import lease
from ci.register import register_cpu_ci
from harness.cli import main
from tests.test_ci_leases import Fake

register_cpu_ci(est_time=30, stage="commit")

Tree = Callable[..., list[str]]
RUNNERS = """
[runner.ubuntu-latest]
labels = ["ubuntu-latest"]
[runner.two]
labels = ["two"]
gpu = "H100"
gpus = 2
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes test files, each with this registration, and gives the options that name the tree."""

    def write(call: str, **texts: str) -> list[str]:
        (tmp_path / "tests").mkdir()
        (tmp_path / "runners.toml").write_text(RUNNERS)
        head = "register_cpu_ci = register_gpu_ci = lambda **_: None\n"
        for name, text in texts.items():
            (tmp_path / "tests" / f"{name}.py").write_text(f"{head}{call}\n{text}\n")
        return ["--root", str(tmp_path), "--runners", str(tmp_path / "runners.toml")]

    return write


CPU = "register_cpu_ci(est_time=700, stage='commit')"
COMMIT = ["--stage", "commit", "--runner", "ubuntu-latest"]


def test_plan_as_matrix(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    """`ci plan --matrix` is one line that a workflow takes as it is."""
    options = tree(CPU, test_a="", test_b="")
    assert 0 == main(["ci", "plan", *options, *COMMIT, "--matrix"])
    (line,) = capsys.readouterr().out.splitlines()
    assert [("1/2", 1), ("2/2", 1)] == [(job["part"], job["files"]) for job in json.loads(line)["include"]]


def test_plan_of_several_stages(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    """One matrix holds several stages, and with --gpu all runners with GPUs that have files in one of them."""
    other = "register_gpu_ci(est_time=1, stage='night', runner='two')"
    options = tree(f"register_cpu_ci(est_time=1, stage='commit')\n{other}", test_a="")
    on_cpu = ["--stage", "commit", "--runner", "ubuntu-latest"]
    for words, wanted in (
        (on_cpu, [("commit", "ubuntu-latest")]),
        (["--stage", "night", "--gpu"], [("night", "two")]),
    ):
        assert 0 == main(["ci", "plan", *options, *words, "--matrix"])
        assert wanted == [(job["stage"], job["runner"]) for job in json.loads(capsys.readouterr().out)["include"]]
    for words, says in (
        (["--stage", "commit", "--gpu"], "no file of stage commit is on a runner with GPUs"),
        ([*on_cpu, "--gpu"], "one of --runner and --gpu"),
        (["--stage", "commit"], "one of --runner and --gpu"),
    ):
        assert 3 == main(["ci", "plan", *options, *words])
        assert says in capsys.readouterr().err


def test_plan_for_people(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    """`ci plan` shows each part with its files, and --json the same."""
    options = tree(CPU, test_a="", test_b="")
    assert 0 == main(["ci", "plan", *options, *COMMIT, "--parts", "1"])
    out = capsys.readouterr().out
    assert out.startswith(
        "part 1/1: 1400 s, 2 files\n     700.0 s  tests/test_a.py\n     700.0 s  tests/test_b.py\nplan "
    )
    assert 0 == main(["ci", "plan", *options, *COMMIT, "--parts", "1", "--json"])
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert ["tests/test_a.py", "tests/test_b.py"] == [file["file"] for file in part["files"]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "--stage", "comit", "--runner", "ubuntu-latest"], "did you mean 'commit'?"),
        (["plan", "--stage", "commit", "--runner", "ubuntu"], "did you mean 'ubuntu-latest'?"),
        (["run", *COMMIT, "--part", "2/1"], "'2/1': expected I/N"),
        (["run", *COMMIT, "--jobs", "0"], "'0': expected 1 to 64"),
        (["run", *COMMIT, "--part", "1/3"], "3 parts; expected 1 to 2"),
        (["run", *COMMIT, "--part", "1/2", "--digest", "0"], "give the same tree"),
        (["lint", "--folder", "nowhere"], "no such folder"),
        (["lint", "--today", "tomorrow"], "expected a date"),
        (["plan", *COMMIT, "--timings", "none.json"], "give another file or none"),
        ([], "required"),
    ],
)
def test_wrong_usage(tree: Tree, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    """What cannot work is one line on stderr and code 3."""
    options = tree(CPU, test_a="", test_b="")
    assert 3 == main(["ci", *words[:1], *(options if words else []), *words[1:]])
    assert says in capsys.readouterr().err


def test_lint(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    """`ci lint` is 0 without and 1 with problems, which it lists."""
    options = tree("register_cpu_ci(est_time=1, stage='s', disabled='x https://x.y 2026-01-02')", test_a="")
    assert 0 == main(["ci", "lint", *options, "--today", "2026-01-01"])
    assert "0 problems, 1 registrations in 1 files\n" == capsys.readouterr().out
    assert 1 == main(["ci", "lint", *options, "--today", "2026-01-02"])
    assert capsys.readouterr().out.startswith("tests/test_a.py:2: disabled until 2026-01-02: x")


def test_run(tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ci run` runs its part only, with the digest that `ci plan` told, and is 0 or 1."""
    options = tree(CPU, test_a="def test(): ...", test_b="def test(): assert 0")
    assert 0 == main(["ci", "plan", *options, *COMMIT, "--json"])
    digest = json.loads(capsys.readouterr().out)["digest"]
    rest = [*options, *COMMIT, "--digest", digest, "--out", str(tmp_path / "out")]
    assert 0 == main(["ci", "run", *rest, "--part", "1/2"])
    assert "part 1/2: 1 pass; results in" in capsys.readouterr().out
    assert 1 == main(["ci", "run", *rest, "--part", "2/2"])
    assert "part 2/2: 1 fail; results in" in capsys.readouterr().out


def test_nothing_to_run(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage without a file to run is no pass: code 2."""
    options = tree(f"{CPU[:-1]}, nightly=True)", test_a="def test(): ...")
    assert 2 == main(["ci", "run", *options, *COMMIT])
    assert "no file to run" in capsys.readouterr().out


def test_run_on_gpus(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part on a GPU runner leases its GPUs: tests see those, and nobody else gets them meanwhile."""
    text = "import os\ndef test(): assert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-b,GPU-c'"
    options = tree("register_gpu_ci(est_time=1, stage='commit', runner='two')", test_a=text)
    monkeypatch.setattr(ci_cli, "NvmlProbe", lambda _: Fake())
    locks = tmp_path / "locks"
    locks.mkdir()
    rest = [
        *options,
        "--stage",
        "commit",
        "--runner",
        "two",
        "--out",
        str(tmp_path / "out"),
        "--lease-folder",
        str(locks),
    ]
    assert 3 == main(["ci", "run", *rest, "--jobs", "2"])  # they would share the GPUs
    assert 3 == main(["ci", "run", *rest, "--together", "60"])
    with lease(1, Fake(), "another", wait_seconds=0, folder=locks):
        assert 0 == main(["ci", "run", *rest])
    with lease(3, Fake(), "another", wait_seconds=0, folder=locks):
        assert 3 == main(["ci", "run", *rest, "--lease-wait", "0.1"])
    lease(4, Fake(), "another", wait_seconds=0, folder=locks).close()


def test_gpus_that_stay_busy(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPUs whose memory is not free are not given to tests."""
    options = tree("register_gpu_ci(est_time=1, stage='commit', runner='two')", test_a="def test(): ...")
    monkeypatch.setattr(ci_cli, "NvmlProbe", lambda _: Fake(used=[9 << 30]))
    rest = ["--out", str(tmp_path / "out"), "--lease-folder", str(tmp_path), "--lease-wait", "0.1"]
    assert 3 == main(["ci", "run", *options, "--stage", "commit", "--runner", "two", *rest])
    assert "GPU-a has 9.0 GiB in use" in capsys.readouterr().err


def test_memory_that_is_not_given_back(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPUs whose memory is still in use after the last file are an error, though all tests passed."""
    options = tree("register_gpu_ci(est_time=1, stage='commit', runner='two')", test_a="def test(): ...")
    monkeypatch.setattr(ci_cli, "NvmlProbe", lambda _: Fake(used=[0, 0, 9 << 30]))  # both GPUs, then the first again
    rest = ["--out", str(tmp_path / "out"), "--lease-folder", str(tmp_path), "--lease-wait", "0.1"]
    assert 3 == main(["ci", "run", *options, "--stage", "commit", "--runner", "two", *rest])
    told = capsys.readouterr()
    assert "part 1/1: 1 pass; results in" in told.out
    assert "GPU-a has 9.0 GiB in use" in told.err
    lease(4, Fake(), "another", wait_seconds=0, folder=tmp_path).close()


def test_this_project() -> None:
    """Every test file of this project is registered without a problem, and its stages can be planned."""
    root = ["--root", str(Path(__file__).parent.parent)]
    assert 0 == main(["ci", "lint", *root, "--require"])
    assert 0 == main(["ci", "plan", *root, *COMMIT, "--runner", "ubuntu-sglang"])
    for stage in ("cases", "servers", "accuracy"):
        assert 0 == main(["ci", "plan", *root, "--stage", stage, "--runner", "ubuntu-latest"])
    assert 0 == main(["ci", "plan", *root, "--stage", "commit", "--gpu"])


@pytest.mark.parametrize("command", ["plan", "run", "rerun", "lint"])
def test_help_tells_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help of each command tells its exit codes."""
    assert 0 == main(["ci", command, "--help"])
    assert "exit codes: 0 " in " ".join(capsys.readouterr().out.split())

"""Parts of plans are run for real: what hangs, dies, forks, hides or runs nothing is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ci.plan import Plan, PlanError, plan
from ci.register import register_cpu_ci
from ci.registry import scan
from ci.result import Verdict
from ci.run import EXIT_FAILED, EXIT_PASSED, Options, run_part
from ci.runners import Runner
from tests.launch_rig import environment

register_cpu_ci(est_time=120, stage="commit")

ROOT = Path(__file__).parent.parent
RUNNER = Runner(name="ubuntu-latest", labels=("ubuntu-latest",))
GUARD = "\nif __name__ == '__main__':\n    {}\n"
UNIT = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        {}\n"
# fails the first time in a folder
ONCE = """
from pathlib import Path
def test_once():
    mark = Path("mark")
    is_second, _ = mark.exists(), mark.touch()
    assert is_second
"""


class Rig:
    """A repository of test files, and what running them came to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.said: list[str] = []

    def write(self, name: str, text: str, register: str = "", est_time: float = 1) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        call = f"register_cpu_ci(est_time={est_time}, stage='commit'{register})"
        file.write_text(f"register_cpu_ci = lambda **_: None\n{call}\n{text}")

    def plan(self) -> Plan:
        return plan(
            scan(self.folder, ["tests", *(["suites"] if (self.folder / "suites").is_dir() else [])]), "commit", RUNNER
        )

    def run(self, **options: Any) -> int:
        bare = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **options.pop("environment", {})}  # pytest is up sooner
        base = Options(root=self.folder, out=self.out, say=self.said.append, commit="abc", environment=bare)
        made = replace(base, **options)
        return run_part(self.plan(), 1, made)

    def lines(self, kind: str = "file", name: str = "results") -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (self.out / f"{name}.jsonl").read_text().splitlines()]
        return [line for line in found if line.get("kind", kind) == kind]

    def only(self, text: str, register: str = "", **options: Any) -> tuple[str, str, dict[str, int]]:
        """Verdict, reason and counts of the one file with this text."""
        self.write("tests/test_a.py", text, register)
        self.run(**options)
        line = self.lines()[-1]
        return line["verdict"], line["reason"], line["attempts"][-1]["counts"]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def wait_for(is_so: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_pytest_file(rig: Rig) -> None:
    """Outcomes of a pytest file are counted by test."""
    text = """
import pytest
def test_a(): ...
@pytest.mark.parametrize("x", [1, 2])
def test_b(x): ...
@pytest.mark.skip(reason="later")
def test_c(): ...
@pytest.mark.xfail
def test_d(): assert 0
@pytest.mark.xfail(run=False)
def test_e(): assert 0
"""
    verdict, reason, counts = rig.only(text)
    assert ("pass", "") == (verdict, reason)
    assert {"executed": 4, "passed": 3, "skipped": 2, "xfailed": 1} == {name: n for name, n in counts.items() if n}


@pytest.mark.parametrize(
    ("text", "verdict", "reason"),
    [
        (UNIT.format("pass") + GUARD.format("unittest.main()"), "pass", ""),
        (UNIT.format("self.fail('no')") + GUARD.format("unittest.main()"), "fail", "failed: __main__.T.test_a"),
        (UNIT.format("self.skipTest('x')") + GUARD.format("unittest.main()"), "vacuous", "all skipped: 1 tests (x)"),
        (
            UNIT.format("self.fail('no')") + GUARD.format("unittest.main(exit=False)"),
            "fail",
            "though its exit code is 0",
        ),
        (UNIT.format("self.fail('no')") + GUARD.format("print('main')"), "vacuous", "import only"),
        ("import unittest" + GUARD.format("unittest.main()"), "vacuous", "import only"),
        ("import pytest\ndef test_a(): assert 0" + GUARD.format("pytest.main([__file__])"), "fail", "exit code is 0"),
        ("import pytest, sys\ndef test_a(): ..." + GUARD.format("sys.exit(pytest.main([__file__]))"), "pass", ""),
    ],
)
def test_scripts(rig: Rig, text: str, verdict: str, reason: str) -> None:
    """A file with a `__main__` guard runs as a script; its tests are counted in unittest and in pytest."""
    seen = rig.only(text)
    assert verdict == seen[0]
    assert reason in seen[1]


@pytest.mark.parametrize(
    ("text", "verdict", "reason"),
    [
        ("", "vacuous", "empty file"),
        ("import pytest\npytest.skip('no gpu', allow_module_level=True)", "vacuous", "all skipped: 1 tests (no gpu)"),
        ("import pytest\ndef test_a(): pytest.skip('no gpu')", "vacuous", "all skipped: 1 tests (no gpu)"),
        ("raise ValueError('no import')", "fail", "collection of tests/test_a.py"),
        ("import os\ndef test_a(): ...\ndef test_b(): os.kill(os.getpid(), 9)", "fail", "signal SIGKILL after 1 tests"),
    ],
)
def test_nothing_ran(rig: Rig, text: str, verdict: str, reason: str) -> None:
    """A file that ran nothing fails with the reason, and a death is told with what had passed."""
    seen = rig.only(text)
    assert verdict == seen[0]
    assert reason in seen[1]


def test_floor(rig: Rig) -> None:
    """A file that executes fewer tests than its registration asks for has not passed."""
    text = "import pytest\ndef test_a(): ...\ndef test_b(): pytest.skip('no gpu')"
    assert ("vacuous", 1) == ((seen := rig.only(text, ", min_tests=2"))[0], seen[2]["executed"])


@pytest.mark.parametrize(
    "text",
    [
        "import os\ndef test_a(): ...\ndef test_b(): os._exit(0)\ndef test_c(): assert 0",
        "import pytest\ndef test_a(): ...\ndef test_b(): pytest.exit('done', 0)\ndef test_c(): assert 0",
        f"import os\n{UNIT.format('pass')}    def test_b(self): os._exit(0){GUARD.format('unittest.main()')}",
    ],
)
def test_cut_short(rig: Rig, text: str) -> None:
    """A process that ends itself with code 0 before the last test has not passed, though no test failed."""
    seen = rig.only(text)
    assert ("fail", 1) == (seen[0], seen[2]["passed"])
    assert seen[1].startswith("cut short after 1 tests, with exit code 0")


def test_deselected(rig: Rig) -> None:
    """A file of which an option leaves nothing has not passed."""
    seen = rig.only("def test_a(): ...", environment={"PYTEST_ADDOPTS": "-k nothing"})
    assert ("vacuous", "all deselected: 1 tests") == (seen[0], seen[1].partition(";")[0])


def test_timeout_ends_the_family(rig: Rig) -> None:
    """A file over its time is ended with the processes that it started, sessions of their own too; stacks are shown."""
    sleep = f"[{sys.executable!r}, '-c', 'import time; time.sleep(100)', {str(rig.folder)!r}]"
    starts = f"    subprocess.Popen({sleep}, start_new_session=True)\n    time.sleep(100)\n"
    text = f"import subprocess, time\ndef test_a(): ...\ndef test_slow():\n{starts}"
    verdict, reason, counts = rig.only(text, grace_seconds=10.0)
    assert ("timeout", 1) == (verdict, counts["passed"])
    assert reason.startswith("over its limit of 11 s (est_time 1 s) after 1 tests")
    assert [] == processes(rig.folder)
    assert "in test_slow" in (rig.out / "logs" / "tests.test_a.py-1.log").read_text()
    # the evidence has what both processes were doing, and what the GPUs held
    held = json.loads((rig.out / "evidence" / "tests.test_a.py" / "tests.test_a.py-1.gpus").read_text())
    assert (held[:9] == "not known") if isinstance(held, str) else all("uuid" in gpu for gpu in held)
    stacks = (rig.out / "evidence" / "tests.test_a.py" / "tests.test_a.py-1.stacks").read_text()
    assert ["process", "process"] == [line.split()[0] for line in stacks.splitlines() if line.startswith("process ")]
    assert ("test_slow" in stacks) == ("py-spy is not installed" not in stacks)


def processes(folder: Path) -> list[int]:
    """Living processes with the folder as an argument."""
    seen = [process.info | {"pid": process.pid} for process in psutil.process_iter(["cmdline", "status"])]
    living = [made for made in seen if made["status"] != psutil.STATUS_ZOMBIE]
    return [made["pid"] for made in living if str(folder) in (made["cmdline"] or [])]


def test_left_processes_are_ended(rig: Rig) -> None:
    """What a passed file leaves behind is ended and told."""
    sleep = f"[{sys.executable!r}, '-c', 'import time; time.sleep(100)', {str(rig.folder)!r}]"
    assert "pass" == rig.only(f"import subprocess\ndef test_a(): subprocess.Popen({sleep})")[0]
    assert [] == processes(rig.folder)
    assert 1 == rig.lines()[0]["attempts"][0]["ended"]


def test_fail_fast_and_continue(rig: Rig) -> None:
    """The first failed file ends the part, and the rest is told as not run; with `keep_going` all are run."""
    rig.write("tests/test_a.py", "def test(): assert 0", est_time=9)
    rig.write("tests/test_b.py", "def test(): ...")
    assert EXIT_FAILED == rig.run()
    assert (["test_a.py"], [["tests/test_b.py"]]) == (names(rig), [line["not_run"] for line in rig.lines("end")])
    (rig.out / "results.jsonl").unlink()
    assert EXIT_FAILED == rig.run(keep_going=True)
    assert (["test_a.py", "test_b.py"], [[]]) == (names(rig), [line["not_run"] for line in rig.lines("end")])


def names(rig: Rig) -> list[str]:
    return [Path(line["file"]).name for line in rig.lines()]


def test_flaky(rig: Rig) -> None:
    """A pass on a retry is `flaky`, passes the run, and is in the ledger; both attempts are in the results."""
    rig.write("tests/test_a.py", ONCE)
    assert EXIT_PASSED == rig.run(retries=1)
    (line,) = rig.lines()
    assert ("flaky", ["fail", "pass"]) == (line["verdict"], [made["verdict"] for made in line["attempts"]])
    (flake,) = rig.lines(name="flakes")
    assert ("tests/test_a.py::test_once", "abc", ["fail", "pass"]) == (
        flake["test"],
        flake["commit"],
        flake["outcomes"],
    )


def test_no_retry_unless_asked(rig: Rig) -> None:
    """Without retries the first failure counts."""
    assert "fail" == rig.only(ONCE)[0]


@pytest.mark.parametrize(("name", "register"), [("tests/test_a.py", ", gate=True"), ("suites/accuracy/test_a.py", "")])
def test_gates_are_never_retried(rig: Rig, name: str, register: str) -> None:
    """A gate has one attempt, whatever is asked for."""
    (rig.folder / "tests").mkdir()
    rig.write(name, ONCE, register)
    assert EXIT_FAILED == rig.run(retries=3)
    (line,) = rig.lines()
    assert ("fail", 1, True) == (line["verdict"], len(line["attempts"]), line["gate"])


def test_vacuous_is_not_retried(rig: Rig) -> None:
    """What ran nothing would run nothing again."""
    assert Verdict.VACUOUS == rig.only("", retries=3)[0]
    assert 1 == len(rig.lines()[0]["attempts"])


def test_results_survive_a_kill(rig: Rig) -> None:
    """After SIGKILL the results have every finished file and no end, and no process is left."""
    rig.write("tests/test_a.py", "def test(): ...", est_time=9)
    rig.write(
        "tests/test_b.py",
        f"import time\ndef test():\n    open('started', 'w').write({str(rig.folder)!r})\n    time.sleep(100)",
    )
    words = ["--stage", "commit", "--runner", "ubuntu-latest", "--root", str(rig.folder), "--out", str(rig.out)]
    command = [sys.executable, "-m", "harness.cli", "ci", "run", *words]
    process = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for((rig.folder / "started").exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (["test_a.py"], []) == (names(rig), rig.lines("end"))
    wait_for(lambda: not processes(rig.folder))


def test_last_lines(rig: Rig) -> None:
    """The last lines tell what was left out, why tests were skipped, and how many there were of each outcome."""
    text = "import pytest\ndef test_a(): ...\n@pytest.mark.xfail\ndef test_b(): assert 0\n"
    rig.write("tests/test_a.py", f"{text}@pytest.mark.skip(reason='no gpu')\ndef test_c(): ...\ndef test_d(): ...")
    rig.write("tests/test_b.py", text, ", nightly=True")
    assert EXIT_PASSED == rig.run(environment={"PYTEST_ADDOPTS": "-k 'not test_d'"})
    assert [
        "left out: nightly: tests/test_b.py",
        "skipped: no gpu: tests/test_a.py (1)",
        "tests: 1 passed, 0 failed, 1 skipped, 1 xfailed, 1 deselected, in 1 files",
    ] == rig.said[-3:]


def test_part_that_is_not(rig: Rig) -> None:
    """A part beyond the plan is an error, not an empty pass."""
    rig.write("tests/test_a.py", "def test(): ...")
    with pytest.raises(PlanError, match="part 2 of 1"):
        run_part(rig.plan(), 2, Options(root=rig.folder, out=rig.out))


def test_waiting_for_gpus_that_fails(rig: Rig) -> None:
    """When GPUs do not become free between files, what was done is told before the error."""
    rig.write("tests/test_a.py", "def test(): ...", est_time=9)
    rig.write("tests/test_b.py", "def test(): ...")
    calls: list[int] = []

    def busy() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise PlanError("GPU is busy")

    with pytest.raises(PlanError, match="GPU is busy"):
        rig.run(before_file=busy)
    assert ["test_a.py"] == names(rig)
    assert "1 not run, 1 pass" in rig.said[-2]
    assert "tests: 1 passed, 0 failed, 0 skipped, in 1 files" == rig.said[-1]


def test_environment_of_this_process_is_left_alone(rig: Rig) -> None:
    """The variables for the files are theirs alone."""
    before = dict(os.environ)
    text = "import os\ndef test(): assert os.environ['GPUS'] == '1'"
    assert "pass" == rig.only(text, environment={"GPUS": "1"})[0]
    assert before == dict(os.environ)

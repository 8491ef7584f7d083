"""A registered file that is started as `python FILE -f` runs its tests, and says how many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.plugin import plugin_arguments
from tests.launch_rig import environment

register_cpu_ci(est_time=40, stage="commit")

ROOT = Path(__file__).parent.parent
HEAD = "import pytest\nfrom ci.register import register_cpu_ci\nregister_cpu_ci(est_time=1, stage='commit'{})\n"
TESTS = "class TestA:\n    def test_a(self): ...\n    def test_b(self): assert 0\ndef test_c(): ...\n"


def start(folder: Path, text: str, *words: str, more: str = "") -> tuple[int, str]:
    """Exit code and last line."""
    file = folder / "test_x.py"
    file.write_text(HEAD.format(more) + text)
    bare = {**environment(), "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "test_x.py", *words]
    done = subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()[-1]


EMPTY = "0 tests ran: 0 passed, 0 failed, 0 skipped; empty file: it holds no test"
FAILED = "2 passed, 1 failed, 0 skipped; failed: test_x.py::TestA::test_b"
FAST = "1 passed, 1 failed, 0 skipped; failed: test_x.py::TestA::test_b"
FEW = "1 passed, 0 failed, 0 skipped; executed 1 tests; expected at least 2"
ONE = "1 tests ran: 1 passed, 0 failed, 0 skipped"
SKIPPED = "0 tests ran: 0 passed, 0 failed, 1 skipped; all skipped: 1 tests"
USAGE = "unknown option -k; expected CLASS or CLASS.METHOD, or -f; use python -m pytest for more"
NAME = "runner='a b'; expected a name of letters, digits, '.', '_' and '-'; correct it"


@pytest.mark.parametrize(
    ("text", "words", "more", "code", "told"),
    [
        (TESTS, "", "", 1, f"fail: test_x.py: 3 tests ran: {FAILED}"),
        (TESTS, "-f", "", 1, f"fail: test_x.py: 2 tests ran: {FAST}"),
        (TESTS, "TestA.test_a -f", ", min_tests=3", 0, f"pass: test_x.py: {ONE}"),
        (TESTS, "TestA.test_b TestA.test_a -f", "", 1, "fail: test_x.py: 1 tests ran: 0 passed, 1 failed, 0 skipped"),
        ("def test_a(): ...", "-f", "", 0, f"pass: test_x.py: {ONE}"),
        ("def test_a(): ...", "-f", ", min_tests=2", 1, f"vacuous: test_x.py: 1 tests ran: {FEW}"),
        ("", "-f", "", 1, f"vacuous: test_x.py: {EMPTY}"),
        ("def test_a(): pytest.skip('no gpu')", "-f", "", 1, f"vacuous: test_x.py: {SKIPPED}"),
        ("def test_a(): ...", "-k a", "", 3, f"test_x.py: {USAGE}"),
        ("", "-f", ", runner='a b'", 3, f"test_x.py:3: {NAME}"),
    ],
)
def test_started(tmp_path: Path, text: str, words: str, more: str, code: int, told: str) -> None:
    """The last line has the verdict and the counts, and 0 is the exit code only of a file that ran and passed."""
    seen = start(tmp_path, text, *words.split(), more=more)
    assert (code, told) == (seen[0], seen[1][: len(told)])


def test_own_guard(tmp_path: Path) -> None:
    """A file that has a guard runs by it, and not by its marker."""
    text = "if __name__ == '__main__':\n    import sys\n    print('the guard', sys.argv[1])"
    assert (0, "the guard -f") == start(tmp_path, text, "-f")


def test_own_file() -> None:
    """A file of this project's tests runs in that way."""
    command = [sys.executable, "tests/test_comment_parse.py", "-f"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    told = done.stdout.splitlines()[-1]
    assert (0, True) == (done.returncode, told.startswith("pass: ")), told


@pytest.mark.parametrize(
    ("engine", "code", "told"),
    [
        ("ref", 0, "pass: suites/invariants/test_misuse.py: 1 tests ran: 1 passed, 0 failed, 0 skipped"),
        ("", 1, "fail: suites/invariants/test_misuse.py: 1 tests ran: 0 passed, 1 failed, 0 skipped; failed: "),
    ],
)
def test_suite_file(engine: str, code: int, told: str) -> None:
    """A file of suites/ judges the engine that the environment names; where there is none it fails, and says so."""
    named = {"KVSHARD_ENGINE": engine} if engine else {}
    told_how = {**environment(), "PYTEST_ADDOPTS": " ".join([*plugin_arguments(), "--budget smoke"]), **named}
    command = [sys.executable, "suites/invariants/test_misuse.py", "-f"]
    done = subprocess.run(command, cwd=ROOT, env=told_how, capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1]
    assert (code, told) == (done.returncode, last[: len(told)])

"""The broken engines of CONTRIBUTING.md: each is caught as the page says, and its replay command works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.record import read
from harness.result import Failure
from harness.types import Verdict

register_cpu_ci(est_time=70, stage="commit")

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))


DOUBLE_FREE = """
from harness.adapters.ref import RefEngine
from kvshard_ref.allocator import PageAllocator

def engine():
    PageAllocator._check_owned = lambda self, pages: None
    free = PageAllocator.free
    PageAllocator.free = lambda self, pages: free(self, [*pages, *pages])
    return RefEngine()
"""


def kvshard(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *words],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_page_has_a_case_and_three_broken_engines() -> None:
    """A case of one's own, a leak, two owners mixed up, a claim that is not kept."""
    assert sorted(EXAMPLES) == ["leaky", "liar", "mixed_up", "test_capacity"]


def test_the_case_of_the_page_runs(tmp_path: Path) -> None:
    """The case passes on the reference from a file of its own, and fails on an engine that breaks its claim."""
    (tmp_path / "test_capacity.py").write_text(EXAMPLES["test_capacity"])
    words = ["--suite", "test_capacity.py", "--budget", "commit", "--jobs", "0", "--seed", "1"]
    right = kvshard(tmp_path, "run", "ref", *words)
    (tmp_path / "double.py").write_text(DOUBLE_FREE)
    wrong = kvshard(tmp_path, "run", "py:double.py:engine", *words)

    assert right.returncode == 0, right.stdout + right.stderr
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "No owner class has more free pages than its capacity." in wrong.stdout


@pytest.mark.parametrize(
    ("name", "cases", "code", "verdict"),
    [
        ("leaky", "conserved or baseline", 1, Verdict.FAIL),
        ("mixed_up", "every_row or warm", 1, Verdict.FAIL),
        ("liar", "reused or pressure", 3, Verdict.ERROR),
    ],
)
def test_broken_engines_fail_well(tmp_path: Path, name: str, cases: str, code: int, verdict: Verdict) -> None:
    """A counterexample of at most six ops with its five parts, the promised exit code, and a replay that reproduces."""
    (tmp_path / f"{name}.py").write_text(EXAMPLES[name])
    assert f"kvshard run py:{name}.py:engine`, exit code {code}" in PAGE

    words = ["run", f"py:{name}.py:engine", "--budget", "smoke", "-k", cases, "--jobs", "0", "--seed", "3"]
    run = kvshard(tmp_path, *words, "--record", "run.jsonl")

    assert run.returncode == code, run.stdout + run.stderr
    failures = [result for result in read(tmp_path / "run.jsonl").results if result.verdict is verdict]
    assert failures
    for result in failures:
        failure = result.failure
        assert isinstance(failure, Failure)
        assert 1 <= len(failure.ops) <= 6
        assert all((failure.claim, failure.seen, failure.expected, failure.why, failure.config))
        assert failure.claim in run.stdout
    (command,) = {result.failure.replay for result in failures[:1] if result.failure}
    again = kvshard(tmp_path, *shlex.split(command)[1:])
    assert again.returncode == code, again.stdout + again.stderr
    assert "reproduced" in again.stdout

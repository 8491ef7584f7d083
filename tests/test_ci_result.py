"""Verdicts come from counts of tests, never from an exit code alone; and how results are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.flakes import Flake, flakes
from ci.register import register_cpu_ci
from ci.result import Attempt, Counts, FileResult, Told, Verdict, judge, of_attempts, read_events, summed
from ci.summary import markdown, quoted_log, workflow_annotations, write_summary

register_cpu_ci(est_time=10, stage="commit")

CUT = "cut short after 1 tests, with exit code 0: what was to come never ran; look for os._exit and pytest.exit"
ACTIONS = {"GITHUB_ACTIONS": "true"}


def told(*outcomes: str, **repeated: int) -> Told:
    """Of one test for each outcome."""
    events = [{"outcome": o, "test": f"t{at}", "why": f"why {o}", "count": 1} for at, o in enumerate(outcomes)]
    repeated = {"left": 1, **repeated}
    more = [{"outcome": o, "test": "", "why": "", "count": n} for o, n in repeated.items() if n]
    return summed([*events, *more])


def attempt(verdict: Verdict, *failed: str, reason: str = "why") -> Attempt:
    counts = Counts(executed=3, failed=len(failed))
    return Attempt(
        verdict=verdict,
        reason="" if verdict is Verdict.PASS else reason,
        seconds=1.0,
        timeout_seconds=9.0,
        code=0,
        counts=counts,
        failed=failed,
        log="x.log",
    )


def result(*attempts: Attempt, file: str = "tests/test_a.py") -> FileResult:
    verdict, reason = of_attempts(attempts)
    return FileResult(
        file=file,
        stage="commit",
        runner="r",
        part="1/1",
        verdict=verdict,
        reason=reason,
        seconds=1.0,
        est_time=2.0,
        gate=False,
        line=7,
        commit="abc",
        started="now",
        attempts=attempts,
    )


def test_counts_are_of_tests() -> None:
    """A test is counted once, whatever its phases and subtests tell; a failure of any of them is a failure."""
    seen = [("passed", "a"), ("failed", "a"), ("passed", "b"), ("passed", "b"), ("rerun", "c"), ("passed", "c")]
    seen += [("skipped", "d"), ("skipped", "setUpClass (x.T)"), ("xfailed", "e")]
    made = summed({"outcome": outcome, "test": test, "why": "", "count": 1} for outcome, test in seen)
    assert Counts(executed=4, passed=2, failed=1, skipped=2, xfailed=1, rerun=1) == made.counts
    assert ("a",) == made.failed


def test_cut_off_events(tmp_path: Path) -> None:
    """The events of a process that was killed count up to the last whole line."""
    file = tmp_path / "events"
    file.write_text('{"outcome": "passed", "test": "a", "why": "", "count": 1}\n{"outcome": "fai')
    assert 1 == read_events(file).counts.passed
    assert 0 == read_events(tmp_path / "none").counts.executed


@pytest.mark.parametrize(
    ("seen", "code", "expected"),
    [
        (told("passed", "skipped"), 0, (Verdict.PASS, "")),
        (told("xfailed"), 0, (Verdict.PASS, "")),
        (told("passed", "failed"), 1, (Verdict.FAIL, "failed: t1 (why failed)")),
        (told("passed", "failed"), 0, (Verdict.FAIL, "failed: t1 (why failed), though its exit code is 0")),
        (told("passed"), 1, (Verdict.FAIL, "exit code 1 after 1 tests, none of which failed")),
        (told("passed"), -11, (Verdict.FAIL, "signal SIGSEGV after 1 tests, none of which failed")),
        (told(), 4, (Verdict.FAIL, "exit code 4 after 0 tests, none of which failed")),
        (told(), 5, (Verdict.VACUOUS, "empty file: it holds no test")),
        (told(), 0, (Verdict.VACUOUS, "empty file: it holds no test")),
        (told("skipped", "skipped"), 0, (Verdict.VACUOUS, "all skipped: 2 tests (why skipped)")),
        (told("skipped"), 5, (Verdict.VACUOUS, "all skipped: 1 tests (why skipped)")),
        (told("passed", left=0), 0, (Verdict.FAIL, CUT)),
        (told("passed", cut=1), 0, (Verdict.FAIL, CUT)),
        (told(deselected=3), 5, (Verdict.VACUOUS, "all deselected: 3 tests; look at -m and -k in PYTEST_ADDOPTS")),
    ],
)
def test_judge(seen: Told, code: int, expected: tuple[Verdict, str]) -> None:
    """The verdict follows from what was executed, with the reason."""
    assert expected == judge(seen, code, is_script=False, gate=False, min_tests=1)


def test_import_only() -> None:
    """A script that ends well and has run no test was only imported."""
    verdict, reason = judge(told(), 0, is_script=True, gate=False, min_tests=1)
    assert (Verdict.VACUOUS, "import only") == (verdict, reason.partition(":")[0])


def test_floor() -> None:
    """Fewer executed tests than the registration asks for are no pass; skipped ones are not executed."""
    seen = told("passed", "passed", "skipped")
    assert Verdict.PASS == judge(seen, 0, is_script=False, gate=False, min_tests=2)[0]
    assert Verdict.VACUOUS == judge(seen, 0, is_script=False, gate=False, min_tests=3)[0]


def test_reruns_within_the_file() -> None:
    """A plugin that runs tests again makes a pass flaky, and fails a gate."""
    events = [{"outcome": o, "test": "a", "why": "", "count": 1} for o in ("rerun", "passed", "left")]
    assert Verdict.FLAKY == judge(summed(events), 0, is_script=False, gate=False, min_tests=1)[0]
    assert Verdict.FAIL == judge(summed(events), 0, is_script=False, gate=True, min_tests=1)[0]


def test_flaky_is_a_verdict_of_its_own() -> None:
    """A pass after a failure is flaky and tells what failed; a failure after a failure is the last one."""
    assert (Verdict.FLAKY, "passed on attempt 2; before: fail, why") == of_attempts(
        [attempt(Verdict.FAIL, "a"), attempt(Verdict.PASS)]
    )
    assert (Verdict.TIMEOUT, "why") == of_attempts([attempt(Verdict.FAIL), attempt(Verdict.TIMEOUT)])
    assert (Verdict.PASS, "") == of_attempts([attempt(Verdict.PASS)])


def test_ledger() -> None:
    """The ledger has a line for each test that failed and passed, with the commit and all outcomes."""
    made = result(attempt(Verdict.FAIL, "a", "b"), attempt(Verdict.FAIL, "b"), attempt(Verdict.PASS))
    found = [(flake.test, flake.commit, flake.outcomes) for flake in flakes(made)]
    assert [("a", "abc", ("fail", "pass", "pass")), ("b", "abc", ("fail", "fail", "pass"))] == found
    assert [] == list(flakes(result(attempt(Verdict.FAIL, "a"))))


def test_ledger_of_a_file() -> None:
    """Where no test is known the ledger names the file."""
    (flake,) = flakes(result(attempt(Verdict.TIMEOUT), attempt(Verdict.PASS)))
    assert isinstance(flake, Flake)
    assert ("tests/test_a.py", ("timeout", "pass")) == (flake.test, flake.outcomes)


def test_annotations() -> None:
    """Failures are errors and flakes warnings, ten of each at most, escaped, and only in GitHub Actions."""
    bad = result(attempt(Verdict.FAIL, reason="50%\nno"), file="a,b:c.py")
    flaky = result(attempt(Verdict.FAIL), attempt(Verdict.PASS))
    lines = list(workflow_annotations([bad, flaky, result(attempt(Verdict.PASS))], ACTIONS))
    assert "::error file=a%2Cb%3Ac.py,line=7,title=fail%3A a%2Cb%3Ac.py::50%25%0Ano" == lines[0]
    assert lines[1].startswith("::warning file=tests/test_a.py,line=7,")
    assert 2 == len(lines)
    assert 10 == len(list(workflow_annotations([bad] * 30, ACTIONS)))
    assert [] == list(workflow_annotations([bad], {}))


def test_log_is_no_command() -> None:
    """What a test prints is not taken for a workflow command."""
    lines = quoted_log("log", "::add-mask::x", ACTIONS).splitlines()
    token = lines[1].removeprefix("::stop-commands::")
    assert ["::group::log", "::add-mask::x", f"::{token}::", "::endgroup::"] == [lines[0], *lines[2:]]
    assert len(token) >= 32
    assert "log\n::add-mask::x" == quoted_log("log", "::add-mask::x", {})


def test_summary(tmp_path: Path) -> None:
    """The step summary has failures first and what was not run, is appended to, and stays below 1 MiB."""
    target = tmp_path / "summary.md"
    target.write_text("before\n")
    good, bad = result(attempt(Verdict.PASS), file="good.py"), result(attempt(Verdict.FAIL, reason="a|b <x>"))
    environment = {"GITHUB_STEP_SUMMARY": str(target)}
    write_summary("commit", [good, bad], ["rest.py"], environment)
    text = target.read_text()
    assert text.startswith("before\n### commit: 1 of 3 files passed\n")
    assert ["| fail | tests/test\\_a.py | 3 | 1.0 | 2 | a\\|b &lt;x&gt; |"] == [
        x for x in text.splitlines() if x.startswith("| fail")
    ]
    assert text.index("| fail") < text.index("| pass") < text.index("| not run | rest.py")
    write_summary(
        "x", [result(attempt(Verdict.FAIL, reason="y" * 500), file=f"{n}.py") for n in range(3000)], [], environment
    )
    assert 1 << 20 == target.stat().st_size
    assert markdown("commit", [], []).startswith("### commit: 0 of 0")

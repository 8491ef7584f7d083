"""What a file of tests came to: counts from its events, a verdict with its reason, and the JSON line of a run."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.launch.processes import told

NO_TESTS_CODE = 5  # of pytest, and of unittest from Python 3.12 on
REASONS_SHOWN = 3
_EXECUTED = frozenset({"passed", "failed", "xfailed"})
_NOT_A_TEST = ("collection of ", "setUpClass (", "tearDownClass (", "setUpModule (", "tearDownModule (")


class Verdict(enum.StrEnum):
    """Of a file, or of one attempt at it."""

    PASS = "pass"
    FLAKY = "flaky"  # passed on a retry; a pass that is counted apart
    FAIL = "fail"
    TIMEOUT = "timeout"
    VACUOUS = "vacuous"  # ran nothing, or less than it must


PASSING = frozenset({Verdict.PASS, Verdict.FLAKY})


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Tests by outcome. A test is one however many times it was told of; a failure of any of its phases counts."""

    executed: int = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    xfailed: int = 0
    deselected: int = 0
    rerun: int = 0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The events of an attempt."""

    counts: Counts
    failed: tuple[str, ...] = ()  # ids, in order
    reasons: tuple[str, ...] = ()  # the first reasons of failures, else of skips
    skips: dict[str, int] = msgspec.field(default_factory=dict)  # reason -> tests
    is_begun: bool = False
    is_left: bool = False  # the process came to its end, not to an `os._exit` or `pytest.exit` in the middle
    seconds: float | None = None  # from the beginning of the file's tests to their end, if it was seen


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One process that ran the file."""

    verdict: Verdict
    reason: str
    seconds: float
    timeout_seconds: float
    code: int | None  # None: it was ended
    counts: Counts
    failed: tuple[str, ...]
    log: str
    skips: dict[str, int] = msgspec.field(default_factory=dict)  # reason -> tests
    ended: int = 0  # processes that it left behind, which were ended


class FileResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="file"):
    """A line of the results."""

    file: str
    stage: str
    runner: str
    part: str
    verdict: Verdict
    reason: str
    seconds: float  # of the last attempt
    est_time: float
    gate: bool
    line: int  # of the registration
    commit: str | None
    started: str
    attempts: tuple[Attempt, ...]
    evidence: str | None = None  # the folder with what is left of a failure


class RunStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="start"):
    """The first line: what is to be run. A file of it without a line of its own did not finish."""

    stage: str
    runner: str
    part: str
    digest: str
    commit: str | None
    started: str
    files: tuple[str, ...]


class RunEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The last line; a run without it was killed."""

    code: int
    not_run: tuple[str, ...]


def read_events(path: Path) -> Told:
    """The events of `ci.counted`."""
    return summed(_events(path))


def read_events_by_file(path: Path) -> dict[str, Told]:
    """The same of files that ran in one process, by file; "" stands for the process."""
    events: dict[str, list[Mapping[str, Any]]] = {}
    for event in _events(path):
        events.setdefault(event["test"].removeprefix(_NOT_A_TEST[0]).partition("::")[0], []).append(event)
    return {file: summed(theirs) for file, theirs in events.items()}


def _events(path: Path) -> list[Mapping[str, Any]]:
    """A last line that was cut off is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def summed(events: Iterable[Mapping[str, Any]]) -> Told:
    """Counts tests, not events."""
    outcomes: dict[str, set[str]] = {}
    whys: dict[str, list[str]] = {"failed": [], "skipped": []}
    why_skipped: dict[str, str] = {}
    deselected, is_begun, is_left, is_cut, seconds = 0, False, False, False, None
    for event in events:
        outcome, test = event["outcome"], event["test"]
        if outcome == "deselected":
            deselected += event["count"]
            continue
        if outcome in {"left", "cut"}:
            is_left, is_cut = is_left or outcome == "left", is_cut or outcome == "cut"
            continue
        if outcome in {"begun", "done"}:
            is_begun, seconds = True, event.get("seconds")
            continue
        if outcome == "skipped":
            why_skipped[test] = event["why"]
        outcomes.setdefault(test, set()).add(outcome)
        if event["why"] and outcome in whys and event["why"] not in whys[outcome]:
            whys[outcome].append(event["why"])
    failed = tuple(test for test, seen in outcomes.items() if "failed" in seen)
    tests = {test: seen for test, seen in outcomes.items() if not test.startswith(_NOT_A_TEST)}
    counts = Counts(
        executed=sum(1 for seen in tests.values() if seen & _EXECUTED),
        passed=sum(1 for seen in tests.values() if "passed" in seen and "failed" not in seen),
        failed=len(failed),
        skipped=sum(1 for seen in outcomes.values() if "skipped" in seen and not seen & _EXECUTED),
        xfailed=sum(1 for seen in tests.values() if "xfailed" in seen),
        deselected=deselected,
        rerun=sum(1 for seen in tests.values() if "rerun" in seen),
    )
    skips = Counter(why for test, why in why_skipped.items() if not outcomes[test] & _EXECUTED)
    reasons = tuple((whys["failed"] or whys["skipped"])[:REASONS_SHOWN])
    return Told(
        counts=counts,
        failed=failed,
        reasons=reasons,
        skips=dict(skips),
        is_begun=is_begun,
        is_left=is_left and not is_cut,
        seconds=seconds,
    )


def judge(told_of: Told, code: int, *, is_script: bool, gate: bool, min_tests: int) -> tuple[Verdict, str]:
    """The verdict of a process that ended by itself, and why. Exit code 0 alone proves nothing."""
    counts = told_of.counts
    if counts.failed:
        names = ", ".join(told_of.failed[:REASONS_SHOWN]) + (", .." if counts.failed > REASONS_SHOWN else "")
        hidden = ", though its exit code is 0" if code == 0 else ""
        why = f" ({'; '.join(told_of.reasons)})" if told_of.reasons else ""
        return Verdict.FAIL, f"failed: {names}{why}{hidden}"
    ran = f"{counts.executed} tests"
    if code not in (0, NO_TESTS_CODE) or (code == NO_TESTS_CODE and counts.executed):
        why = f"{told(code)} after {ran}, none of which failed"
    elif not told_of.is_left:
        why = f"cut short after {ran}, with {told(code)}: what was to come never ran; look for os._exit and pytest.exit"
    else:
        return _ended_well(told_of, is_script=is_script, gate=gate, min_tests=min_tests)
    return Verdict.FAIL, why


def _ended_well(told_of: Told, *, is_script: bool, gate: bool, min_tests: int) -> tuple[Verdict, str]:
    """The verdict of one in which no test failed."""
    counts = told_of.counts
    if counts.executed < min_tests:
        return Verdict.VACUOUS, _vacuous(told_of, is_script=is_script, min_tests=min_tests)
    if not counts.rerun:
        return Verdict.PASS, ""
    if gate:
        return Verdict.FAIL, f"{counts.rerun} tests of a gate were run again; expected one attempt; turn reruns off"
    return Verdict.FLAKY, f"{counts.rerun} tests passed only when run again within the file"


def _vacuous(told_of: Told, *, is_script: bool, min_tests: int) -> str:
    """Why too little ran."""
    counts = told_of.counts
    if counts.executed:
        return f"executed {counts.executed} tests; expected at least {min_tests} (min_tests of its registration)"
    if counts.skipped:
        return f"all skipped: {counts.skipped} tests ({'; '.join(told_of.reasons) or 'no reason given'})"
    if counts.deselected:
        return f"all deselected: {counts.deselected} tests; look at -m and -k in PYTEST_ADDOPTS"
    if is_script:
        return "import only: its __main__ guard ran no test; it must call unittest.main() or sys.exit(pytest.main(..))"
    return "empty file: it holds no test"


def of_attempts(attempts: Sequence[Attempt]) -> tuple[Verdict, str]:
    """The verdict of a file: that of its last attempt, but a pass after a failure is flaky."""
    last = attempts[-1]
    if len(attempts) > 1 and last.verdict in PASSING:
        return Verdict.FLAKY, f"passed on attempt {len(attempts)}; before: {attempts[0].verdict}, {attempts[0].reason}"
    return last.verdict, last.reason

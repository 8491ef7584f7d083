"""Faults in servers of their own: brought up with them, judged by the cases over HTTP alone, taken down, logs read."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import msgspec

from ci.e2e_faults_table import Entry, Table, topology
from harness.case import Case
from harness.connect import close, connect
from harness.launch.control import Control
from harness.launch.deployment import Deployment
from harness.launch.processes import STARTED_AGAIN, LaunchError
from harness.result import CaseResult
from harness.trial import BUDGETS, Trial
from harness.types import Verdict
from harness.usage import UserError

BUDGET = replace(BUDGETS["smoke"], shrink_seconds=0.0)  # that it fails is asked, not how little is needed
PLANTED = re.compile(r"^fault (?P<id>\S+) is planted$", re.MULTILINE)
RUN = re.compile(r"^fault (?P<id>\S+) was run (?P<times>\d+) times", re.MULTILINE)


class Outcome(StrEnum):
    """What became of a fault."""

    CAUGHT = "caught"  # a case failed, and what the fault changes was run
    HIDDEN = "survived"  # it was run, and no case failed
    IDLE = "not exercised"  # what it changes was never run
    ERROR = "error"  # the harness failed, or a case failed without the fault being run


WANTED = {"caught": Outcome.CAUGHT, "hidden": Outcome.HIDDEN}  # by what a table expects


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one entry. `seen` and `expected` are of the first case that failed."""

    id: str
    outcome: Outcome
    runs: int  # how often all ranks together ran what it changes
    cases: tuple[str, ...] = ()  # that failed
    passed: int = 0
    seen: str = ""
    expected: str = ""
    why: str = ""  # of an error, or a case that neither passed nor failed
    seconds: float = 0.0
    beside: int = 0  # other faults in the same servers


def fates(table: Table, entries: Sequence[Entry], cases: Sequence[Case], log_dir: Path, seed: int) -> list[Fate]:
    """Plants the faults in one set of servers and judges. First the cases named, then all others until one fails."""
    started, results, ended = time.monotonic(), list[CaseResult](), ""
    named = {name for entry in entries for name in entry.cases}
    try:
        with Deployment(topology(table, entries), log_dir) as up, Control(up):
            address = up.filled([table.address])[0]
            engine = connect(address)
            try:
                for made in sorted(cases, key=lambda made: made.id not in named):
                    if made.id not in named and _failing(results):
                        break
                    up.check()
                    results.append(Trial(made, engine, address, BUDGET, seed).run()[0])
            finally:
                close(engine)
    except (LaunchError, UserError) as error:
        ended = str(error).splitlines()[0]
    seconds = round(time.monotonic() - started, 1)
    found = []
    for entry in entries:
        paths = [log_dir / f"{name}.log" for name in entry.workers]
        logs = [path.read_text(errors="replace") for path in paths if path.exists()]  # none of what never started
        its = judged(entry.id, results, logs, ended)
        found.append(msgspec.structs.replace(its, seconds=seconds, beside=len(entries) - 1))
    return found


def judged(name: str, results: Sequence[CaseResult], logs: Sequence[str], ended: str = "") -> Fate:
    """What cases and the logs of the workers with the fault come to. `ended`: how the servers ended before time.

    A case may kill and restart a worker: of a rank that was killed nothing more is told, so the last process counts.
    """
    last = [log.rpartition(STARTED_AGAIN.decode())[2] for log in logs]
    ranks, told = _counts(last, PLANTED, name), _counts(last, RUN, name)
    runs, failing = sum(_counts(logs, RUN, name)), _failing(results)
    why = ended or next((f"{each.case}: {each.why}" for each in results if each.verdict is Verdict.ERROR), "")
    passed = sum(each.verdict is Verdict.PASS for each in results)
    if not ranks or len(told) < len(ranks):
        outcome, why = Outcome.ERROR, why or f"{len(ranks)} ranks planted it, {len(told)} told how often it was run"
    elif failing:
        outcome = Outcome.CAUGHT if runs else Outcome.ERROR
        why = why or ("" if runs else "a case failed, but what the fault changes was never run")
    elif why or not passed:
        outcome, why = Outcome.ERROR, why or "no case has passed or failed"
    else:
        outcome = Outcome.HIDDEN if runs else Outcome.IDLE
        why = "; ".join(f"{each.case} {each.verdict}: {each.why}" for each in results if each.verdict != Verdict.PASS)
    first = failing[0].failure if failing else None
    return Fate(
        id=name,
        outcome=outcome,
        runs=runs,
        cases=tuple(each.case for each in failing),
        passed=passed,
        seen=first.seen if first else "",
        expected=first.expected if first else "",
        why=why,
    )


def _failing(results: Sequence[CaseResult]) -> list[CaseResult]:
    return [each for each in results if each.verdict is Verdict.FAIL]


def _counts(logs: Sequence[str], pattern: re.Pattern[str], name: str) -> list[int]:
    """What the ranks have told of that fault, one number for each that has; 0 where they tell no number."""
    found = [match for log in logs for match in pattern.finditer(log) if match["id"] == name]
    return [int(match.groupdict().get("times") or 0) for match in found]

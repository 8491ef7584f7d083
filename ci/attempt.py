"""One attempt at a file: a process in a session of its own, ended with all that it started when its time is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ci.plan import Entry
from ci.result import Attempt, Verdict, judge, read_events
from harness.launch.families import family
from harness.launch.processes import Guardian, Process

LAUNCHER = Path(__file__).parent / "counted.py"
TIMEOUT_FACTOR = 1.5
STACKS_AT = 0.95  # of the timeout: then the stacks of all threads are shown in the log
STOP_SECONDS = 2.0
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Launch:
    """What all attempts of a run share."""

    root: Path
    logs: Path
    mark: str
    guardian: Guardian
    environment: Mapping[str, str]
    grace_seconds: float = 120.0


def timeout_seconds(entry: Entry, grace_seconds: float) -> float:
    """How long a file may take: half as long again as it is expected to, and at least so much longer."""
    expected = max(entry.seconds, entry.registration.est_time)
    return max(expected * TIMEOUT_FACTOR, expected + grace_seconds)


def attempt(entry: Entry, launch: Launch, number: int) -> Attempt:
    """Runs the file once. Raises `LaunchError` when no process can be started."""
    made, limit = entry.registration, timeout_seconds(entry, launch.grace_seconds)
    name = f"{entry.file.replace('/', '.')}-{number}"
    events = launch.logs / f"{name}.events"
    launch.logs.mkdir(parents=True, exist_ok=True)
    events.unlink(missing_ok=True)
    way = ["direct"] if made.is_script else ["pytest"]
    where = [str(events.absolute()), str(launch.root.absolute()), f"{limit * STACKS_AT:g}", entry.file]
    command = [sys.executable, str(LAUNCHER), *way, *where, *(["-f"] if made.is_script else [])]
    started = time.monotonic()
    process = Process(command, launch.environment, f"{launch.mark}:{name}", launch.logs / f"{name}.log")
    launch.guardian.watch(process, STOP_SECONDS)
    is_late = False
    try:
        is_late = not _ended(process, started + limit)
    finally:
        seconds, code = time.monotonic() - started, process.code
        left = _left(process)
        process.end(STOP_SECONDS if code is None else 0.0)
        launch.guardian.forget(process)
    told = read_events(events)
    if is_late or code is None:
        ran = told.counts.executed
        reason = (
            f"over its limit of {limit:g} s (est_time {made.est_time:g} s) after {ran} tests; the log has all stacks"
        )
        verdict = Verdict.TIMEOUT
    else:
        verdict, reason = judge(told, code, is_script=made.is_script, gate=entry.is_gate, min_tests=made.min_tests)
    return Attempt(
        verdict=verdict,
        reason=reason,
        seconds=round(seconds, 3),
        timeout_seconds=limit,
        code=code,
        counts=told.counts,
        failed=told.failed,
        log=str(process.log),
        ended=left,
    )


def _ended(process: Process, deadline: float) -> bool:
    """Whether it has ended by the deadline."""
    while process.code is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def _left(process: Process) -> int:
    """How many processes it has left behind."""
    return 0 if process.code is None else len(family(process.leader, process.mark))

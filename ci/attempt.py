"""One attempt at a file, or at several together: a process in a session of its own, ended with all that it started."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ci import stacks
from ci.nvml import gpu_state
from ci.plan import Entry
from ci.result import NO_TESTS_CODE, PASSING, Attempt, Counts, Told, Verdict, judge, read_events, read_events_by_file
from harness.launch.families import family
from harness.launch.processes import Guardian, Process

LAUNCHER = Path(__file__).parent / "counted.py"
TIMEOUT_FACTOR = 1.5
STACKS_AT = 0.95  # of the timeout: then the stacks of all threads are shown in the log
STOP_SECONDS = 2.0
LOOK_SECONDS = 0.02
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")  # in the name of a log


@dataclass(frozen=True)
class Launch:
    """What all attempts of a run share."""

    root: Path
    logs: Path
    mark: str
    guardian: Guardian
    environment: Mapping[str, str]
    grace_seconds: float = 120.0
    stopped: threading.Event = field(default_factory=threading.Event)  # set: whatever still runs is ended


class StoppedError(Exception):
    """The run has ended before this file; what it came to is of no interest."""


@dataclass(frozen=True)
class _Ended:
    """How a process came to its end."""

    seconds: float
    limit: float
    code: int | None  # None: it was ended
    left: int  # processes that it has left behind
    log: Path
    events: Path


def timeout_seconds(entries: Sequence[Entry], grace_seconds: float) -> float:
    """How long files may take: half as long again as they are expected to, and at least so much longer."""
    expected = sum(max(entry.seconds, entry.registration.est_time) for entry in entries)
    return max(expected * TIMEOUT_FACTOR, expected + grace_seconds)


def attempt(entry: Entry, launch: Launch, number: int) -> Attempt:
    """Runs the file once. Raises `LaunchError` when no process can be started."""
    made, limit = entry.registration, timeout_seconds([entry], launch.grace_seconds)
    way, file, rest = ("direct", entry.file, ("-f",)) if made.is_script else ("pytest", entry.target, ())
    name = f"{_UNSAFE.sub('.', entry.target)}-{number}"
    ended = _carried_out(name, [way, file, *(entry.arguments or rest)], limit, launch)
    told = read_events(ended.events)
    if ended.code is None:
        ran = told.counts.executed
        reason = (
            f"over its limit of {limit:g} s (est_time {made.est_time:g} s) after {ran} tests; the log has all stacks"
        )
        verdict = Verdict.TIMEOUT
    else:
        verdict, reason = judge(
            told, ended.code, is_script=made.is_script, gate=entry.is_gate, min_tests=made.min_tests
        )
    return _made(verdict, reason, told, ended, ended.seconds)


def together(entries: Sequence[Entry], launch: Launch, number: int) -> list[Attempt | None]:
    """Runs several files in one process, whose start they share; None for a file that is to be run alone.

    That is a file which the process did not come to, or which was running when the time of all was over. The one that
    was running when the process died has failed.
    """
    limit = timeout_seconds(entries, launch.grace_seconds)
    files = [entry.target for entry in entries]
    options = ["--continue-on-collection-errors", f"--rootdir={launch.root.absolute()}"]
    ended = _carried_out(f"together-{number}", ["pytest", *files, *options], limit, launch)
    told = read_events_by_file(ended.events)
    has_failed = any(each.counts.failed for each in told.values())
    is_left = "" in told and told[""].is_left
    is_whole = is_left and (ended.code in (0, NO_TESTS_CODE) or (ended.code == 1 and has_failed))
    attempts: list[Attempt | None] = []
    for entry in entries:
        each = told.get(entry.file, Told(counts=Counts()))
        is_done = is_whole or each.seconds is not None
        if not is_done and (ended.code is None or not each.is_begun):
            attempts.append(None)
            continue
        code = (1 if each.counts.failed else 0) if is_done or ended.code is None else ended.code
        all_told = msgspec.structs.replace(each, is_left=True)  # the process is judged above and below
        verdict, reason = judge(all_told, code, is_script=False, gate=False, min_tests=entry.registration.min_tests)
        if not is_done and verdict in PASSING:
            verdict, reason = Verdict.FAIL, f"the process ended with exit code {code} in the middle of the file"
        attempts.append(_made(verdict, reason, each, replace(ended, code=code), each.seconds or 0.0))
        ended = replace(ended, left=0)  # told once
    return attempts


def _made(verdict: Verdict, reason: str, told: Told, ended: _Ended, seconds: float) -> Attempt:
    return Attempt(
        verdict=verdict,
        reason=reason,
        seconds=round(seconds, 3),
        timeout_seconds=ended.limit,
        code=ended.code,
        counts=told.counts,
        failed=told.failed,
        skips=told.skips,
        log=str(ended.log),
        ended=ended.left,
    )


def _carried_out(name: str, words: Sequence[str], limit: float, launch: Launch) -> _Ended:
    """A process of `ci.counted`, from its start to its end."""
    launch.logs.mkdir(parents=True, exist_ok=True)
    events, hung, gpus = (launch.logs / f"{name}.{kind}" for kind in ("events", "stacks", "gpus"))
    for older in (events, hung, gpus):
        older.unlink(missing_ok=True)
    way, file, *rest = words
    where = [str(events.absolute()), str(launch.root.absolute()), f"{limit * STACKS_AT:g}", file]
    started = time.monotonic()
    command = [sys.executable, str(LAUNCHER), way, *where, *rest]
    process = Process(command, launch.environment, f"{launch.mark}:{name}", launch.logs / f"{name}.log")
    launch.guardian.watch(process, STOP_SECONDS)
    is_late = False
    try:
        is_late = not _ended(process, started + limit, launch)
    finally:
        seconds, code = time.monotonic() - started, process.code
        if is_late:
            gpus.write_text(json.dumps(gpu_state(), indent=2), encoding="utf-8")  # while it still holds them
            stacks.dump(family(process.leader, process.mark), hung)
        left = _left(process)
        process.end(STOP_SECONDS if code is None else 0.0)
        launch.guardian.forget(process)
    return _Ended(seconds, limit, None if is_late else code, left, process.log, events)


def _ended(process: Process, deadline: float, launch: Launch) -> bool:
    """Whether it has ended by the deadline. Raises `StoppedError`."""
    while process.code is None:
        if launch.stopped.is_set():
            raise StoppedError
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def _left(process: Process) -> int:
    """How many processes it has left behind."""
    return 0 if process.code is None else len(family(process.leader, process.mark))

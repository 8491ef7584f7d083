"""Which files run in which part of a stage on a runner: longest first, each to the part with the least work.

The result depends on nothing but its inputs, so that every shard computes the same plan; its digest shows that it did.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import heapq
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.registry import Registration, Registry
from ci.runners import Runner
from harness.usage import UserError, nearest

Timings = Mapping[str, float]  # file -> seconds it took

GATE_FOLDERS = ("suites/accuracy/",)  # gates, marked or not
JOB_MARGIN = 1.5  # a job may take so much longer than its files; the rest is for its start
JOB_START_SECONDS = 600


class PlanError(UserError):
    """There is no plan: no such stage, a file over the limit, too many parts."""


@dataclass(frozen=True)
class Entry:
    """A file of a plan, and the seconds that it is planned with."""

    registration: Registration
    seconds: float
    node: str = ""  # what of the file runs, as pytest names it behind `::`; all of it when empty
    arguments: tuple[str, ...] = ()  # of its command line, behind the file

    @property
    def target(self) -> str:
        """What pytest is given."""
        return f"{self.file}::{self.node}" if self.node else self.file

    @property
    def file(self) -> str:
        """Its path below the root."""
        return self.registration.path.as_posix()

    @property
    def is_gate(self) -> bool:
        """Whether one attempt has to do."""
        return self.registration.gate or self.file.startswith(GATE_FOLDERS)


@dataclass(frozen=True)
class Plan:
    """The parts of a stage on a runner; `parts[i]` is in the order in which its files run."""

    stage: str
    runner: Runner
    parts: tuple[tuple[Entry, ...], ...]
    disabled: tuple[Registration, ...]  # left out
    absent: Mapping[str, str] = field(default_factory=dict)  # further files of the stage -> why they are left out

    def loads(self) -> list[float]:
        """Seconds of each part."""
        return [math.fsum(entry.seconds for entry in part) for part in self.parts]

    def left_out(self) -> dict[str, str]:
        """Every file of the stage that is in no part, and why."""
        return {made.path.as_posix(): f"disabled, {made.disabled}" for made in self.disabled} | dict(self.absent)

    def digest(self) -> str:
        """The same for the same plan only."""
        files = [[(entry.file, entry.seconds) for entry in part] for part in self.parts]
        return hashlib.sha256(json.dumps([self.stage, self.runner.name, files]).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """The whole plan."""
        parts = [
            {
                "part": f"{number}/{len(self.parts)}",
                "seconds": round(load, 3),
                "files": [{"file": entry.file, "seconds": entry.seconds} for entry in part],
            }
            for number, (part, load) in enumerate(zip(self.parts, self.loads(), strict=True), 1)
        ]
        left_out = [made.path.as_posix() for made in self.disabled]
        head = {"stage": self.stage, "runner": self.runner.name, "digest": self.digest()}
        return {**head, "parts": parts, "disabled": left_out}

    def matrix(self) -> dict[str, Any]:
        """What `strategy.matrix` of a GitHub workflow takes."""
        digest = self.digest()
        include = [
            {
                "stage": self.stage,
                "runner": self.runner.name,
                "labels": list(self.runner.labels),
                "install": self.runner.install or "",
                "part": f"{number}/{len(self.parts)}",
                "files": len(part),
                "timeout_minutes": math.ceil((load * JOB_MARGIN + JOB_START_SECONDS) / 60),
                "digest": digest,
            }
            for number, (part, load) in enumerate(zip(self.parts, self.loads(), strict=True), 1)
        ]
        return {"include": include}


def plan(
    registry: Registry,
    stage: str,
    runner: Runner,
    *,
    nightly: bool = False,
    timings: Timings | None = None,
    parts: int | None = None,
    today: dt.date | None = None,
) -> Plan:
    """The plan of a stage on a runner. Raises `PlanError`, and `RegistrationError` when a file has a problem.

    `nightly` adds the nightly files. Without `parts` there are as few as keep each within the runner's job limit.
    """
    day = dt.datetime.now(dt.UTC).date() if today is None else today
    ours = [made for made in registry.checked().registrations if made.runner == runner.name]
    _check_stage(stage, runner, ours)
    wanted = [made for made in ours if made.stage == stage and (nightly or not made.nightly)]
    enabled = [made for made in wanted if made.is_enabled(day)]
    entries = [_entry(made, runner, timings or {}) for made in enabled]
    _check_once(entries)
    split = _derived(entries, runner) if parts is None else _given(entries, parts)
    left_out = sorted((made for made in wanted if not made.is_enabled(day)), key=lambda made: made.path.as_posix())
    disabled = {made.path for made in left_out}
    of_stage = [made for made in registry.registrations if made.stage == stage]
    absent = _absent([made for made in of_stage if made.path not in disabled], enabled, runner)
    return Plan(stage, runner, split, tuple(left_out), absent)


def _absent(of_stage: Iterable[Registration], enabled: Iterable[Registration], runner: Runner) -> dict[str, str]:
    """Why files of a stage do not run on this runner: they are nightly, or registered on others only."""
    here = {made.path for made in enabled}
    runners: dict[str, list[str]] = {}
    for made in of_stage:
        if made.path not in here:
            runners.setdefault(made.path.as_posix(), []).append(made.runner)
    return {
        file: "nightly" if runner.name in names else f"on {', '.join(sorted(names))}"
        for file, names in sorted(runners.items())
    }


def partition(entries: Iterable[Entry], parts: int) -> tuple[tuple[Entry, ...], ...]:
    """Longest processing time first; at most 4/3 of the best possible longest part. Names break ties."""
    heap = [(0.0, number) for number in range(parts)]
    split: list[list[Entry]] = [[] for _ in range(parts)]
    for entry in sorted(entries, key=lambda entry: (-entry.seconds, entry.file)):
        load, number = heap[0]
        split[number].append(entry)
        heapq.heapreplace(heap, (load + entry.seconds, number))
    return tuple(map(tuple, split))


def read_timings(files: Sequence[Path], runner: str) -> dict[str, float]:
    """Seconds of each file on a runner: medians of earlier runs. Raises `PlanError`.

    A file is the JSONL of `kvshard ci run`, of which passed files count, or one JSON object {runner: {file: seconds}}.
    """
    seen: dict[str, list[float]] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            for name, seconds in _timed(text, runner):
                if not (isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0):
                    raise TypeError(f"{name}: {seconds!r} seconds")
                seen.setdefault(name, []).append(float(seconds))
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            expected = "the JSONL of `kvshard ci run`, or {runner: {file: seconds}}"
            raise PlanError(f"{file}: {error}; expected {expected}; give another file or none") from error
    return {name: statistics.median(values) for name, values in seen.items()}


def _timed(text: str, runner: str) -> Iterable[tuple[str, Any]]:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and "kind" not in whole:
        return list(whole.get(runner, {}).items())
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    passed = [line for line in lines if line["kind"] == "file" and line["verdict"] == "pass"]
    return [(line["file"], line["seconds"]) for line in passed if line["runner"] == runner]


def _check_stage(stage: str, runner: Runner, ours: Sequence[Registration]) -> None:
    """A misspelt stage is no empty plan."""
    stages = sorted({made.stage for made in ours})
    if not stages:
        step = "register files on it, or look at --root and the folders"
        raise PlanError(f"no file is registered on runner {runner.name!r}; expected at least one; {step}")
    if stage not in stages:
        known = ", ".join(stages)
        raise PlanError(f"no file of runner {runner.name!r} has stage {stage!r}{nearest(stage, stages)} Has: {known}")


def _entry(made: Registration, runner: Runner, timings: Timings) -> Entry:
    """The file with its recorded or estimated time. Raises `PlanError` for one over the limit."""
    recorded = timings.get(made.path.as_posix())
    seconds = made.est_time if recorded is None else recorded
    if seconds > runner.file_seconds:
        source = "estimated" if recorded is None else "recorded"
        where, limit = f"{made.path.as_posix()}:{made.line}", f"at most {runner.file_seconds:g} s on {runner.name}"
        raise PlanError(f"{where}: {source} {seconds:g} s; expected {limit}; split the file")
    return Entry(made, seconds)


def _check_once(entries: Sequence[Entry]) -> None:
    """Foreign trees may register a file for two backends under one name of runner."""
    seen: set[str] = set()
    for entry in entries:
        if entry.file in seen:
            where = f"{entry.file}:{entry.registration.line}"
            raise PlanError(f"{where}: twice in this stage on this runner; expected once; rename one runner")
        seen.add(entry.file)


def _derived(entries: Sequence[Entry], runner: Runner) -> tuple[tuple[Entry, ...], ...]:
    """As few parts as keep each within the job limit. Raises `PlanError` when that is more than there may be."""
    if not entries:
        return ()
    least = max(1, math.ceil(math.fsum(entry.seconds for entry in entries) / runner.job_seconds))
    for parts in range(least, runner.max_parts + 1):
        split = partition(entries, parts)
        if max(math.fsum(entry.seconds for entry in part) for part in split) <= runner.job_seconds:
            return split
    limits = f"at most {runner.max_parts} parts of {runner.job_seconds:g} s on {runner.name}"
    step = "give the runner more parts, or move files to another stage"
    raise PlanError(f"{len(entries)} files need {least} parts or more; expected {limits}; {step}")


def _given(entries: Sequence[Entry], parts: int) -> tuple[tuple[Entry, ...], ...]:
    if not entries:
        return ()
    if not 1 <= parts <= len(entries):
        expected = f"1 to {len(entries)}, the number of files"
        raise PlanError(f"{parts} parts; expected {expected}; take the number that `kvshard ci plan` derives")
    return partition(entries, parts)

"""Runs the files of one part of a plan, one process each, and keeps a line of each result that survives a kill."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ci import summary
from ci.attempt import Launch, attempt, together
from ci.batches import batches, each
from ci.evidence import Bundles
from ci.flakes import flakes
from ci.plan import Entry, Plan, PlanError
from ci.redact import Redactor
from ci.result import PASSING, Attempt, FileResult, RunEnd, RunStart, Verdict, of_attempts
from harness.launch.processes import Guardian, tail

EXIT_PASSED = 0
EXIT_FAILED = 1
EXIT_NOTHING = 2

RETRIED = frozenset({Verdict.FAIL, Verdict.TIMEOUT})  # what ran nothing runs nothing again
LOG_LINES = 100


class Lines:
    """A JSONL file; each line is written in one piece and is on the disk before the next thing happens."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, value: msgspec.Struct) -> None:
        """One line."""
        os.write(self._file, msgspec.json.encode(value) + b"\n")
        os.fsync(self._file)

    def close(self) -> None:
        """Nothing is written any more."""
        os.close(self._file)


@dataclass(frozen=True)
class Options:
    """How a part is run."""

    root: Path
    out: Path  # results.jsonl, flakes.jsonl, logs/, evidence/
    retries: int = 0
    keep_going: bool = False  # else the first file that fails is the last
    jobs: int = 1  # processes at a time
    together_seconds: float = 0.0  # files share a process up to so much expected time
    grace_seconds: float = 120.0
    commit: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # for the files, over that of this process
    actions: Mapping[str, str] = field(default_factory=dict)  # where GITHUB_* are looked up
    say: Callable[[str], Any] = print
    before_file: Callable[[], Any] = lambda: None  # waits for GPUs


def part_of(plan: Plan, number: int) -> tuple[Entry, ...]:
    """The files of part `number`, counted from 1. Raises `PlanError`."""
    if not 1 <= number <= len(plan.parts):
        raise PlanError(f"part {number} of {len(plan.parts)}; expected 1 to {len(plan.parts)}; see `kvshard ci plan`")
    return plan.parts[number - 1]


def run_part(plan: Plan, number: int, options: Options) -> int:
    """Runs a part; returns the exit code. Raises `LaunchError` when no process can be started."""
    if not plan.parts:
        options.say(f"{plan.stage} on {plan.runner.name}: no file to run, all are disabled or nightly")
        return EXIT_NOTHING
    entries = part_of(plan, number)
    part = f"{number}/{len(plan.parts)}"
    bundles = Bundles(options.out / "evidence", options.root, {**os.environ, **options.environment})
    results, ledger = Lines(options.out / "results.jsonl"), Lines(options.out / "flakes.jsonl")
    mark = f"ci-{os.getpid()}-{secrets.token_hex(4)}"
    guardian = Guardian(mark, options.out / "logs" / "guardian.log")
    launch = Launch(
        root=options.root,
        logs=options.out / "logs",
        mark=mark,
        guardian=guardian,
        environment=options.environment,
        grace_seconds=options.grace_seconds,
    )
    runner = PartRunner(plan, part, launch, options, bundles)
    try:
        results.write(
            RunStart(
                stage=plan.stage,
                runner=plan.runner.name,
                part=part,
                digest=plan.digest(),
                commit=options.commit,
                started=_now(),
                files=tuple(entry.file for entry in entries),
            )
        )
        done: list[FileResult] = []
        left, shown = list(entries), set[str]()
        try:
            for entry, result in runner.results(entries):
                results.write(result)
                for flake in flakes(result):
                    ledger.write(flake)
                done.append(result)
                left.remove(entry)
                _show(result, options, bundles.redactor, shown)
                if result.verdict not in PASSING and not options.keep_going:
                    break
        finally:  # also when GPUs do not become free: what is done is told
            not_run = tuple(entry.file for entry in left)
            _conclude(f"{plan.stage} on {plan.runner.name}, part {part}", done, not_run, options)
            for text in summary.closing(done, plan.left_out()):
                options.say(text)
        code = EXIT_PASSED if all(result.verdict in PASSING for result in done) else EXIT_FAILED
        results.write(RunEnd(code=code, not_run=not_run))
        return code
    finally:
        guardian.dismiss()
        results.close()
        ledger.close()


@dataclass(frozen=True)
class PartRunner:
    """Runs the files of one part."""

    plan: Plan
    part: str
    launch: Launch
    options: Options
    bundles: Bundles

    def results(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, FileResult]]:
        """Each file with what it came to, in the order in which they end."""
        units = batches(entries, self.options.together_seconds)
        work = partial(self._unit, units)
        with contextlib.closing(each(units, work, self.options.jobs, self.launch.stopped.set)) as found:
            for results in found:
                yield from results

    def _unit(self, units: Sequence[tuple[Entry, ...]], number: int) -> list[tuple[Entry, FileResult]]:
        """The files of one process; those that it did not come to are run alone."""
        entries, started, since = units[number], _now(), time.time()
        self.options.before_file()
        firsts: Sequence[Attempt | None] = [None]
        if len(entries) > 1:
            firsts = together(entries, self.launch, number)
        return [(entry, self._file(entry, first, started, since)) for entry, first in zip(entries, firsts, strict=True)]

    def _file(self, entry: Entry, first: Attempt | None, started: str, since: float) -> FileResult:
        """A file with its retries, after a first attempt beside others; and with the evidence of its failure."""
        attempts = [] if first is None else [first]
        if first is None:
            started, since = _now(), time.time()
        most = 1 if entry.is_gate else 1 + self.options.retries
        while not attempts or (attempts[-1].verdict in RETRIED and len(attempts) < most):
            attempts.append(attempt(entry, self.launch, len(attempts) + 1))
        attempts = [self.bundles.without_secrets(made) for made in attempts]
        verdict, reason = of_attempts(attempts)
        result = FileResult(
            file=entry.file,
            stage=self.plan.stage,
            runner=self.plan.runner.name,
            part=self.part,
            verdict=verdict,
            reason=reason,
            seconds=attempts[-1].seconds,
            est_time=entry.registration.est_time,
            gate=entry.is_gate,
            line=entry.registration.line,
            commit=self.options.commit,
            started=started,
            attempts=tuple(attempts),
        )
        if verdict in PASSING:
            return result
        return msgspec.structs.replace(result, evidence=str(self.bundles.collect(entry, result, since)))


def _show(result: FileResult, options: Options, redactor: Redactor, shown: set[str]) -> None:
    """What a file came to, and the end of its log, which files of one process have in common. shown: logs so far."""
    options.say(summary.line(result))
    for at, made in enumerate(result.attempts, 1):
        if made.ended:
            options.say(f"         attempt {at} left {made.ended} processes behind; they were ended")
    failed = [made for made in result.attempts if made.verdict not in PASSING]
    if failed and failed[0].log in shown:
        options.say(f"         its log is above: {failed[0].log}")
    elif failed:  # the first one; the others' logs are mostly the same
        shown.add(failed[0].log)
        others = f" (other attempts: {', '.join(made.log for made in failed[1:])})" if failed[1:] else ""
        title = f"{result.file}: the end of {failed[0].log}{others}"
        text = redactor.text(tail(Path(failed[0].log), LOG_LINES))
        options.say(summary.quoted_log(title, text, options.actions))
    if result.evidence:
        options.say(f"         evidence: {result.evidence}")


def _conclude(title: str, done: Sequence[FileResult], not_run: Sequence[str], options: Options) -> None:
    for command in summary.workflow_annotations(done, options.actions):
        options.say(command)
    summary.write_summary(title, done, not_run, options.actions)
    verdicts = [str(result.verdict) for result in done] + ["not run"] * len(not_run)
    counted = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(sorted(verdicts)))
    options.say(f"{title}: {counted}; results in {options.out / 'results.jsonl'}")


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")

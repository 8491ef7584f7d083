"""Runs the files of one part of a plan, one process each, and keeps a line of each result that survives a kill."""

from __future__ import annotations

import datetime as dt
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ci import summary
from ci.attempt import Launch, attempt
from ci.flakes import flakes
from ci.plan import Entry, Plan, PlanError
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
    out: Path  # results.jsonl, flakes.jsonl, logs/
    retries: int = 0
    keep_going: bool = False  # else the first file that fails is the last
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
    name = f"{number}/{len(plan.parts)}"
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
    done: list[FileResult] = []
    try:
        results.write(
            RunStart(
                stage=plan.stage,
                runner=plan.runner.name,
                part=name,
                digest=plan.digest(),
                commit=options.commit,
                started=_now(),
                files=tuple(entry.file for entry in entries),
            )
        )
        try:
            for entry in entries:
                options.before_file()
                result = run_file(entry, plan, name, launch, options)
                results.write(result)
                for flake in flakes(result):
                    ledger.write(flake)
                done.append(result)
                _show(result, options)
                if result.verdict not in PASSING and not options.keep_going:
                    break
        finally:  # also when GPUs do not become free: what is done is told
            not_run = tuple(entry.file for entry in entries[len(done) :])
            _conclude(f"{plan.stage} on {plan.runner.name}, part {name}", done, not_run, options)
        code = EXIT_PASSED if all(result.verdict in PASSING for result in done) else EXIT_FAILED
        results.write(RunEnd(code=code, not_run=not_run))
        return code
    finally:
        guardian.dismiss()
        results.close()
        ledger.close()


def run_file(entry: Entry, plan: Plan, part: str, launch: Launch, options: Options) -> FileResult:
    """A file with its retries."""
    started, gate = _now(), entry.is_gate
    attempts: list[Attempt] = []
    for number in range(1, (1 if gate else 1 + options.retries) + 1):
        attempts.append(attempt(entry, launch, number))
        if attempts[-1].verdict not in RETRIED:
            break
    verdict, reason = of_attempts(attempts)
    return FileResult(
        file=entry.file,
        stage=plan.stage,
        runner=plan.runner.name,
        part=part,
        verdict=verdict,
        reason=reason,
        seconds=attempts[-1].seconds,
        est_time=entry.registration.est_time,
        gate=gate,
        line=entry.registration.line,
        commit=options.commit,
        started=started,
        attempts=tuple(attempts),
    )


def _show(result: FileResult, options: Options) -> None:
    options.say(summary.line(result))
    for at, made in enumerate(result.attempts, 1):
        if made.ended:
            options.say(f"         attempt {at} left {made.ended} processes behind; they were ended")
    failed = [made for made in result.attempts if made.verdict not in PASSING]
    if failed:  # the first one; the others' logs are mostly the same
        others = f" (other attempts: {', '.join(made.log for made in failed[1:])})" if failed[1:] else ""
        title = f"{result.file}: the end of {failed[0].log}{others}"
        options.say(summary.quoted_log(title, tail(Path(failed[0].log), LOG_LINES), options.actions))


def _conclude(title: str, done: Sequence[FileResult], not_run: Sequence[str], options: Options) -> None:
    for command in summary.workflow_annotations(done, options.actions):
        options.say(command)
    summary.write_summary(title, done, not_run, options.actions)
    verdicts = [str(result.verdict) for result in done] + ["not run"] * len(not_run)
    counted = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(sorted(verdicts)))
    options.say(f"{title}: {counted}; results in {options.out / 'results.jsonl'}")


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")

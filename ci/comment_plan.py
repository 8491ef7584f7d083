"""Commands and a pull request's tree -> which files run on which runner, with the exact command line of each.

The tree is data: registrations are read from syntax trees by `ci.registry`. Every argument that leaves this module is
made of the characters of `ARGUMENT`, whatever the tree's files are called.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ci.comment_parse import SPECS_MAX, Bad, Command, Refusal, shown
from ci.comment_rights import Table, group_specs
from ci.comment_tree import Tree, listed, parsed, resolve
from ci.registry import Registration, RegistrationError, registrations

FILES_MAX = 100  # of one comment
PATH_MAX = 200
ARGUMENT = re.compile(r"[A-Za-z0-9_./:-]+")
PYTEST = ("python3", "-m", "pytest", "-x")
TESTED_BY = frozenset({"rerun-test", "rerun-group"})
MADE_RUNNERS = "ci/runners.toml"
REGISTER = "call `register_cpu_ci(..)` or `register_gpu_ci(..)` of `ci.register` at its top level"


class RunnerLike(Protocol):
    """What a plan needs to know of a runner; `ci.runners.Runner` has it."""

    @property
    def labels(self) -> tuple[str, ...]:
        """What `runs-on` takes."""
        ...

    @property
    def file_seconds(self) -> float:
        """The longest file."""
        ...

    @property
    def job_seconds(self) -> float:
        """The longest job."""
        ...

    @property
    def max_parts(self) -> int:
        """The most jobs at a time."""
        ...


class CommandLine(NamedTuple):
    """One file, or a part of it, on one runner."""

    runner: str
    file: str
    arguments: tuple[str, ...]
    seconds: float
    is_whole: bool  # nothing is named behind `::`


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One job: a runner and what runs there, in order."""

    runner: str
    labels: tuple[str, ...]
    tests: tuple[CommandLine, ...]
    limit_minutes: float

    @property
    def minutes(self) -> float:
        """The estimate of all."""
        return sum(test.seconds for test in self.tests) / 60

    @property
    def commands(self) -> list[list[str]]:
        """The command lines, as lists of arguments."""
        return [list(test.arguments) for test in self.tests]

    @property
    def digest(self) -> str:
        """Short, and the same for the same work only."""
        return hashlib.sha256(json.dumps([self.runner, self.commands]).encode()).hexdigest()[:12]


@dataclass(slots=True)
class Plan:
    """What is to run, what is refused, and what else is to be told."""

    dispatches: list[Dispatch] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        jobs = [
            {
                "runner": job.runner,
                "labels": list(job.labels),
                "files": list(dict.fromkeys(test.file for test in job.tests)),
                "commands": job.commands,
                "minutes": round(job.minutes, 1),
                "limit_minutes": job.limit_minutes,
            }
            for job in self.dispatches
        ]
        return {"dispatches": jobs, "refusals": [refusal._asdict() for refusal in self.refusals], "notes": self.notes}


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans from the base branch's tables and a pull request's tree."""

    tree: Tree
    runners: Mapping[str, RunnerLike]
    table: Table
    today: dt.date

    def plan(self, commands: Iterable[Command], changed: Sequence[Mapping[str, Any]] = ()) -> Plan:
        """The plan of all test commands; others are left alone."""
        plan = Plan()
        tests: dict[tuple[str, tuple[str, ...]], CommandLine] = {}
        files: set[str] = set()
        for command in commands:
            if command.name not in TESTED_BY:
                continue
            for what, found in self._found(command, changed, plan):
                if len(files | {file for file, _ in found}) > FILES_MAX:
                    why = f"it adds {len(found)} to {len(files)} files, and one comment runs {FILES_MAX} at most"
                    plan.refusals.append(Refusal(shown(what), why, "name a folder or glob with fewer"))
                    continue
                files.update(file for file, _ in found)
                for test in self._tests(what, found, plan):
                    tests[test.runner, test.arguments] = test
        self._pack(list(tests.values()), plan)
        return plan

    def _found(
        self, command: Command, changed: Sequence[Mapping[str, Any]], plan: Plan
    ) -> Iterable[tuple[str, list[tuple[str, str]]]]:
        """Each spec of a command with the files that it means, and what is named in each."""
        try:
            is_group = command.name == "rerun-group"
            specs = group_specs(self.table, command.arguments[0]) if is_group else command.arguments
        except Bad as bad:
            plan.refusals.append(Refusal(shown(command.text), bad.why, bad.advice))
            return
        for spec in specs[:SPECS_MAX]:
            try:
                yield spec, resolve(spec, self.tree)
            except Bad as bad:
                plan.refusals.append(Refusal(shown(spec), bad.why, bad.advice))
        if command.changed:
            files = [file for file in changed_tests(changed) if file in self.tree.paths and self.tree.is_test(file)]
            if files:
                yield "-c", [(file, "") for file in files]
            else:
                advice = "it takes test files that the pull request adds or edits; name a file instead"
                plan.refusals.append(Refusal("-c", "the pull request changes no test file", advice))

    def _tests(self, what: str, found: Sequence[tuple[str, str]], plan: Plan) -> Iterable[CommandLine]:
        """The command lines of some files; the reasons of those without one go into the plan, once for each reason."""
        refused: dict[tuple[str, str], list[str]] = {}
        for file, node in found:
            try:
                yield from self._tests_of(file, node, plan)
            except Bad as bad:
                refused.setdefault((bad.why, bad.advice), []).append(file)
        for (why, advice), files in refused.items():
            is_one = len(files) == 1
            told = why if is_one else f"{len(files)} files are meant, and of each: {why}: {listed(files)}"
            plan.refusals.append(Refusal(shown(files[0] if is_one else what), told, advice))

    def _tests_of(self, file: str, node: str, plan: Plan) -> list[CommandLine]:
        """The command lines of one file, one for each runner; raises `Bad`."""
        if not ARGUMENT.fullmatch(file) or len(file) > PATH_MAX:
            raise Bad("its name has characters that no command line here may have, or is too long", "rename the file")
        text = self.tree.read_text(file)
        try:
            made = registrations(Path(file), text)
        except RegistrationError as error:
            parsed(text)  # a file that is no Python at all has a reason of its own
            first = error.problems[0]
            why = f"its registration cannot be used, line {first.line}: `{shown(first.value)}`"
            raise Bad(why, f"expected `{shown(first.expected)}`") from None
        except (RecursionError, MemoryError, ValueError):  # a tree that is made to break whoever walks it
            raise Bad("its registration cannot be read", REGISTER) from None
        if not made:
            raise Bad("it is registered nowhere", REGISTER)
        enabled = [registration for registration in made if registration.is_enabled(self.today)]
        for registration in made:
            if registration not in enabled and registration.disabled is not None:
                reason = shown(registration.disabled.reason)
                plan.notes.append(f"`{file}` is disabled on `{registration.runner}`: `{reason}`")
        if not enabled:
            raise Bad("it is disabled", "enable it in its registration to run it")
        return [self._test(file, node, registration) for registration in enabled]

    def _test(self, file: str, node: str, registration: Registration) -> CommandLine:
        """The command line of a file on a runner; raises `Bad`."""
        runner = self.runners.get(registration.runner)
        if runner is None:
            why = f"it is registered on `{shown(registration.runner)}`, and there is no such runner"
            raise Bad(why, f"one of {listed(self.runners)}, see `{MADE_RUNNERS}`")
        if registration.est_time > min(runner.file_seconds, runner.job_seconds):
            most = min(runner.file_seconds, runner.job_seconds) / 60
            why = f"its estimate of {registration.est_time / 60:.0f} min is over the limit of {most:.0f} min"
            raise Bad(f"{why} on `{registration.runner}`", "split the file; it could only time out")
        arguments: tuple[str, ...] = (*PYTEST, f"{file}::{node}" if node else file)
        if registration.is_script and not (node and "pytest" in self.tree.read_text(file)):
            arguments = ("python3", file, *([node.replace("::", ".")] if node else []), "-f")
        if not all(map(ARGUMENT.fullmatch, arguments)):
            raise Bad("its command line has characters that it may not have", "rename the test")
        return CommandLine(registration.runner, file, arguments, registration.est_time, not node)

    def _pack(self, tests: list[CommandLine], plan: Plan) -> None:
        """Jobs within the limit of their runner: the longest test first, each into the first job that has room."""
        for name in sorted({test.runner for test in tests}):
            runner = self.runners[name]
            whole = {test.file for test in tests if test.runner == name and test.is_whole}
            mine = [test for test in tests if test.runner == name and (test.is_whole or test.file not in whole)]
            jobs: list[list[CommandLine]] = []
            for test in sorted(mine, key=lambda test: (-test.seconds, test.arguments)):
                seconds = runner.job_seconds - test.seconds
                room = next((job for job in jobs if sum(t.seconds for t in job) <= seconds), None)
                if room is None:
                    jobs.append(room := [])
                room.append(test)
            if len(jobs) > runner.max_parts:
                minutes = sum(test.seconds for test in mine) / 60
                why = f"{len(mine)} tests of {minutes:.0f} min in all are more than {runner.max_parts} jobs can hold"
                plan.refusals.append(Refusal(name, why, "name fewer"))
                continue
            limit = runner.job_seconds / 60
            in_order = [tuple(sorted(job, key=lambda test: test.arguments)) for job in jobs]
            plan.dispatches += [Dispatch(name, tuple(runner.labels), job, limit) for job in in_order]


def changed_tests(changed: Iterable[Mapping[str, Any]]) -> list[str]:
    """The files that a pull request adds or edits; not those that it removes or only moves."""
    kept = []
    for file in changed:
        moved = file.get("status") == "renamed" and not file.get("changes")
        if file.get("status") not in {"removed", "unchanged"} and not moved:
            kept.append(str(file.get("filename", "")))
    return sorted(set(kept))

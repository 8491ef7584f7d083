"""`kvshard selfcheck`: are the suites worth something? Plants faults in an engine, one at a time, and sees them killed.

Exit codes: 0 every fault was killed and every variant passed, 1 one was not, 2 one was not exercised or nothing ran,
3 wrong usage or an error of the harness, 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from harness import connect, forks, kill_table, provenance, record
from harness.canary import CANARIES
from harness.fault import FaultError
from harness.fault_files import LIBRARY, Library, library
from harness.hunt import Hunt, hunted
from harness.hunted import Hunted, Outcome
from harness.render import console_for, duration, safe
from harness.runner import default_jobs
from harness.suite import SUITES, located
from harness.trial import BUDGETS
from harness.usage import UserError, nearest

ENGINE = "ref"
SHRINK = ("all", "first", "none")
VARIANTS_SHARE = 10  # of a sample: a variant takes as long as so many faults
SECONDS_MAX = {"smoke": 300.0, "commit": 900.0, "night": 7200.0}  # of one job
STYLES = {
    Outcome.KILLED: "green",
    Outcome.PASSED: "green",
    Outcome.SURVIVED: "bold red",
    Outcome.REFUSED: "bold red",
    Outcome.IDLE: "yellow",
    Outcome.ERROR: "bold magenta",
}
EXIT_INTERRUPTED = 130
EXIT_CODES = {Outcome.SURVIVED: 1, Outcome.REFUSED: 1, Outcome.ERROR: 3, Outcome.IDLE: 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard selfcheck`."""
    add = parser.add_argument
    add("--faults", default=LIBRARY, metavar="FILE_OR_DIR", help=f"faults to plant (default {LIBRARY})")
    add("--engine", metavar="ADDRESS", help=f"engine in this process (default {ENGINE}, or what a fault asks for)")
    add("--budget", choices=tuple(BUDGETS), default="commit", help="the most that is spent on a case (default commit)")
    add("--seeds", type=int, default=1, metavar="K", help="tries each fault with so many seeds (default 1)")
    add("--seed", type=int, metavar="INT", help="the first seed (default: the commit in CI, else random)")
    add("--jobs", type=int, metavar="J", help="faults at a time (default: cores, at most 4)")
    add("-k", dest="pattern", default="", metavar="TEXT", help="only what has it in its id")
    add(
        "--sample",
        type=int,
        metavar="COUNT",
        help="only so many faults, and a tenth as many variants, drawn by the seed",
    )
    add("--only", choices=("faults", "variants", "canaries"), help="only these")
    add(
        "--whole",
        action="store_true",
        help="try every case on every fault: which cases kill it, and which only they do",
    )
    add(
        "--shrink",
        choices=SHRINK,
        default=SHRINK[0],
        help="with which seeds counterexamples are shrunk (default all); most of the time goes there",
    )
    add("--suite", default=SUITES[0], metavar="SUITE", help=f"package, file or folder (default {SUITES[0]})")
    add("--record", type=Path, metavar="FILE", help="write the record (JSONL)")
    add("--markdown", type=Path, metavar="FILE", help="write the kill table as Markdown")
    add("--html", type=Path, metavar="FILE", help="write the kill table as a page")


@dataclass(slots=True)
class Check:
    """What is asked, and how far it is."""

    hunts: list[Hunt]
    library: Library
    header: record.Header
    running: dict[str, float] = field(default_factory=dict)
    done: list[Hunted] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def exit_code(self) -> int:
        """See the module."""
        outcomes = {each.outcome for each in self.done}
        bad = [EXIT_CODES[outcome] for outcome in (*EXIT_CODES,) if outcome in outcomes]
        return bad[0] if bad else 0 if self.done else 2


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    jobs = default_jobs() if args.jobs is None else args.jobs
    for option, value in (
        ("--jobs", jobs),
        ("--seeds", args.seeds),
        ("--sample", 1 if args.sample is None else args.sample),
    ):
        if value < 1:
            raise UserError(f"{option} {value}: expected at least 1")
    for option, path in (("--record", args.record), ("--markdown", args.markdown), ("--html", args.html)):
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise UserError(f"{option} {path}: expected a file in a folder that exists")
    located(args.suite)
    check = planned(args)
    with os.fdopen(os.dup(1), "w", errors="replace") as out:
        console = console_for(out)
        try:
            _hunt(check, jobs, console)
        except KeyboardInterrupt:
            if check.done:  # hours of work may be in it
                _write(args, check, EXIT_INTERRUPTED)
            raise
        _write(args, check, check.exit_code)
    return check.exit_code


def _write(args: argparse.Namespace, check: Check, exit_code: int) -> None:
    """The files that are asked for."""
    for path, page in ((args.markdown, kill_table.markdown), (args.html, kill_table.html)):
        if path is not None:
            record.write_text(path, page(check.header, check.library, check.done))
    if args.record is not None:
        counts = {str(outcome): sum(each.outcome is outcome for each in check.done) for outcome in Outcome}
        seconds = round(time.monotonic() - check.started, 3)
        footer = record.Footer(counts=counts, seconds=seconds, exit_code=exit_code)
        record.write_lines(args.record, [check.header, *check.done, footer])


def planned(args: argparse.Namespace) -> Check:
    """The jobs, one seed after the other. Raises `UserError`."""
    known = library(args.faults)
    commit = provenance.commit()
    seed, origin = args.seed, "given"
    if seed is None:
        seed, origin = provenance.default_seed(commit, in_ci=provenance.in_ci())
    names = _chosen(args, known, seed)
    if not names:
        kind, every = args.only or "faults", {**known.faults, **known.variants, **CANARIES}
        raise FaultError(f"-k {args.pattern!r}: no {kind} in {args.faults}{nearest(args.pattern, every)}")
    asked = {name: known.faults[name].engine for name in names if name in known.faults}
    engines = {name: args.engine or asked.get(name) or ENGINE for name in names}
    manifest = None
    for address in dict.fromkeys([args.engine or ENGINE, *engines.values()]):
        engine = connect.connect(address)
        manifest = manifest or connect.manifest_of(engine, address)
        connect.close(engine)
    hunts = [
        Hunt(name, seed + at, engines[name], args.budget, args.faults, args.suite, args.whole, shrinks(args.shrink, at))
        for at in range(args.seeds)
        for name in names
    ]
    options = ("faults", "seeds", "jobs", "pattern", "sample", "only", "whole", "shrink", "suite")
    header = record.Header(
        kvshard=provenance.kvshard_version(),
        engine=manifest.name if manifest else "",
        engine_version=manifest.version if manifest else "",
        engine_options=connect.parse(args.engine or ENGINE).options,
        budget=args.budget,
        seed=seed,
        seed_origin=origin,
        commit=commit,
        versions=provenance.versions(),
        options={name: str(getattr(args, name)) for name in options if getattr(args, name)},
        environment=provenance.environment(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return Check(hunts, known, header)


def shrinks(which: str, at: int) -> bool:
    """Whether the counterexamples of the seed at this place are shrunk."""
    return which == "all" or (which == "first" and at == 0)


def _chosen(args: argparse.Namespace, known: Library, seed: int) -> list[str]:
    """Ids of what is asked for, the longest jobs first; of a sample those that the seed draws."""
    kinds = {"canaries": [*CANARIES], "variants": [*known.variants], "faults": [*known.faults]}
    drawn = []
    for kind, names in kinds.items():
        matching = [name for name in names if args.pattern in name] if args.only in (None, kind) else []
        if args.sample is not None and kind != "canaries":
            most = args.sample if kind == "faults" else max(1, args.sample // VARIANTS_SHARE)
            kept = set(sorted(matching, key=lambda name: _lot(seed, name))[:most])
            matching = [name for name in matching if name in kept]
        drawn += matching
    return drawn


def _lot(seed: int, name: str) -> bytes:
    """What orders names at random, each for itself: a name that is new takes the place of one, and no more."""
    return hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()


def _hunt(check: Check, jobs: int, console: Console) -> None:
    """All jobs, shown as they end."""
    preload = ["harness.hunt", *{connect.engine_module(hunt.engine) for hunt in check.hunts}]
    live = (
        Live(console=console, get_renderable=lambda: _standing(check), refresh_per_second=4, transient=True)
        if console.is_terminal and not console.is_dumb_terminal
        else None
    )
    if live is not None:
        live.start()
    try:
        results = forks.each(
            check.hunts,
            hunted,
            workers=jobs,
            seconds_max=SECONDS_MAX[check.header.budget] * (4 if check.header.options.get("whole") else 1),
            preload=preload,
            on_start=lambda hunt: check.running.update({f"{hunt.id} {hunt.seed}": time.monotonic()}),
        )
        for hunt, told in results:
            died = isinstance(told, forks.Died)
            result = Hunted(id=hunt.id, seed=hunt.seed, outcome=Outcome.ERROR, why=told.why) if died else told
            check.running.pop(f"{hunt.id} {hunt.seed}", None)
            check.done.append(result)
            if live is None or not result.outcome.wanted:
                console.print(_line(result), soft_wrap=True)
    finally:
        if live is not None:
            live.stop()
    for line in kill_table.summary(check.library, check.done):
        console.print(Text(line))


def _line(result: Hunted) -> Text:
    """One ended job."""
    by = f"{result.seconds:7.2f} s {len(result.ops):3} ops  {result.case}" if result.ops or result.case else result.why
    line = Text(f"{result.outcome:8}", style=STYLES[result.outcome])
    return line.append(
        f" {result.id:52} {result.seed:>10}  {safe(by if result.outcome is Outcome.KILLED else result.why)}"
    )


def _standing(check: Check) -> RenderableType:
    """What runs, and how far it is."""
    now = time.monotonic()
    running = [Text(f"runs     {name} {now - since:5.0f} s", style="cyan") for name, since in [*check.running.items()]]
    counts = {outcome: sum(each.outcome is outcome for each in check.done) for outcome in Outcome}
    told = "  ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    left = (now - check.started) / max(1, len(check.done)) * (len(check.hunts) - len(check.done))
    time_left = f"about {duration(left)} left" if check.done else ""
    return Group(*running, Text(f"{len(check.done)}/{len(check.hunts)}  {told}  {time_left}"))

"""`kvshard gate run`: asks a server every item of a task and keeps each answer, so that a run can be gone on with."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from harness.gate_ask import Asker, Endpoint, Question, Reply, endpoint
from harness.gate_journal import Answered, Journal, RunOf
from harness.gate_tasks import Task, Wanted, load
from harness.record import write_text
from harness.render import console_for, duration, safe
from harness.samples import Sample, State
from harness.usage import UserError

EXIT_DONE, EXIT_BAD, EXIT_INTERRUPTED = 0, 2, 130
LOOK_SECONDS = 0.1
FAILED_IN_A_ROW = 8  # or as many as are in flight, if those are more: then the server is gone
OPTIONS = (
    *(
        "engine",
        "task",
        "model",
        "chat",
        "native",
        "data",
        "shots_data",
        "shots",
        "limit",
        "filter",
        "repeats",
        "max_tokens",
    ),
    *("temperature", "concurrency", "timeout", "unjudged_max", "out"),
)  # that a run is gone on with
LINES = 10  # of progress where there is no terminal


class Asking(NamedTuple):
    """How a run asks."""

    concurrency: int = 8
    repeats: int = 1
    errors_max: float = 0.01  # share of the requests


class Counts(NamedTuple):
    """What a run has come to."""

    right: int
    wrong: int
    truncated: int
    errors: int

    @property
    def done(self) -> int:
        """Items that need not be asked again."""
        return self.right + self.wrong + self.truncated

    @property
    def told(self) -> str:
        """On one line."""
        judged = self.right + self.wrong
        share = f" ({100 * self.right / judged:.1f} %)" if judged else ""
        return f"{self.right:,} of {judged:,} right{share}, {self.truncated:,} cut off, {self.errors:,} failed"


class Ended(NamedTuple):
    """How a run ended: all asked, interrupted, or given up since nothing was answered any more."""

    counts: Counts
    is_interrupted: bool = False
    gave_up: str | None = None


class Shown(Protocol):
    """Shows how far a run is."""

    def __call__(self, done: int, counts: Counts) -> None:
        """So many of all are through."""


def counted(answered: Answered) -> Counts:
    """Counts samples."""
    states = [(sample.state, sample.correct) for sample in answered.values()]
    return Counts(
        right=states.count((State.ANSWERED, True)),
        wrong=states.count((State.ANSWERED, False)),
        truncated=sum(state is State.TRUNCATED for state, _ in states),
        errors=sum(state is State.ERROR for state, _ in states),
    )


def run_of(task: Task, server: Endpoint, repeats: int) -> RunOf:
    """What tells this run from others."""
    prompts = hashlib.sha256(msgspec.json.encode([tuple(item) for item in task.items])).hexdigest()[:16]
    try:
        installed = version("lm-eval")
    except PackageNotFoundError:
        installed = "not installed"
    return RunOf(
        engine=server.client.url,
        model=server.model,
        dialect="generate" if server.is_native else "chat" if server.is_chat else "completions",
        task=task.name,
        definition=task.definition,
        filter=task.filter,
        shots=task.shots,
        data=task.data,
        prompts=prompts,
        items=len(task.items),
        repeats=repeats,
        generation=task.generation,
        lm_eval=installed,
    )


def questions(task: Task, server: Endpoint, repeats: int, answered: Answered) -> list[Question]:
    """Those that are not answered yet; a repeat's number is its seed."""
    return [
        Question(at, repeat, server.body(item.prompt, task.generation, repeat))
        for repeat in range(repeats)
        for at, item in enumerate(task.items)
        if (item.key, repeat) not in answered
    ]


def sample_of(task: Task, reply: Reply) -> Sample:
    """A reply, scored if it is an answer."""
    scored = None if reply.error is not None else task.score(reply.at, reply.text)
    return Sample(
        item=task.items[reply.at].key,
        repeat=reply.repeat,
        correct=scored is not None and scored.correct,
        answer="" if scored is None else scored.answer,
        finish_reason=reply.finish_reason,
        error=reply.error,
        tokens=reply.tokens,
        accept_length=reply.accept_length,
        about=task.items[reply.at].about,
    )


def ask_all(
    task: Task, server: Endpoint, journal: Journal, asking: Asking, *, is_stopped: Callable[[], bool], show: Shown
) -> Ended:
    """Asks what is not answered yet; every reply that has come is kept, also after an interruption."""
    asked = questions(task, server, asking.repeats, journal.answered)
    limit, in_a_row, gave_up = max(FAILED_IN_A_ROW, asking.concurrency), 0, None
    left = len(asked)
    counts = counted(journal.answered)
    show(counts.done + counts.errors, counts)
    with Asker(server, asked, asking.concurrency) as asker:
        while left and not is_stopped() and gave_up is None:
            reply = asker.next(LOOK_SECONDS)
            if reply is None:
                continue
            counts = _keep(task, journal, reply, counts)
            show(counts.done + counts.errors, counts)
            left -= 1
            in_a_row = in_a_row + 1 if reply.error is not None else 0
            if in_a_row >= limit:
                gave_up = f"{in_a_row:,} requests in a row failed, the last one: {reply.error}"
        for reply in asker.close():
            counts = _keep(task, journal, reply, counts)
            left -= 1
    return Ended(counts, is_interrupted=left > 0 and gave_up is None, gave_up=gave_up)


def _keep(task: Task, journal: Journal, reply: Reply, counts: Counts) -> Counts:
    sample = sample_of(task, reply)
    journal.add(sample, reply.text)
    if sample.state is State.ANSWERED:
        return counts._replace(right=counts.right + sample.correct, wrong=counts.wrong + (not sample.correct))
    if sample.state is State.TRUNCATED:
        return counts._replace(truncated=counts.truncated + 1)
    return counts._replace(errors=counts.errors + 1)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    if args.native and args.chat:
        raise UserError("--native asks /generate, where a prompt is no message; leave out --chat")
    server = endpoint(args.engine, args.model, args.timeout, is_chat=args.chat)  # quick, so before lm-eval is loaded
    server = server._replace(is_native=args.native)
    task = load(
        Wanted(
            task=args.task,
            data=args.data,
            shots_data=args.shots_data,
            shots=args.shots,
            limit=args.limit,
            filter=args.filter,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
        )
    )
    return asked(task, server, args)


def asked(task: Task, server: Endpoint, args: argparse.Namespace) -> int:
    """Asks a task that is loaded; returns the exit code. Raises `UserError`."""
    out = args.out or Path(f"samples-{task.name}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    asking = Asking(args.concurrency, args.repeats, args.unjudged_max / 100)
    if asking.repeats > 1 and not task.generation["temperature"]:
        raise UserError(
            f"--repeats {asking.repeats}: {task.name} asks at temperature 0, where repeats are copies; expected 1, or "
            "a temperature with --temperature. To see how often answers flip, make two runs and compare them with "
            "`kvshard gate calibrate`"
        )
    total = len(task.items) * asking.repeats
    with (
        Journal(out, run_of(task, server, asking.repeats), has_moved=args.moved) as journal,
        on_signals() as is_stopped,
        _progress(total) as show,
    ):
        before, began = len(journal.answered), time.monotonic()
        ended = ask_all(task, server, journal, asking, is_stopped=is_stopped, show=show)
        seconds = time.monotonic() - began
        told = _Told(task, journal, ended, total, before, seconds)
    _write(args.json, told)
    return _end(told, asking, again(args, out))


class _Told(NamedTuple):
    """What there is to say at the end."""

    task: Task
    journal: Journal
    ended: Ended
    total: int
    before: int
    seconds: float


def _end(told: _Told, asking: Asking, again: str) -> int:
    """Says how it ended; returns the exit code. Raises `UserError`."""
    counts, ended = told.ended.counts, told.ended
    where = f"{counts.done:,} of {told.total:,} are answered and kept in {told.journal.path}"
    if ended.gave_up is not None:
        raise UserError(f"{told.journal.run.engine}: {ended.gave_up}; {where}. Go on with: {again}")
    if ended.is_interrupted:
        sys.stderr.write(f"kvshard gate run: interrupted: {where}. Go on with: {again}\n")
        return EXIT_INTERRUPTED
    if counts.errors > asking.errors_max * told.total:
        errors = [sample.error for sample in told.journal.answered.values() if sample.error is not None]
        share = f"{100 * counts.errors / told.total:.1f} %"
        raise UserError(
            f"{counts.errors:,} of {told.total:,} requests failed ({share}); at most {100 * asking.errors_max:g} % "
            f"may; the last one: {errors[-1]}; {where}. Ask the failed ones again with: {again}"
        )
    lines = [_headline(told), f"samples: {told.journal.path}"]
    if counts.errors:
        lines.append(f"failed requests are no wrong answers; ask them again with: {again}")
    for line in lines:  # whole, whatever the width, for who reads them by program
        sys.stdout.write(f"{safe(line)}\n")
    return EXIT_DONE


def _headline(told: _Told) -> str:
    task, before = told.task, told.before
    repeats = told.total // len(task.items)
    other = [name for name in task.filters if name != task.filter]
    by = f"filter {task.filter}" + (f", not {', '.join(other)}" if other else "")
    what = f"{task.name}, {by}, {task.shots} shots, {len(task.items):,} items" + (
        f" x {repeats}" if repeats > 1 else ""
    )
    there = f" ({before:,} were there)" if before else ""
    return f"{what}: {told.ended.counts.told}{there}, {duration(told.seconds)}"


def _write(path: Path | None, told: _Told) -> None:
    if path is None:
        return
    content: dict[str, Any] = {
        "run": msgspec.to_builtins(told.journal.run),
        "samples": str(told.journal.path),
        **told.ended.counts._asdict(),
        "total": told.total,
        "before": told.before,
        "interrupted": told.ended.is_interrupted,
        "gave_up": told.ended.gave_up,
        "seconds": told.seconds,
    }
    write_text(path, msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n")


def again(args: argparse.Namespace, out: Path) -> str:
    """The command that goes on."""
    words = ["kvshard", "gate", "run"]
    for name in OPTIONS:
        value = out if name == "out" else getattr(args, name)
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


@contextlib.contextmanager
def on_signals() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM stop the run after the answer that is being kept; a second one ends it at once."""
    asked = threading.Event()

    def stop(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Shown]:
    """A bar on stderr, or ten lines where that is no terminal."""
    console = console_for(sys.stderr)
    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bars:
            bar = bars.add_task("", total=total)
            yield lambda done, counts: bars.update(bar, completed=done, description=counts.told)
        return
    shown = 0

    def show(done: int, counts: Counts) -> None:
        nonlocal shown
        part = LINES * done // total
        if part > shown:
            sys.stderr.write(f"{done:,} of {total:,}: {counts.told}\n")
            sys.stderr.flush()
        shown = max(shown, part)

    yield show

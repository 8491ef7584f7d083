"""A run on a terminal: what is asked at the start, how far it is while it runs, what it came to at the end.

Text of engines never passes through rich's markup. NO_COLOR and the width of the terminal are respected by rich.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from harness.record import Header, Record
from harness.result import CaseResult, message
from harness.standing import Standing
from harness.types import Verdict

STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.KNOWN: "magenta",
    Verdict.UNKNOWN: "yellow",
    Verdict.SKIP: "dim",
    Verdict.ERROR: "bold magenta",
}
PROBLEMS = (Verdict.FAIL, Verdict.ERROR, Verdict.UNKNOWN)
WIDE = 100  # from this many columns on, what was seen gets a column of its own
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FILE_WIDTH = 160  # where there is no terminal to measure


def console_for(file: IO[str], width: int | None = None) -> Console:
    """A console that writes to `file`; wide where neither a terminal nor COLUMNS limits it."""
    if width is None and not file.isatty() and "COLUMNS" not in os.environ:
        width = FILE_WIDTH
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def opening(header: Header) -> RenderableType:
    """The block at the start: everything that is needed to repeat the run."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    versions = {"kvshard": header.kvshard, **header.versions}
    rows = {
        "engine": " ".join([header.engine, header.engine_version, *_pairs(header.engine_options)]),
        "seed": f"{header.seed} ({header.seed_origin}); --seed {header.seed} repeats the run",
        "commit": header.commit or "none: not in a git checkout",
        "budget": header.budget,
        "options": " ".join(_pairs(header.options)),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "environment": " ".join(_pairs(header.environment)) or "none of the variables that are read is set",
    }
    for name, value in rows.items():
        grid.add_row(name, Text(safe(value)))
    return grid


def live(standing: Standing, rows_max: int) -> RenderableType:
    """The cases that run and those that ended with a problem, then how far the run is."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, width=7)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column(no_wrap=True, justify="right")
    problems = [result for result in standing.results if result.verdict in PROBLEMS]
    running = list(standing.running.values())
    room = max(1, rows_max - len(running) - 3)
    if len(problems) > room:
        table.add_row("", Text(f"{len(problems) - room} earlier problems", style="dim"), "")
    for result in problems[-room:]:
        table.add_row(_verdict(result.verdict), _line([result.case, first_line(result.why)]), f"{result.examples}")
    for progress in running:
        state = "shrinks" if progress.shrinking else "runs"
        table.add_row(Text(state, style="cyan"), Text(progress.case), f"{progress.examples}/{progress.examples_max}")
    return Group(table, _bar(standing))


def plain_line(result: CaseResult) -> str:
    """One ended case, for where there is no terminal."""
    why = f"  {first_line(result.why)}" if result.why else ""
    return f"{result.verdict:7}  {result.case:44}  {result.examples:6} examples  {result.seconds:7.1f} s{why}"


def final(record: Record, width: int) -> RenderableType:
    """Everything that a run came to; failures last, where a terminal shows them."""
    parts: list[RenderableType] = [_table(record.results, width)]
    parts += _skips(record.results)
    for result in record.results:
        if result.verdict in (Verdict.ERROR, Verdict.FAIL):
            title = Text(f"{result.verdict}  {result.case}", style=STYLES[result.verdict])
            parts += [Text(), Rule(title, align="left"), _told(result)]
    parts += [Text(), totals(record)]
    return Group(*parts)


def totals(record: Record) -> Text:
    """Cases per verdict on one line."""
    line = Text()
    for verdict in Verdict:
        count = record.footer.counts.get(verdict, 0)
        if verdict is Verdict.KNOWN and not count:
            continue  # few engines have any
        line.append(f"{count} {verdict}", style=STYLES[verdict] if count else "dim")
        line.append("  ")
    line.append(f"in {record.footer.seconds:.1f} s, seed {record.header.seed}")
    return line


def first_line(text: str) -> str:
    """The line of an explanation that says most: pytest marks it with `E` in a traceback."""
    lines = [line.strip() for line in safe(text).splitlines() if line.strip()]
    marked = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return (marked or lines or [""])[0]


def safe(text: str) -> str:
    """Text without the characters that would steer a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _pairs(options: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items() if value != ""]


def _line(parts: Iterable[str]) -> Text:
    return Text("  ").join(Text(part) for part in parts if part)


def _verdict(verdict: Verdict) -> Text:
    return Text(str(verdict), style=STYLES[verdict])


def _bar(standing: Standing) -> RenderableType:
    left = standing.seconds_left()
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    counts = " ".join(f"{count} {verdict}" for verdict, count in standing.counts().items() if count)
    cases = f"{len(standing.results)}/{standing.total if standing.total is not None else '?'} cases"
    time = "collecting" if standing.total is None else f"about {duration(left)} left" if left is not None else ""
    line.add_row(
        ProgressBar(total=1.0, completed=standing.fraction(), complete_style="green", finished_style="green"),
        _line([cases, counts, time]),
    )
    return line


def duration(seconds: float) -> str:
    """Seconds as `45 s`, `3 min` or `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _table(results: Sequence[CaseResult], width: int) -> Table:
    wide = width >= WIDE
    table = Table(box=None, padding=(0, 1), pad_edge=False, expand=True)
    table.add_column("case", overflow="ellipsis", no_wrap=True, ratio=None if wide else 1)
    table.add_column("verdict", no_wrap=True)
    for name in ("examples", "ops", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("seen", overflow="ellipsis", no_wrap=True, ratio=1)
    for result in results:
        numbers = (str(result.examples), str(result.ops), f"{result.seconds:.1f}")
        seen = (Text(_seen(result)),) if wide else ()
        table.add_row(Text(result.case), _verdict(result.verdict), *numbers, *seen)
        if not wide and _seen(result):
            table.add_row(Text(f"  {_seen(result)}", style="dim"))
    return table


def _seen(result: CaseResult) -> str:
    """What was seen, most frequent first; for a verdict other than pass, why."""
    if result.verdict is not Verdict.PASS:
        return first_line(result.why)
    events = sorted(result.seen.items(), key=lambda item: -item[1])
    return ", ".join(f"{event} {count}" for event, count in events if count)


def _skips(results: Sequence[CaseResult]) -> list[RenderableType]:
    """The reasons for skips, each with its cases."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.verdict is Verdict.SKIP:
            reasons.setdefault(result.why, []).append(result.case)
    if not reasons:
        return []
    lines = [f"skip  {len(cases)}: {why}: {', '.join(cases)}" for why, cases in sorted(reasons.items())]
    return [Text(), *[Text(line, style="dim") for line in lines]]


def _told(result: CaseResult) -> Text:
    """Long lines stay whole, so that a command can be copied; print it with `crop=False`."""
    words = message(result.failure) if result.failure is not None else result.why
    return Text(safe(words), overflow="ignore", no_wrap=True)

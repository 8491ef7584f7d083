"""A matrix as a table, cases by engines, on a terminal and in Markdown; what is no pass has a numbered note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from harness import render
from harness.markdown import SHOWN_MAX, cell, code, folded
from harness.matrix import Column, Matrix
from harness.record import Record
from harness.result import CaseResult, message
from harness.types import Verdict

NOT_RUN = "-"
AS_CODE = ("suite", "cases")  # facts that are so in Markdown


class Cell(NamedTuple):
    """What one engine came to in one case; `note` is the number of its note, 0 for none."""

    verdict: Verdict | None  # None: it did not run
    note: int = 0

    def __str__(self) -> str:
        """As in a table."""
        return f"{self.verdict or NOT_RUN}{f' [{self.note}]' if self.note else ''}"


class Grid(NamedTuple):
    """The table: cells by case, one for each engine; a note for each engine that is not whole; all notes in order."""

    rows: Mapping[str, Sequence[Cell]]
    heads: Sequence[int]
    notes: Sequence[str]


def grid(matrix: Matrix) -> Grid:
    """The table of a matrix. Cells of one engine with one verdict and one reason share their note."""
    numbers: dict[str, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(text, len(numbers) + 1)

    def cell_of(column: Column, result: CaseResult | None) -> Cell:
        if result is None:
            return Cell(None)
        if result.verdict is Verdict.PASS:
            return Cell(result.verdict)
        name = column.record.header.engine if column.record is not None else ""
        why = render.first_line(result.why).removeprefix(f"{name} ")  # it begins the note
        return Cell(result.verdict, number(f"{column.engine}, {result.verdict}: {why}"))

    heads = [
        number(f"{column.engine}: {render.first_line(column.why)}") if column.why else 0 for column in matrix.columns
    ]
    results = [(column, column.results) for column in matrix.columns]
    rows = {case: [cell_of(column, its.get(case)) for column, its in results] for case in matrix.cases}
    return Grid(rows, heads, list(numbers))


def terminal(matrix: Matrix) -> RenderableType:
    """The table, its notes and a line of counts for each engine."""
    found = grid(matrix)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("case", overflow="ellipsis", no_wrap=True)
    for column, head in zip(matrix.columns, found.heads, strict=True):
        title = render.safe(column.title) + (f" [{head}]" if head else "")
        table.add_column(Text(title), overflow="fold")
    for case, cells in found.rows.items():
        told = [Text(str(one), style=render.STYLES[one.verdict] if one.verdict else "dim") for one in cells]
        table.add_row(Text(case), *told)
    notes = [Text(f"[{number}] {render.safe(note)}", style="dim") for number, note in enumerate(found.notes, 1)]
    parts: list[RenderableType] = [table] if found.rows else []
    parts += [Text(), *notes] if notes else []
    return Group(*parts, Text(), *[_totals(column) for column in matrix.columns])


def failures(matrix: Matrix) -> RenderableType:
    """The counterexamples and errors of all engines; print it with `crop=False`, so that a command can be copied."""
    parts: list[RenderableType] = []
    for column in matrix.columns:
        for result in column.results.values():
            if result.verdict in (Verdict.FAIL, Verdict.ERROR):
                title = Text(
                    f"{result.verdict}  {render.safe(column.title)}  {result.case}", render.STYLES[result.verdict]
                )
                told = message(result.failure) if result.failure is not None else result.why
                parts += [Rule(title, align="left"), Text(render.safe(told), overflow="ignore", no_wrap=True), Text()]
    return Group(*parts)


def markdown(matrix: Matrix) -> str:
    """The same for a page or a pull request, every counterexample folded away."""
    found = grid(matrix)
    titles = [column.title for column in matrix.columns]
    told = ", ".join(f"{name} {code(value) if name in AS_CODE else value}" for name, value in facts(matrix).items())
    lines = [f"### kvshard: {', '.join(cell(title) for title in titles)}", "", f"{told[0].upper()}{told[1:]}."]
    heads = [f"{cell(title)}{_marked(head)}" for title, head in zip(titles, found.heads, strict=True)]
    lines += ["", f"| case | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {code(case)} | {' | '.join(map(str, cells))} |" for case, cells in found.rows.items()]
    lines += [f"| all | {' | '.join(counts(column.record) or NOT_RUN for column in matrix.columns)} |"]
    lines += ["", *[f"{number}. {cell(note)}" for number, note in enumerate(found.notes, 1)]] if found.notes else []
    examples = counterexamples(matrix)
    for result in examples[:SHOWN_MAX]:
        lines += ["", *folded(result)]
    if len(examples) > SHOWN_MAX:
        lines += ["", f"{len(examples) - SHOWN_MAX} more are in the record of the run."]
    return "\n".join(lines) + "\n"


def facts(matrix: Matrix) -> Mapping[str, str]:
    """What all engines were asked, by name."""
    asked = matrix.asked
    seeds = dict.fromkeys(str(column.record.header.seed) for column in matrix.columns if column.record is not None)
    told = {"suite": asked.suite, **({"cases": asked.keyword} if asked.keyword else {})}
    return {**told, "budget": asked.budget, "seed": ", ".join(seeds) or "none", "kvshard": asked.kvshard}


def counterexamples(matrix: Matrix) -> Sequence[CaseResult]:
    """The results that have one, their cases with the engine before them."""
    told = [
        replace(result, case=f"{column.title}: {result.case}")
        for column in matrix.columns
        for result in column.results.values()
        if result.failure is not None
    ]
    return sorted(told, key=lambda result: result.verdict is Verdict.KNOWN)  # others matter more


def counts(record: Record | None) -> str:
    """Cases per verdict, without those that have none; empty where no case ran."""
    found = record.footer.counts if record is not None else {}
    return ", ".join(f"{count} {verdict}" for verdict, count in found.items() if count)


def _marked(note: int) -> str:
    return f" [{note}]" if note else ""


def _totals(column: Column) -> Text:
    line = Text(f"{render.safe(column.title)}: ")
    return line.append_text(render.totals(column.record)) if column.record is not None else line.append("no verdict")

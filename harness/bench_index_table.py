"""The index benchmark as a table for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.bench_index import FIGURES, BenchReport, Ratio

_TIMES = "times the first"
_MEANING = {
    "name": "make page keys of the tokens, where it needs them",
    "match": "find the prefix and lock it",
    "evict": "until every class has room",
    "allocate": "draw the pages of the rest",
    "insert": "cache them, lock them instead",
    "free": "the partial page; unlock",
    "cycle": "the five parts together",
    "worker": "the request as a worker runs it",
}


def bench_table(report: BenchReport) -> Group:
    """Microseconds of a request for each engine, and how many times the first one's they are."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("us per\nrequest", no_wrap=True)
    for head in _heads(report):
        table.add_column(head, justify="right", overflow="fold", no_wrap=head == _TIMES)
    for figure in FIGURES:
        if figure in ("cycle", "worker"):
            table.add_section()
        table.add_row(figure, *_cells(report, figure))
    meaning = ", ".join(f"{figure}: {text}" for figure, text in _MEANING.items())
    return Group(Text(_title(report)), table, Text("\n".join([meaning, *_notes(report)])))


def bench_markdown(report: BenchReport) -> str:
    """The same as a Markdown document."""
    heads = ["us per request", *_heads(report), "what it is"]
    lines = [_title(report), "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join([figure, *_cells(report, figure), _MEANING[figure]])} |" for figure in FIGURES]
    return "\n".join([*lines, "", *(f"- {note}" for note in _notes(report))]) + "\n"


def _heads(report: BenchReport) -> Iterator[str]:
    first, *others = [times.engine for times in report.times]
    yield first
    for other in others:
        yield other
        yield _TIMES


def _cells(report: BenchReport, figure: str) -> Iterator[str]:
    for times in report.times:
        taken = times.microseconds(figure, report.workload.requests)
        yield f"{taken:,.0f}" if taken >= 1000 else f"{taken:.1f}"
        if times.engine in report.ratios:
            yield _ratio(report.ratios[times.engine][figure])


def _ratio(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _title(report: BenchReport) -> str:
    workload = report.workload
    return (
        f"{workload.requests:,} requests of {workload.prompt_tokens:,} tokens, pages of {workload.page_size}, "
        f"{workload.pages_per_rank:,} pages per rank, N={workload.shards}, seed {workload.seed}; "
        f"{workload.rounds} rounds, median [quartiles of the ratio round by round]"
    )


def _notes(report: BenchReport) -> Iterator[str]:
    total = report.workload.requests * report.workload.prompt_tokens
    yield (
        f"{report.hit_tokens:,} of {total:,} tokens hit, {report.evicted_pages:,} pages evicted by the parts and "
        f"{report.worker_evicted_pages:,} by the workers; the same for every engine, request by request"
    )
    yield ", ".join(f"{name} {version}" for name, version in report.versions.items())
    for missing in report.missing:
        yield f"not measured: {missing}"

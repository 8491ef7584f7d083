"""The report as tables for the terminal, no wider than 80 columns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.capacity import GIB, Replay, Report, Row

_Column = tuple[str, Callable[[Replay, Row], str]]

_BALANCE: tuple[_Column, ...] = (
    ("skew\nmean", lambda seen, _: f"{seen.skew_mean:.2%}"),
    ("skew\nmax", lambda seen, _: f"{seen.skew_max:.2%}"),
    ("peak\nused", lambda seen, row: f"{seen.used_pages_max / row.pages_per_rank:.1%}"),
    ("not ad-\nmitted", lambda seen, _: f"{sum(seen.not_admitted.values()):,}"),
    ("\nseconds", lambda seen, _: f"{seen.seconds:.2f}"),
    ("tokens\nper s", lambda seen, _: f"{seen.tokens_per_second / 1e6:.1f} M"),
)


def report_tables(report: Report) -> Group:
    """What is hit, and how the ranks share the pages; a row per layout and memory in each table."""
    best = report.bound.hit_tokens
    hits: tuple[_Column, ...] = (
        ("hit\ntokens", lambda seen, _: f"{seen.hit_tokens:,}"),
        ("hit\nrate", lambda seen, _: f"{seen.hit_rate:.1%}"),
        ("of\nbound", lambda seen, _: f"{seen.hit_tokens / best:.1%}" if best else "-"),
        ("evicted\npages", lambda seen, _: f"{seen.evicted_pages:,}"),
    )
    return Group(
        Text(report.title),
        _table(report, ("pages per\nrank", lambda row: f"{row.pages_per_rank:,}"), hits),
        _table(report, ("scratch\nGiB", lambda row: f"{row.scratch_bytes / GIB:.3f}"), _BALANCE),
        Text(_caption(report)),
    )


def comparison(report: Report) -> Group:
    """The other engines beside the first one, a row per layout, memory and other engine."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in (
        "\nlayout",
        "GiB per\nrank",
        "\nengine",
        "hit\ntokens",
        "more than\nthe first",
        "\nseconds",
        "times\nfirst",
    ):
        table.add_column(head, justify="left" if head in ("\nlayout", "\nengine") else "right", overflow="fold")
    for place, first in enumerate(report.rows):
        for other in report.others:
            seen, base = other.rows[place].replay, first.replay
            where = (first.layout, f"{first.memory_bytes / GIB:g}", other.engine)
            if seen is None or base is None:
                table.add_row(*where, "-", "-", "-", "-")
                continue
            ratio = f"{seen.seconds / base.seconds:.2f}" if base.seconds else "-"
            more = seen.hit_tokens - base.hit_tokens
            table.add_row(*where, f"{seen.hit_tokens:,}", f"{more:+,}", f"{seen.seconds:.2f}", ratio)
    return Group(Text(f"compared with {report.engine}, on the same requests"), table)


def _table(report: Report, budget: tuple[str, Callable[[Row], str]], columns: tuple[_Column, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nlayout", no_wrap=True)
    for head in ("GiB per\nrank", budget[0], *(head for head, _ in columns)):
        table.add_column(head, justify="right", overflow="fold")
    for _, rows in groupby(report.rows, key=lambda row: row.layout):
        for row in rows:
            seen = row.replay
            cells = [cell(seen, row) if seen else "-" for _, cell in columns]
            table.add_row(row.layout, f"{row.memory_bytes / GIB:g}", budget[1](row), *cells)
        if len({row.memory_bytes for row in report.rows}) > 1:
            table.add_section()
    return table


def _caption(report: Report) -> str:
    best, sizing = report.bound, report.sizing
    hits = (
        f"bound: an infinite cache hits {best.hit_rate:.1%} of the input tokens ({best.hit_tokens:,}) in pages "
        f"of {sizing.page_size}, and {best.block_rate:.1%} of the 512-token blocks ({best.hit_blocks:,} of "
        f"{best.blocks:,})"
    )
    terms = (
        f"engine {report.engine}; {sizing.row_bytes} bytes per token and layer, {sizing.layers} layers, context "
        f"{sizing.context_tokens:,}, chunk {sizing.chunk_tokens:,}, in flight {report.in_flight}; skew: fullest minus "
        "emptiest rank, peak used: fullest rank, both as share of pages per rank"
    )
    remarks: dict[str, list[str]] = {}
    for row in report.rows:
        where = f"{row.layout} at {row.memory_bytes / GIB:g} GiB"
        refused = row.replay.not_admitted.items() if row.replay else ()
        for remark in [row.note] if row.note else [f"{count:,} not admitted, {kind}" for kind, count in refused]:
            remarks.setdefault(remark, []).append(where)
    told = [
        f"{'all rows' if len(where) == len(report.rows) else ', '.join(where)}: {remark}"
        for remark, where in remarks.items()
    ]
    return "\n".join([hits, terms, *told])

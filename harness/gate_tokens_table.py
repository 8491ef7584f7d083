"""The result of a token gate, as a sentence and as a table."""

from __future__ import annotations

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.gate_table import STYLES
from harness.stats_gate import POINTS, Outcome
from harness.stats_tokens import Judged, Place, Spread

PAGES_MAX = 12  # rows of the table; all are in the JSON
FAILED_MAX = 3


class Parted(msgspec.Struct, frozen=True, kw_only=True):
    """Where two greedy answers part: the index of the first token that differs, or character where ids are not told."""

    item: str
    at: int
    baseline: int | str | None
    candidate: int | str | None


class TokensResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of a token gate with what it rests on; distances in nats."""

    outcome: Outcome
    said: str
    engine: str
    baseline: str
    prompts: int
    failed: dict[str, str]  # item -> why; never a distance
    limits: dict[str, float]
    page: int
    page_is_told: bool
    greedy: bool  # whether other greedy tokens are a failure
    restored: bool  # whether the cached way was to read from the host
    parted: tuple[Parted, ...]
    parted_again: tuple[Parted, ...]  # the baseline's own
    hits: int | None  # prompts that the engine had in its cache, in the way `cached`; None: not told
    judged: Judged | None


def sentence(result: TokensResult, judged: Judged, outcome: Outcome) -> str:
    """The verdict as a person would say it."""
    bounds = _bounds(result)
    spread, n = judged.spread, judged.items
    seen = f"{spread.tokens:,} tokens of {n:,} prompts"
    if outcome is Outcome.PASS:
        most = f"the furthest is {_nats(spread.max)}" if spread.max else "they are equal in every bit"
        parted = f"; {len(result.parted):,} greedy answers part, which is not judged" if result.parted else ""
        return f"The engine scores the same tokens alike {bounds}: {seen}, {most}{parted}{_uncached(result)}."
    if outcome is Outcome.INCONCLUSIVE:
        if not judged.off_again:
            return (
                f"The greedy answers part on {len(result.parted):,} prompts, but the baseline's own part as well, on "
                f"{len(result.parted_again):,}: it is no measure."
            )
        p = "" if judged.p is None else f" (p = {judged.p:.2g})"
        return (
            f"The engine is too far from the baseline on {len(judged.off):,} of {n:,} prompts {bounds}, but the "
            f"baseline is as far from itself on {len(judged.off_again):,}{p}: take a baseline that repeats itself, a "
            "wider tolerance, or more prompts."
        )
    if not judged.off:
        first = result.parted[0]
        return (
            f"The greedy answers part on {len(result.parted):,} of {n:,} prompts, the first one, {first.item}, at its "
            f"token {first.at}, and the baseline's own never do."
        )
    worst = judged.worst
    where = ""
    if worst is not None:
        page = f"page {worst.page}, " if result.page_is_told else ""
        where = (
            f"; the worst token is {page}position {worst.position} of prompt {worst.item} ({worst.way}): "
            f"{worst.candidate:.6g} instead of {worst.baseline:.6g}"
        )
    return (
        f"The engine is too far from the baseline on {len(judged.off):,} of {n:,} prompts {bounds}, "
        f"{spread.over:,} of {spread.tokens:,} tokens are over{where}{_begins(result, judged)}."
    )


def _uncached(result: TokensResult) -> str:
    """What a pass says nothing about."""
    if result.hits is None:
        return "; what the engine had cached is not told"
    return "" if result.hits else "; nothing came from the engine's cache, so that is not judged"


def _bounds(result: TokensResult) -> str:
    limits = result.limits
    if not limits["tolerance"] and not limits["far"]:
        return "(every bit is to be equal)"
    share = f"{POINTS * limits['share_max']:g} % of a prompt's tokens further than {_nats(limits['tolerance'])}"
    return f"(at most {share}, none further than {_nats(limits['far'])})"


def _begins(result: TokensResult, judged: Judged) -> str:
    """Where most items are over for the first time: if that is one place, it is behind what is wrong."""
    place = max(judged.pages, key=lambda each: each.begins, default=None)
    if place is None or place.begins < 2:
        return ""
    unit = "page" if result.page_is_told else f"block of {result.page} tokens"
    return f"; on {place.begins:,} prompts it begins in {unit} {place.page}"


def shown(result: TokensResult) -> RenderableType:
    """Verdict, numbers, and distances by way and by page."""
    head = Text(f"{result.outcome}: {result.said}", style=dict(STYLES).get(result.outcome, "bold red"))
    parts: list[RenderableType] = [head]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in _facts(result):
        grid.add_row(name, value)
    parts.append(grid)
    if result.judged is not None:
        parts += [_spreads(result.judged), _pages(result, result.judged)]
    return Group(*parts)


def _facts(result: TokensResult) -> list[tuple[str, str]]:
    rows = [("engine", result.engine), ("baseline", result.baseline)]
    greedy = f"{len(result.parted):,} part from the baseline's, {len(result.parted_again):,} of its own do"
    rows.append(("greedy answers", f"{greedy}; {'' if result.greedy else 'not '}judged"))
    hits = (
        "not told"
        if result.hits is None
        else f"{result.hits:,} prompts read from the engine's{' host' if result.restored else ''}"
    )
    rows.append(("cache", hits))
    failed = [f"{item}: {why}" for item, why in list(result.failed.items())[:FAILED_MAX]]
    more = f", and {len(result.failed) - FAILED_MAX:,} more" if len(result.failed) > FAILED_MAX else ""
    rows.append(
        ("failed", f"{len(result.failed):,} of {result.prompts:,}" + "".join(f"; {each}" for each in failed) + more)
    )
    return rows


def _spreads(judged: Judged) -> Table:
    table = _table(("way", "tokens", "mean", "99 %", "max", "over"))
    for name, each in (*judged.ways.items(), ("all", judged.spread), ("baseline itself", judged.own)):
        table.add_row(name, *_numbers(each))
    return table


def _pages(result: TokensResult, judged: Judged) -> Table:
    """The first pages, or those with the greatest distances where there are too many."""
    table = _table(
        (
            "page" if result.page_is_told else f"block of {result.page}",
            "tokens",
            "mean",
            "99 %",
            "max",
            "over",
            "begins",
        )
    )
    chosen: list[Place] = sorted(judged.pages, key=lambda each: -(each.spread.max or 0.0))[:PAGES_MAX]
    for place in sorted(chosen, key=lambda each: each.page):
        table.add_row(str(place.page), *_numbers(place.spread), f"{place.begins:,}")
    if len(judged.pages) > PAGES_MAX:
        table.caption = f"the {PAGES_MAX} furthest of {len(judged.pages):,}; --out FILE has all"
    return table


def _numbers(spread: Spread) -> tuple[str, ...]:
    return (f"{spread.tokens:,}", _nats(spread.mean), _nats(spread.p99), _nats(spread.max), f"{spread.over:,}")


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _table(heads: tuple[str, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right")
    return table

"""Several comparisons judged together: `kvshard gate family FILE.toml`, and the table that arms share.

A family of comparisons fails when one of them does, so p-values of a loss are adjusted (Holm): the chance that any of
them fails by luck is alpha at most. It passes when all pass, for which nothing needs to be adjusted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.gate_run import EXIT_OF, judge_runs, write_json
from harness.gate_table import STYLES
from harness.render import console_for
from harness.samples import read
from harness.samples_pairs import InvalidRun
from harness.stats_family import holm
from harness.stats_gate import POINTS, GateResult, Outcome, Terms, outcome_of
from harness.usage import UserError, nearest, toml_of

WORST_FIRST = (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE, Outcome.PASS)
KEYS = ("name", "baseline", "candidate", "filter", "margin")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of a family; without a result it is invalid, and `said` says why."""

    name: str
    outcome: Outcome = Outcome.INVALID
    said: str
    evidence: str = ""  # that the condition held
    p_adjusted: float | None = None
    result: GateResult | None = None


def judged(members: Sequence[Member], alpha: float) -> list[Member]:
    """Outcomes by adjusted p-values of a loss."""
    results = [each.result for each in members if each.result is not None]
    adjusted = iter(holm([each.p_loss for each in results]))
    return [each if each.result is None else _member(each, each.result, next(adjusted), alpha) for each in members]


def _member(member: Member, result: GateResult, p: float, alpha: float) -> Member:
    outcome, said = outcome_of(p, result.p_noninferior, alpha), result.said
    if outcome is not result.outcome:
        said = (
            f"Alone this would be a shown loss ({result.difference_points:+.2f} points, p = {result.p_loss:.2g}), "
            f"among all comparisons it is not (adjusted p = {p:.2g})."
        )
    return msgspec.structs.replace(member, outcome=outcome, said=said, p_adjusted=p)


def worst(members: Sequence[Member]) -> Outcome:
    """Of a family: a shown loss before all, then what could not be judged."""
    return next(each for each in WORST_FIRST if each in {member.outcome for member in members})


def exit_code(members: Sequence[Member]) -> int:
    """That of the worst one."""
    return dict(EXIT_OF)[worst(members)]


def as_json(members: Sequence[Member], alpha: float) -> dict[str, Any]:
    """The whole result."""
    return {"outcome": worst(members), "alpha": alpha, "members": msgspec.to_builtins(list(members))}


def shown(members: Sequence[Member], title: str) -> RenderableType:
    """One table, a sentence for each below it."""
    heads = ("verdict", "items", "lost", "gained", "flips %", "p loss", "adjusted")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(title, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for each in members:
        table.add_row(each.name, *_row(each))
    said = [Text(f"{each.name}: {each.said}", style=dict(STYLES).get(each.outcome, "bold red")) for each in members]
    seen = [Text(f"{each.name}: {each.evidence}") for each in members if each.evidence]
    return Group(table, *said, *([Text("\nevidence"), *seen] if seen else []))


def _row(member: Member) -> tuple[str, ...]:
    result = member.result
    if result is None:
        return (member.outcome, *("-",) * 6)
    flips = "-" if result.flip_rate is None else f"{POINTS * result.flip_rate:.2f}"
    p = "-" if member.p_adjusted is None else f"{member.p_adjusted:.2g}"
    return member.outcome, f"{result.n:,}", str(result.lost), str(result.gained), flips, f"{result.p_loss:.2g}", p


def family(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    members = judged([_compared(row, args) for row in _rows(args.file)], args.alpha)
    write_json(args.json, as_json(members, args.alpha))
    console_for(sys.stdout).print(shown(members, "pair"))
    return exit_code(members)


def _rows(path: Path) -> list[dict[str, Any]]:
    expected = "expected [[pair]] tables with name, baseline and candidate, perhaps filter and margin"
    content = toml_of(path, expected)
    rows = content.get("pair")
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: has {', '.join(content) or 'nothing'}; {expected}")
    for number, row in enumerate(rows, 1):
        unknown = next((key for key in row if key not in KEYS), None)
        if unknown is not None:
            raise UserError(f"{path}: pair {number} has {unknown!r}{nearest(unknown, KEYS)} {expected}")
        lacks = [key for key in KEYS[:3] if not isinstance(row.get(key), str)]
        margin = row.get("margin", 1.0)
        if lacks or not isinstance(margin, int | float) or not 0 < margin < POINTS:
            what = f"no {', '.join(lacks)}" if lacks else f"margin {margin!r}"
            raise UserError(f"{path}: pair {number}: {what}; {expected} in points")
    names = [row["name"] for row in rows]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: names are there twice: {', '.join(names)}; expected names that differ")
    return rows


def _compared(row: dict[str, Any], args: argparse.Namespace) -> Member:
    chosen, folder = row.get("filter"), args.file.parent
    terms = Terms(margin=row.get("margin", args.margin) / POINTS, alpha=args.alpha)
    try:
        arms = (read(folder / row["baseline"], chosen), read(folder / row["candidate"], chosen))
        result, _ = judge_runs(*arms, terms, args.unjudged_max / POINTS)
    except InvalidRun as error:
        return Member(name=row["name"], said=str(error))
    return Member(name=row["name"], said=result.said, result=result)

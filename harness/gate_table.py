"""What accuracy gates find, as tables for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.samples_pairs import Matched
from harness.stats import Calibration
from harness.stats_gate import POINTS, GateResult, Outcome
from harness.stats_power import Plan
from harness.stats_simulate import Cell, Setting, Shares

STYLES = ((Outcome.PASS, "green"), (Outcome.FAIL, "bold red"), (Outcome.INCONCLUSIVE, "yellow"))
HEADS = (
    ("items", "flips %", "loss", "passes", "fails", "open", "fails", "open", "passes"),
    ("items", "flips %", "no retry", "1 retry", "2 retries", "unpaired", "sequential", "its items"),
)
TITLES = (
    "paired gate: % of runs, candidate without loss | candidate that lost `loss` points",
    "other gates: % of runs that fail, without loss / with it; the sequential gate's mean number of items",
)


def gate(result: GateResult, matched: Matched | None) -> RenderableType:
    """One verdict with its numbers."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in gate_rows(result, matched):
        grid.add_row(name, value)
    return Group(Text(f"{result.outcome}: {result.said}", style=dict(STYLES)[result.outcome]), grid)


def gate_rows(result: GateResult, matched: Matched | None) -> list[tuple[str, str]]:
    """The numbers of a verdict, named."""
    low, high = result.interval_points
    rows = [
        ("items", f"{result.n:,}"),
        ("accuracy", f"baseline {POINTS * result.baseline:.2f} %, candidate {POINTS * result.candidate:.2f} %"),
        ("difference", f"{result.difference_points:+.2f} points, {low:+.2f} to {high:+.2f}"),
        ("loss", f"p = {result.p_loss:.2g} for no loss; alpha {result.alpha:g}"),
        ("margin", f"{result.margin_points:g} points, p = {result.p_noninferior:.2g} for a loss of it or more"),
        ("power", f"{result.power_at_margin:.0%} to show a loss of the margin; {_least(result)}"),
        ("method", result.method),
    ]
    if result.lost is not None and result.flip_rate is not None:
        rows.insert(1, ("flips", f"{result.lost:,} lost, {result.gained:,} gained; flip rate {result.flip_rate:.2%}"))
    if result.items_needed is not None:
        rows.append(("would settle it", f"about {result.items_needed:,} items, if what was seen is the truth"))
    if matched is not None:
        counts = [
            (arm.name, f"{arm.errors:,} errors, {arm.truncated:,} cut off", arm.samples) for arm in matched.unjudged
        ]
        rows += [("not judged", f"{name}: {told} of {samples:,}") for name, told, samples in counts]
        if matched.dropped or matched.only_baseline or matched.only_candidate:
            only = f"{matched.only_baseline:,} only in the baseline, {matched.only_candidate:,} only in the candidate"
            rows.append(("left out", f"{matched.dropped:,} items without a judged pair of answers, {only}"))
    return rows


def _least(result: GateResult) -> str:
    if result.detectable_points is None:
        return "no loss is shown that often"
    return f"the least loss shown in {result.power:.0%} of runs is {result.detectable_points:.2f} points"


def plans(found: Sequence[Plan]) -> RenderableType:
    """Items needed, a row per flip rate."""
    first = found[0]
    asked = f"alpha {first.alpha:g}, power {first.power:.0%}"
    title = f"items that tell a loss of {POINTS * first.loss:g} points from none, {asked}"
    table = _table(("flips %", "to fail\nthe loss", "to pass\nwithout it", "both", "not\npaired"))
    for each in found:
        numbers = (each.items_to_fail, each.items_to_pass, each.items, each.items_unpaired)
        table.add_row(f"{POINTS * each.flip_rate:g}", *(f"{number:,}" if number else "-" for number in numbers))
    return Group(Text(title), table)


def calibration(found: Calibration, least_loss: float | None, smallest_p: float) -> RenderableType:
    """What A/A runs say."""
    low, high = found.interval
    detectable = "none" if least_loss is None else f"{POINTS * least_loss:.2f} points with 80 % power at alpha .05"
    rows = (
        ("runs", f"{found.runs} of {found.n:,} items, accuracy {POINTS * found.accuracy:.2f} %"),
        (
            "flip rate",
            f"{found.flip_rate:.2%}, 95 % interval {low:.2%} to {high:.2%}; {found.ever_flipped:,} items flipped",
        ),
        (
            "rerun noise",
            f"{POINTS * found.rerun_sd:.2f} points seen, {POINTS * found.rerun_sd_expected:.2f} from the flips",
        ),
        ("item noise", f"{POINTS * found.item_se:.2f} points, which a gate on the same items does not have"),
        ("detectable", f"the least loss that this many items show: {detectable}"),
        ("same engine?", f"smallest p of any two runs, for all pairs together: {smallest_p:.2g}"),
    )
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    return grid


def simulation(setting: Setting, cells: Sequence[Cell]) -> RenderableType:
    """Operating characteristics for the terminal."""
    parts: list[RenderableType] = [Text(terms(setting))]
    for title, heads, rows in zip(TITLES, HEADS, _both(cells), strict=True):
        table = _table(heads)
        for row in rows:
            table.add_row(*row)
        parts += [Text(f"\n{title}"), table]
    return Group(*parts)


def simulation_markdown(setting: Setting, cells: Sequence[Cell]) -> str:
    """Operating characteristics as Markdown."""
    lines = [f"{terms(setting)}."]
    for title, heads, rows in zip(TITLES, HEADS, _both(cells), strict=True):
        lines += ["", f"{title[0].upper()}{title[1:]}:".replace("|", "/"), "", f"| {' | '.join(heads)} |"]
        lines += ["|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def terms(setting: Setting) -> str:
    """What was simulated, on a line."""
    margin = "the loss of the row" if setting.margin is None else f"{POINTS * setting.margin:g} points"
    return (
        f"{setting.runs:,} runs a cell, seed {setting.seed}, accuracy {POINTS * setting.accuracy:g} %, "
        f"alpha {setting.alpha:g}, margin {margin}, threshold {POINTS * setting.slack:g} points under the true accuracy"
    )


def _both(cells: Sequence[Cell]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    paired, others = [], []
    for each in cells:
        where = (f"{each.n:,}", f"{POINTS * each.flip_rate:g}")
        good, bad = each.healthy, each.worse
        shares = (good.passed, good.failed, good.inconclusive, bad.failed, bad.inconclusive, bad.passed)
        paired.append((*where, f"{POINTS * each.loss:.2f}", *(_percent(share) for share in shares)))
        others.append((*where, *(_pair(*ends) for ends in zip(_fails(good), _fails(bad), strict=True)), _items(each)))
    return paired, others


def _fails(shares: Shares) -> tuple[float, ...]:
    return (*shares.threshold_failed, shares.unpaired_failed, shares.sequential_failed)


def _items(each: Cell) -> str:
    return f"{each.healthy.sequential_items:.0f} / {each.worse.sequential_items:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _pair(good: float, bad: float) -> str:
    return f"{_percent(good)} / {_percent(bad)}"


def _table(heads: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right")
    return table

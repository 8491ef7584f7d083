"""Operating characteristics as a picture: false alarms and losses found, a panel per size, a bar per gate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.capacity import CapacityError
from harness.capacity_plot import load_figure
from harness.stats_simulate import Cell, Setting, Shares
from harness.usage import UserError

NAMES = ("paired", "sequential", "threshold, no retry", "threshold, 1 retry", "threshold, 2 retries", "unpaired")


def require_plot() -> None:
    """Raises `UserError` without matplotlib, before the work begins."""
    try:
        load_figure()
    except CapacityError as error:
        raise UserError(str(error)) from None


def save(setting: Setting, cells: Sequence[Cell], path: Path) -> None:
    """Writes a PNG. Raises `UserError`."""
    require_plot()
    sizes = list(dict.fromkeys(each.n for each in cells))
    figure = load_figure()(figsize=(4 * len(sizes) + 1, 7), layout="constrained")
    grid = figure.subplots(2, len(sizes), sharey="row", squeeze=False)
    for column, n in enumerate(sizes):
        here = [each for each in cells if each.n == n]
        for row, (title, line) in enumerate((("false alarms", setting.alpha), ("losses found", setting.power))):
            axes = grid[row][column]
            for at, name in enumerate(NAMES):
                shares = [100 * _failed(each.worse if row else each.healthy)[at] for each in here]
                places = [place + (at - len(NAMES) / 2 + 0.5) * 0.13 for place in range(len(here))]
                axes.bar(places, shares, 0.13, label=name)
            axes.axhline(100 * line, linestyle="--", color="black", linewidth=1)
            axes.set_xticks(range(len(here)), [f"{100 * each.flip_rate:g}" for each in here])
            axes.set_title(f"{n:,} items: {title}", fontsize=10)
            axes.set_xlabel("flip rate (%)")
        grid[0][0].set_ylabel("% of runs without loss that fail")
        grid[1][0].set_ylabel("% of runs with the loss that fail")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(NAMES), fontsize=8)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written: {error.strerror or error}") from error


def _failed(shares: Shares) -> tuple[float, ...]:
    return (shares.failed, shares.sequential_failed, *shares.threshold_failed, shares.unpaired_failed)

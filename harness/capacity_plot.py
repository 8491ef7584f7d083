"""The report as a picture: hit rate against memory per rank, a line per layout, the bound dashed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from harness.capacity import GIB, CapacityError, Report


def load_figure() -> Any:
    """The Figure class of matplotlib; it needs no display. CapacityError when the extra `plot` is not installed."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise CapacityError(
            f"--plot needs matplotlib ({error}); install it with: pip install 'kvshard[plot]'"
        ) from None


def save_plot(report: Report, path: Path) -> None:
    """Write the picture as PNG."""
    figure = load_figure()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report.rows:
        points = lines.setdefault(row.layout, [])
        if row.replay is not None:
            points.append((row.memory_bytes / GIB, 100 * row.replay.hit_rate))
    for layout, points in lines.items():
        points.sort()
        label = layout if points else f"{layout} (does not fit)"
        axes.plot([memory for memory, _ in points], [rate for _, rate in points], marker="o", label=label)
    best = 100 * report.bound.hit_rate
    axes.axhline(best, linestyle="--", color="black", label=f"infinite cache ({best:.1f} %)")
    memories = sorted({row.memory_bytes / GIB for row in report.rows})
    if len(memories) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(memories, [f"{memory:g}" for memory in memories])
    axes.minorticks_off()
    axes.set_ylim(0, max(1.0, 1.1 * best))
    axes.set_xlabel("memory per rank (GiB)")
    axes.set_ylabel("hit rate (% of input tokens)")
    axes.set_title(report.title, fontsize=9, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)

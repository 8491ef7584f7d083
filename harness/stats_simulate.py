"""Operating characteristics: how often gates are right, by simulation of what they see.

One item set, fixed. A share 2q of the items is a coin toss in every run, so that two runs of one engine differ on a
share q; the others are always right or always wrong. A candidate that lost x gets each sure item wrong with a chance
that makes the mean loss x. All gates see the same runs:

    paired      baseline and candidate once each, judged at the margin
    sequential  the same, item by item in a random order
    threshold   score >= the true accuracy less SLACK points, with silent retries
    unpaired    two-sample z test of the two scores, as tools do that keep no pairs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy.stats import binom, norm  # type: ignore[import-untyped]  # scipy ships no types

from harness.stats import StatsError
from harness.stats_paired import Decision, decision
from harness.stats_power import TAIL, detectable_loss
from harness.stats_sequential import FAIL, OPEN, PASS, Sequential, crossings, final_losses, sequential

RETRIES = (0, 1, 2)
CELLS_AT_ONCE = 2_000_000  # answers held at a time


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated."""

    items: tuple[int, ...] = (200, 500, 1319)
    flip_rates: tuple[float, ...] = (0.0, 0.01, 0.034, 0.05)
    runs: int = 10_000
    seed: int = 0
    accuracy: float = 0.94
    slack: float = 0.009  # of the threshold: a published gate had 0.935 where the mean was 0.944
    margin: float | None = None  # None: the least loss that is shown with `power`, cell by cell
    alpha: float = 0.05
    power: float = 0.8


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the runs; of the candidate without loss or of the one that lost."""

    passed: float
    failed: float
    inconclusive: float
    sequential_passed: float
    sequential_failed: float
    sequential_items: float  # mean
    threshold_failed: tuple[float, ...]  # by retries
    unpaired_failed: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One size and flip rate."""

    n: int
    flip_rate: float
    loss: float  # of the candidate that lost: the least that is shown with the power asked for
    margin: float
    healthy: Shares
    worse: Shares


class _Gates(NamedTuple):
    """What judges a cell."""

    paired: Decision
    design: Sequential
    final: Decision
    threshold: float


def simulate(setting: Setting) -> Iterator[Cell]:
    """A cell for each size and flip rate. Raises `StatsError`."""
    check(setting)
    for n in setting.items:
        for flip_rate in setting.flip_rates:
            yield cell(setting, n, flip_rate)


def check(setting: Setting) -> None:
    """Raises `StatsError` for a setting that no engine can have."""
    for n in setting.items:
        for rate in setting.flip_rates:
            loss = detectable_loss(n, rate, setting.alpha, setting.power)
            if loss is None or not rate + loss < setting.accuracy < 1 - rate:
                size = "any size" if loss is None else f"{loss:.3f}"
                raise StatsError(
                    f"{n} items, flip rate {rate:g}, accuracy {setting.accuracy:g}: the items that are always right or "
                    f"always wrong do not suffice for a loss of {size}; take more items"
                )


def cell(setting: Setting, n: int, flip_rate: float) -> Cell:
    """Both candidates through all gates. Seeded by seed, n and flip rate: a cell alone is that of the table."""
    loss = detectable_loss(n, flip_rate, setting.alpha, setting.power) or 0.0
    margin = setting.margin or loss
    design = sequential(n, margin, flip_rate, setting.alpha)
    lost_max = int(binom.isf(TAIL, n, flip_rate / 2 + loss)) + 1
    gates = _Gates(
        decision(n, margin, setting.alpha, lost_max),
        design,
        decision(n, margin, design.final, lost_max)._replace(losses=final_losses(design, n)),
        n * (setting.accuracy - setting.slack),
    )
    source = np.random.default_rng([setting.seed, n, round(flip_rate * 1e6)])
    healthy, worse = (_shares(setting, n, flip_rate, gates, each, source) for each in (0.0, loss))
    return Cell(n=n, flip_rate=flip_rate, loss=loss, margin=margin, healthy=healthy, worse=worse)


def _shares(setting: Setting, n: int, rate: float, gates: _Gates, loss: float, source: np.random.Generator) -> Shares:
    tossed = round(2 * rate * n)
    sure = round(setting.accuracy * n - tossed / 2)  # always right in the baseline
    broken = source.binomial(sure, loss * n / sure, setting.runs)
    _, fell, rose, right = source.multinomial(tossed, [0.25] * 4, setting.runs).T
    lost, gained = broken + fell, rose
    passed = gates.paired.noninferior(lost, gained)
    failed = ~passed & gates.paired.loss_shown(lost, gained)
    baseline, candidate = sure + fell + right, sure - broken + rose + right
    early = _sequential(gates, lost, gained, source)
    scores = [candidate, *(sure - broken + source.binomial(tossed, 0.5, setting.runs) for _ in RETRIES[1:])]
    under = np.array([score < gates.threshold - 1e-9 for score in scores])
    return Shares(
        passed=float(passed.mean()),
        failed=float(failed.mean()),
        inconclusive=float(1 - passed.mean() - failed.mean()),
        sequential_passed=float((early[1] == PASS).mean()),
        sequential_failed=float((early[1] == FAIL).mean()),
        sequential_items=float(early[0].mean()),
        threshold_failed=tuple(float(under[: retries + 1].all(axis=0).mean()) for retries in RETRIES),
        unpaired_failed=float((unpaired_z(baseline, candidate, n) <= -norm.isf(setting.alpha)).mean()),
    )


def unpaired_z(baseline: Any, candidate: Any, n: int) -> Any:
    """The pooled two-sample z of two counts of right answers."""
    pooled = (baseline + candidate) / (2 * n)
    spread = np.sqrt(np.maximum(2 * pooled * (1 - pooled) / n, 1e-300))
    return (candidate - baseline) / n / spread


def _sequential(gates: _Gates, lost: Any, gained: Any, source: np.random.Generator) -> tuple[Any, Any]:
    """Items asked and outcome of each run, its items in a random order."""
    n, runs = gates.design.n, len(lost)
    asked, outcome = np.full(runs, n), np.full(runs, OPEN)
    step = max(1, CELLS_AT_ONCE // n)
    for at in range(0, runs, step):
        part = slice(at, at + step)
        down, up = lost[part, None], gained[part, None]
        place = np.arange(n)[None, :]
        moves = np.where(place < down, -1, np.where(place < down + up, 1, 0)).astype(np.int8)
        item, stopped = crossings(gates.design, source.permuted(moves, axis=1))
        asked[part] = np.where(item, item, n)
        outcome[part] = stopped
    left = outcome == OPEN
    passed = left & gates.final.noninferior(lost, gained)
    failed = left & ~passed & gates.final.loss_shown(lost, gained)
    return asked, np.where(passed, PASS, np.where(failed, FAIL, outcome))


def worst(cells: Sequence[Cell]) -> tuple[float, float]:
    """The greatest share of false alarms and the smallest of losses found, of the paired gate."""
    return max(each.healthy.failed for each in cells), min(each.worse.failed for each in cells)

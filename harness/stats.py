"""Two arms, baseline and candidate, answered the same items: what is counted, and the exact tests on it.

Shares are fractions of 1 here; points (hundredths) are for people. `lost` is an item that the baseline has right and
the candidate wrong, `gained` the other way round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import beta, binom, binomtest  # type: ignore[import-untyped]  # scipy ships no types

from harness.usage import UserError


class StatsError(UserError):
    """A number that a test cannot work with; the message names it and what was expected."""


class Interval(NamedTuple):
    """A confidence interval, both ends included."""

    low: float
    high: float


class Pairs(NamedTuple):
    """Items by the answers of the two arms: a 2 x 2 table."""

    both_right: int
    lost: int
    gained: int
    both_wrong: int

    @property
    def n(self) -> int:
        """Items."""
        return sum(self)

    @property
    def discordant(self) -> int:
        """Items on which the arms differ."""
        return self.lost + self.gained

    @property
    def flip_rate(self) -> float:
        """Share of items on which the arms differ."""
        return self.discordant / self.n

    @property
    def difference(self) -> float:
        """Accuracy of the candidate less that of the baseline."""
        return (self.gained - self.lost) / self.n

    @property
    def baseline(self) -> float:
        """Accuracy of the baseline."""
        return (self.both_right + self.lost) / self.n

    @property
    def candidate(self) -> float:
        """Accuracy of the candidate."""
        return (self.both_right + self.gained) / self.n


def pairs_of(baseline: Any, candidate: Any) -> Pairs:
    """Counts the answers of two arms, item by item. Raises `StatsError`."""
    first, second = np.asarray(baseline, bool), np.asarray(candidate, bool)
    if first.shape != second.shape or first.ndim != 1 or not first.size:
        raise StatsError(f"answers of shapes {first.shape} and {second.shape}: expected one for each item in both arms")
    table = np.bincount(2 * first + second, minlength=4)
    return Pairs(int(table[3]), int(table[2]), int(table[1]), int(table[0]))


def mcnemar_p(lost: int, gained: int) -> float:
    """Exact one-sided McNemar: the chance of so many losses or more, if a flip were as likely up as down."""
    if lost < 0 or gained < 0:
        raise StatsError(f"lost {lost}, gained {gained}: expected counts of items")
    if not lost + gained:
        return 1.0
    return float(binomtest(lost, lost + gained, 0.5, alternative="greater").pvalue)


def losses_needed(discordant: Any, alpha: float) -> Any:
    """How many of so many discordant items must be losses for `mcnemar_p` <= alpha; more than all: it cannot be."""
    return binom.isf(alpha, np.asarray(discordant), 0.5).astype(int) + 1


def proportion_interval(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Clopper-Pearson. `successes` may be fractional: a sum of n scores between 0 and 1 varies no more than a count."""
    if not (0 <= successes <= n and n > 0):
        raise StatsError(f"{successes} of {n}: expected a count between 0 and n")
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, successes, n - successes + 1)) if successes else 0.0
    high = float(beta.isf(tail, successes + 1, n - successes)) if successes < n else 1.0
    return Interval(low, high)


class Calibration(NamedTuple):
    """How much runs of the same engine differ on the same items."""

    runs: int
    n: int
    flip_rate: float  # share of items on which two runs differ, mean over all pairs of runs
    interval: Interval  # of the flip rate
    ever_flipped: int  # items that not all runs agree on
    accuracy: float
    rerun_sd: float  # of the accuracy over the runs, as seen
    rerun_sd_expected: float  # sqrt(q / 2n): what the flips alone make
    item_se: float  # sqrt(p (1 - p) / n): what another draw of items would make


def calibrate(answers: Any, confidence: float = 0.95) -> Calibration:
    """The flip rate of A/A runs; `answers` is runs x items. Raises `StatsError`."""
    right = np.asarray(answers, bool)
    if right.ndim != 2 or right.shape[0] < 2 or not right.shape[1]:
        raise StatsError(f"answers of shape {right.shape}: expected two or more runs of one item or more")
    runs, n = right.shape
    ups = right.sum(axis=0)
    differing = 2 * ups * (runs - ups) / (runs * (runs - 1))  # share of pairs of runs that differ on the item
    total = float(differing.sum())
    accuracy = float(right.mean())
    return Calibration(
        runs=runs,
        n=n,
        flip_rate=total / n,
        interval=proportion_interval(total, n, confidence),
        ever_flipped=int(((ups > 0) & (ups < runs)).sum()),
        accuracy=accuracy,
        rerun_sd=float(right.mean(axis=1).std(ddof=1)),
        rerun_sd_expected=float(np.sqrt(total / n / (2 * n))),
        item_se=float(np.sqrt(accuracy * (1 - accuracy) / n)),
    )


def checked_share(value: float, name: str, low: float = 0.0, high: float = 1.0) -> float:
    """A value strictly between two bounds. Raises `StatsError`."""
    if not low < value < high:
        raise StatsError(f"{name} {value:g}: expected more than {low:g} and less than {high:g}")
    return value

"""Several repeats per item: the items are clusters.

Repeats are averaged per item and arm and the test runs over items, so whatever the repeats of an item share (its
difficulty, a prefix in the cache, one batch) cannot pass for evidence. Without a change the arms' repeats of an item
can be exchanged, so its difference is as likely up as down: the sign-flip test is exact then for any number of items,
and with one repeat it is the exact McNemar test. Its price: fewer than five items that moved can never show a loss at
.05.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import permutation_test, t  # type: ignore[import-untyped]  # scipy ships no types

from harness.stats import Interval, StatsError

WORK_MAX = 100_000_000  # multiplications that the exact distribution may take
RESAMPLES = 99_999


class Repeats(NamedTuple):
    """Right answers and repeats per item in each arm; arrays of one length."""

    right_baseline: Any
    repeats_baseline: Any
    right_candidate: Any
    repeats_candidate: Any

    @property
    def n(self) -> int:
        """Items."""
        return len(self.right_baseline)

    @property
    def differences(self) -> Any:
        """Share right in the candidate less that in the baseline, per item."""
        return self.right_candidate / self.repeats_candidate - self.right_baseline / self.repeats_baseline

    @property
    def flip_rate(self) -> float:
        """Chance that one repeat of the baseline and one of the candidate differ, on an item drawn at random."""
        first, second = self.right_baseline / self.repeats_baseline, self.right_candidate / self.repeats_candidate
        return float(np.mean(first * (1 - second) + second * (1 - first)))

    @property
    def are_copies(self) -> bool:
        """Whether all repeats of each item agree in each arm, so that they tell no more than one of them."""
        first = (self.right_baseline == 0) | (self.right_baseline == self.repeats_baseline)
        second = (self.right_candidate == 0) | (self.right_candidate == self.repeats_candidate)
        return bool((first & second).all())


def repeats_of(right_baseline: Any, repeats_baseline: Any, right_candidate: Any, repeats_candidate: Any) -> Repeats:
    """Checks the counts. Raises `StatsError`."""
    given = (right_baseline, repeats_baseline, right_candidate, repeats_candidate)
    arrays = Repeats(*(np.asarray(each, int) for each in given))
    fits = len({each.shape for each in arrays}) == 1 and arrays.right_baseline.ndim == 1 and arrays.n >= 2
    if not fits or any(
        ((right < 0) | (right > repeats) | (repeats < 1)).any() for right, repeats in (arrays[:2], arrays[2:])
    ):
        raise StatsError(
            "repeats: expected for two items or more, in both arms, a repeat or more and no more right than that"
        )
    return arrays


def sign_flip_p(repeats: Repeats) -> float:
    """One-sided: the chance of so great a loss or a greater, if each item's difference were as likely up as down.

    Exact by convolution over whole numbers of repeats; where their common multiple is too great, by random signs.
    """
    common = lcm(*{int(count) for count in (*repeats.repeats_baseline, *repeats.repeats_candidate)})
    whole = [
        int((Fraction(int(c), int(kc)) - Fraction(int(b), int(kb))) * common)
        for b, kb, c, kc in zip(*repeats, strict=True)
    ]
    moved = [abs(each) for each in whole if each]
    if not moved:
        return 1.0
    if len(moved) * sum(moved) > WORK_MAX:
        drawn = permutation_test(
            (repeats.differences,),
            np.mean,
            permutation_type="samples",
            alternative="less",
            n_resamples=RESAMPLES,
            batch=1000,
            rng=np.random.default_rng(0),
        )
        return float(drawn.pvalue)
    # chance of each sum of the items that move down; all signs together are sum(moved) - 2 * that
    chance = np.ones(1)
    for size in moved:
        longer = np.zeros(len(chance) + size)
        longer[: len(chance)] += chance / 2
        longer[size:] += chance / 2
        chance = longer
    down = (sum(moved) - sum(whole)) // 2
    return min(1.0, float(chance[down:].sum()))


def standard_error(repeats: Repeats) -> float:
    """Of the mean difference: over the items, and never less than what the repeats within items make.

    The second is binomial with Jeffreys' half counts: where all repeats agree that is no proof that nothing varies.
    """
    over_items = float(np.var(repeats.differences, ddof=1)) / repeats.n
    within = 0.0
    for right, count in (repeats[:2], repeats[2:]):
        share = (right + 0.5) / (count + 1)
        within += float((share * (1 - share) / count).sum()) / repeats.n**2
    return float(np.sqrt(max(over_items, within)))


def mean_noninferior_p(repeats: Repeats, margin: float) -> float:
    """Paired t over items, H0 "worse by `margin` or more": nearly exact where many items move."""
    mean = float(repeats.differences.mean())
    return float(t.sf((mean + margin) / standard_error(repeats), repeats.n - 1))


def mean_interval(repeats: Repeats, alpha: float) -> Interval:
    """Two one-sided bounds, each at alpha, on the mean difference; widened to hold 0 where no test shows a change."""
    mean = float(repeats.differences.mean())
    half = float(t.isf(alpha, repeats.n - 1)) * standard_error(repeats)
    low, high = max(-1.0, mean - half), min(1.0, mean + half)
    swapped = Repeats(*repeats[2:], *repeats[:2])
    if sign_flip_p(swapped) > alpha:
        low = min(low, 0.0)
    if sign_flip_p(repeats) > alpha:
        high = max(high, 0.0)
    return Interval(low, high)

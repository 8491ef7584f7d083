"""Is the candidate no worse than the baseline by more than a margin: exact, on items that both arms answered.

H0 is `difference <= floor`, difference being P(gained) - P(lost). Tables are ordered by Tango's score statistic
(Tango 1998, Statistics in Medicine 17:891), and the p-value is the greatest chance, over all flip rates that fit, of
a table at least as favourable: the exact unconditional test of Sidik (2003, Statistics in Medicine 22:265). Flip
rates outside of a confidence set of 1 - GAMMA are left out and GAMMA added to p (Berger and Boos 1994), which keeps p
exact and sharper. Tango's own interval is nearly right and much quicker, but with few discordant items it promises
too much: with none among 200 it excludes a loss of 1.33 points, at which such a table has a chance of 6.9 %, not 5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom, norm  # type: ignore[import-untyped]  # scipy ships no types

from harness.stats import Interval, Pairs, StatsError, losses_needed, mcnemar_p, proportion_interval

GAMMA = 5e-4  # what the flip rates that are left out may add to p
GRID = 48  # flip rates tried between the ends of their confidence set; p is smooth between them
NEGLIGIBLE = 1e-9  # chance of the tables that are not enumerated
BOUND_STEP = 1e-5  # of the interval's ends: a thousandth of a point


def tango_z(lost: Any, gained: Any, n: int, floor: float) -> Any:
    """Tango's score statistic of H0 `difference = floor`; large values speak for a greater difference. Takes arrays."""
    lost, gained = np.asarray(lost, float), np.asarray(gained, float)
    b = (2 * n - gained + lost) * floor - gained - lost
    c = -lost * floor * (1 - floor)
    share_lost = (np.sqrt(np.maximum(b * b - 8 * n * c, 0)) - b) / (4 * n)  # likeliest P(lost) under H0
    variance = n * (2 * share_lost + floor * (1 - floor))
    shift = gained - lost - n * floor
    with np.errstate(divide="ignore", invalid="ignore"):
        z = shift / np.sqrt(np.maximum(variance, 0))
    return np.where(variance > 1e-12, z, np.where(np.abs(shift) < 1e-9, 0.0, np.where(shift < 0, -np.inf, np.inf)))


def floor_p(lost: int, gained: int, n: int, floor: float) -> float:
    """Exact p-value of H0 `difference <= floor`."""
    if min(lost, gained, n - lost - gained) < 0 or not -1 < floor < 1:
        raise StatsError(
            f"lost {lost}, gained {gained} of {n}, floor {floor}: expected counts that fit and -1 < floor < 1"
        )
    fits = proportion_interval(lost + gained, n, 1 - GAMMA)
    low, high = max(fits.low, abs(floor)), fits.high
    if low > high:  # no flip rate that fits allows so small a difference
        return GAMMA
    flips = np.linspace(low, high, GRID)
    lose, gain = (flips - floor) / 2, (flips + floor) / 2
    losts, gaineds = _likely(n, lose), _likely(n, gain)
    fewest = favourable_gains(losts, gaineds[0], gaineds[-1], n, floor, float(tango_z(lost, gained, n, floor)))
    rest = np.clip(gain[:, None] / np.maximum(1 - lose[:, None], 1e-300), 0, 1)
    chance = binom.pmf(losts, n, lose[:, None]) * binom.sf(fewest - 1, n - losts, rest)
    return min(1.0, float(chance.sum(axis=1).max()) + GAMMA)


def _likely(n: int, shares: Any) -> Any:
    """All counts that one of these shares of n makes with more than a negligible chance."""
    least = int(binom.ppf(NEGLIGIBLE, n, shares.min())) if shares.min() > 0 else 0
    most = int(binom.isf(NEGLIGIBLE, n, min(1.0, shares.max()))) + 1
    return np.arange(max(least, 0), min(most, n) + 1)


def favourable_gains(losts: Any, low: int, high: int, n: int, floor: float, z: float) -> Any:
    """For each count of losses the fewest gains, from `low` on, whose statistic is at least z, by bisection.

    It rises with the gains. `high` + 1 where none up to that is enough or possible.
    """
    below, enough = np.full(len(losts), low - 1), np.full(len(losts), high + 1)
    while (open_ := enough - below > 1).any():
        middle = (below + enough) // 2
        reached = (tango_z(losts, middle, n, floor) >= z - 1e-9) | (losts + middle > n)
        enough = np.where(open_ & reached, middle, enough)
        below = np.where(open_ & ~reached, middle, below)
    return np.where(losts + enough > n, high + 1, enough)


def noninferior_p(pairs: Pairs, margin: float) -> float:
    """Exact p-value of H0 "the candidate is worse by `margin` or more"."""
    return floor_p(pairs.lost, pairs.gained, pairs.n, -margin)


def difference_interval(pairs: Pairs, alpha: float) -> Interval:
    """Two one-sided bounds, each at alpha, on the difference: what the exact tests do not refute.

    It holds 0 wherever the exact McNemar test, which is a little more careful, shows neither loss nor gain.
    """
    low = _lower_bound(pairs.lost, pairs.gained, pairs.n, alpha)
    high = -_lower_bound(pairs.gained, pairs.lost, pairs.n, alpha)
    if mcnemar_p(pairs.gained, pairs.lost) > alpha:
        low = min(low, 0.0)
    if mcnemar_p(pairs.lost, pairs.gained) > alpha:
        high = max(high, 0.0)
    return Interval(low, high)


def _lower_bound(lost: int, gained: int, n: int, alpha: float) -> float:
    refuted, possible = -1.0, (gained - lost) / n
    while possible - refuted > BOUND_STEP:
        middle = (refuted + possible) / 2
        if floor_p(lost, gained, n, middle) <= alpha:
            refuted = middle
        else:
            possible = middle
    return refuted


def gains_needed(losts: Any, n: int, margin: float, alpha: float) -> Any:
    """For each count of losses (rising by one) the fewest gains that show non-inferiority; n + 1 where none does."""
    counts = [int(count) for count in losts]

    def shown(lost: int, gained: int) -> bool:
        return floor_p(lost, gained, n, -margin) <= alpha

    # where to begin: Tango's own threshold is one or two beside the exact one
    gains = int(favourable_gains(np.array(counts[:1]), 0, n - counts[0], n, -margin, float(norm.isf(alpha)))[0])
    gains = min(gains, n - counts[0])
    while gains and shown(counts[0], gains - 1):
        gains -= 1
    needed = []
    for lost in counts:
        while lost + gains <= n and not shown(lost, gains):
            gains += 1
        needed.append(gains if lost + gains <= n else n + 1)
    return np.asarray(needed)


class Decision(NamedTuple):
    """The two exact tests of one n, margin and alpha for all tables with few enough losses, made ready for arrays."""

    n: int
    margin: float
    alpha: float
    gains: Any  # per count of losses from 0 on: the fewest gains that show non-inferiority
    losses: Any  # per count of discordant items: the fewest losses that show a loss

    def noninferior(self, lost: Any, gained: Any) -> Any:
        """Whether non-inferiority is shown; never beyond the counts of losses that the table holds."""
        known = np.minimum(lost, len(self.gains) - 1)
        return (gained >= self.gains[known]) & (lost < len(self.gains))

    def loss_shown(self, lost: Any, gained: Any) -> Any:
        """Whether the exact McNemar test shows a loss."""
        return lost >= self.losses[np.asarray(lost) + gained]


def decision(n: int, margin: float, alpha: float, lost_max: int) -> Decision:
    """The decisions for tables with at most `lost_max` losses; with more non-inferiority is taken as not shown."""
    gains = gains_needed(range(min(lost_max, n) + 1), n, margin, alpha)
    return Decision(n, margin, alpha, gains, losses_needed(np.arange(n + 1), alpha))

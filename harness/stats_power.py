"""What a paired gate can see, and how many items it takes: binomial mixtures, enumerated.

The model of a candidate: each item flips by luck with chance `flip_rate`, as often up as down, and a share `loss` of
the items is lost on top. So P(lost) = flip_rate / 2 + loss and P(gained) = flip_rate / 2, and the accuracy falls by
`loss`. Damage adds flips; formulas that keep the flip rate fixed promise to find losses greater than it, which no
candidate can have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]  # scipy ships no types
from scipy.stats import binom, nct, norm, t  # type: ignore[import-untyped]  # scipy ships no types

from harness.stats import StatsError, checked_share, losses_needed
from harness.stats_paired import favourable_gains, gains_needed

TAIL = 1e-7  # chance of the tables that are not enumerated
EXACT_LOSSES_MAX = 40  # expected losses up to which non-inferiority is enumerated with the exact test
ITEMS_MAX = 10_000_000
SHARE_MIN = 1e-15  # less is none: binom.pmf of scipy 1.17 overflows for the smallest shares that there are


class Shares(NamedTuple):
    """Chances that an item is lost and gained."""

    lost: float
    gained: float


def shares(loss: float, flip_rate: float) -> Shares:
    """The chances of the model. Raises `StatsError`."""
    if loss < 0 or flip_rate < 0 or loss + flip_rate > 1:
        raise StatsError(f"loss {loss:g} and flip rate {flip_rate:g}: expected shares of 0 or more, at most 1 together")
    lost, gained = (share if share > SHARE_MIN else 0.0 for share in (flip_rate / 2 + loss, flip_rate / 2))
    return Shares(lost, gained)


def loss_power(n: int, loss: float, flip_rate: float, alpha: float) -> float:
    """Chance that the exact one-sided McNemar test shows a loss."""
    chance = shares(loss, flip_rate)
    flips = min(1.0, chance.lost + chance.gained)
    if not flips:
        return 0.0
    counts = _likely(n, flips)
    shown = binom.sf(losses_needed(counts, alpha) - 1, counts, chance.lost / flips)
    return float(binom.pmf(counts, n, flips) @ shown)


def pass_power(n: int, loss: float, flip_rate: float, margin: float, alpha: float) -> float:
    """Chance that non-inferiority at `margin` is shown; with many losses by Tango's test, which then agrees."""
    chance = shares(loss, flip_rate)
    losts = _likely(n, chance.lost)
    if n * chance.lost <= EXACT_LOSSES_MAX:
        needed = gains_needed(losts, n, margin, alpha)
    else:
        gaineds = _likely(n, chance.gained)
        needed = favourable_gains(losts, gaineds[0], gaineds[-1], n, -margin, float(norm.isf(alpha)))
    rest = min(1.0, chance.gained / (1 - chance.lost)) if chance.lost < 1 else 0.0
    return float(binom.pmf(losts, n, chance.lost) @ binom.sf(needed - 1, n - losts, rest))


def _likely(n: int, share: float) -> Any:
    return np.arange(int(max(binom.ppf(TAIL, n, share), 0)), int(binom.isf(TAIL, n, share)) + 1)


def detectable_loss(n: int, flip_rate: float, alpha: float, power: float = 0.8) -> float | None:
    """The smallest loss that is shown with at least this power; None: not even the greatest that there is."""
    most = 1 - flip_rate
    if most <= 0 or loss_power(n, most, flip_rate, alpha) < power:
        return None
    if loss_power(n, 0.0, flip_rate, alpha) >= power:
        return 0.0
    found: float = brentq(lambda loss: loss_power(n, loss, flip_rate, alpha) - power, 0.0, most, xtol=1e-7)
    return found if loss_power(n, found, flip_rate, alpha) >= power else found + 2e-7


class Plan(NamedTuple):
    """Items that a gate needs."""

    loss: float
    flip_rate: float
    alpha: float
    power: float
    items_to_fail: int | None  # a loss of this size is shown with this power
    items_to_pass: int | None  # a candidate without loss passes at this margin with this power
    items_unpaired: int | None  # to show the loss without pairing, from two sets of items

    @property
    def items(self) -> int | None:
        """For both promises."""
        both = (self.items_to_fail, self.items_to_pass)
        return None if None in both else max(number for number in both if number is not None)


def plan(loss: float, flip_rate: float, alpha: float, power: float, accuracy: float) -> Plan:
    """How many items it takes to tell a loss of this size from none. Raises `StatsError`."""
    checked_share(loss, "loss")
    checked_share(alpha, "alpha", high=0.5)
    checked_share(power, "power")
    shares(loss, flip_rate)
    return Plan(
        loss=loss,
        flip_rate=flip_rate,
        alpha=alpha,
        power=power,
        items_to_fail=fewest(lambda n: loss_power(n, loss, flip_rate, alpha) >= power),
        items_to_pass=fewest(lambda n: pass_power(n, 0.0, flip_rate, loss, alpha) >= power),
        items_unpaired=unpaired_items(loss, alpha, power, accuracy),
    )


def fewest(enough: Callable[[int], bool], above: int = 4) -> int | None:
    """The smallest n above that which is enough, as far as bisection sees: counts make power a little jagged in n."""
    low, high = above, 2 * above
    while not enough(high):
        low, high = high, 2 * high
        if high > ITEMS_MAX:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def unpaired_items(loss: float, alpha: float, power: float, accuracy: float) -> int | None:
    """Items per arm for a test that does not pair, normal approximation; None where the accuracy cannot fall so far."""
    lower = accuracy - loss
    if not 0 < lower < accuracy < 1:
        return None
    pooled = (accuracy + lower) / 2
    same = norm.isf(alpha) * np.sqrt(2 * pooled * (1 - pooled))
    other = norm.isf(1 - power) * np.sqrt(accuracy * (1 - accuracy) + lower * (1 - lower))
    return int(np.ceil(((same + other) / loss) ** 2))


def mean_power(loss: float, standard_error: float, n: int, alpha: float) -> float:
    """Power of a paired t test over n items, for a mean difference with this standard error."""
    return float(nct.sf(t.isf(alpha, n - 1), n - 1, loss / standard_error))


def mean_detectable(standard_error: float, n: int, alpha: float, power: float = 0.8) -> float:
    """The smallest mean loss that a paired t test over n items shows with this power."""
    found: float = brentq(lambda loss: mean_power(loss, standard_error, n, alpha) - power, 0, 100 * standard_error)
    return found


def repeats_needed(items: int, loss: float, flip_rate: float, alpha: float, power: float) -> int | None:
    """Repeats per item and arm that show a loss spread evenly over the items; flip_rate: of two repeats of one item.

    The difference of an item's means varies by flip_rate / repeats. A loss that sits in few items needs
    more items, not repeats.
    """
    if items < 2:
        raise StatsError(f"{items} items: expected two or more")
    if not flip_rate:
        return None  # repeats are copies then

    def enough(repeats: int) -> bool:
        return mean_power(loss, float(np.sqrt(flip_rate / repeats / items)), items, alpha) >= power

    return next((repeats for repeats in range(1, 4097) if enough(repeats)), None)

"""A paired gate that stops early: two bets, one against "no loss" and one against "a loss of the margin or more".

A bet starts with capital 1 and stakes a fixed share on each item; it is fair or worse when its hypothesis holds, so
it reaches 1/a with chance a at most, at any time (Ville). Against "no loss" only discordant items count and the
capital is Wald's likelihood ratio of (1 + stake) / 2 against 1/2. Against the margin it is a bet on a bounded mean
(Waudby-Smith and Ramdas 2024, JRSS B 86:1), for which the flip rate need not be known. The capital says

    1 / early  against "no loss"  : stop, fail          early = alpha * EARLY
    1 / early  against the margin : stop, pass

At the last item non-inferiority is tested exactly at alpha - early, and a loss by the count of losses that leaves a
fair coin just alpha for both ways to fail, enumerated path by path. So, whatever the flip rate: a candidate without
loss fails with chance alpha at most, and one that lost the margin or more passes with chance alpha at most. Items
must come in an order that has nothing to do with their answers. Stakes are tuned to an expected flip rate, which
costs items and power when it is wrong, never errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]  # scipy ships no types

from harness.stats import StatsError, checked_share
from harness.stats_paired import floor_p
from harness.stats_power import shares

EARLY = 0.4  # share of alpha that is spent on stopping before the last item
FAIL, PASS, OPEN = 1, 2, 0  # fail, pass and none of both, as numbers in arrays


class Sequential(NamedTuple):
    """A sequential gate, fixed before the first item."""

    n: int  # items at most
    margin: float
    alpha: float
    loss_stake: float  # against "no loss"
    margin_stake: float  # against "a loss of the margin or more"

    @property
    def early(self) -> float:
        """Error rate of stopping early, in each direction."""
        return self.alpha * EARLY

    @property
    def final(self) -> float:
        """Error rate of the exact non-inferiority test at the last item."""
        return self.alpha - self.early


def final_losses(design: Sequential, discordant_max: int) -> Any:
    """For each count of discordant items up to that: the fewest losses that fail a run at its last item.

    A fair coin then fails with chance alpha at most, early or late; more losses than items: it cannot fail late.
    """
    up, down = np.log1p(design.loss_stake), np.log1p(-design.loss_stake)
    open_runs, stopped = np.ones(1), 0.0  # chance of each count of losses without a stop so far; chance of a stop
    needed = np.empty(discordant_max + 1, int)
    for count in range(discordant_max + 1):
        late = np.cumsum(open_runs[::-1])[::-1]  # so many losses or more
        enough = stopped + late <= design.alpha
        needed[count] = int(enough.argmax()) if enough.any() else count + 1
        longer = np.zeros(count + 2)
        longer[:-1] += open_runs / 2
        longer[1:] += open_runs / 2
        losses = np.arange(count + 2)
        crossed = losses * up + (count + 1 - losses) * down >= -np.log(design.early)
        stopped += float(longer[crossed].sum())
        open_runs = np.where(crossed, 0.0, longer)
    return needed


class Stopped(NamedTuple):
    """Where a run of the gate stopped."""

    items: int
    outcome: int
    early: bool


def sequential(n: int, margin: float, flip_rate: float, alpha: float) -> Sequential:
    """Stakes that grow fastest: for a loss of the margin, and for no loss, at this flip rate. Raises `StatsError`."""
    checked_share(margin, "margin")
    checked_share(alpha, "alpha", high=0.5)
    if n < 1:
        raise StatsError(f"{n} items: expected one or more")
    worse, same = shares(margin, flip_rate), shares(0.0, flip_rate)

    def against_no_loss(stake: float) -> float:
        return -float(worse.lost * np.log1p(stake) + worse.gained * np.log1p(-stake))

    def against_margin(stake: float) -> float:
        up, level, down = np.log1p(stake * np.array([1 + margin, margin, margin - 1]))
        return -float(same.gained * up + (1 - flip_rate) * level + same.lost * down)

    most = 1 - 1e-3  # a stake of all would end the bet at the first answer against it
    loss_stake = minimize_scalar(against_no_loss, bounds=(0, most), method="bounded").x
    margin_stake = minimize_scalar(against_margin, bounds=(0, most / (1 - margin)), method="bounded").x
    return Sequential(n, margin, alpha, float(loss_stake), float(margin_stake))


def capitals(design: Sequential, differences: Any) -> tuple[Any, Any]:
    """Log capital of both bets after each item; differences: +1 gained, -1 lost, items along the last axis."""
    moves = np.array([-1, 0, 1])
    place = np.asarray(differences, np.intp) + 1
    loss = np.log1p(-design.loss_stake * moves)[place]
    margin = np.log1p(design.margin_stake * (moves + design.margin))[place]
    return np.cumsum(loss, axis=-1), np.cumsum(margin, axis=-1)


def crossings(design: Sequential, differences: Any) -> tuple[Any, Any]:
    """Per run (rows): the item, from 1 on, at which it stops early, 0 if it does not, and the outcome then."""
    loss, margin = (capital >= -np.log(design.early) for capital in capitals(design, differences))
    stops = loss | margin
    item = stops.argmax(axis=-1)
    stopped = stops.any(axis=-1)
    failed = np.take_along_axis(loss, item[..., None], axis=-1)[..., 0]
    return np.where(stopped, item + 1, 0), np.where(stopped, np.where(failed, FAIL, PASS), OPEN)


def run_through(design: Sequential, differences: Any) -> Stopped:
    """One run through all its items, or up to where it stops. Raises `StatsError` for another number of items."""
    given = np.asarray(differences, int)
    if given.shape != (design.n,):
        raise StatsError(f"{given.shape} differences: expected {design.n}, the number of items that was fixed before")
    item, outcome = crossings(design, given[None, :])
    if item[0]:
        return Stopped(int(item[0]), int(outcome[0]), early=True)
    lost, gained = int((given < 0).sum()), int((given > 0).sum())
    if floor_p(lost, gained, design.n, -design.margin) <= design.final:
        return Stopped(design.n, PASS, early=False)
    failed = lost >= final_losses(design, lost + gained)[-1]
    return Stopped(design.n, FAIL if failed else OPEN, early=False)

"""The verdict of an accuracy gate, with every number that it rests on.

    pass          non-inferiority at the margin is shown at alpha
    fail          it is not, and a loss is shown at alpha
    inconclusive  neither is shown; the result says how many items would settle it
    invalid       too many requests failed or answers were cut off, so nothing is judged

A candidate that is worse, but shown to be worse by less than the margin, passes: that is what a margin says.
"""

from __future__ import annotations

import enum

import msgspec
import numpy as np

from harness.stats import Pairs, StatsError, checked_share, mcnemar_p
from harness.stats_paired import difference_interval, noninferior_p
from harness.stats_power import (
    detectable_loss,
    fewest,
    loss_power,
    mean_detectable,
    mean_power,
    pass_power,
    unpaired_items,
)
from harness.stats_repeats import Repeats, mean_interval, mean_noninferior_p, sign_flip_p, standard_error
from harness.stats_unpaired import Unpaired, against_score

POINTS = 100


class Outcome(enum.StrEnum):
    """What a gate says."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of a gate, as fractions."""

    margin: float
    alpha: float = 0.05
    power: float = 0.8

    def __post_init__(self) -> None:
        checked_share(self.margin, "margin")
        checked_share(self.alpha, "alpha", high=0.5)
        checked_share(self.power, "power")


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict and its numbers; accuracies and rates are fractions, what is in points says so."""

    outcome: Outcome
    said: str  # the verdict in a sentence
    method: str
    n: int
    lost: int | None  # items, for repeats those whose share of right answers fell; None: not paired
    gained: int | None
    flip_rate: float | None
    baseline: float
    candidate: float
    difference_points: float  # candidate less baseline
    interval_points: tuple[float, float]  # each end at alpha
    margin_points: float
    alpha: float
    p_loss: float
    p_noninferior: float
    power_at_margin: float  # chance that a loss of the margin is shown
    detectable_points: float | None  # the least loss shown with `power`
    power: float
    items_needed: int | None  # only for inconclusive: about, if what was seen is the truth; None there: no number helps


def outcome_of(p_loss: float, p_noninferior: float, alpha: float) -> Outcome:
    """The rule of this module."""
    if p_noninferior <= alpha:
        return Outcome.PASS
    return Outcome.FAIL if p_loss <= alpha else Outcome.INCONCLUSIVE


def judge_pairs(pairs: Pairs, terms: Terms) -> GateResult:
    """One answer per item and arm: exact tests."""
    if not pairs.n:
        raise StatsError("no item is left to judge")
    p_loss, p_noninferior = mcnemar_p(pairs.lost, pairs.gained), noninferior_p(pairs, terms.margin)
    outcome = outcome_of(p_loss, p_noninferior, terms.alpha)
    loss = max(0.0, -pairs.difference)
    luck = min(pairs.flip_rate - loss, 1 - terms.margin)  # flips without the net loss
    low, high = difference_interval(pairs, terms.alpha)
    return _told(
        GateResult(
            outcome=outcome,
            said="",
            method="exact McNemar and exact unconditional non-inferiority on paired items",
            n=pairs.n,
            lost=pairs.lost,
            gained=pairs.gained,
            flip_rate=pairs.flip_rate,
            baseline=pairs.baseline,
            candidate=pairs.candidate,
            difference_points=POINTS * pairs.difference,
            interval_points=(POINTS * low, POINTS * high),
            margin_points=POINTS * terms.margin,
            alpha=terms.alpha,
            p_loss=p_loss,
            p_noninferior=p_noninferior,
            power_at_margin=loss_power(pairs.n, terms.margin, luck, terms.alpha),
            detectable_points=_points(detectable_loss(pairs.n, luck, terms.alpha, terms.power)),
            power=terms.power,
            items_needed=_settling(pairs, loss, luck, terms) if outcome is Outcome.INCONCLUSIVE else None,
        )
    )


def _settling(pairs: Pairs, loss: float, luck: float, terms: Terms) -> int | None:
    """Items that would show a loss, or that there is none of the margin, if the shares seen are the true ones."""
    numbers = []
    if loss > 0:
        numbers.append(fewest(lambda n: loss_power(n, loss, luck, terms.alpha) >= terms.power, pairs.n))
    if loss < terms.margin:
        # a candidate that gained is taken for an equal one: gains are not what a gate may count on
        numbers.append(fewest(lambda n: pass_power(n, loss, luck, terms.margin, terms.alpha) >= terms.power, pairs.n))
    return min((number for number in numbers if number is not None), default=None)


def judge_repeats(repeats: Repeats, terms: Terms) -> GateResult:
    """Several answers per item and arm: tests over items."""
    if repeats.are_copies:
        raise StatsError("all repeats of each item agree: they are copies; judge one of them with `judge_pairs`")
    moves, error, n = repeats.differences, standard_error(repeats), repeats.n
    p_loss, p_noninferior = sign_flip_p(repeats), mean_noninferior_p(repeats, terms.margin)
    outcome = outcome_of(p_loss, p_noninferior, terms.alpha)
    low, high = mean_interval(repeats, terms.alpha)
    needed = None
    loss = max(0.0, -float(moves.mean()))
    if outcome is Outcome.INCONCLUSIVE:
        away = max(loss, terms.margin - loss)  # the nearer of "no loss" and "a loss of the margin" takes more
        needed = fewest(lambda m: mean_power(away, error * np.sqrt(n / m), m, terms.alpha) >= terms.power, n)
    return _told(
        GateResult(
            outcome=outcome,
            said="",
            method="sign-flip test and paired t over items, repeats averaged per item and arm",
            n=n,
            lost=int((moves < 0).sum()),
            gained=int((moves > 0).sum()),
            flip_rate=repeats.flip_rate,
            baseline=float((repeats.right_baseline / repeats.repeats_baseline).mean()),
            candidate=float((repeats.right_candidate / repeats.repeats_candidate).mean()),
            difference_points=POINTS * float(moves.mean()),
            interval_points=(POINTS * low, POINTS * high),
            margin_points=POINTS * terms.margin,
            alpha=terms.alpha,
            p_loss=p_loss,
            p_noninferior=p_noninferior,
            power_at_margin=mean_power(terms.margin, error, n, terms.alpha),
            detectable_points=POINTS * mean_detectable(error, n, terms.alpha, terms.power),
            power=terms.power,
            items_needed=needed,
        )
    )


def judge_score(right: int, n: int, score: float, score_n: int | None, terms: Terms) -> GateResult:
    """A candidate against a reference score alone: not paired. Raises `StatsError`."""
    found: Unpaired = against_score(right, n, score, score_n, terms.margin, terms.alpha)
    outcome = outcome_of(found.p_loss, found.p_noninferior, terms.alpha)
    behind = "without an error of its own" if score_n is None else f"of {score_n:,} items"
    arms = 1.0 if score_n is None else (1 + n / score_n) / 2  # of the variance of two arms of n items
    seen = 1 - right / n  # a perfect score still has noise: half an item wrong
    error = np.sqrt(2 * arms * max(seen, 0.5 / n) * max(1 - seen, 0.5 / n) / n)
    needed = unpaired_items(terms.margin, terms.alpha, terms.power, score) if outcome is Outcome.INCONCLUSIVE else None
    return _told(
        GateResult(
            outcome=outcome,
            said="",
            method=f"not paired, against a score {behind}",
            n=n,
            lost=None,
            gained=None,
            flip_rate=None,
            baseline=score,
            candidate=right / n,
            difference_points=POINTS * (right / n - score),
            interval_points=(POINTS * found.interval.low, POINTS * found.interval.high),
            margin_points=POINTS * terms.margin,
            alpha=terms.alpha,
            p_loss=found.p_loss,
            p_noninferior=found.p_noninferior,
            power_at_margin=mean_power(terms.margin, error, n, terms.alpha),
            detectable_points=POINTS * mean_detectable(error, n, terms.alpha, terms.power),
            power=terms.power,
            items_needed=needed,
        )
    )


def _points(share: float | None) -> float | None:
    return None if share is None else POINTS * share


def _told(result: GateResult) -> GateResult:
    return msgspec.structs.replace(result, said=sentence(result))


def sentence(result: GateResult) -> str:
    """The verdict as a person would say it."""
    low, high = result.interval_points
    level = f"{100 * (1 - 2 * result.alpha):g} % interval {low:+.2f} to {high:+.2f}"
    where = f"{result.difference_points:+.2f} points ({level})"
    flips = f", {result.lost:,} lost and {result.gained:,} gained" if result.lost is not None else ""
    items = f"on {result.n:,} items{flips}"
    if result.outcome is Outcome.PASS:
        small = "; a loss is shown, but a smaller one than the margin" if result.p_loss <= result.alpha else ""
        return f"The candidate is not {result.margin_points:g} points worse: {where} {items}{small}."
    if result.outcome is Outcome.FAIL:
        luck = f"luck alone makes such a loss in {100 * result.p_loss:.2g} % of comparisons"
        return f"The candidate is worse: {where} {items}; {luck}."
    least = result.detectable_points
    sees = (
        "no loss at all can be shown"
        if least is None
        else f"the least loss that it would likely show is {least:.2f} points"
    )
    more = result.items_needed
    settle = "no number of items would settle it" if more is None else f"about {more:,} items would settle it"
    shown = f"Neither a loss nor the absence of one of {result.margin_points:g} points is shown"
    return f"{shown}: {where} {items}; {sees}, {settle}."

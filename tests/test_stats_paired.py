"""Exact tests on paired items: known values, symmetry, the level that they keep, and intervals that cover."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]  # scipy ships no types
from scipy.special import xlogy  # type: ignore[import-untyped]  # scipy ships no types
from scipy.stats import binom, multinomial  # type: ignore[import-untyped]  # scipy ships no types
from statsmodels.stats.contingency_tables import mcnemar  # type: ignore[import-untyped]  # statsmodels ships no types

from ci.register import register_cpu_ci
from harness.stats import (
    Interval,
    Pairs,
    StatsError,
    calibrate,
    losses_needed,
    mcnemar_p,
    pairs_of,
    proportion_interval,
)
from harness.stats_paired import (
    BOUND_STEP,
    GAMMA,
    decision,
    difference_interval,
    favourable_gains,
    floor_p,
    gains_needed,
    noninferior_p,
    tango_z,
)

register_cpu_ci(est_time=25, stage="commit")

COUNTS = st.integers(0, 60)


@pytest.mark.parametrize(
    ("gained", "lost", "p"), [(0, 5, 0.031), (3, 9, 0.073), (5, 13, 0.048), (10, 20, 0.049), (15, 27, 0.044)]
)
def test_known_values(gained: int, lost: int, p: float) -> None:
    """The exact one-sided McNemar values that are published for small tables."""
    assert p == pytest.approx(mcnemar_p(lost, gained), abs=5e-4)


@settings(deadline=None)
@given(COUNTS, COUNTS)
def test_mcnemar_is_a_tail_of_fair_coins(lost: int, gained: int) -> None:
    """The value is a sum of binomial coefficients, and half of the two-sided one where losses prevail."""
    n = lost + gained
    assert sum(comb(n, k) for k in range(lost, n + 1)) / 2**n == pytest.approx(mcnemar_p(lost, gained))
    if lost > gained:
        two_sided = mcnemar([[0, lost], [gained, 0]], exact=True).pvalue
        assert two_sided / 2 == pytest.approx(mcnemar_p(lost, gained))


def test_no_discordant_item_shows_nothing() -> None:
    """Without a discordant item p is 1; negative counts are refused."""
    assert mcnemar_p(0, 0) == 1.0
    with pytest.raises(StatsError, match="lost -1, gained 0"):
        mcnemar_p(-1, 0)


@pytest.mark.parametrize("alpha", [0.5, 0.05, 0.03125, 0.01])
def test_losses_needed_is_the_step_of_the_test(alpha: float) -> None:
    """The fewest losses that show a loss, for every number of discordant items; none suffice: one more than all."""
    counts = range(80)
    steps = [next((lost for lost in range(n + 1) if mcnemar_p(lost, n - lost) <= alpha), n + 1) for n in counts]
    assert steps == losses_needed(np.array(counts), alpha).tolist()


def test_tables_are_counted() -> None:
    """Right and wrong per arm become the four cells, and rates follow."""
    pairs = pairs_of([1, 1, 1, 0, 0], [1, 0, 0, 1, 0])
    assert Pairs(both_right=1, lost=2, gained=1, both_wrong=1) == pairs
    assert (5, 3, 0.6, -0.2, 0.6, 0.4) == pytest.approx(
        (pairs.n, pairs.discordant, pairs.flip_rate, pairs.difference, pairs.baseline, pairs.candidate)
    )
    for wrong in ([], [1], [[1, 0]]):
        with pytest.raises(StatsError, match="expected one for each item in both arms"):
            pairs_of(wrong, [1, 0] if wrong else [])


@pytest.mark.parametrize(("successes", "n"), [(0, 20), (3, 20), (20, 20)])
def test_clopper_pearson(successes: int, n: int) -> None:
    """Each end is where the count would just be in a tail of 2.5 %."""
    low, high = proportion_interval(successes, n)
    assert (0.025 if successes else 0.0) == pytest.approx(binom.sf(successes - 1, n, low) if successes else low)
    assert (0.025 if successes < n else 1.0) == pytest.approx(binom.cdf(successes, n, high) if successes < n else high)
    with pytest.raises(StatsError, match="expected a count between 0 and n"):
        proportion_interval(n + 1, n)


@settings(deadline=None)
@given(COUNTS, COUNTS)
def test_tango_without_floor_is_mcnemar(lost: int, gained: int) -> None:
    """At floor 0 the statistic is McNemar's (gained - lost) / sqrt(gained + lost)."""
    plain = (gained - lost) / np.sqrt(gained + lost) if gained + lost else 0.0
    assert plain == pytest.approx(float(tango_z(lost, gained, 200, 0.0)))


@settings(deadline=None)
@given(st.integers(5, 120), st.floats(-0.3, 0.3), st.floats(-3.0, 3.0))
def test_favourable_gains_by_bisection(n: int, floor: float, z: float) -> None:
    """The statistic rises with the gains, so bisection finds the fewest that reach z, as a look at all of them does."""
    losts = np.arange(n + 1)
    grid = tango_z(losts[:, None], losts[None, :], n, floor)
    steps = np.diff(grid, axis=1)[(losts[:, None] + losts[None, 1:]) <= n]
    assert steps.min() > -1e-9
    reached = (grid >= z - 1e-9) & (losts[:, None] + losts[None, :] <= n)
    fewest = np.where(reached.any(axis=1), reached.argmax(axis=1), n + 1)
    assert fewest.tolist() == favourable_gains(losts, 0, n, n, floor, z).tolist()


def test_tango_published() -> None:
    """Airway data (Bentur 2009; 1, 1, 7, 12): Tango's 95 % interval: -0.517 to -0.026 (Fagerland et al. 2014)."""
    assert [1.96, -1.96] == pytest.approx([float(tango_z(7, 1, 21, end)) for end in (-0.517, -0.026)], abs=0.01)


@pytest.mark.parametrize(("lost", "gained", "floor"), [(9, 3, -0.05), (3, 9, 0.02), (0, 4, -0.03), (20, 20, -0.1)])
def test_tango_likelihood(lost: int, gained: int, floor: float) -> None:
    """The closed form is the score with the P(lost) that makes the table likeliest at that floor."""
    n = 130

    def unlikely(lose: float) -> float:
        shares = np.array([lose, lose + floor, 1 - 2 * lose - floor])
        return -float(xlogy([lost, gained, n - lost - gained], np.maximum(shares, 1e-12)).sum())

    lose = minimize_scalar(
        unlikely, bounds=(max(0.0, -floor), (1 - floor) / 2), method="bounded", options={"xatol": 1e-10}
    ).x
    z = (gained - lost - n * floor) / np.sqrt(n * (2 * lose + floor - floor**2))
    assert z == pytest.approx(float(tango_z(lost, gained, n, floor)), abs=1e-4)


@settings(deadline=None)
@given(COUNTS, COUNTS, st.floats(-0.2, 0.2))
def test_tango_is_antisymmetric(lost: int, gained: int, floor: float) -> None:
    """Swapping the arms turns the sign."""
    here, there = float(tango_z(lost, gained, 150, floor)), float(tango_z(gained, lost, 150, -floor))
    assert -there == pytest.approx(here, abs=1e-6)


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from([0.01, 0.03, 0.1]))
def test_noninferiority_is_monotone(lost: int, gained: int, margin: float) -> None:
    """Where it could decide, below .2, p falls with a gain more and rises with a loss more."""
    here = floor_p(lost, gained, 120, -margin)
    assert here > 0.2 or floor_p(lost, gained + 1, 120, -margin) <= here + 1e-4
    assert here > 0.2 or floor_p(lost + 1, gained, 120, -margin) >= here - 1e-4


def test_no_losses_at_all() -> None:
    """Without a discordant item among n, p is the chance of that at a loss of the margin, (1 - margin) ** n."""
    assert 0.98**100 + GAMMA == pytest.approx(noninferior_p(Pairs(90, 0, 0, 10), 0.02), rel=1e-6)
    assert pytest.approx(GAMMA) == noninferior_p(Pairs(90, 0, 0, 10), 0.15)  # no flip rate that fits is so high


def level(n: int, margin: float, alpha: float, flips: float, *, exact: bool) -> float:
    """Chance that a candidate that lost exactly the margin passes, all tables enumerated."""
    lose, gain = (flips + margin) / 2, (flips - margin) / 2
    losts, gaineds = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
    chance = multinomial.pmf(
        np.stack(np.broadcast_arrays(losts, gaineds, np.maximum(n - losts - gaineds, 0)), axis=-1),
        n,
        [lose, gain, 1 - lose - gain],
    )
    if exact:
        passed = gaineds >= gains_needed(range(n + 1), n, margin, alpha)[:, None]
    else:
        passed = tango_z(losts, gaineds, n, -margin) >= 1.6449
    return float(chance[passed & (losts + gaineds <= n)].sum())


@pytest.mark.parametrize("n", [40, 100])
@pytest.mark.parametrize("margin", [0.05, 0.1])
def test_a_loss_of_the_margin_passes_with_chance_alpha_at_most(n: int, margin: float) -> None:
    """The level is kept for all flip rates, near the ceiling too, where nothing flips but what was lost."""
    levels = [level(n, margin, 0.05, flips, exact=True) for flips in (margin, margin + 0.01, margin + 0.05, 0.4)]
    assert max(levels) <= 0.05
    assert max(levels) > 0.02  # a test that never passes would keep the level too


def test_tangos_own_threshold_promises_too_much() -> None:
    """Why the exact test: with few discordant items Tango's normal threshold passes a loss of the margin too often."""
    assert level(200, 0.01335, 0.05, 0.01335, exact=False) == pytest.approx(0.068, abs=1e-3)
    assert level(200, 0.01335, 0.05, 0.01335, exact=True) <= 0.05


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 25), st.integers(0, 25), st.sampled_from([60, 400]))
def test_interval_mirrors_and_agrees(lost: int, gained: int, n: int) -> None:
    """Swapping the arms mirrors the interval; it holds the estimate and agrees with pass and fail."""
    pairs = Pairs(n - lost - gained, lost, gained, 0)
    low, high = difference_interval(pairs, 0.05)
    swapped = difference_interval(Pairs(n - lost - gained, gained, lost, 0), 0.05)
    assert Interval(-swapped.high, -swapped.low) == pytest.approx((low, high))
    assert low <= pairs.difference <= high
    assert (mcnemar_p(lost, gained) <= 0.05) == (high < 0)
    for margin in (0.01, 0.05, 0.2):
        if abs(low + margin) > 2 * BOUND_STEP and low < 0:
            assert (noninferior_p(pairs, margin) <= 0.05) == (low > -margin)


@pytest.mark.parametrize(("lost", "gained"), [(3, 0), (9, 3), (14, 6)])
def test_interval_says_no_more_than_mcnemar(lost: int, gained: int) -> None:
    """The unconditional test alone would exclude 0; the exact McNemar test shows no loss, so it is held."""
    assert floor_p(gained, lost, 200, 0.0) <= 0.05 < mcnemar_p(lost, gained)
    assert difference_interval(Pairs(200 - lost - gained, lost, gained, 0), 0.05).high == 0.0
    assert difference_interval(Pairs(200 - lost - gained, gained, lost, 0), 0.05).low == 0.0


@pytest.mark.parametrize(("lose", "gain"), [(0.0, 0.0), (0.02, 0.0), (0.03, 0.03), (0.08, 0.02), (0.3, 0.2)])
def test_intervals_cover(lose: float, gain: float) -> None:
    """Each end misses the true difference with chance 5 % at most, enumerated: few flips, many, none."""
    n, truth = 50, gain - lose
    missed_below = missed_above = 0.0
    for lost in range(n + 1):
        for gained in range(n + 1 - lost):
            chance = float(multinomial.pmf([lost, gained, n - lost - gained], n, [lose, gain, 1 - lose - gain]))
            if chance > 1e-7:
                missed_below += chance * (floor_p(lost, gained, n, truth) <= 0.05)
                missed_above += chance * (floor_p(gained, lost, n, -truth) <= 0.05)
    assert max(missed_below, missed_above) <= 0.05


def test_decision_tables_are_the_tests() -> None:
    """What is made ready for arrays decides as the tests do; more losses than it holds never pass."""
    ready = decision(150, 0.04, 0.05, 12)
    for lost in range(14):
        for gained in range(9):
            shown = floor_p(lost, gained, 150, -0.04) <= 0.05 and lost <= 12
            assert shown == bool(ready.noninferior(np.array([lost]), np.array([gained]))[0])
            assert (mcnemar_p(lost, gained) <= 0.05) == bool(ready.loss_shown(np.array([lost]), np.array([gained]))[0])


@pytest.mark.parametrize(("lost", "gained", "floor"), [(-1, 0, 0.0), (60, 50, 0.0), (1, 1, 1.0), (1, 1, -1.0)])
def test_impossible_tables_are_refused(lost: int, gained: int, floor: float) -> None:
    """Counts that do not fit into n, and floors that no difference can have."""
    with pytest.raises(StatsError, match="expected counts that fit"):
        floor_p(lost, gained, 100, floor)


def test_calibration_of_two_runs() -> None:
    """Two runs: the flip rate is the share of items that differ, its interval is Clopper and Pearson's."""
    first = np.arange(100) < 90
    second = first.copy()
    second[[0, 1, 95]] ^= True
    found = calibrate([first, second])
    assert (2, 100, 0.03, 3, 0.895) == pytest.approx(
        (found.runs, found.n, found.flip_rate, found.ever_flipped, found.accuracy)
    )
    assert proportion_interval(3, 100) == found.interval
    assert np.sqrt(0.03 / 200) == pytest.approx(found.rerun_sd_expected)


def test_calibration_of_many_runs() -> None:
    """Many runs of items that are tossed: the flip rate is found, and the rerun noise is what the flips make."""
    source = np.random.default_rng(0)
    tossed = source.random((60, 1000)) < np.where(np.arange(1000) < 68, 0.5, 1.0)
    found = calibrate(tossed)
    assert found.flip_rate == pytest.approx(0.034, abs=0.002)
    assert found.interval.low < 0.034 < found.interval.high
    assert found.rerun_sd_expected == pytest.approx(found.rerun_sd, rel=0.25)


def test_calibration_of_equal_runs_is_not_certain() -> None:
    """No flip among 200 items leaves flip rates up to 1.8 % possible."""
    assert pytest.approx(0.0183, abs=1e-4) == calibrate([[True] * 200] * 2).interval.high
    with pytest.raises(StatsError, match="two or more runs"):
        calibrate([[True, False]])

"""Repeats: the sign-flip test against enumeration and McNemar, and what the t bound keeps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.stats import StatsError, mcnemar_p
from harness.stats_repeats import (
    Repeats,
    mean_interval,
    mean_noninferior_p,
    repeats_of,
    sign_flip_p,
    standard_error,
)

register_cpu_ci(est_time=10, stage="commit")

ITEM = st.integers(1, 6).flatmap(lambda k: st.tuples(st.integers(0, k), st.integers(0, k), st.just(k)))


def made(rows: list[tuple[int, int, int]]) -> Repeats:
    baseline, candidate, repeats = zip(*rows, strict=True)
    return repeats_of(baseline, repeats, candidate, repeats)


@settings(deadline=None)
@given(st.lists(ITEM, min_size=2, max_size=8))
def test_sign_flip_is_the_share_of_signs(rows: list[tuple[int, int, int]]) -> None:
    """p is the share of all sign patterns whose mean is as low as the one seen."""
    repeats = made(rows)
    moves = repeats.differences
    means = [float(np.dot(signs, moves)) for signs in product((-1, 1), repeat=len(moves))]
    assert np.mean([mean <= moves.sum() + 1e-9 for mean in means]) == pytest.approx(sign_flip_p(repeats))


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 20))
def test_one_repeat_is_mcnemar(lost: int, gained: int) -> None:
    """With one repeat per item the sign-flip test is the exact McNemar test."""
    rows = [(1, 0, 1)] * lost + [(0, 1, 1)] * gained + [(1, 1, 1)] * 3
    assert mcnemar_p(lost, gained) == pytest.approx(sign_flip_p(made(rows)))


def test_repeats_are_not_items() -> None:
    """One item lost in all of 64 repeats is one item: p is a half, however many repeats say so."""
    rows = [(64, 0, 64)] + [(60, 60, 64)] * 29
    assert sign_flip_p(made(rows)) == 0.5


def test_uneven_repeats_fall_back_to_random_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the exact distribution is too long, drawn signs give nearly the same."""
    rows = [(7, 5, 8), (3, 1, 5), (6, 6, 7), (9, 5, 9), (2, 3, 3), (4, 1, 6)] * 3
    exact = sign_flip_p(made(rows))
    monkeypatch.setattr("harness.stats_repeats.WORK_MAX", 0)
    assert exact == pytest.approx(sign_flip_p(made(rows)), abs=0.003)


def test_flip_rate_and_copies() -> None:
    """Two repeats of one item differ with chance p (1 - q) + q (1 - p); repeats that all agree are copies."""
    assert (0.5 + 0.0) / 2 == pytest.approx(made([(2, 4, 4), (4, 4, 4)]).flip_rate)
    assert made([(4, 0, 4), (4, 4, 4)]).are_copies
    assert not made([(4, 3, 4), (4, 4, 4)]).are_copies


def test_agreement_is_not_certainty() -> None:
    """Where every repeat is right in both arms, the standard error is still that of half a wrong answer."""
    repeats = made([(16, 16, 16)] * 30)
    share = 0.5 / 17
    assert np.sqrt(2 * 30 * share * (1 - share) / 16) / 30 == pytest.approx(standard_error(repeats))
    assert mean_noninferior_p(repeats, 0.005) > 0.05


@pytest.mark.parametrize("rows", [[(1, 1, 1)], [(2, 1, 1), (1, 1, 1)], [(-1, 0, 1), (1, 1, 1)], [(0, 0, 0), (1, 1, 1)]])
def test_bad_counts_are_refused(rows: list[tuple[int, int, int]]) -> None:
    """One item, more right than repeats, fewer than none, no repeat."""
    with pytest.raises(StatsError, match="two items or more"):
        made(rows)


def simulated(runs: int, chances: np.ndarray, losses: np.ndarray, repeats: int) -> list[Repeats]:
    source = np.random.default_rng(5)
    counts = np.full(len(chances), repeats)
    return [
        repeats_of(source.binomial(repeats, chances), counts, source.binomial(repeats, chances - losses), counts)
        for _ in range(runs)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [4, 16])
@pytest.mark.parametrize("spread", ["even", "few"])
def test_error_rates_of_a_small_set(repeats: int, spread: str) -> None:
    """Near the ceiling: no loss fails, and a loss of the margin passes, in 5 % of runs at most; bounds cover."""
    runs, margin = 1500, 0.05
    chances = np.concatenate([np.full(12, 0.98), np.full(10, 0.9), np.full(8, 0.5)])
    losses = np.full(30, margin) if spread == "even" else np.where(np.arange(30) < 3, 0.5, 0.0)
    slack = 3 * np.sqrt(0.05 * 0.95 / runs)
    healthy = simulated(runs, chances, np.zeros(30), repeats)
    worse = simulated(runs, chances, losses, repeats)
    assert np.mean([sign_flip_p(each) <= 0.05 for each in healthy]) <= 0.05 + slack
    assert np.mean([mean_noninferior_p(each, margin) <= 0.05 for each in worse]) <= 0.05 + slack
    assert np.mean([mean_interval(each, 0.05).low > -margin + 1e-9 for each in worse]) <= 0.05 + slack


def test_interval_holds_zero_unless_a_change_is_shown() -> None:
    """Four items that moved show nothing at .05, so the interval holds 0, whatever t says."""
    repeats = made([(8, 4, 8)] * 4 + [(8, 8, 8)] * 2)
    assert sign_flip_p(repeats) == 1 / 16
    assert mean_interval(repeats, 0.05).high == 0.0

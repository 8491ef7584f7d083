"""The gate that stops early: its error rates by enumeration and simulation, and its pieces."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.stats import StatsError, mcnemar_p
from harness.stats_sequential import (
    FAIL,
    OPEN,
    PASS,
    capitals,
    crossings,
    final_losses,
    run_through,
    sequential,
)

register_cpu_ci(est_time=10, stage="commit")

MOVES = st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=40)


@settings(deadline=None)
@given(MOVES)
def test_capital_is_the_likelihood_ratio(moves: list[int]) -> None:
    """Against no loss the capital is Wald's ratio of the two coins, over the discordant items alone."""
    design = sequential(len(moves), 0.02, 0.03, 0.05)
    lost, gained, share = moves.count(-1), moves.count(1), (1 + design.loss_stake) / 2
    ratio = lost * np.log(share / 0.5) + gained * np.log((1 - share) / 0.5)
    assert ratio == pytest.approx(float(capitals(design, moves)[0][-1]), abs=1e-9)


@settings(deadline=None)
@given(st.floats(0.005, 0.2), st.floats(0.0, 0.2), st.floats(0.0, 0.5))
def test_bets_are_fair(margin: float, expected: float, flips: float) -> None:
    """Under its hypothesis one step leaves the capital no greater on average, whatever the flip rate really is."""
    design = sequential(100, margin, expected, 0.05)
    steps = np.array(capitals(design, [[-1], [0], [1]]))[:, :, 0]
    level = np.array([flips / 2, 1 - flips, flips / 2])
    assert float(level @ np.exp(steps[0])) == pytest.approx(1.0)
    worse = np.array([margin + (1 - margin) * flips / 2, 0.0, (1 - margin) * flips / 2])
    worse[1] = 1 - worse.sum()
    assert float(worse @ np.exp(steps[1])) <= 1 + 1e-9


@pytest.mark.parametrize("flips", [0.02, 0.2])
def test_a_fair_coin_fails_with_chance_alpha_at_most(flips: float) -> None:
    """All sequences of 14 discordant items: stopping early and late together fail at most alpha of them."""
    design = sequential(14, 0.1, flips, 0.05)
    needed = final_losses(design, 14)[14]
    sequences = np.array(list(product((-1, 1), repeat=14)))
    capital = capitals(design, sequences)[0]
    early = (capital >= -np.log(design.early)).any(axis=1)
    late = ~early & ((sequences < 0).sum(axis=1) >= needed)
    one_less = ~early & ((sequences < 0).sum(axis=1) >= needed - 1)
    assert float((early | late).mean()) <= 0.05
    assert float((early | one_less).mean()) > 0.05  # it is the fewest


@settings(deadline=None)
@given(st.integers(0, 80))
def test_the_last_decision_is_nearly_the_fixed_one(count: int) -> None:
    """What stopping early costs at the end: two losses more at most than the exact McNemar test needs."""
    design = sequential(1319, 0.02, 0.034, 0.05)
    fixed = next((lost for lost in range(count + 1) if mcnemar_p(lost, count - lost) <= 0.05), count + 1)
    assert fixed <= final_losses(design, count)[count] <= fixed + 2


def test_it_stops_where_the_capital_crosses() -> None:
    """A run of losses fails early, a run without flips passes early, and both say after how many items."""
    design = sequential(400, 0.05, 0.01, 0.05)
    bad = run_through(design, [-1] * 400)
    good = run_through(design, [0] * 400)
    assert (FAIL, True) == (bad.outcome, bad.early)
    assert int(np.ceil(np.log(1 / design.early) / np.log1p(design.loss_stake))) == bad.items
    assert (PASS, True) == (good.outcome, good.early)
    assert int(np.ceil(np.log(1 / design.early) / np.log1p(0.05 * design.margin_stake))) == good.items


def test_the_last_item_decides_exactly() -> None:
    """Without a stop the exact tests speak: too few losses and too few items leave it open."""
    design = sequential(30, 0.02, 0.03, 0.05)
    assert (30, OPEN, False) == run_through(design, [0] * 30)
    assert FAIL == run_through(design, ([0] * 4 + [-1]) * 6).outcome
    with pytest.raises(StatsError, match="expected 30"):
        run_through(design, [0] * 29)


@settings(max_examples=30, deadline=None)
@given(st.lists(MOVES.filter(lambda moves: len(moves) == 40) | st.just([0] * 40), min_size=1, max_size=4))
def test_runs_beside_each_other_are_runs_alone(runs: list[list[int]]) -> None:
    """Arrays of runs stop where each run alone stops."""
    design = sequential(40, 0.2, 0.1, 0.2)
    items, outcomes = crossings(design, runs)
    for run, item, outcome in zip(runs, items, outcomes, strict=True):
        alone = run_through(design, run)
        assert (alone.items, alone.outcome) == (item, outcome) if item else not alone.early


@pytest.mark.slow
@pytest.mark.parametrize("flips", [0.0, 0.01, 0.1])
def test_a_loss_of_the_margin_passes_with_chance_alpha_at_most(flips: float) -> None:
    """Simulated, with a flip rate far from the expected one: wrong passes and wrong fails stay at or below alpha."""
    n, margin, runs = 300, 0.03, 3000
    design = sequential(n, margin, 0.03, 0.05)
    source = np.random.default_rng(2)
    slack = 3 * np.sqrt(0.05 * 0.95 / runs)
    for loss, wrong in ((margin, PASS), (0.0, FAIL)):
        drawn = source.random((runs, n))
        moves = np.where(drawn < flips / 2 + loss, -1, np.where(drawn > 1 - flips / 2, 1, 0))
        items, outcomes = crossings(design, moves)
        rest = [run_through(design, moves[row]).outcome for row in np.flatnonzero(items == 0)[:800]]
        late = (np.array(rest) == wrong).mean() * (items == 0).mean() if rest else 0.0
        assert (outcomes == wrong).mean() + late <= 0.05 + slack


def test_bad_designs_are_refused() -> None:
    """No items, margins and alphas that are no shares."""
    for n, margin, alpha in ((0, 0.02, 0.05), (10, 0.0, 0.05), (10, 0.02, 0.5)):
        with pytest.raises(StatsError):
            sequential(n, margin, 0.03, alpha)

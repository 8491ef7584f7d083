"""Power, detectable losses and plans: against brute force, against published numbers, and in the right direction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.stats import StatsError, mcnemar_p
from harness.stats_paired import floor_p
from harness.stats_power import (
    detectable_loss,
    fewest,
    loss_power,
    mean_detectable,
    mean_power,
    pass_power,
    plan,
    repeats_needed,
    shares,
    unpaired_items,
)

register_cpu_ci(est_time=15, stage="commit")

RATES = st.floats(0.0, 0.2)


def test_shares_of_the_model() -> None:
    """Luck flips as often up as down, damage adds losses; impossible shares are refused."""
    assert (0.037, 0.017) == pytest.approx(tuple(shares(0.02, 0.034)))
    for loss, flips in ((-0.1, 0.1), (0.1, -0.1), (0.6, 0.5)):
        with pytest.raises(StatsError, match="at most 1 together"):
            shares(loss, flips)


@pytest.mark.parametrize(("loss", "flips"), [(0.0, 0.1), (0.1, 0.0), (0.1, 0.2)])
def test_powers_are_sums_over_tables(loss: float, flips: float) -> None:
    """Both powers are what adding up the chances of all tables gives."""
    n, chance = 40, shares(loss, flips)
    source = np.random.default_rng(1)
    draws = source.multinomial(n, [chance.lost, chance.gained, 1 - sum(chance)], 60_000)[:, :2]
    tables, counts = np.unique(draws, axis=0, return_counts=True)
    weights = counts / counts.sum()
    shown = np.array([mcnemar_p(lost, gained) <= 0.05 for lost, gained in tables.tolist()])
    passed = np.array([floor_p(lost, gained, n, -0.15) <= 0.05 for lost, gained in tables.tolist()])
    assert float(weights @ shown) == pytest.approx(loss_power(n, loss, flips, 0.05), abs=0.008)
    assert float(weights @ passed) == pytest.approx(pass_power(n, loss, flips, 0.15, 0.05), abs=0.008)


@settings(deadline=None)
@given(RATES, st.sampled_from([50, 300, 1319]))
def test_a_candidate_without_loss_fails_with_chance_alpha_at_most(flips: float, n: int) -> None:
    """False alarms are at or below alpha for every flip rate."""
    assert loss_power(n, 0.0, flips, 0.05) <= 0.05 + 1e-9


@settings(deadline=None)
@given(st.floats(0.0, 0.1), st.floats(0.0, 0.05), RATES)
def test_power_rises_with_the_loss(loss: float, more: float, flips: float) -> None:
    """A greater loss is shown more often."""
    assert loss_power(400, loss, flips, 0.05) <= loss_power(400, loss + more, flips, 0.05) + 1e-6


def test_without_flips_five_losses_are_needed() -> None:
    """With a flip rate of 0 the power is the chance of five losses or more; one flip alone is not enough for a fail."""
    n, loss = 200, 0.02
    four = sum(
        float(np.prod([(n - i) / (i + 1) for i in range(k)])) * loss**k * (1 - loss) ** (n - k) for k in range(5)
    )
    assert 1 - four == pytest.approx(loss_power(n, loss, 0.0, 0.05), abs=1e-6)
    assert loss_power(n, 0.0, 0.0, 0.05) == 0.0


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([150, 500, 1319]), RATES)
def test_the_detectable_loss_is_detected(n: int, flips: float) -> None:
    """It is shown with the power asked for, a little less of it is not."""
    loss = detectable_loss(n, flips, 0.05, 0.8)
    assert loss is not None
    assert loss_power(n, loss, flips, 0.05) >= 0.8
    assert loss_power(n, loss - 1e-5, flips, 0.05) < 0.8


def test_normal_formulas_promise_too_much() -> None:
    """2.486 sqrt(q / n), as published, keeps the flip rate fixed; exactly, and with damage on top, more is needed."""
    published = {
        (200, 0.034): 0.0324,
        (500, 0.034): 0.0205,
        (1319, 0.034): 0.0126,
        (200, 0.01): 0.018,
        (1319, 0.01): 0.007,
    }
    exact = {cell: detectable_loss(*cell, 0.05, 0.8) or 0.0 for cell in published}
    assert [2.486 * np.sqrt(q / n) for n, q in published] == pytest.approx(list(published.values()), abs=5e-4)
    assert {True} == {exact[cell] > published[cell] for cell in published}
    assert [0.0541, 0.0290, 0.0158, 0.0419, 0.0101] == pytest.approx(list(exact.values()), abs=1e-4)


def test_too_few_items_detect_nothing() -> None:
    """Four items can never show a loss at .05."""
    assert detectable_loss(4, 0.0, 0.05) is None
    assert detectable_loss(4, 1.0, 0.05) is None
    assert detectable_loss(5, 0.0, 0.05, 0.999) is not None


def test_plan_keeps_its_promises() -> None:
    """The items planned have the power, both ways; pairing takes less than half of the items that go without."""
    made = plan(0.03, 0.034, 0.05, 0.8, 0.94)
    assert made.items_to_fail is not None
    assert made.items_to_pass is not None
    assert made.items_unpaired is not None
    assert loss_power(made.items_to_fail, 0.03, 0.034, 0.05) >= 0.8
    assert loss_power(made.items_to_fail - 20, 0.03, 0.034, 0.05) < 0.8
    assert pass_power(made.items_to_pass, 0.0, 0.034, 0.03, 0.05) >= 0.8
    assert max(made.items_to_fail, made.items_to_pass) == made.items
    assert 2 * made.items_to_fail < made.items_unpaired


def test_published_unpaired_numbers() -> None:
    """.95 against .93: one sample against a known .95 takes 821 items, two samples about twice that each."""
    found = unpaired_items(0.02, 0.05, 0.8, 0.95)
    assert found is not None
    assert 2 * 821 == pytest.approx(found, rel=0.07)
    assert unpaired_items(0.95, 0.05, 0.8, 0.94) is None


def test_many_items_use_tango_which_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Tango's test stands in for the exact one, both give the same power to a hundredth."""
    exact = pass_power(1200, 0.0, 0.05, 0.015, 0.05)
    monkeypatch.setattr("harness.stats_power.EXACT_LOSSES_MAX", 1)
    assert exact == pytest.approx(pass_power(1200, 0.0, 0.05, 0.015, 0.05), abs=0.01)


def test_fewest() -> None:
    """The smallest number, or none up to the limit."""
    assert 137 == fewest(lambda n: n >= 137)
    assert fewest(lambda n: False) is None


def test_repeats_of_a_small_set() -> None:
    """30 items: repeats reduce the noise within items; half of the loss takes four times as many; copies never help."""
    assert mean_power(0.0, 0.01, 30, 0.05) == pytest.approx(0.05)
    assert mean_power(mean_detectable(0.01, 30, 0.05), 0.01, 30, 0.05) == pytest.approx(0.8)
    few, many = repeats_needed(30, 0.04, 0.2, 0.05, 0.8), repeats_needed(30, 0.02, 0.2, 0.05, 0.8)
    assert few is not None
    assert many is not None
    assert 4 == pytest.approx(many / few, rel=0.05)
    powers = [mean_power(0.04, float(np.sqrt(0.2 / repeats / 30)), 30, 0.05) for repeats in (few - 1, few)]
    assert powers[0] < 0.8 <= powers[1]
    assert repeats_needed(30, 0.04, 0.0, 0.05, 0.8) is None
    with pytest.raises(StatsError, match="1 items"):
        repeats_needed(1, 0.04, 0.2, 0.05, 0.8)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "flips"), [(0.05, 0.2), (0.03, 0.1)])
def test_planned_repeats_have_the_power(loss: float, flips: float) -> None:
    """Simulated: 30 items, each right with a chance that makes the flip rate, the loss on all of them."""
    repeats = repeats_needed(30, loss, flips, 0.05, 0.8)
    assert repeats is not None
    source = np.random.default_rng(0)
    share = (1 + np.sqrt(1 - 2 * flips)) / 2  # 2 p (1 - p) = flips
    right = [source.binomial(repeats, p, (4000, 30)) / repeats for p in (share, share - loss)]
    moves = right[1] - right[0]
    t = moves.mean(axis=1) / (moves.std(axis=1, ddof=1) / np.sqrt(30))
    assert 0.8 == pytest.approx(float((t <= -1.699).mean()), abs=0.07)


@pytest.mark.parametrize(
    ("loss", "alpha", "power", "word"), [(0.0, 0.05, 0.8, "loss"), (0.1, 0.6, 0.8, "alpha"), (0.1, 0.05, 1.0, "power")]
)
def test_bad_plans_are_refused(loss: float, alpha: float, power: float, word: str) -> None:
    """Shares out of their range are named."""
    with pytest.raises(StatsError, match=f"^{word} "):
        plan(loss, 0.03, alpha, power, 0.94)

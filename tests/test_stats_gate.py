"""Verdicts: when each is given, and that every number of a result is there and fits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.stats import Pairs, StatsError, mcnemar_p
from harness.stats_gate import Outcome, Terms, judge_pairs, judge_repeats, judge_score, outcome_of
from harness.stats_paired import noninferior_p
from harness.stats_power import loss_power
from harness.stats_repeats import repeats_of

register_cpu_ci(est_time=25, stage="commit")

TERMS = Terms(margin=0.02)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 25), st.integers(0, 25), st.sampled_from([0.01, 0.03, 0.1]))
def test_verdicts_are_what_is_shown(lost: int, gained: int, margin: float) -> None:
    """Pass only where non-inferiority is shown, fail only where a loss is, else open, with what would settle it."""
    pairs = Pairs(500 - lost - gained - 20, lost, gained, 20)
    result = judge_pairs(pairs, Terms(margin=margin))
    passed, loss = noninferior_p(pairs, margin) <= 0.05, mcnemar_p(lost, gained) <= 0.05
    expected = Outcome.PASS if passed else Outcome.FAIL if loss else Outcome.INCONCLUSIVE
    assert expected == result.outcome
    assert (lost, gained, 500, (lost + gained) / 500) == (result.lost, result.gained, result.n, result.flip_rate)
    low, high = result.interval_points
    assert low <= result.difference_points <= high
    assert (result.items_needed is not None and result.items_needed > 500) or expected is not Outcome.INCONCLUSIVE


def test_the_rule() -> None:
    """A loss that is shown to be smaller than the margin passes."""
    assert [Outcome.PASS, Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE] == [
        outcome_of(*ps, 0.05) for ps in ((0.5, 0.05), (0.01, 0.01), (0.05, 0.06), (0.051, 0.051))
    ]


@pytest.mark.parametrize(
    ("pairs", "outcome", "words"),
    [
        (Pairs(940, 3, 5, 52), Outcome.PASS, "The candidate is not 2 points worse: +0.20 points"),
        (Pairs(1209, 11, 1, 78), Outcome.PASS, "a loss is shown, but a smaller one than the margin"),
        (Pairs(450, 27, 9, 14), Outcome.FAIL, "The candidate is worse: -3.60 points"),
        (Pairs(180, 4, 3, 13), Outcome.INCONCLUSIVE, "Neither a loss nor the absence of one of 2 points is shown"),
    ],
)
def test_sentences(pairs: Pairs, outcome: Outcome, words: str) -> None:
    """A person's sentence, with the difference, its interval, the counts and, when open, what would settle it."""
    result = judge_pairs(pairs, TERMS)
    assert outcome == result.outcome
    assert words in result.said
    assert f"{pairs.n:,} items, {pairs.lost} lost and {pairs.gained} gained" in result.said
    assert (outcome is Outcome.INCONCLUSIVE) == ("items would settle it" in result.said)


def test_power_goes_with_the_noise_that_was_seen() -> None:
    """Power at the margin and the detectable loss are those of the flips that are left without the net loss."""
    result = judge_pairs(Pairs(450, 27, 9, 14), TERMS)
    assert loss_power(500, 0.02, 18 / 500, 0.05) == pytest.approx(result.power_at_margin)
    assert result.detectable_points is not None
    assert pytest.approx(0.8, abs=1e-3) == loss_power(500, result.detectable_points / 100, 18 / 500, 0.05)


def test_one_flip_of_a_deterministic_engine_is_no_loss_yet() -> None:
    """One lost item among 500 is p = .5: never a fail by itself."""
    assert (Outcome.PASS, 0.5) == (judge_pairs(Pairs(480, 1, 0, 19), TERMS).outcome, mcnemar_p(1, 0))


def test_too_small_a_set_is_inconclusive() -> None:
    """Thirty items without a flip do not show the absence of a loss of 2 points; about 150 would."""
    result = judge_pairs(Pairs(25, 0, 0, 5), TERMS)
    assert Outcome.INCONCLUSIVE == result.outcome
    assert 149 == pytest.approx(result.items_needed, abs=2)


def test_everything_lost() -> None:
    """The worst candidate there is fails, and every number is still there."""
    result = judge_pairs(Pairs(0, 50, 0, 0), TERMS)
    assert (Outcome.FAIL, 1.0, 0.0, -100.0) == (
        result.outcome,
        result.baseline,
        result.candidate,
        result.difference_points,
    )


def test_repeats_are_judged_over_items() -> None:
    """A loss on 10 of 30 items is shown; the same answers with the arms swapped pass; lost and gained count items."""
    right, low, count = [16] * 20 + [8] * 10, [16] * 20 + [5] * 10, [16] * 30
    worse = judge_repeats(repeats_of(right, count, low, count), TERMS)
    better = judge_repeats(repeats_of(low, count, right, count), TERMS)
    assert [(Outcome.FAIL, 10, 0, 30), (Outcome.PASS, 0, 10, 30)] == [
        (each.outcome, each.lost, each.gained, each.n) for each in (worse, better)
    ]
    assert 2**-10 == pytest.approx(worse.p_loss)
    with pytest.raises(StatsError, match="they are copies"):
        judge_repeats(repeats_of([2, 0], [2, 2], [2, 2], [2, 2]), TERMS)


def test_repeats_that_show_nothing_say_what_would() -> None:
    """A few items that moved both ways are open, with a number of items."""
    result = judge_repeats(repeats_of([8, 7, 4, 8], [8] * 4, [8, 8, 3, 7], [8] * 4), TERMS)
    assert Outcome.INCONCLUSIVE == result.outcome
    assert result.items_needed is not None
    assert result.items_needed > 4


def test_a_score_alone_is_judged_without_pairs() -> None:
    """0.9346 against 0.9423 of 1,299 items is inconclusive, and the result says that nothing is paired."""
    result = judge_score(1214, 1299, 1224 / 1299, 1299, TERMS)
    assert (Outcome.INCONCLUSIVE, None, None, None) == (result.outcome, result.lost, result.gained, result.flip_rate)
    assert "not paired, against a score of 1,299 items" == result.method
    assert "gained" not in result.said
    assert 2.4 == pytest.approx(result.detectable_points, abs=0.1)
    assert "without an error of its own" in judge_score(1300, 1300, 0.94, None, TERMS).method


@pytest.mark.parametrize(
    "terms", [{"margin": 0.0}, {"margin": 1.0}, {"margin": 0.1, "alpha": 0.5}, {"margin": 0.1, "power": 1.0}]
)
def test_terms_are_checked(terms: dict[str, float]) -> None:
    """A margin, an alpha or a power out of range is named."""
    with pytest.raises(StatsError, match="expected more than"):
        Terms(**terms)


def test_nothing_to_judge() -> None:
    """No item at all is an error, not a verdict."""
    with pytest.raises(StatsError, match="no item is left"):
        judge_pairs(Pairs(0, 0, 0, 0), TERMS)

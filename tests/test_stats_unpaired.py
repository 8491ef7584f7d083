"""The fallback against a score, and families of gates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm  # type: ignore[import-untyped]  # scipy ships no types

from ci.register import register_cpu_ci
from harness.stats import StatsError
from harness.stats_family import holm
from harness.stats_unpaired import against_score

register_cpu_ci(est_time=10, stage="commit")


def test_two_scores_of_1299_items() -> None:
    """.9346 against .9423 of 1,299 items each: z 0.82, two-sided p .41, so .207 for a loss; nothing is shown."""
    found = against_score(1214, 1299, 1224 / 1299, 1299, 0.02, 0.05)
    assert 0.41 / 2 == pytest.approx(found.p_loss, abs=0.005)
    pooled = (1214 + 1224) / 2598
    z = (1214 - 1224) / 1299 / np.sqrt(2 * pooled * (1 - pooled) / 1299)
    assert float(norm.cdf(z)) == pytest.approx(found.p_loss, abs=1e-3)
    low, high = z_interval = (found.interval.low, found.interval.high)
    assert (-0.0233, 0.0079) == pytest.approx(z_interval, abs=1e-4)
    assert low < -10 / 1299 < 0 < high
    at_margin = (-10 / 1299 + 0.02) / np.sqrt(2 * pooled * (1 - pooled) / 1299)
    assert float(norm.sf(at_margin)) == pytest.approx(found.p_noninferior, abs=0.01)


def test_a_score_without_items_is_taken_as_it_is() -> None:
    """Then the tests are exact binomial ones, and p is smaller than with the score's own noise."""
    alone = against_score(1214, 1299, 0.9423, None, 0.02, 0.05)
    assert float(binom.cdf(1214, 1299, 0.9423)) == pytest.approx(alone.p_loss)
    assert float(binom.sf(1213, 1299, 0.9223)) == pytest.approx(alone.p_noninferior)
    assert alone.p_loss < against_score(1214, 1299, 0.9423, 1299, 0.02, 0.05).p_loss


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 199), st.sampled_from([None, 50, 200]))
def test_values_are_shares(right: int, behind: int, score_n: int | None) -> None:
    """p-values are between 0 and 1 and the interval holds the difference, at the ends of the scale too."""
    found = against_score(right, 200, behind / 200, score_n, 0.05, 0.05)
    difference = right / 200 - (behind / 200 if score_n is None else round(behind / 200 * score_n) / score_n)
    assert 0 <= found.p_loss <= 1
    assert 0 <= found.p_noninferior <= 1
    assert found.interval.low - 1e-9 <= difference <= found.interval.high + 1e-9


@pytest.mark.parametrize(("right", "n", "score", "score_n"), [(5, 4, 0.5, 4), (1, 2, 0.0, 4), (1, 2, 0.5, 0)])
def test_bad_scores_are_refused(right: int, n: int, score: float, score_n: int) -> None:
    """More right than items, a score that is none, no items behind it."""
    with pytest.raises(StatsError):
        against_score(right, n, score, score_n, 0.05, 0.05)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), max_size=12))
def test_holm(p_values: list[float]) -> None:
    """The k-th smallest p is multiplied by what is left of the family, never falls, and is at most 1."""
    adjusted: dict[float, float] = {}
    highest = 0.0
    for rank, p in enumerate(sorted(p_values)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p))
        adjusted[p] = min(adjusted.get(p, 1.0), highest) if p in adjusted else highest
    ranked = sorted(range(len(p_values)), key=lambda at: p_values[at])
    found = holm(p_values)
    assert sorted(found) == [found[at] for at in ranked]
    assert [adjusted[p_values[at]] for at in ranked[:1]] == pytest.approx([found[at] for at in ranked[:1]])
    assert all(p <= now <= 1 for p, now in zip(p_values, found, strict=True))


def test_holm_known_values() -> None:
    """Four gates: .01, .04, .03, .005 become .03, .06, .06, .02."""
    assert [0.03, 0.06, 0.06, 0.02] == pytest.approx(holm([0.01, 0.04, 0.03, 0.005]))

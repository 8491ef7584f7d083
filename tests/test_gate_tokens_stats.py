"""Distances of tokens: what is off, what is noise, and where it begins."""

from __future__ import annotations

import math

import pytest

from ci.register import register_cpu_ci
from harness.stats import StatsError
from harness.stats_gate import Outcome
from harness.stats_tokens import BITWISE, Judged, Limits, Row, judge_tokens

register_cpu_ci(est_time=8, stage="commit")

LIMITS = Limits(tolerance=0.01, far=0.5, share_max=0.1)
FLAT = (-1.0,) * 40


def row(item: int, moved: dict[int, float] | None = None, again: dict[int, float] | None = None) -> Row:
    def values(changes: dict[int, float] | None) -> tuple[float, ...]:
        return tuple(value + (changes or {}).get(at, 0.0) for at, value in enumerate(FLAT))

    return Row(str(item), "computed", 1, tuple(range(100, 140)), FLAT, values(moved), values(again))


def judged(*rows: Row, limits: Limits = LIMITS) -> Judged:
    return judge_tokens(rows, limits, page=8)


@pytest.mark.parametrize(
    ("moved", "outcome"),
    [
        ({}, Outcome.PASS),
        ({3: 0.4, 9: 0.4, 20: 0.4, 30: 0.4}, Outcome.PASS),  # 4 of 40 are 10 %
        ({3: 0.4, 9: 0.4, 20: 0.4, 30: 0.4, 31: 0.02}, Outcome.FAIL),
        (dict.fromkeys(range(40), 0.009), Outcome.PASS),
        ({39: 0.6}, Outcome.FAIL),
        ({39: math.nan}, Outcome.FAIL),
        ({39: -math.inf}, Outcome.FAIL),
    ],
)
def test_what_is_off(moved: dict[int, float], outcome: Outcome) -> None:
    """Too many tokens over the tolerance, or one that is further than any may be, or is no number."""
    assert outcome is judged(row(1, moved), row(2)).outcome


def test_bitwise() -> None:
    """The last bit of one token."""
    assert Outcome.PASS is judged(row(1), limits=BITWISE).outcome
    assert Outcome.FAIL is judged(row(1, {5: 2e-16 * 2}), limits=BITWISE).outcome


def test_equal_infinities_are_equal() -> None:
    """Both servers rule a token out."""
    out = (-math.inf, -1.0)
    assert 0.0 == judge_tokens([Row("a", "computed", 0, (1, 2), out, out, out)], BITWISE, 8).spread.max


def test_noise_of_the_baseline() -> None:
    """Off as often as the baseline from itself is inconclusive; off on many more prompts is shown by their number."""
    off = {3: 1.0}
    same = [row(at, off, off) for at in range(3)]
    assert (Outcome.INCONCLUSIVE, 1.0) == (judged(*same).outcome, judged(*same).p)
    more = [*same, *(row(10 + at, off) for at in range(4))]
    assert (Outcome.INCONCLUSIVE, 1 / 16) == (judged(*more).outcome, judged(*more).p)
    most = [*more, row(20, off)]
    assert (Outcome.FAIL, 1 / 32) == (judged(*most).outcome, judged(*most).p)
    assert Outcome.PASS is judged(row(1, None, off)).outcome


def test_where_it_begins() -> None:
    """Of each prompt the first page with a token over the tolerance; the worst token is named."""
    found = judged(row(1, {10: 0.7, 30: 0.2}), row(2, {9: 0.6}), row(3))
    assert {1: 2} == {each.page: each.begins for each in found.pages if each.begins}
    assert [7, 8, 8, 8, 8, 1] == [each.spread.tokens // 3 for each in found.pages]
    assert found.worst is not None
    assert ("1", 11, 1, 110) == (found.worst.item, found.worst.position, found.worst.page, found.worst.token)
    assert (0.7, 3) == (round(found.spread.max or 0.0, 9), found.spread.over)


def test_nothing_to_judge() -> None:
    """No token is an error, not a pass."""
    with pytest.raises(StatsError, match="no token was scored by both"):
        judge_tokens([Row("a", "computed", 0, (), (), (), ())], LIMITS, 8)

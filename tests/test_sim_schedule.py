from __future__ import annotations

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.sim.schedule import (
    ALL,
    HOLD,
    IN_ORDER,
    LAZY,
    STREAMS_MAX,
    Policy,
    Schedule,
    checked,
    mode_of,
    named,
    only,
    schedules,
    text,
    without,
)

register_cpu_ci(est_time=15, stage="commit")


@settings(deadline=None)
@given(st.integers(0, STREAMS_MAX - 1), st.none() | st.integers(0, 63))
def test_modes_are_numbers_and_back(stream: int, rank: int | None) -> None:
    """Every stream of every rank has its own two modes."""
    assert (Policy.ONLY, stream, rank) == mode_of(only(stream, rank))
    assert (Policy.WITHOUT, stream, rank) == mode_of(without(stream, rank))
    assert [Policy.ALL, Policy.HOLD] == [mode_of(mode).policy for mode in (ALL, HOLD)]


@settings(deadline=None)
@given(schedules(streams=3, ranks=2, positions=50))
def test_schedules_are_plain_values_in_order(schedule: Schedule) -> None:
    """The strategy gives tuples of pairs of integers that a queue takes, and that print and replay as they are."""
    assert schedule == checked(eval(repr(schedule)))  # noqa: S307 - that a schedule can be pasted is the claim
    assert all(0 <= position < 50 for position, _ in schedule)


@pytest.mark.parametrize("policy", [Policy.ONLY, Policy.WITHOUT])
def test_schedules_reach_every_mode_of_every_rank(policy: Policy) -> None:
    """The strategy finds the modes of one rank's stream; the smallest example is one pair, at the first operation."""
    found = find(
        schedules(streams=2, ranks=3, positions=20),
        lambda schedule: any(mode_of(mode) == (policy, 1, 2) for _, mode in schedule),
        settings=settings(derandomize=True, max_examples=2000),
    )
    assert ((0, only(1, 2) if policy is Policy.ONLY else without(1, 2)),) == found


def test_shrinks_to_in_order() -> None:
    """No interference is the simplest schedule."""
    assert IN_ORDER == find(schedules(), lambda _: True)


def test_named() -> None:
    """In order, lazy, and each stream ahead of and behind all others."""
    assert {
        "in order": IN_ORDER,
        "lazy": LAZY,
        "only stream 0": ((0, 2),),
        "without stream 0": ((0, -1),),
        "only stream 1": ((0, 3),),
        "without stream 1": ((0, -2),),
    } == named(2)


@pytest.mark.parametrize("schedule", [((3, 1), (3, 0)), ((4, 1), (2, 0)), ((-1, 1),)])
def test_positions_must_ascend(schedule: Schedule) -> None:
    """A schedule whose pairs are in disorder is an error that names them."""
    with pytest.raises(ValueError, match=r"expected ascending numbers from 0"):
        checked(schedule)


@pytest.mark.parametrize(("stream", "rank"), [(16, None), (-1, None), (0, -1)])
def test_streams_and_ranks_have_limits(stream: int, rank: int | None) -> None:
    """A stream or rank that no mode can name is an error."""
    with pytest.raises(ValueError, match="expected a stream in"):
        only(stream, rank)


def test_text() -> None:
    """A schedule can be told in words."""
    assert "in order" == text(IN_ORDER)
    assert "from operation 0: nothing runs\nfrom operation 7: only stream 1 of every rank" == text(((0, 1), (7, 3)))
    assert "from operation 0: without stream 1 of rank 0" == text(((0, without(1, 0)),))

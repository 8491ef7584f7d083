"""Schedules: plain values that say what a simulated device runs when; they replay, print and shrink.

A schedule is a tuple of (position, mode) pairs. The n-th operation that any rank issues has position n; for it, the
mode of the last pair with a position <= n holds. The empty schedule runs everything in issue order.

==========  =====================================================================================================
mode        what runs as soon as it is issued
==========  =====================================================================================================
0           everything, in issue order
1           nothing: only what a host waits for, with what that waits for
2 + s       stream s of every rank, with what it waits for; nothing else
-1 - s      everything but stream s of every rank and what waits for it
==========  =====================================================================================================

Stream 0 is the default stream of a rank, the others count in the order in which the rank made them. For s >= 16 it is
stream s % 16 of rank s // 16 - 1 only.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

from hypothesis import strategies as st

Schedule: TypeAlias = tuple[tuple[int, int], ...]

STREAMS_MAX = 16
ALL = 0
HOLD = 1
IN_ORDER: Schedule = ()
LAZY: Schedule = ((0, HOLD),)


class Policy(Enum):
    """What a mode does, apart from the stream it is about."""

    ALL = "all"
    HOLD = "hold"
    ONLY = "only"
    WITHOUT = "without"


class Mode(NamedTuple):
    """A mode in words: the policy, its stream, and the rank, or None for the stream of every rank."""

    policy: Policy
    stream: int
    rank: int | None

    def concerns(self, rank: int, stream: int) -> bool:
        """Whether it is about this stream."""
        return stream == self.stream and self.rank in {None, rank}

    def __str__(self) -> str:
        if self.policy in {Policy.ALL, Policy.HOLD}:
            return "everything runs" if self.policy is Policy.ALL else "nothing runs"
        whose = "every rank" if self.rank is None else f"rank {self.rank}"
        return f"{self.policy.value} stream {self.stream} of {whose}"


def only(stream: int, rank: int | None = None) -> int:
    """The mode in which one stream runs ahead of all others."""
    return 2 + _code(stream, rank)


def without(stream: int, rank: int | None = None) -> int:
    """The mode in which one stream falls behind all others."""
    return -1 - _code(stream, rank)


def mode_of(mode: int) -> Mode:
    """What the number of a mode means."""
    if mode in {ALL, HOLD}:
        return Mode(Policy.HOLD if mode else Policy.ALL, 0, None)
    code = mode - 2 if mode > 0 else -1 - mode
    rank = code // STREAMS_MAX - 1
    return Mode(Policy.ONLY if mode > 0 else Policy.WITHOUT, code % STREAMS_MAX, None if rank < 0 else rank)


def named(streams: int) -> dict[str, Schedule]:
    """The schedules that every program should pass first: one mode from start to end, for `streams` streams a rank."""
    schedules = {"in order": IN_ORDER, "lazy": LAZY}
    for stream in range(streams):
        schedules[f"only stream {stream}"] = ((0, only(stream)),)
        schedules[f"without stream {stream}"] = ((0, without(stream)),)
    return schedules


def schedules(streams: int = 2, ranks: int = 1, positions: int = 1000, changes: int = 6) -> st.SearchStrategy[Schedule]:
    """Hypothesis strategy: at most `changes` changes of mode at positions below `positions`; shrinks to in order."""
    whose: list[int | None] = [None, *(range(ranks) if ranks > 1 else ())]
    modes = [ALL, HOLD]
    modes += [make(stream, rank) for rank in whose for make in (only, without) for stream in range(streams)]
    pairs = st.tuples(st.integers(0, positions - 1), st.sampled_from(modes))
    return st.lists(pairs, max_size=changes, unique_by=lambda pair: pair[0]).map(lambda found: tuple(sorted(found)))


def text(schedule: Schedule) -> str:
    """One line per change of mode."""
    return "\n".join(f"from operation {position}: {mode_of(mode)}" for position, mode in schedule) or "in order"


def checked(schedule: Schedule) -> Schedule:
    """The schedule, if its positions ascend; ValueError otherwise."""
    positions = [position for position, _ in schedule]
    if positions != sorted(set(positions)) or any(position < 0 for position in positions):
        raise ValueError(
            f"schedule {schedule}: positions {positions}, expected ascending numbers from 0; sort the pairs, and give "
            "each position one mode"
        )
    return schedule


def _code(stream: int, rank: int | None) -> int:
    if not 0 <= stream < STREAMS_MAX or (rank is not None and rank < 0):
        raise ValueError(
            f"mode for stream {stream} of rank {rank}: expected a stream in 0..{STREAMS_MAX - 1}, and a rank >= 0 or "
            "None for every rank"
        )
    return stream + (0 if rank is None else (rank + 1) * STREAMS_MAX)

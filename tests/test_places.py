"""Whose rows a chunk carries: what the caller was told counts, not what an engine makes of it later."""

from __future__ import annotations

from functools import partial

from ci.register import register_cpu_ci
from harness.places import places
from harness.types import AnyOp, AnyReply, Evicted, Extended, Flush, Ok, Open, Opened, Refused, Replies, Together
from harness.types import Extend as Chunk

register_cpu_ci(est_time=10, stage="commit")

Extend = partial(Chunk, rows={})
OPENED = Ok(Opened(cached=0))


def computed(start: int, end: int) -> Ok:
    return Ok(Extended(start=start, end=end, reads=()))


def test_a_chunk_begins_where_the_last_one_ended() -> None:
    """Cached tokens, then chunks; a refused chunk moves nothing, and a second open begins anew."""
    ops: list[AnyOp] = [
        Open("r", (1, 2, 3, 4, 5)),
        Extend("r", 2),
        Extend("r", 9),
        Extend("r", 1),
        Open("r", (1, 2)),
        Extend("r", 1),
    ]
    replies: list[AnyReply | None] = [
        Ok(Opened(cached=1)),
        computed(1, 3),
        Refused("too much"),
        computed(3, 4),
        OPENED,
        None,
    ]

    assert [(), ((0, 1),), ((0, 3),), ((0, 3),), (), ((0, 0),)] == places(ops, replies)


def test_an_engine_that_forgets_a_chunk_does_not_move_it() -> None:
    """An engine computes [0, 2) again when [2, 4) is due: the rows it got are still those of 2."""
    ops: list[AnyOp] = [Open("r", (1, 2, 3, 4)), Extend("r", 2), Extend("r", 2)]

    assert [(), ((0, 0),), ((0, 2),)] == places(ops, [OPENED, *[computed(0, 2)] * 2])


def test_a_batch_has_a_place_for_each_chunk() -> None:
    """Chunks that run together, of two requests; replies may be missing at the end."""
    both = Together((Extend("a", 1), Extend("b", 2)))
    opened: list[AnyOp] = [Open("a", (1, 2, 3)), Open("b", (4, 5, 6, 7))]
    replies: list[AnyReply | None] = [
        Ok(Opened(cached=2)),
        OPENED,
        Replies((computed(2, 3), computed(0, 2))),
        None,
    ]

    assert [(), (), ((0, 2), (0, 0)), ((0, 3), (0, 2))] == places([*opened, both, both], replies)


def test_a_dropped_cache_begins_another_life() -> None:
    """The same place of the same prompt has other rows once the cache was dropped, unless the drop was refused."""
    ops: list[AnyOp] = [Open("r", (1, 2)), Flush(), Extend("r", 1), Flush(), Extend("r", 1)]
    replies: list[AnyReply | None] = [
        OPENED,
        Refused("busy"),
        computed(0, 1),
        Ok(Evicted(tokens=1)),
        None,
    ]

    assert [(), (), ((0, 0),), (), ((1, 1),)] == places(ops, replies)

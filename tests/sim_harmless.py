"""Changes to the waits of the gather that order the same accesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.sim_faults import Change, Rank, early_end, elsewhere, instead, rows_to_another_stream
from tests.test_gather import LAYERS


def host_waits(rank: Rank) -> None:
    def read(original: Callable[..., Any], *args: Any) -> Any:
        rank.device.synchronize()
        return original(*args)

    instead(rank.gather, "read", read)


def through_a_third_stream(rank: Rank) -> None:
    """The compute stream waits for a stream that waits for the gather."""
    third = rank.device.Stream()

    def wait(original: Callable[..., Any], event: Any) -> None:
        third.wait_event(event)
        original(third.record_event())

    instead(rank.compute, "wait_event", wait)


def prefetch_then_wait(rank: Rank) -> None:
    """The next layer is kicked before the stream waits for this one."""
    gather, wait = rank.gather, rank.compute.wait_event
    late: list[Any] = []
    rank.compute.wait_event = late.append

    def prefetch(original: Callable[..., Any], layer: int) -> None:
        original(layer)
        while late:
            wait(late.pop())

    def read(original: Callable[..., Any], layer: int, *args: Any, **kwargs: Any) -> Any:
        if layer == LAYERS - 1:
            rank.compute.wait_event = wait  # nothing to kick
        rows = original(layer, *args, **kwargs)
        rank.compute.wait_event = late.append
        return rows

    instead(gather, "prefetch", prefetch)
    instead(gather, "read", read)


def stream_per_layer(rank: Rank) -> None:
    """Every gather has a new stream."""

    def prefetch(original: Callable[..., Any], layer: int) -> None:
        rank.gather._stream = rank.device.Stream()
        original(layer)

    instead(rank.gather, "prefetch", prefetch)


def one_event(rank: Rank) -> None:
    """Both slots share an event: it is waited for before it is recorded again."""
    rank.gather._ready[1] = rank.gather._ready[0]


HARMLESS: dict[str, Change] = {
    "nothing": lambda r: None,
    "the gather's stream in place of its event": lambda r: instead(
        r.compute, "wait_event", lambda original, _: r.compute.wait_stream(r.gather._stream)
    ),
    "more waits": lambda r: instead(
        r.gather, "read", lambda original, *args: (r.compute.wait_stream(r.gather._stream), original(*args))[1]
    ),
    "the host waits before every read": host_waits,
    "the host waits in place of the stream": lambda r: instead(
        r.compute, "wait_event", lambda original, event: event.synchronize()
    ),
    "through a third stream": through_a_third_stream,
    "prefetch before the wait": prefetch_then_wait,
    "a stream per layer": stream_per_layer,
    "one event": one_event,
    "all on one stream": lambda r: setattr(r.gather, "_stream", r.compute),
    "rows copied": lambda r: instead(r.gather, "read", lambda original, *args: original(*args).clone()),
    "chunk staged on another stream": lambda r: elsewhere(r, r.gather, "stage", before=True, after=True),
    "chunk persisted on another stream": lambda r: elsewhere(r, r.gather.pool, "write", before=True, after=True),
    "rows go to another stream": rows_to_another_stream,
    "a layer left unread": lambda r: early_end(r, wait=True),
}

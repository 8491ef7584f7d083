"""A gather on simulated devices, and changes to its waits that are faults of order only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from harness.lockstep import Lockstep, LockstepGroup
from harness.sim import Schedule, SimDevice, SimGroup, Simulation
from kvshard_ref.errors import LayerOrderError
from kvshard_ref.gather import PrefixGather
from tests.test_gather import COMPONENTS, LAYERS, chain, fill, gather_of, locs_of, stored

Pairs = list[tuple[Tensor, Tensor]]  # what was computed, and what it must be
RANKS = 2


class Rank(NamedTuple):
    """One rank of the gather program, for a change to work on."""

    gather: PrefixGather
    device: SimDevice
    compute: Any
    rank: int

    @property
    def next_layer(self) -> int:
        """While layer l-1 is read, layer l is gathered."""
        return self.gather._layer + 1


Change = Callable[[Rank], object]


def gathers(change: Change) -> Callable[[SimDevice, LockstepGroup], Pairs]:
    """Three batches over both slots; the second one's prefix ends with the chunk of the first."""

    def program(device: SimDevice, group: LockstepGroup) -> Pairs:
        gather = gather_of(SimGroup(device, group), device_module=device)
        fill(gather)
        first = chain(RANKS, 1, [3, 1, 4, 2, 5])
        fresh = chain(RANKS, 0, [11, 12, 10])
        change(Rank(gather, device, device.current_stream(), group.rank))
        found: Pairs = []
        for prefix, chunk in ((first, fresh[:1]), ([*first, fresh[0]], fresh[1:]), (first[:3], fresh[:2])):
            owned = gather.pool.owned(locs_of(*chunk).numpy())  # the only wait of the host until all is issued
            gather.begin([prefix], [chunk])
            chunk_locs, every = locs_of(*chunk), locs_of(*prefix, *chunk)
            for layer in range(LAYERS):
                for component in COMPONENTS:
                    rows = stored(layer, component, chunk_locs)
                    gather.stage(layer, component.name, gather.translate(chunk_locs), rows)
                    gather.pool.write(layer, component.name, owned, rows)
                for component in COMPONENTS:
                    seen = gather.read(layer, component.name, gather.translate(every))
                    found.append((seen, stored(layer, component, every)))
            gather.end()
        gather.settle()
        return found

    return program


def run(program: Callable[[SimDevice, LockstepGroup], Pairs], *, order: bool, schedule: Schedule | None = None) -> int:
    """Run it on every rank, in issue order by default. Raises what is found; returns how many results are wrong."""
    simulation = Simulation(RANKS, schedule, order)
    with Lockstep(RANKS) as lockstep:
        found = simulation.run(lockstep, lambda rank: program(simulation.devices[rank], lockstep.groups[rank]))
    return sum(not torch.equal(seen, expected) for pairs in found for seen, expected in pairs)


# ---- how to change a wait


def drop(target: Any, method: str, when: Callable[[], bool] = lambda: True) -> None:
    """`target.method` does nothing while `when` holds."""
    original = getattr(target, method)
    setattr(target, method, lambda *args: None if when() else original(*args))


def instead(target: Any, method: str, function: Callable[..., Any]) -> None:
    """`function(original, *args)` in the place of `target.method`."""
    original = getattr(target, method)
    setattr(target, method, lambda *args, **kwargs: function(original, *args, **kwargs))


def elsewhere(rank: Rank, target: Any, method: str, *, before: bool, after: bool) -> None:
    """`target.method` goes to a stream of its own, that waits for the compute stream before, and it for that after."""
    side = rank.device.Stream()

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if before:
            side.wait_stream(rank.compute)
        with rank.device.stream(side):
            result = original(*args, **kwargs)
        if after:
            rank.compute.wait_stream(side)
        return result

    instead(target, method, call)


# ---- faults of the gather


def recorded_on_compute(rank: Rank) -> None:
    for event in rank.gather._ready:
        instead(event, "record", lambda original, _: original(rank.compute))


def recorded_once(rank: Rank) -> None:
    """From layer 2 on the events stand for the layers before."""
    for event in rank.gather._ready:
        drop(event, "record", lambda: rank.next_layer >= 2)


def recorded_early(rank: Rank) -> None:
    """The event is recorded before the rows are copied."""
    gather = rank.gather
    records = [event.record for event in gather._ready]
    for event in gather._ready:
        drop(event, "record")

    def wait(original: Callable[..., Any], stream: Any) -> None:
        original(stream)
        records[rank.next_layer % 2](gather._stream)

    instead(gather._stream, "wait_stream", wait)


def recorded_after(rank: Rank, collectives: int) -> None:
    """The event is recorded when so many collectives of the layer are issued, of as many as there are components."""
    gather = rank.gather
    records = [event.record for event in gather._ready]
    for event in gather._ready:
        drop(event, "record")
    count = [0]

    def all_gather(original: Callable[..., Any], *args: Any) -> None:
        if count[0] % len(COMPONENTS) == collectives:
            records[rank.next_layer % 2](gather._stream)
        original(*args)
        count[0] += 1

    instead(gather.group, "all_gather", all_gather)


def one_slot(rank: Rank) -> None:
    for slots in rank.gather._slots.values():
        slots[1] = slots[0]


def two_ahead(rank: Rank) -> None:
    """The first read of layer l kicks layer l+2, into the slot that the second one still reads."""
    gather = rank.gather
    gather._check_layer = lambda call, layer: None  # type: ignore[method-assign]  # the fault

    def read(original: Callable[..., Any], layer: int, *args: Any, **kwargs: Any) -> Any:
        rows = original(layer, *args, **kwargs)
        if layer + 2 < LAYERS:
            gather.prefetch(layer + 2)
        return rows

    instead(gather, "read", read)


def wait_after_read(rank: Rank) -> None:
    """The rows are taken first, then the stream waits for them."""
    late: list[Any] = []
    wait = rank.compute.wait_event

    def read(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rows = original(*args, **kwargs)
        while late:
            wait(late.pop())
        return rows

    rank.compute.wait_event = late.append
    instead(rank.gather, "read", read)


def other_event(rank: Rank) -> None:
    events = rank.gather._ready
    instead(rank.compute, "wait_event", lambda original, event: original(events[1 - events.index(event)]))


def rows_to_another_stream(rank: Rank, *, wait: bool = True, record: bool = True) -> None:
    """What is read goes on to a stream of its own, such as that of the sampler, and comes back."""
    side = rank.device.Stream()

    def read(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rows = original(*args, **kwargs)
        if wait:
            side.wait_stream(rank.compute)
        with rank.device.stream(side):
            doubled = rows * 2
        rank.compute.wait_stream(side)
        if record:
            doubled.record_stream(rank.compute)
        return doubled // 2

    instead(rank.gather, "read", read)


def plan_given_back(rank: Rank) -> None:
    """The pages to send are dropped when the gather that reads them is only issued."""
    gather = rank.gather

    def prefetch(original: Callable[..., Any], layer: int) -> None:
        pages = gather._send_pages
        gather._send_pages = pages.clone()
        original(layer)
        gather._send_pages = pages

    instead(gather, "prefetch", prefetch)


def early_end(rank: Rank, *, wait: bool) -> None:
    """The first batch is left after one layer, as when a request is aborted, and the next one begins."""
    gather = rank.gather
    if not wait:
        drop(rank.compute, "wait_event", lambda: gather.plan is None)
    left = [False]

    def begin(original: Callable[..., Any], prefixes: Any, chunks: Any) -> Any:
        if not left[0]:
            left[0] = True
            original(prefixes, chunks)
            gather.read(0, "kv", gather.translate(locs_of(*prefixes[0])))
            with pytest.raises(LayerOrderError, match="never read"):
                gather.end()
        return original(prefixes, chunks)

    instead(gather, "begin", begin)


class Fault(NamedTuple):
    """A change, and what its story says: what was not ordered after what, and the operations."""

    change: Change
    says: str
    earlier: str
    later: str


def raw(change: Change, rank: int = 0) -> Fault:
    """Rows are read before they are gathered."""
    says = f"read of 'rank {rank} stream 0' not ordered after write of 'rank {rank} stream 1'"
    return Fault(change, says, "all_gather", "aten.index_select.out")


def war(change: Change) -> Fault:
    """Rows are gathered into a slot that is still read."""
    says = "write of 'rank 0 stream 1' not ordered after read of 'rank 0 stream 0'"
    return Fault(change, says, "aten.index_select.out", "aten.index_select.out")


def freed(change: Change, home: int, user: int, use: str) -> Fault:
    """What a stream uses goes back to the stream that made it."""
    says = f"memory of 'rank 0 stream {home}' was given back while 'rank 0 stream {user}' may still use it"
    return Fault(change, says, use, "")


def late(change: Change, earlier: str, later: str) -> Fault:
    """A stream of its own reads what the compute stream writes."""
    return Fault(change, "read of 'rank 0 stream 2' not ordered after write of 'rank 0 stream 0'", earlier, later)


COPY, TAKE, ADD, MUL = "aten.index_copy_.default", "aten.index_select.out", "aten.add.Tensor", "aten.mul.Tensor"
GATHER_FAULTS: dict[str, Fault] = {
    "no wait for the compute stream": Fault(
        lambda r: drop(r.gather._stream, "wait_stream"),
        "read of 'rank 0 stream 1' not ordered after write of 'rank 0 stream 0'",
        "aten.lift_fresh.default",  # the pages to send, made by torch.tensor
        TAKE,
    ),
    "no wait for the compute stream from layer 1": war(
        lambda r: drop(r.gather._stream, "wait_stream", lambda: r.next_layer >= 1)
    ),
    "no wait for the compute stream from layer 2": war(
        lambda r: drop(r.gather._stream, "wait_stream", lambda: r.next_layer >= 2)
    ),
    "no wait for the gather": raw(lambda r: drop(r.compute, "wait_event")),
    "no wait for the last layer's gather": raw(lambda r: drop(r.compute, "wait_event", lambda: r.next_layer == LAYERS)),
    "no wait for the gather on rank 1": raw(lambda r: drop(r.compute, "wait_event", lambda: r.rank == 1), rank=1),
    "wait for the other slot's event": raw(other_event),
    "wait after the read": raw(wait_after_read),
    "event on the compute stream": raw(recorded_on_compute),
    "event before the copies": raw(recorded_early),
    "event before the collective": raw(lambda r: recorded_after(r, 0)),
    "event before the last component's collective": raw(lambda r: recorded_after(r, 1)),
    "event never recorded again": raw(recorded_once),
    "chunk staged on another stream, no wait before": late(
        lambda r: elsewhere(r, r.gather, "stage", before=False, after=True), ADD, COPY
    ),
    "chunk staged on another stream, no wait after": freed(
        lambda r: elsewhere(r, r.gather, "stage", before=True, after=False), 0, 2, COPY
    ),
    "chunk persisted on another stream, no wait before": late(
        lambda r: elsewhere(r, r.gather.pool, "write", before=False, after=True), MUL, "aten.index_select.default"
    ),
    "chunk persisted on another stream, no wait after": freed(
        lambda r: elsewhere(r, r.gather.pool, "write", before=True, after=False), 0, 2, "aten.index_select.default"
    ),
    "read on another stream, no wait before": late(
        lambda r: elsewhere(r, r.gather, "read", before=False, after=True), COPY, TAKE
    ),
    "read on another stream, no wait after": freed(
        lambda r: elsewhere(r, r.gather, "read", before=True, after=False), 0, 2, TAKE
    ),
    "rows go to another stream, no wait": late(lambda r: rows_to_another_stream(r, wait=False), TAKE, MUL),
    "rows come from another stream, not recorded": freed(
        lambda r: rows_to_another_stream(r, record=False), 2, 0, "aten.floor_divide.default"
    ),
    "pages to send given back at once": freed(plan_given_back, 0, 1, TAKE),
    "no wait for a layer left unread": freed(lambda r: early_end(r, wait=False), 0, 1, TAKE),
}
# rows in the wrong place: in issue order they are wrong as well
MISPLACED: dict[str, Change] = {"one slot": one_slot, "two layers ahead": two_ahead}

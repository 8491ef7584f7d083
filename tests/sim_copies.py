"""Small programs with copies, host buffers and temporaries, each right, or wrong in its waits only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.lockstep import LockstepGroup
from harness.sim import SimDevice, SimGroup

Pairs = list[tuple[Tensor, Tensor]]  # what was computed, and what it must be


class Place(NamedTuple):
    """One rank of a program, and a tensor of zeros [4] that all ranks share."""

    device: SimDevice
    group: SimGroup
    shared: Tensor
    wrong: bool


def rows(value: float, count: int = 4) -> Tensor:
    return torch.full((count,), value)


def recorded(tensor: Tensor, stream: Any) -> None:
    tensor.record_stream(stream)


def copy_to_host(place: Place, synchronize: Callable[[Any], object], *, early: bool = False) -> Pairs:
    device = place.device
    pinned = torch.zeros(4, pin_memory=True)
    source, event = rows(3), device.Event()
    if early:
        event.record()
    pinned.copy_(source, non_blocking=True)
    if not early:
        event.record()
    synchronize(event)
    return [(torch.tensor(pinned.tolist()), torch.full((4,), 3.0))]


def read_on_host(place: Place) -> Pairs:
    return copy_to_host(place, lambda event: None if place.wrong else event.synchronize())


def event_before_copy(place: Place) -> Pairs:
    return copy_to_host(place, lambda event: event.synchronize(), early=place.wrong)


def other_stream_synchronized(place: Place) -> Pairs:
    side, current = place.device.Stream(), place.device.current_stream()
    return copy_to_host(place, lambda _: (side if place.wrong else current).synchronize())


def source_overwritten(place: Place) -> Pairs:
    device = place.device
    pinned, target = torch.zeros(4, pin_memory=True), torch.empty(4)
    pinned.fill_(5)
    target.copy_(pinned, non_blocking=True)
    if not place.wrong:
        device.current_stream().synchronize()
    pinned.fill_(9)
    return [(target, torch.full((4,), 5.0))]


def ring_of_buffers(place: Place) -> Pairs:
    """Two host buffers in turn; before one is filled again, its copy of two turns ago must be done."""
    device = place.device
    buffers = [torch.zeros(4, pin_memory=True) for _ in range(2)]
    events = [device.Event() for _ in range(2)]
    targets = [torch.empty(4) for _ in range(5)]
    for turn, target in enumerate(targets):
        slot = turn % 2
        if not place.wrong or turn < 3:  # wrong: only the first time round
            events[slot].synchronize()
        buffers[slot].fill_(turn)
        target.copy_(buffers[slot], non_blocking=True)
        events[slot].record()
    return [(target, torch.full((4,), float(turn))) for turn, target in enumerate(targets)]


def temporary(place: Place, rescue: Callable[[Tensor, Any], object]) -> Pairs:
    """Made on the current stream, used on another one, and dropped."""
    device = place.device
    side = device.Stream()
    temp, total = rows(2), torch.zeros(4)
    side.wait_stream(device.current_stream())
    with device.stream(side):
        total.add_(temp)
    rescue(temp, side)
    del temp
    next_one = rows(7)
    device.current_stream().wait_stream(side)
    return [(total, torch.full((4,), 2.0)), (next_one, torch.full((4,), 7.0))]


def temporary_dropped(place: Place) -> Pairs:
    return temporary(place, lambda temp, side: None if place.wrong else recorded(temp, side))


def temporary_of_the_wrong_stream(place: Place) -> Pairs:
    current = place.device.current_stream()
    return temporary(place, lambda temp, side: recorded(temp, current if place.wrong else side))


def temporary_waited_for(place: Place) -> Pairs:
    current = place.device.current_stream()
    return temporary(place, lambda _, side: None if place.wrong else current.wait_stream(side))


def made_for_another_stream(place: Place) -> Pairs:
    """Memory of one stream, first written by another, that must not come before what the first still does with it."""
    device = place.device
    side, fresh = device.Stream(), torch.empty(4)
    if not place.wrong:
        side.wait_stream(device.current_stream())
    with device.stream(side):
        fresh.fill_(1)
    device.current_stream().wait_stream(side)
    return [(fresh, torch.full((4,), 1.0))]


def kernel(place: Place) -> Pairs:
    """A kernel that is no torch operation, on a stream of its own."""
    device = place.device
    side, source, target = device.Stream(), rows(1), torch.zeros(4)
    if place.wrong:
        side.wait_stream(device.current_stream())
    source.mul_(4)
    if not place.wrong:
        side.wait_stream(device.current_stream())
    with device.stream(side):
        device.host_callback(lambda: target.add_(source), reads=[source], writes=[target])
    device.current_stream().wait_stream(side)
    return [(target, torch.full((4,), 4.0))]


def restore(place: Place, *, start: bool, done: bool) -> Pairs:
    """A page comes back from the host on a load stream, into rows that were read before and are read after."""
    device = place.device
    load, current = device.Stream(), device.current_stream()
    host = torch.zeros(2, pin_memory=True)
    host.fill_(8)
    pool = torch.zeros(4, 2)
    before = pool.index_select(0, torch.tensor([1, 2]))
    if start:
        load.wait_stream(current)
    with device.stream(load):
        pool[1].copy_(host, non_blocking=True)
        event = load.record_event()
    other = pool.index_select(0, torch.tensor([0, 3]))  # other rows need no wait
    if done:
        current.wait_event(event)
    after = pool.index_select(0, torch.tensor([1, 2]))
    current.wait_event(event)
    zeros = torch.zeros(2, 2)
    return [(before, zeros), (other, zeros), (after, torch.tensor([[8.0, 8.0], [0.0, 0.0]]))]


def restore_too_early(place: Place) -> Pairs:
    return restore(place, start=not place.wrong, done=True)


def restore_not_awaited(place: Place) -> Pairs:
    return restore(place, start=True, done=not place.wrong)


def shared_by_ranks(place: Place) -> Pairs:
    """Rank 0 writes what rank 1 reads, in memory of the hosts: they need to meet in between."""
    rank, shared = place.group.rank, place.device.pin(place.shared)
    place.group.minimum([0])
    if rank == 0:
        shared.fill_(6)
    if not place.wrong:
        place.group.minimum([0])
    found = torch.tensor(shared.tolist()) if rank == 1 else torch.full((4,), 6.0)
    place.group.minimum([0])
    return [(found, torch.full((4,), 6.0))]


def part_overwritten(place: Place) -> Pairs:
    """A rank's part of a collective is written by another stream, before or after the collective sent it."""
    device, rank = place.device, place.group.rank
    side, part, out = device.Stream(), rows(float(rank), 2), torch.zeros(4)
    if place.wrong:
        side.wait_stream(device.current_stream())
    place.group.all_gather(out, part)
    if not place.wrong:
        side.wait_stream(device.current_stream())
    with device.stream(side):
        part.fill_(9)
    device.current_stream().wait_stream(side)
    return [(out, torch.tensor([0.0, 0.0, 1.0, 1.0]))]


def index_overwritten(place: Place) -> Pairs:
    """An index that a gather on another stream still follows is changed in place."""
    device = place.device
    side, index, pool = device.Stream(), torch.arange(2), torch.arange(8).view(4, 2)
    side.wait_stream(device.current_stream())
    with device.stream(side):
        found = pool.index_select(0, index)
    if not place.wrong:
        device.current_stream().wait_stream(side)
    index.add_(2)
    device.current_stream().wait_stream(side)
    recorded(found, device.current_stream())
    return [(found, torch.arange(4).view(2, 2))]


HOST, MAIN, SIDE = "'rank 0 host'", "'rank 0 stream 0'", "'rank 0 stream 1'"
# program -> what its story says when it is wrong
COPIES: dict[str, tuple[Callable[[Place], Pairs], str]] = {
    "host reads a copy in flight": (read_on_host, f"read of {HOST} not ordered after write of {MAIN}"),
    "host waits for an event before the copy": (event_before_copy, f"read of {HOST} not ordered after write of {MAIN}"),
    "host waits for another stream": (
        other_stream_synchronized,
        f"read of {HOST} not ordered after write of {MAIN}",
    ),
    "host overwrites a source in flight": (source_overwritten, f"write of {HOST} not ordered after read of {MAIN}"),
    "host fills the buffer of a copy in flight": (ring_of_buffers, f"write of {HOST} not ordered after read of {MAIN}"),
    "temporary dropped": (temporary_dropped, f"memory of {MAIN} was given back while {SIDE} may still use it"),
    "temporary recorded on the wrong stream": (
        temporary_of_the_wrong_stream,
        f"memory of {MAIN} was given back while {SIDE} may still use it",
    ),
    "temporary not waited for": (
        temporary_waited_for,
        f"memory of {MAIN} was given back while {SIDE} may still use it",
    ),
    "new memory used on another stream": (
        made_for_another_stream,
        f"write of {SIDE} not ordered after write of {MAIN}",
    ),
    "kernel that does not wait": (kernel, f"read of {SIDE} not ordered after write of {MAIN}"),
    "restore into rows still read": (restore_too_early, f"write of {SIDE} not ordered after"),
    "restored rows read too early": (restore_not_awaited, f"read of {MAIN} not ordered after write of {SIDE}"),
    "memory shared by two hosts": (shared_by_ranks, "read of 'rank 1 host' not ordered after write of 'rank 0 host'"),
    "part of a collective overwritten": (part_overwritten, f"write of {SIDE} not ordered after read of {MAIN}"),
    "index of a gather overwritten": (index_overwritten, f"write of {MAIN} not ordered after read of {SIDE}"),
}


def copies(program: Callable[[Place], Pairs], *, wrong: bool) -> Callable[[SimDevice, LockstepGroup], Pairs]:
    """The program of one rank; all ranks share a tensor."""
    shared = torch.zeros(4)
    return lambda device, group: program(Place(device, SimGroup(device, group), shared, wrong))

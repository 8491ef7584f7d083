"""Devices whose events are late to say that their work is done, and later on some ranks.

So copies stay in flight for a few ops, and the ranks see their ends at different times: on a CPU, where work is done
when it is issued, and on a GPU, where the copies of small tests are done before anybody looks.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from harness.sim.late import polls_of
from kvshard_ref.device import DeviceModule, HostDevice, HostEvent


class LateEvent(HostEvent):
    """An event that answers "not yet" for its first polls, unless somebody waits for it."""

    def __init__(self, polls: int) -> None:
        self._polls = polls

    def synchronize(self) -> None:
        """Whoever waits sees the end."""
        self._polls = 0

    def query(self) -> bool:
        """Whether all work before the event is known to be done."""
        self._polls -= 1
        return self._polls < 0


class LateDevice(HostDevice):
    """Event n of rank r is late by a number of polls that both decide; repeatable."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._numbers = itertools.count()
        self._events: list[LateEvent] = []

    @property
    def Event(self) -> type[HostEvent]:  # type: ignore[override]  # noqa: N802  # torch.cuda's name; a factory here
        """A new event."""
        return self._event  # type: ignore[return-value]  # called like a class, with nothing

    def synchronize(self) -> None:
        """Whoever waits for all work sees the end of all events."""
        for event in self._events:
            event.synchronize()
        self._events.clear()

    def _event(self) -> LateEvent:
        event = LateEvent(polls_of(self._rank, next(self._numbers)))
        self._events.append(event)
        return event


class LateCudaEvent(torch.cuda.Event):
    """A real event that answers "not yet" for its first polls, whatever the GPU says, unless somebody waits for it."""

    late_polls = 0

    def synchronize(self) -> None:
        """Whoever waits sees the end."""
        self.late_polls = 0
        super().synchronize()

    def query(self) -> bool:
        """Whether all work before the event is known to be done."""
        self.late_polls -= 1
        return self.late_polls < 0 and bool(super().query())  # type: ignore[no-untyped-call]  # torch has no types here


class LateCuda:
    """torch.cuda with such events; everything else is its own."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers = itertools.count()
        self._events: list[LateCudaEvent] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def Event(self) -> LateCudaEvent:  # noqa: N802  # torch.cuda's name
        """A new event."""
        event = LateCudaEvent()  # type: ignore[no-untyped-call]  # torch has no types here
        event.late_polls = polls_of(self._rank, next(self._numbers))
        self._events.append(event)
        return event

    def synchronize(self) -> None:
        """Whoever waits for all work sees the end of all events."""
        for event in self._events:
            event.late_polls = 0
        self._events.clear()
        torch.cuda.synchronize()


def late_device(rank: int, device: str) -> DeviceModule:
    """The late module of a device."""
    module: DeviceModule = LateDevice(rank) if device == "cpu" else LateCuda(rank)
    return module

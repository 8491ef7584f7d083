"""A device whose work is done when it is issued, but whose events are late to say so, and later on some ranks.

So copies stay in flight for a few ops, and the ranks see their ends at different times, as on real devices.
"""

from __future__ import annotations

import itertools

from harness.sim.late import polls_of
from kvshard_ref.device import HostDevice, HostEvent


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

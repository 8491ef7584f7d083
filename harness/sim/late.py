"""Events that are late to say that their work is done, and later on some ranks.

Where work runs at once an event is true at its first look, and nothing is ever seen in flight; here it takes a few
looks, so that programs are seen with work in flight and ranks that learn of its end at different times.
"""

from __future__ import annotations

from typing import Any

from harness.sim.device import SimDevice, SimEvent

POLLS_MAX = 4


def polls_of(rank: int, number: int) -> int:
    """How often event `number` of a rank answers "not yet": fewer than POLLS_MAX times, otherwise on each rank."""
    return (number * 7 + rank * (1 + number % 3)) % POLLS_MAX


class LateSimEvent(SimEvent):
    """An event of a device that runs work at once, yet is late to say so: else no copy were ever seen in flight."""

    def __init__(self, device: SimDevice, polls: int) -> None:
        super().__init__(device)
        self._late = polls

    def synchronize(self) -> None:
        """Whoever waits sees the end."""
        self._late = 0
        super().synchronize()

    def query(self) -> bool:
        """Whether the host may know that all work before the event is done."""
        self._late -= 1
        return self._late < 0 and super().query()


class LateSimDevice:
    """A simulated device whose events are late; everything else is the device's own."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._events: list[LateSimEvent] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def Event(self) -> LateSimEvent:  # noqa: N802  # torch.cuda's name
        """A new event."""
        event = LateSimEvent(self._device, polls_of(self._device.rank, len(self._events)))
        self._events.append(event)
        return event

    def synchronize(self) -> None:
        """Whoever waits for all work sees the end of all events."""
        for event in self._events:
            event.synchronize()
        self._device.synchronize()

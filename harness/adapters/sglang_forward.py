"""The streams of sglang's scheduler: it prepares a batch on its own, and launches its forward on another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

FLYING_MAX = 2  # forwards that the scheduler launches before it looks at the result of the oldest


class Forwards(Protocol):
    """How the forwards of a rank are launched, and their results waited for."""

    stream: Any

    @property
    def launched(self) -> int:
        """Forwards so far."""
        ...

    def launch(self) -> Any:
        """A context in which the work of one forward is issued."""
        ...

    def land(self, number: int) -> None:
        """The host waits for the results of the first `number` forwards."""
        ...

    def drain(self) -> None:
        """The host waits for everything."""
        ...


class OneStream:
    """Everything is on the scheduler's stream, whose work is done when it is issued."""

    launched = 0

    def __init__(self, device: Any) -> None:
        self.stream = device.current_stream()

    @contextmanager
    def launch(self) -> Iterator[None]:
        """See Forwards."""
        yield

    def land(self, number: int) -> None:
        """Nothing is in flight."""

    def drain(self) -> None:
        """Nothing is in flight."""


class TwoStreams:
    """A forward waits for what the scheduler has prepared, and what the scheduler prepares next waits for it.

    The host goes on meanwhile: it waits for a forward when it looks at its result, or when two are in flight. So does
    the overlapping loop of a prefill worker, whose scheduler has no finer event of a prefill to wait for.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self.stream = device.Stream()
        self._flying: deque[Any] = deque()
        self.launched = 0

    @contextmanager
    def launch(self) -> Iterator[None]:
        """See Forwards."""
        self.land(self.launched + 1 - FLYING_MAX)
        schedule = self._device.current_stream()
        self.stream.wait_stream(schedule)
        with self._device.stream(self.stream):
            yield
        self._flying.append(self.stream.record_event())
        self.launched += 1
        schedule.wait_stream(self.stream)

    def land(self, number: int) -> None:
        """See Forwards."""
        while self.launched - len(self._flying) < number:
            self._flying.popleft().synchronize()

    def drain(self) -> None:
        """See Forwards."""
        self._flying.clear()
        self._device.synchronize()

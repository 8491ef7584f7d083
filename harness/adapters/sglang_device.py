"""A device for ranks on a CPU: work of the first stream runs at once, that of the others when somebody waits for it.

So a wait that is left out reads what was there before. Streams and events are those of `torch.cuda`; a simulated device
can take its place, but for `issue`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness.sim.late import polls_of

Work = Callable[[], None]


class LazyStream:
    """Work that is issued runs in order, at the latest when a wait needs it."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self._pending: deque[Work] = deque()
        self.issued = 0
        self.done = 0

    def issue(self, work: Work) -> None:
        """Put work at the end of the stream."""
        self._pending.append(work)
        self.issued += 1

    def run(self, until: int) -> None:
        """Run the first `until` works ever issued, as far as they have not run."""
        while self.done < until:
            self.done += 1
            self._pending.popleft()()

    def wait_event(self, event: LazyEvent) -> None:
        """What comes after on this stream needs what the event stands for."""
        event.synchronize()

    def wait_stream(self, stream: LazyStream) -> None:
        """What comes after on this stream needs all that is on the other one now."""
        stream.synchronize()

    def record_event(self, event: LazyEvent | None = None) -> LazyEvent:
        """The event, or a new one, recorded on this stream."""
        event = event or self._device.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Run all that is pending."""
        self.run(self.issued)

    def query(self) -> bool:
        """Whether nothing is pending."""
        return self.done == self.issued


class LazyEvent:
    """A point of a stream; before it is recorded it holds nobody back."""

    def __init__(self, device: LazyDevice, polls: int) -> None:
        self._device = device
        self._stream: LazyStream | None = None
        self._until = 0
        self._polls = polls

    def record(self, stream: LazyStream | None = None) -> None:
        """Stand for all that is on the stream, the current one by default, now."""
        self._stream = stream or self._device.current_stream()
        self._until = self._stream.issued

    def wait(self, stream: LazyStream | None = None) -> None:
        """What comes after on the stream needs what was recorded."""
        self.synchronize()

    def synchronize(self) -> None:
        """Run what was recorded."""
        if self._stream is not None:
            self._stream.run(self._until)

    def query(self) -> bool:
        """Whether it is done; after some looks that find it pending, on some ranks more than on others, it is."""
        if self._stream is None or self._stream.done >= self._until:
            return True
        self._polls -= 1
        if self._polls < 0:
            self.synchronize()
        return self._polls < 0

    def elapsed_time(self, end: LazyEvent) -> float:
        """Milliseconds from this event to `end`: none, for nothing is timed."""
        return 0.0


class LazyDevice:
    """The device of one rank, in the place of `torch.cuda`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers = itertools.count()
        self._default = self._current = self.Stream()

    def Stream(self, *_: object, **__: object) -> LazyStream:  # noqa: N802  # torch.cuda's name
        """A new stream; device and priority are taken and mean nothing."""
        return LazyStream(self)

    def Event(self, *_: object, **__: object) -> LazyEvent:  # noqa: N802  # torch.cuda's name
        """A new event; timing and blocking are taken and mean nothing."""
        return LazyEvent(self, polls_of(self._rank, next(self._numbers)))

    @contextmanager
    def stream(self, stream: LazyStream | None) -> Iterator[None]:
        """Work issued inside the context goes to the stream; None changes nothing."""
        before = self._current
        self._current = stream or before
        try:
            yield
        finally:
            self._current = before

    def current_stream(self, device: object = None) -> LazyStream:
        """The stream that work goes to now."""
        return self._current

    def issue(self, work: Work) -> None:
        """Copies, and rows of other ranks; what a rank computes itself runs without being issued."""
        self._current.issue(work)
        if self._current is self._default:
            self._current.synchronize()

"""A simulated device per rank: streams and events as `torch.cuda` has them, for tensors that are all on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor

from harness.lockstep import CollectiveMismatch, Lockstep
from harness.sim import access, hostreads
from harness.sim.access import Access, Operations
from harness.sim.clock import Clock, Clocks
from harness.sim.defer import Deferred, Shapes
from harness.sim.memory import mark_host, same_memory
from harness.sim.mode import Quiet, SimMode
from harness.sim.order import OrderCheck
from harness.sim.queue import Entry, Queue
from harness.sim.race import SimFinding, UnexpectedSync
from harness.sim.schedule import IN_ORDER, Schedule
from harness.sim.sites import Sites

T = TypeVar("T")
POLLS_MAX = 16
"""Looks at one event that find it pending, after which its work runs, so that a host that polls comes to an end."""


class Simulation:
    """The devices of all ranks, and the schedule that says what runs when.

    `schedule` None runs everything in issue order. `order` checks that all accesses are ordered by waits. With
    `expected_syncs` a host that waits for its device at a call site that matches none of these patterns (as in fnmatch)
    is an UnexpectedSync; `syncs` counts all such waits by call site. `pointers` are patterns of call sites that may
    take a tensor's address. `shapes` is what simulations of like programs can share to save time.
    """

    def __init__(
        self,
        ranks: int,
        schedule: Schedule | None = None,
        order: bool = False,  # noqa: FBT001, FBT002 - read best as Simulation(2, order=True), and given by position too
        expected_syncs: Collection[str] | None = None,
        *,
        pointers: Collection[str] = (),
        shapes: Shapes | None = None,
    ) -> None:
        self.syncs: Counter[str] = Counter()
        self.sites = Sites()
        self.shapes = shapes or Shapes()
        self.operations = Operations()
        self.host_memory = False  # whether any memory was marked as the host's
        self.pointers = tuple(pointers)
        self.clocks = Clocks() if order else None
        # pending work keeps tensors alive, so lifetimes are only true when nothing is ever pending
        self.order = None if self.clocks is None else OrderCheck(self.clocks, lifetimes=not schedule)
        self.quiet = Quiet()
        self.queue = Queue(schedule or IN_ORDER, self.quiet)
        self.finding: SimFinding | None = None
        self._expected = None if expected_syncs is None else tuple(expected_syncs)
        self.devices = [SimDevice(self, rank) for rank in range(ranks)]

    def finish(self) -> None:
        """Run all that is left; Deadlock when a collective lacks a peer. For a thread with no device active."""
        self.queue.finish()
        if self.order is not None:
            self.order.settle()

    def run(self, lockstep: Lockstep, program: Callable[[int], T]) -> list[T]:
        """`program(rank)` on every rank of `lockstep`, each with its device active, and then all that is left.

        A finding of the simulation is raised as itself, also where the lockstep sees that a rank is missing by it.
        """

        def job(rank: int, _: object) -> T:
            with self.devices[rank].active():
                try:
                    return program(rank)
                except SimFinding as finding:
                    self.finding = self.finding or finding
                    raise

        self.finding = None
        try:
            results = lockstep.run(job)
        except CollectiveMismatch as mismatch:
            if self.finding is not None:
                raise self.finding from mismatch
            raise
        self.finish()
        return results

    def host_waits(self, name: str, site: str) -> None:
        """Log that a host waits for its device; UnexpectedSync if it should not."""
        self.syncs[site] += 1
        if self._expected is not None and not any(fnmatchcase(site, pattern) for pattern in self._expected):
            raise UnexpectedSync(
                f"{name} at {site} makes the host wait for its device, expected only at {list(self._expected)}; take "
                "the wait out of the program, or expect it there"
            )

    def ran(self, name: str, site: str, clock: Clock | None, accesses: Sequence[Access]) -> None:
        """Tell the order check, if there is one."""
        if self.order is not None and clock is not None:
            self.order.ran(name, site, clock, accesses)


class SimStream:
    """A stream of one rank: what is issued on it runs in order, at a time of the schedule's choice."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.simulation = device.simulation
        self.lane = self.simulation.queue.lane(device.rank)
        clocks = self.simulation.clocks
        self.line = -1 if clocks is None else clocks.line(f"rank {device.rank} stream {self.lane.index}")
        self._polls = SimEvent(device)

    def wait_event(self, event: SimEvent) -> None:
        """What comes to this stream from now on waits for what was recorded."""
        self._after(event.entry, event.clock)

    def wait_stream(self, stream: SimStream) -> None:
        """What comes to this stream from now on waits for all that is on the other one now."""
        clocks = stream.simulation.clocks
        self._after(stream.lane.tail, None if clocks is None else clocks.now(stream.line, self.device.host))

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        """The event, or a new one, recorded on this stream."""
        event = event or SimEvent(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for all that is on the stream now."""
        self.device.wait("Stream.synchronize", self)

    def query(self) -> bool:
        """Whether all that is on the stream now is done."""
        if self._polls.entry is not self.lane.tail:
            self._polls.record(self)
        return self._polls.query()

    def _after(self, entry: Entry | None, clock: Clock | None) -> None:
        simulation = self.simulation
        if entry is not None and not entry.done:
            simulation.queue.wait(self.lane, entry, simulation.sites.here())
        if simulation.clocks is not None and clock is not None:
            simulation.clocks.join(self.line, clock, simulation.sites.here())


class SimEvent:
    """A point of a stream; before it is recorded it holds nobody back."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.entry: Entry | None = None
        self.clock: Clock | None = None
        self._polls = 0

    def record(self, stream: SimStream | None = None) -> None:
        """Stand for all that is on the stream (the current one by default) now."""
        stream = stream or self.device.current_stream()
        clocks = stream.simulation.clocks
        self.entry = stream.lane.tail
        self.clock = None if clocks is None else clocks.now(stream.line, self.device.host)
        self._polls = 0

    def wait(self, stream: SimStream | None = None) -> None:
        """What comes to the stream (the current one by default) from now on waits for this event."""
        (stream or self.device.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for this event."""
        self.device.wait("Event.synchronize", self)

    def query(self) -> bool:
        """Whether what was recorded is done; a look that finds it pending lets the schedule move on."""
        queue = self.device.simulation.queue
        if self.entry is not None and not self.entry.done:
            self._polls += 1
            queue.polled()
            if self._polls >= POLLS_MAX:
                queue.force(self.entry)
            if not self.entry.done:
                return False
        self.device.know(self.clock)
        return True


class SimDevice:
    """The device of one rank, in the place of `torch.cuda`. Its rank enters `active()` around its work.

    A tensor is in device memory unless it was given to `pin`, or came from `.cpu()` or `.to("cpu")`. Give `device` to
    the program as the torch device of its tensors: a move to it is a copy to the device, one to plain "cpu" a read by
    the host.
    """

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation = simulation
        self.rank = rank
        self.device = torch.device("cpu", 0)
        clocks = simulation.clocks
        self.host = -1 if clocks is None else clocks.line(f"rank {rank} host")
        self._streams: list[SimStream] = []
        self._current = self.Stream()
        self._default = self._current

    def Stream(self, *_: object, **__: object) -> SimStream:  # noqa: N802 - torch.cuda's name
        """A new stream; device and priority are taken and mean nothing."""
        stream = SimStream(self)
        self._streams.append(stream)
        return stream

    def Event(self, *_: object, **__: object) -> SimEvent:  # noqa: N802 - torch.cuda's name
        """A new event; timing and blocking are taken and mean nothing."""
        return SimEvent(self)

    @contextmanager
    def stream(self, stream: SimStream | None) -> Iterator[None]:
        """Work issued inside the context goes to the stream; None changes nothing."""
        before = self._current
        self._current = stream or before
        try:
            yield
        finally:
            self._current = before

    def current_stream(self) -> SimStream:
        """The stream that work goes to now."""
        return self._current

    def default_stream(self) -> SimStream:
        """Stream 0 of the rank."""
        return self._default

    def synchronize(self) -> None:
        """The host waits for all work of this rank."""
        self.wait("synchronize", *self._streams)

    @contextmanager
    def active(self) -> Iterator[None]:
        """All torch operations of this thread are work of this device, and its reads of values are seen."""
        with hostreads.watched(self), SimMode(self):
            yield

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor, whose memory is pinned host memory from now on.

        Raises ValueError when work on it is pending: it is made outside of `active()`, or by a factory with
        pin_memory=True.
        """
        simulation = self.simulation
        for entry in simulation.queue.entries():
            work = entry.work
            if isinstance(work, Deferred) and any(same_memory(tensor, used) for used in work.tensors()):
                raise ValueError(
                    f"pin of a tensor {tuple(tensor.shape)} on which {entry.name} of {entry.site} is pending, expected "
                    "one that no stream has touched; make it outside of active(), or with pin_memory=True"
                )
        if simulation.order is not None:
            simulation.order.forget(tensor.untyped_storage())
        simulation.host_memory = True
        return mark_host(tensor, pinned=True)

    def host_callback(
        self, function: Callable[[], Any], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """A Python function in stream order, for what is no torch operation; say what it reads and writes."""
        stream, simulation = self._current, self.simulation
        name, site = getattr(function, "__qualname__", repr(function)), simulation.sites.here()
        clock = self.issue(stream)
        accesses = [*map(access.read, reads), *map(access.write, writes)]

        def work() -> None:
            function()
            simulation.ran(name, site, clock, accesses)

        if simulation.queue.ready(stream.lane):
            with simulation.quiet:
                work()
        else:
            simulation.queue.put(stream.lane, name, site, work)

    # ---- for the other parts of the simulation

    def issue(self, stream: SimStream) -> Clock | None:
        """The clock of an operation that this rank puts on a stream; None without an order check."""
        clocks = self.simulation.clocks
        return None if clocks is None else clocks.issue(stream.line, self.host)

    def wait(self, name: str, *points: SimStream | SimEvent) -> None:
        """The host waits for streams as they are now, or for events."""
        simulation = self.simulation
        site = simulation.sites.here()
        simulation.host_waits(name, site)
        for point in points:
            if isinstance(point, SimStream):
                simulation.queue.force(point.lane.tail)
                if simulation.clocks is not None:
                    self.know(simulation.clocks.now(point.line), site)
            else:
                simulation.queue.force(point.entry)
                self.know(point.clock, site)

    def know(self, clock: Clock | None, site: str = "") -> None:
        """What the host does from now on is ordered after `clock`."""
        if self.simulation.clocks is not None and clock is not None:
            self.simulation.clocks.join(self.host, clock, site)

    def answered(self, name: str, accesses: Sequence[Access] = ()) -> None:
        """The host waits for values that the current stream computes; they are read there."""
        stream = self._current
        self.wait(name, stream)
        self.simulation.ran(name, self.simulation.sites.here(), self.issue(stream), accesses)
        if self.simulation.clocks is not None:
            self.know(self.simulation.clocks.now(stream.line))

    def host_access(self, name: str, accesses: Sequence[Access]) -> None:
        """The host itself touches host memory."""
        simulation = self.simulation
        if simulation.clocks is not None:
            simulation.ran(name, simulation.sites.here(), simulation.clocks.host_op(self.host), accesses)

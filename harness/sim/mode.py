"""SimMode: takes every torch operation of a rank, and runs it at once or leaves it to the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from harness.sim import defer
from harness.sim.clock import Clock
from harness.sim.defer import Deferred, Kind, Op
from harness.sim.memory import mark_host, places
from harness.sim.queue import failed

if TYPE_CHECKING:
    from harness.sim.device import SimDevice

COPIES = frozenset({"aten.copy_.default", "aten._to_copy.default"})


def _keys() -> Any:
    key = torch._C.DispatchKey  # noqa: SLF001 - torch has no public name for dispatch keys
    keys = torch._C.DispatchKeySet(key.Python)  # noqa: SLF001 - the same
    for name in ("PythonTLSSnapshot", "ADInplaceOrView", "AutogradCPU", "AutogradOther", "AutogradMeta", "AutocastCPU"):
        keys |= torch._C.DispatchKeySet(getattr(key, name))  # noqa: SLF001 - the same
    return keys


KEYS = _keys()


def plain() -> AbstractContextManager[object]:
    """Operations inside are no work of a device; what modes and autograd do at issue is not done again."""
    guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(KEYS)  # noqa: SLF001 - no public name
    return guard


class Quiet:
    """A context, one per simulation, in which the simulation works itself: what torch does inside is seen by nobody."""

    def __init__(self) -> None:
        self._guards: list[AbstractContextManager[object]] = []

    @property
    def entered(self) -> bool:
        """Whether the simulation is inside."""
        return bool(self._guards)

    def __enter__(self) -> None:
        guard = plain()
        guard.__enter__()
        self._guards.append(guard)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guards.pop().__exit__(kind, error, trace)


class SimMode(TorchDispatchMode):
    """The operations of the thread that entered it are work of one device."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.device = device
        self.simulation = device.simulation
        self.queue = device.simulation.queue
        self.shapes = device.simulation.shapes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What keeps torch's compiler out of this class costs more than all the rest, and nothing is compiled here."""
        return False

    def __enter__(self) -> Self:
        # torch's own also sets flags of the whole process, which threads that enter and leave by turns would not reset
        torch._C._push_on_torch_dispatch_stack(self)  # noqa: SLF001 - no public name
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch._C._pop_torch_dispatch_stack(None)  # noqa: SLF001 - no public name

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run or put one operation; see Kind for what happens to which."""
        kwargs = kwargs or {}
        op = self.shapes.ops.get(func) or self.shapes.op(func)
        kind = op.kind
        if kind is Kind.VIEW:
            return func(*args, **kwargs)
        if self.simulation.host_memory or kwargs.get("pin_memory"):
            return self._placed(op, args, kwargs)
        if kind is Kind.DATA:
            return self._data(op, args, kwargs)
        return self._special(op, args, kwargs)

    def _data(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = self.device
        stream = device._current  # noqa: SLF001 - a call per operation less
        if op.masks and defer.has_mask(args):
            if len(args) == 2:  # x[mask] has as many rows as the mask says
                return self._answer(op, args, kwargs)
            device.wait(op.name, stream)
        seed = defer.drawn(kwargs) if op.draws else None
        clock = device.issue(stream)
        if self.queue.ready(stream.lane):
            try:
                result = defer.call(op, args, kwargs, seed)
            except Exception as error:
                if not self.queue.pending:
                    raise
                self.shapes.recipes(op, args, kwargs)  # an error of shapes is the program's own, and raised as such
                raise failed(op.name, stream.lane, self.simulation.sites.here(), error) from error
            if clock is not None:
                self._ran(op, self.simulation.sites.here(), clock, args, kwargs, result)
            return result
        outs = defer.promised(self.shapes.recipes(op, args, kwargs), args, kwargs)
        site = self.simulation.sites.here()
        work = Deferred(op, args, kwargs, outs, seed)
        if clock is not None:
            work.ran = lambda done: self._ran(op, site, clock, done.args, done.kwargs, done.outs)
        self.queue.put(stream.lane, op.name, site, work)
        return outs

    def _special(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if op.kind is Kind.ANSWER:
            return self._answer(op, args, kwargs)
        if op.kind is Kind.RESHAPE:
            return self._reshape(op, args, kwargs)
        # new memory belongs to the current stream, so another stream must wait before it uses it
        result = op.func(*args, **kwargs)
        if op.kind is Kind.EMPTY:
            defer.poison(result)
        clock = self.device.issue(self.device.current_stream())
        if clock is not None:
            self._ran(op, self.simulation.sites.here(), clock, args, kwargs, result)
        return result

    def _answer(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The host waits for the stream, reads, and goes on."""
        device, simulation = self.device, self.simulation
        stream = device.current_stream()
        seed = defer.drawn(kwargs) if op.draws else None
        clock = device.issue(stream)
        self.queue.ready(stream.lane)  # it is an operation too, so the schedule counts it
        device.wait(op.name, stream)
        result = defer.call(op, args, kwargs, seed)
        if clock is not None:
            self._ran(op, simulation.sites.here(), clock, args, kwargs, result)
        return result

    def _reshape(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if self.queue.pending:
            with self.simulation.quiet:
                alias = torch.ops.aten.alias(tensor)
            for entry in self.queue.entries():
                if isinstance(entry.work, Deferred):
                    entry.work.replace(tensor, alias)
        return op.func(*args, **kwargs)

    def _placed(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The same where some memory is the host's: the host runs what is all its own; blocking copies make it wait."""
        pinned = bool(kwargs.pop("pin_memory", False))
        host, device = places(args, kwargs)
        target = kwargs.get("device")
        if pinned or (host and not device and (target is None or target.index is None)):
            return self._hosted(op, args, kwargs, pinned=pinned)
        result = self._data(op, args, kwargs) if op.kind is Kind.DATA else self._special(op, args, kwargs)
        if host and op.name in COPIES and not _non_blocking(op, args, kwargs):
            self.device.wait(op.name, self.device.current_stream())
        return result

    def _hosted(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any], *, pinned: bool) -> Any:
        """An operation of the host on its own memory runs now."""
        self.simulation.host_memory = True
        result = op.func(*args, **kwargs)
        if self.simulation.clocks is not None and op.kind is not Kind.RESHAPE:
            accesses = self.simulation.operations.accesses(op.func, args, kwargs, result)
            self.device.host_access(op.name, accesses)
        given = list(defer.tensors_in([*args, *kwargs.values()]))
        for tensor in defer.tensors_in(result):
            if not any(tensor is other for other in given):
                mark_host(tensor, pinned=pinned)
        return result

    def _ran(
        self, op: Op, site: str, clock: Clock, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        accesses = self.simulation.operations.accesses(op.func, args, kwargs, result)
        self.simulation.ran(op.name, site, clock, accesses)


def _non_blocking(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if op.name == "aten.copy_.default" and len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("non_blocking", False))

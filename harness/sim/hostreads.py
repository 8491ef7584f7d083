"""Reads by the host that no dispatch mode sees: methods of torch.Tensor, replaced while a device is active.

What goes past this: a numpy array or an address that was taken earlier, and `tensor.data = other`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from harness.sim import access
from harness.sim.memory import is_host, is_pinned, mark_host
from harness.sim.race import UnknownOp

if TYPE_CHECKING:
    from harness.sim.device import SimDevice

NAME = "_kvshard_patch"
LOCK = threading.Lock()


class Patch(NamedTuple):
    """What is in place while any thread has a device active: the devices by thread, and the methods before."""

    devices: dict[int, SimDevice]
    before: dict[str, Any]


class Call(NamedTuple):
    """A call of a method of a tensor by a thread whose device is active."""

    device: SimDevice
    name: str
    original: Callable[..., Any]
    tensor: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def watched(device: SimDevice) -> Iterator[None]:
    """Reads by this thread are reads by the device's host."""
    thread = threading.get_ident()
    with LOCK:
        patch = _patch() or _install()
        if thread in patch.devices:
            raise RuntimeError(
                f"device of rank {device.rank}: active() in a thread where the device of rank "
                f"{patch.devices[thread].rank} is active; leave that first"
            )
        patch.devices[thread] = device
    try:
        yield
    finally:
        with LOCK:
            del patch.devices[thread]
            if not patch.devices:
                _restore(patch)


def _patch() -> Patch | None:
    patch: Patch | None = torch.Tensor.__dict__.get(NAME)
    return patch


def _install() -> Patch:
    patch = Patch({}, {})
    reads = ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__", "__reduce_ex__")
    functions: dict[str, Callable[[Call], Any]] = dict.fromkeys(reads, _read)
    functions |= {"cpu": _cpu, "to": _to, "data_ptr": _data_ptr}
    functions |= {"record_stream": _record_stream, "pin_memory": _pin_memory, "is_pinned": _is_pinned}
    for name, function in functions.items():
        patch.before[name] = torch.Tensor.__dict__.get(name)
        setattr(torch.Tensor, name, _method(patch.devices, name, function))
    setattr(torch.Tensor, NAME, patch)
    return patch


def _method(devices: dict[int, SimDevice], name: str, function: Callable[[Call], Any]) -> Callable[..., Any]:
    original = getattr(torch.Tensor, name)

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = devices.get(threading.get_ident())
        if device is None or device.simulation.quiet.entered:
            return original(self, *args, **kwargs)
        return function(Call(device, name, original, self, args, kwargs))

    return method


def _restore(patch: Patch) -> None:
    for name, before in patch.before.items():
        if before is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, before)
    delattr(torch.Tensor, NAME)


def _read(call: Call) -> Any:
    _seen(call)
    with call.device.simulation.quiet:  # what torch itself calls inside was seen already
        return call.original(call.tensor, *call.args, **call.kwargs)


def _seen(call: Call) -> None:
    """The host reads all values of the tensor."""
    accesses = [access.read(call.tensor)] if call.tensor.numel() else []
    if is_host(call.tensor):
        call.device.host_access(f"Tensor.{call.name}", accesses)
    else:
        call.device.answered(f"Tensor.{call.name}", accesses)


def _cpu(call: Call) -> Tensor:
    return _fetch(call, pinned=False)


def _to(call: Call) -> Any:
    """`.to("cpu")` by that name is a read by the host; a torch.device without an index is where all tensors are."""
    target = call.kwargs.get("device", call.args[0] if call.args else None)
    if not isinstance(target, str) or target != "cpu":
        return call.original(call.tensor, *call.args, **call.kwargs)
    kwargs = dict(call.kwargs)
    moved = _fetch(call, pinned=bool(kwargs.pop("non_blocking", False)))
    return call.original(moved, *call.args, **kwargs)


def _fetch(call: Call, *, pinned: bool) -> Tensor:
    """The host's copy of a tensor; the host waits for it, unless it is pinned, as a copy without a wait makes it."""
    if is_host(call.tensor):
        return call.tensor
    call.device.simulation.host_memory = True
    with call.device.simulation.quiet:
        copy = torch.empty_like(call.tensor, device="cpu", requires_grad=False)
    mark_host(copy, pinned=pinned)
    return copy.copy_(call.tensor, non_blocking=pinned)


def _data_ptr(call: Call) -> int:
    simulation = call.device.simulation
    if simulation.queue.pending:
        site = simulation.sites.here()
        if not any(fnmatchcase(site, pattern) for pattern in simulation.pointers):
            raise UnknownOp(
                f"Tensor.data_ptr at {site}: what is read or written at an address cannot be seen, and work is "
                "pending. Use the tensor, or run the access as a host_callback, or allow this call site with "
                "Simulation(pointers=[...])"
            )
    return int(call.original(call.tensor))


def _record_stream(call: Call) -> None:
    if call.device.simulation.order is not None:
        call.device.simulation.order.record_stream(call.tensor, call.args[0].line)


def _pin_memory(call: Call) -> Tensor:
    if is_pinned(call.tensor):
        return call.tensor
    _seen(call)
    call.device.simulation.host_memory = True
    with call.device.simulation.quiet:
        return mark_host(call.tensor.clone(), pinned=True)


def _is_pinned(call: Call) -> bool:
    return is_pinned(call.tensor)

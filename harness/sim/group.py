"""SimGroup: the collectives of a shard group as work of the streams they are issued on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.lockstep import LockstepGroup, LockstepMisuseError
from harness.ring import Post
from harness.sim import access
from harness.sim.clock import Clock
from harness.sim.device import SimDevice, SimStream
from harness.sim.memory import same_memory
from harness.sim.queue import Meeting


class Part(NamedTuple):
    """What one rank brings to an all_gather."""

    device: SimDevice
    stream: SimStream
    site: str
    out: Tensor
    part: Tensor


class SimGroup:
    """One rank's end of a shard group whose ranks are threads of a lockstep and have simulated devices.

    An all_gather is put on the rank's current stream; it runs once, when it is at the head of that stream on every
    rank. That ranks meet when they issue it orders nothing. Two collectives on different streams are not ordered, as
    with a communicator for each.
    """

    def __init__(self, device: SimDevice, group: LockstepGroup) -> None:
        self.device = device
        self.rank = group.rank
        self.size = group.size
        self.log = group.log
        self._group = group

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Put each rank's part [n, ...] into out [size * n, ...], by rank; `part` may be out's own block.

        Both are contiguous. Raises LockstepMisuseError for shapes, dtypes or an overlap that do not fit.
        """
        self.log.append(f"all_gather {_shape(out)}")
        wrong = _unfit(self.rank, self.size, out, part)
        if wrong:
            raise LockstepMisuseError(
                f"all_gather on rank {self.rank} of {self.size}: out {_shape(out)}, part {_shape(part)}: {wrong}"
            )
        sites = self.device.simulation.sites
        payload = Part(self.device, self.device.current_stream(), sites.here(), out, part)
        signature = ("out", out.dtype, tuple(out.shape), "part", part.dtype, tuple(part.shape))
        self._meet("all_gather", signature, payload, _all_gather)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The elementwise minimum over the ranks; their hosts wait for each other, and for no stream."""
        self.log.append(f"minimum int64[{len(values)}]")
        return list(self._meet("minimum", ("values", len(values)), (self.device, list(values)), _minimum))

    def _meet(
        self, kind: str, signature: tuple[object, ...], payload: Any, complete: Callable[[list[Any]], Any]
    ) -> Any:
        # by the ring itself, which takes the program's call site; LockstepGroup.meet would name this file
        file, line, _ = self.device.simulation.sites.place()
        return self._group._ring.meet(self.rank, Post(kind, signature, payload, complete, (file, line)))  # noqa: SLF001 - see above


def _all_gather(parts: list[Part]) -> None:
    simulation = parts[0].device.simulation
    clocks: list[Clock | None] = [None] * len(parts)
    if simulation.clocks is not None:
        clocks = list(
            simulation.clocks.meet([part.stream.line for part in parts], [part.device.host for part in parts])
        )

    def work() -> None:
        gathered = torch.cat([part.part for part in parts])
        for part, clock in zip(parts, clocks, strict=True):
            part.out.copy_(gathered)
            simulation.ran("all_gather", part.site, clock, [access.read(part.part), access.write(part.out)])

    if simulation.queue.ready(*(part.stream.lane for part in parts)):
        with simulation.quiet:
            work()
    else:
        meeting = Meeting("all_gather", len(parts), work)
        for part in parts:
            simulation.queue.join(meeting, part.stream.lane, part.site)


def _minimum(payloads: list[tuple[SimDevice, list[int]]]) -> list[int]:
    clocks = payloads[0][0].simulation.clocks
    if clocks is not None:
        before = [clocks.now(device.host) for device, _ in payloads]
        for device, _ in payloads:
            for clock in before:
                device.know(clock)
    return [min(values) for values in zip(*(values for _, values in payloads), strict=True)]


def _unfit(rank: int, size: int, out: Tensor, part: Tensor) -> str | None:
    if not part.dim() or out.shape != (size * part.shape[0], *part.shape[1:]) or out.dtype != part.dtype:
        return f"out must have the dtype and width of a part [n, ...] and {size}*n rows"
    if not (out.is_contiguous() and part.is_contiguous()):
        return f"strides {out.stride()} and {part.stride()}: both must be contiguous, call .contiguous() first"
    if not part.numel() or not same_memory(out, part):
        return None
    start, length = part.storage_offset() - out.storage_offset(), part.numel()
    if start == rank * length or start <= -length or start >= size * length:
        return None
    return f"part overlaps out from element {start}; only this rank's own block, at {rank * length}, may be shared"


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"

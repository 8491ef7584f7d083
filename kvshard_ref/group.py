"""Group: what the ranks of a shard group say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from kvshard_ref.errors import GeometryError

# torch 2.13 gave it a new name and deprecates the old one
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Group(Protocol):
    """Collectives over `size` ranks; every rank must make the same calls with the same shapes, in the same order.

    `log` holds one entry per collective, such as "all_gather int64[8,2]"; the owner of the group clears it.
    """

    rank: int
    size: int
    log: list[str]

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Put each rank's part [n, ...] into out [size * n, ...], by rank; `part` may be out's own block."""

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum over the ranks; waits for the answer."""


class SoloGroup:
    """A group of one rank."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.log: list[str] = []

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Copy part [n, ...] to out [n, ...]."""
        self.log.append(checked_gather(out, part, self.size))
        out.copy_(part)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The values themselves."""
        self.log.append(f"minimum int64[{len(values)}]")
        return [int(value) for value in values]


class TorchGroup:
    """A group over `torch.distributed`: Gloo between processes on CPUs, NCCL between GPUs.

    A collective is issued on the current stream of the device. `device` is where `minimum` exchanges its values.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.log: list[str] = []
        self._process_group = process_group
        self._device = torch.device(device)
        self._in_place = dist.get_backend(process_group) == "nccl"

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """See Group; any dtype, because bytes are sent."""
        self.log.append(checked_gather(out, part, self.size))
        if not self._in_place:
            part = part.clone()  # only NCCL promises that a part may be a block of the output
        _all_gather(out.view(torch.uint8), part.view(torch.uint8), group=self._process_group)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """See Group."""
        self.log.append(f"minimum int64[{len(values)}]")
        lowest = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self._process_group)
        return [int(value) for value in lowest.tolist()]


def checked_gather(out: torch.Tensor, part: torch.Tensor, size: int) -> str:
    """The log entry: dtype and shape of the result. Raises GeometryError unless `size` parts fill `out`."""
    given, whole = (f"{rows.dtype}[{','.join(map(str, rows.shape))}]".removeprefix("torch.") for rows in (part, out))
    if out.shape[0] != size * part.shape[0] or out.shape[1:] != part.shape[1:] or out.dtype != part.dtype:
        raise GeometryError(
            f"all_gather of {size} parts {given} into {whole}: expected {size} times its rows, of its width and dtype"
        )
    return f"all_gather {whole}"

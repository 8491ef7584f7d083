"""The shard group of ranks in one process, as sglang's pools see it: a group, and a communicator for the gathers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harness.adapters.sglang_device import LazyDevice
from harness.lockstep import LockstepGroup


class Gathering(Protocol):
    """What a communicator needs of a group; `harness.sim.group.SimGroup` is one too."""

    rank: int
    size: int
    log: list[str]

    def all_gather(self, out: Tensor, part: Tensor) -> None: ...
    def minimum(self, values: Sequence[int]) -> list[int]: ...


class LazyGroup:
    """The shard group of ranks with lazy devices: rows of other ranks arrive when the ready event is waited for."""

    def __init__(self, device: LazyDevice, group: LockstepGroup) -> None:
        self.rank = group.rank
        self.size = group.size
        self.log = group.log
        self._device = device
        self._group = group

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Copy each rank's part [n, ...] into rows [r*n, (r+1)*n) of `out`; the ranks meet now, the rows come later."""
        shape = f"{str(out.dtype).removeprefix('torch.')}[{','.join(map(str, out.shape))}]"
        self.log.append(f"all_gather {shape}")
        if out.shape != (self.size * part.shape[0], *part.shape[1:]):
            raise ValueError(f"all_gather of {self.size} parts {tuple(part.shape)} into {tuple(out.shape)}")
        signature = ("out", out.dtype, tuple(out.shape))
        gathered = self._group.meet("all_gather", signature, part, _joined)

        def arrive() -> None:
            out.copy_(gathered)

        self._device.issue(arrive)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The elementwise minimum over the ranks; their hosts wait for each other."""
        return self._group.minimum(values)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


class Communicator:
    """In the place of sglang's `PyNcclCommunicator`. `group` is what the pool was given as `shard_group.cpu_group`."""

    def __init__(self, group: Gathering, device: object, cta_policy: object = None) -> None:
        self._group = group

    @contextmanager
    def change_state(self, *, enable: bool) -> Iterator[None]:
        """It is always on."""
        yield

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """See the group."""
        self._group.all_gather(out, part)


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """In the place of sglang's `GroupCoordinator`, as far as a pool looks at it."""

    cpu_group: Gathering
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.cpu_group.size

    @property
    def rank_in_group(self) -> int:
        """This rank."""
        return self.cpu_group.rank

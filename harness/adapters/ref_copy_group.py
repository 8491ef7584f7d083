"""CopyGroup: ranks on the GPUs of one host gather by copies between GPUs, which occupy no multiprocessor."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from kvshard_ref.errors import GeometryError
from kvshard_ref.group import TorchGroup, checked_gather


class CopyGroup(TorchGroup):
    """A TorchGroup whose `all_gather` goes through staging that all ranks can read.

        part --> own staging, all ranks meet, peers' staging --> out

    There are two staging halves, used in turn: when a half is written again, every rank has been at the meeting after
    the one behind which it read that half. So calls must follow each other on one stream.
    Meant for prefixes: a collective kernel takes multiprocessors away from the layer that it should run beside.
    """

    def __init__(self, bytes_max: int, device: torch.device | str) -> None:
        """Over all ranks, `bytes_max` for the largest part; every rank makes its own at the same time."""
        super().__init__(device=device)
        self._bytes_max = bytes_max
        staging = symm_mem.empty((2, bytes_max), dtype=torch.uint8, device=torch.device(device))
        world = dist.group.WORLD
        if world is None:
            raise GeometryError(
                "CopyGroup: no process group, expected all ranks in one; call init_process_group before"
            )
        self._handle = symm_mem.rendezvous(staging, world)
        shape = (2, bytes_max)
        self._staging = [self._handle.get_buffer(rank, shape, torch.uint8) for rank in range(self.size)]
        self._half = 0

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """See Group. Raises GeometryError for a part that is larger than the staging."""
        self.log.append(checked_gather(out, part, self.size))
        if part.nbytes > self._bytes_max:
            raise GeometryError(f"all_gather of a part of {part.nbytes} bytes, expected at most {self._bytes_max}")
        self._half = 1 - self._half
        staged = [staging[self._half, : part.nbytes] for staging in self._staging]
        blocks = out.view(torch.uint8).view(self.size, -1)
        mine = part.view(torch.uint8).view(-1)
        staged[self.rank].copy_(mine)
        self._handle.barrier(channel=0)
        for step in range(1, self.size):  # every rank begins at another peer
            peer = (self.rank + step) % self.size
            blocks[peer].copy_(staged[peer], non_blocking=True)
        if blocks[self.rank].data_ptr() != mine.data_ptr():
            blocks[self.rank].copy_(mine)

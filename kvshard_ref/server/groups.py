"""The groups that a rank is in.

Rank numbers of a worker with 2 context and 2 tensor parallel ranks::

    context 0   0 1     tensor parallel groups are the rows: each computes the same tokens together
    context 1   2 3     context parallel groups are the columns: each holds one copy of the cache between its ranks

Without context parallelism it is the tensor parallel group that holds the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it in __all__

from kvshard_ref.group import Group, SoloGroup, TorchGroup
from kvshard_ref.server.frames import Message
from kvshard_ref.server.settings import Settings


class JointGroup:
    """Rows go round one group; decisions are taken by a larger one, so that all copies of the cache stay alike."""

    def __init__(self, rows: Group, decisions: Group) -> None:
        self.rank, self.size, self.log = rows.rank, rows.size, rows.log
        self._rows, self._decisions = rows, decisions

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """See Group."""
        self._rows.all_gather(out, part)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """See Group; over all ranks of the worker."""
        return self._decisions.minimum(values)


@dataclass(frozen=True, slots=True)
class Groups:
    """Of one rank."""

    cache: Group
    """Computes chunks together and holds one copy of a sharded cache."""
    tensor: Group
    """Computes layers together."""
    control: Any = None
    """A process group of all ranks on the CPU, for orders; None for one rank."""


def device_of(settings: Settings, number: int) -> torch.device:
    """Of a rank. Where there are fewer GPUs than ranks they take turns, if NCCL_MULTI_RANK_GPU_ENABLE=1 lets NCCL."""
    if settings.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", number % torch.cuda.device_count())


def joined(settings: Settings, number: int, tell: Callable[[Message], None], heard: Callable[[], Message]) -> Groups:
    """Joins the other ranks. Rank 0 holds the rendezvous: it tells the port, the others hear it."""
    if settings.ranks == 1:
        return Groups(SoloGroup(), SoloGroup())
    if number == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        tell({"kind": "store", "port": store.port})
    else:
        store = TCPStore("127.0.0.1", heard()["port"], is_master=False)
    gpu = settings.device == "cuda"
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=number, world_size=settings.ranks)
    control = dist.new_group(backend="gloo")
    device = device_of(settings, number)
    world = TorchGroup(device=device)
    tp, cp = settings.tp_size, settings.attn_cp_size
    tensor = _own([[first * tp + at for at in range(tp)] for first in range(cp)], number, device)
    context = _own([[first + at * tp for at in range(cp)] for first in range(tp)], number, device)
    world.minimum([number])  # every pair is connected before the first request
    if cp == 1:
        return Groups(tensor, tensor, control)
    return Groups(JointGroup(context, world), tensor, control)


def _own(partition: Sequence[Sequence[int]], number: int, device: torch.device) -> Group:
    """The part that this rank is in; every rank makes all parts, in the same order."""
    own: Group = SoloGroup()
    for ranks in partition:
        if len(ranks) > 1:
            made = dist.new_group(list(ranks))
            if number in ranks:
                own = TorchGroup(made, device)
                own.minimum([number])
    return own

"""Runner: one model of a worker on one rank, the target or its MTP draft: its rows, its scratch, its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvshard_ref.device import DeviceModule
from kvshard_ref.gather import PrefixGather
from kvshard_ref.group import Group
from kvshard_ref.pool import ShardPool
from kvshard_ref.request import Extent
from kvshard_ref.spec import WorkerSpec
from kvshard_ref.split import restore, share


class Compute(Protocol):
    """What a model does with one batch on one rank. The runner calls `fresh`, then `read`, layer by layer."""

    def fresh(self, layer: int) -> dict[str, torch.Tensor]:
        """Per component the rows [padded, width] of this rank's share of the chunk (see split)."""

    def read(self, layer: int, rows: dict[str, torch.Tensor]) -> None:
        """Per component what attention reads: the rows of [0, end) of every request, one after the other."""

    def reads(self) -> list[dict[str, torch.Tensor]]:
        """Per request what it tells of its reads, after the last layer."""


class Runner:
    """The ranks compute a chunk together over `group` and gather its prefix over `gather_group`."""

    def __init__(
        self, pool: ShardPool, group: Group, gather_group: Group, spec: WorkerSpec, device_module: DeviceModule
    ) -> None:
        self.pool = pool
        self.group = group
        self.split = spec.split
        self.gather = PrefixGather(pool, gather_group, spec.scratch, spec.padding, device_module)
        self._offsets = np.arange(pool.placement.page_size)

    def forward(self, extents: Sequence[Extent], compute: Compute, loads: Sequence[Any] = ()) -> None:
        """Per layer: stage the batch's chunk, persist the owned rows, read. Index tensors are made once, before.

        `loads`: one event per layer when pages of a prefix are still being restored.
        """
        locs = [self._locs([*e.prefix_pages, *e.chunk_pages], e.end) for e in extents]
        chunk_locs = np.concatenate([part[e.start :] for part, e in zip(locs, extents, strict=True)])
        owned = self.pool.owned(chunk_locs)
        self.gather.begin([e.prefix_pages for e in extents], [e.chunk_pages for e in extents], loads)
        # [0, read tokens) of all requests, then [read tokens, + chunk tokens)
        every = torch.from_numpy(np.concatenate([*locs, chunk_locs])).to(self.pool.device)
        scratch_rows = self.gather.translate(every)
        read_rows, chunk_rows = scratch_rows[: -len(chunk_locs)], scratch_rows[-len(chunk_locs) :]
        for layer in range(self.pool.layers):
            exchanged = {name: self.exchange(part, len(chunk_rows)) for name, part in compute.fresh(layer).items()}
            for name, fresh in exchanged.items():
                self.gather.stage(layer, name, chunk_rows, fresh)
                self.pool.write(layer, name, owned, fresh)
            compute.read(layer, {c.name: self.gather.read(layer, c.name, read_rows) for c in self.pool.components})
        self.gather.end()

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., count, width] of a batch's chunk to this rank's share [..., padded, width]."""
        return share(rows, self.group.rank, self.group.size, self.split)

    def exchange(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """All ranks' shares [padded, width] as the chunk's rows [count, width]."""
        if self.group.size == 1 or self.split == "whole":
            return part[:count]
        gathered = part.new_empty(self.group.size * part.shape[0], part.shape[1])
        self.group.all_gather(gathered, part)
        return restore(gathered, count, self.group.size, self.split)

    def _locs(self, pages: Sequence[int], count: int) -> npt.NDArray[Any]:
        """Locations of the first `count` tokens on these pages."""
        firsts = np.asarray(pages, np.int64)[:, None] * self.pool.placement.page_size
        locs: npt.NDArray[Any] = firsts + self._offsets
        return locs.reshape(-1)[:count]

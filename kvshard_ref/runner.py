"""Runner: one model of a worker on one rank, the target or its MTP draft: its rows, its scratch, its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class Runner:
    """The ranks compute a chunk together over `group` and gather its prefix over `gather_group`."""

    def __init__(
        self, pool: ShardPool, group: Group, gather_group: Group, spec: WorkerSpec, device_module: DeviceModule
    ) -> None:
        self.pool = pool
        self.group = group
        self.gather = PrefixGather(pool, gather_group, spec.scratch, spec.padding, device_module)
        self._offsets = np.arange(pool.placement.page_size)

    def forward(
        self, extents: Sequence[Extent], rows: Sequence[dict[str, torch.Tensor]], loads: Sequence[Any] = ()
    ) -> list[dict[str, torch.Tensor]]:
        """Per layer: stage the batch's chunk, persist the owned rows, read. Index tensors are made once, before.

        `rows` per request as in Chunk; `loads` one event per layer when pages of a prefix are still being restored.
        Returns per request and component the rows [layers, end, width] that attention reads.
        """
        locs = [self._locs([*e.prefix_pages, *e.chunk_pages], e.end) for e in extents]
        chunk_locs = np.concatenate([part[e.start :] for part, e in zip(locs, extents, strict=True)])
        owned = self.pool.owned(chunk_locs)
        self.gather.begin([e.prefix_pages for e in extents], [e.chunk_pages for e in extents], loads)
        # [0, read tokens) of all requests, then [read tokens, + chunk tokens)
        every = torch.from_numpy(np.concatenate([*locs, chunk_locs])).to(self.pool.device)
        scratch_rows = self.gather.translate(every)
        read_rows, chunk_rows = scratch_rows[: -len(chunk_locs)], scratch_rows[-len(chunk_locs) :]
        shares = {c.name: self._share([each[c.name] for each in rows]) for c in self.pool.components}
        reads = {
            c.name: torch.empty(self.pool.layers, len(read_rows), c.width, dtype=c.dtype, device=self.pool.device)
            for c in self.pool.components
        }
        for layer in range(self.pool.layers):
            exchanged = {name: self._exchange(part[layer], len(chunk_rows)) for name, part in shares.items()}
            for name, fresh in exchanged.items():
                self.gather.stage(layer, name, chunk_rows, fresh)
                self.pool.write(layer, name, owned, fresh)
            for name, out in reads.items():
                self.gather.read(layer, name, read_rows, out=out[layer])
        self.gather.end()
        # request i reads [ends[i-1], ends[i]) of the batch
        split = {name: read.split([e.end for e in extents], dim=1) for name, read in reads.items()}
        return [{name: parts[index] for name, parts in split.items()} for index in range(len(extents))]

    def _locs(self, pages: Sequence[int], count: int) -> npt.NDArray[Any]:
        """Locations of the first `count` tokens on these pages."""
        firsts = np.asarray(pages, np.int64)[:, None] * self.pool.placement.page_size
        locs: npt.NDArray[Any] = firsts + self._offsets
        return locs.reshape(-1)[:count]

    def _share(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's share [layers, padded, width] of the batch's chunk."""
        batch = rows[0] if len(rows) == 1 else torch.cat(list(rows), dim=1)
        return share(batch, self.group.rank, self.group.size).to(self.pool.device)

    def _exchange(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """All ranks' parts [padded, width] of one layer as the chunk's rows [count, width]."""
        if self.group.size == 1:
            return part
        gathered = part.new_empty(self.group.size * part.shape[0], part.shape[1])
        self.group.all_gather(gathered, part)
        return restore(gathered, count, self.group.size)

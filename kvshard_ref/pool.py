"""ShardPool: the rows that one rank stores, for every layer and component."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvshard_ref.checks import at_least
from kvshard_ref.components import Component, raw, total_row_bytes
from kvshard_ref.errors import ForeignPageError, GeometryError
from kvshard_ref.placement import Placement
from kvshard_ref.rows import RowBuffer


class OwnedRows(NamedTuple):
    """The locations of a list that one rank owns, in the list's order."""

    positions: torch.Tensor
    """int64 [owned]: places in the list."""
    rows: torch.Tensor
    """int64 [owned]: local rows."""


class ShardPool:
    """Per component and layer one RowBuffer on `device`.

    Local rows of a rank, the same for all its buffers::

        [0, ps)                     reserved page: pad source, target of padded writes
        [ps, (pages_per_rank+1)*ps) pages 1..pages_per_rank

    Nothing here waits for the device.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        pages_per_rank: int,
        layers: int,
        components: Sequence[Component],
        device: torch.device | str = "cpu",
    ) -> None:
        at_least(1, "ShardPool", pages_per_rank=pages_per_rank, layers=layers)
        if not 0 <= rank < placement.shards:
            raise GeometryError(f"ShardPool: rank is {rank}, expected 0 <= rank < {placement.shards}")
        names = [component.name for component in components]
        if not names or len(set(names)) != len(names):
            raise GeometryError(f"ShardPool: components {names}, expected at least one, each with its own name")
        self.rank = rank
        self.placement = placement
        self.pages_per_rank = pages_per_rank
        self.layers = layers
        self.components = tuple(components)
        self.device = torch.device(device)
        self.rows = (pages_per_rank + 1) * placement.page_size
        self.written_rows = 0
        self._buffers = {
            c.name: [RowBuffer(c, pages_per_rank + 1, placement.page_size, self.device) for _ in range(layers)]
            for c in components
        }

    @staticmethod
    def planned_bytes(placement: Placement, pages_per_rank: int, layers: int, components: Sequence[Component]) -> int:
        """Bytes that one rank will allocate for this shape."""
        return (pages_per_rank + 1) * placement.page_size * layers * total_row_bytes(components)

    @property
    def bytes(self) -> int:
        """Bytes allocated on this rank."""
        return sum(buffer.pages.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def rows_of(self, layer: int, component: str) -> RowBuffer:
        """The rows of one component in one layer."""
        return self._buffers[component][layer]

    def pages(self, layer: int, component: str) -> torch.Tensor:
        """Tensor [pages_per_rank + 1, page elements] of one layer, by local page: the memory as it lies."""
        return self._buffers[component][layer].pages

    def owned(self, locs: npt.NDArray[Any]) -> OwnedRows:
        """The owner filter: host locations [n] in, this rank's part of them out, on the pool's device.

        Raises ForeignPageError for a location outside the pool.
        """
        limit = self.placement.shards * self.rows
        if locs.size and not 0 <= locs.min() <= locs.max() < limit:
            raise ForeignPageError(
                f"pool: write to {locs.min()}..{locs.max()}, expected 0 <= loc < {limit}; use pages of this pool"
            )
        positions = np.flatnonzero(self.placement.owner(locs) == self.rank)
        rows = self.placement.local_row(locs[positions])
        return OwnedRows(torch.from_numpy(positions).to(self.device), torch.from_numpy(rows).to(self.device))

    def write(self, layer: int, component: str, owned: OwnedRows, rows: torch.Tensor) -> int:
        """Persist the owned ones of `rows` [n, width]; other ranks' rows are left alone. Returns rows written."""
        count = owned.positions.shape[0]
        if count:
            self._buffers[component][layer].put(owned.rows, raw(rows).index_select(0, owned.positions))
        self.written_rows += count
        return count

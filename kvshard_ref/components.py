"""Component: one kind of state that every token has a row of, in every layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvshard_ref.errors import GeometryError


@dataclass(frozen=True, slots=True)
class Component:
    """One row of `width` elements per token and layer: target latent KV, indexer keys, draft KV, ...

    The last `scales` elements of a row lie apart from its keys (see RowBuffer): 8 bit indexer keys with one float32
    scale are 128 + 4 bytes, `Component("index", 132, torch.uint8, scales=4)`.
    All components of a worker share one placement: a token's rows live on one rank, at one local row.
    """

    name: str
    width: int
    dtype: torch.dtype
    scales: int = 0

    def __post_init__(self) -> None:
        if not self.name or not 0 <= self.scales < self.width:
            raise GeometryError(f"{self}: expected a name, a width >= 1 and fewer scales than the width")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row in one layer."""
        return self.width * self.dtype.itemsize


def total_row_bytes(components: Iterable[Component]) -> int:
    """Bytes of one token in one layer, all components together."""
    return sum(component.row_bytes for component in components)


def raw(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, as bytes if they are 8 bit floats: index kernels do not know those on every device."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 and rows.dtype.is_floating_point else rows

"""Placement: which rank stores a token location, and where. Stateless arithmetic, no table.

    loc  = group * (N * ps) + owner * ps + offset      0 <= owner < N, 0 <= offset < ps
    page = loc div ps        owner = page mod N        local page = page div N

    widened space   [0, N*ps) reserved  [N*ps, 2*N*ps) group 1  ...     shared by all ranks
    rank r's buffer [0,   ps) reserved  [ps,     2*ps) group 1  ...     the same local rows on every rank

Rules: sglang 0.5.23, mem_cache/page_interleave.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvshard_ref.errors import GeometryError

Index = TypeVar("Index", int, torch.Tensor, npt.NDArray[np.integer[Any]])


def widen(value: Index) -> Index:
    """`value` in 64 bits: int32 locations overflow as soon as they are multiplied by a row size."""
    if isinstance(value, torch.Tensor):
        exact = not (value.is_floating_point() or value.is_complex())
        wide = value.to(torch.int64)
    elif isinstance(value, np.ndarray):
        exact = np.issubdtype(value.dtype, np.integer)
        wide = value.astype(np.int64, copy=False)
    else:
        return operator.index(value)
    if not exact:
        raise GeometryError(f"locations of dtype {value.dtype}: expected integers; convert them where they are made")
    return wide


@dataclass(frozen=True, slots=True)
class Placement:
    """N ranks share one index space of pages of `page_size` tokens.

    Every method takes ints and int tensors or arrays of any shape alike, and returns the same kind (64 bits wide).
    """

    shards: int
    page_size: int

    def __post_init__(self) -> None:
        if self.shards < 1 or self.page_size < 1:
            raise GeometryError(f"Placement(shards={self.shards}, page_size={self.page_size}): both must be at least 1")

    def page(self, loc: Index) -> Index:
        """Page id of a location."""
        return widen(loc) // self.page_size

    def owner(self, loc: Index) -> Index:
        """Rank that stores a location."""
        return widen(loc) // self.page_size % self.shards

    def local_row(self, loc: Index) -> Index:
        """Row of a location inside its owner's buffer."""
        loc = widen(loc)
        return loc // (self.shards * self.page_size) * self.page_size + loc % self.page_size

    def loc(self, owner: Index, local_row: Index) -> Index:
        """Inverse of (owner, local_row)."""
        local_row = widen(local_row)
        return self.page_id(owner, local_row // self.page_size) * self.page_size + local_row % self.page_size

    def page_owner(self, page: Index) -> Index:
        """Rank that stores a page."""
        return widen(page) % self.shards

    def local_page(self, page: Index) -> Index:
        """Page number of a page inside its owner's buffer."""
        return widen(page) // self.shards

    def page_id(self, owner: Index, local_page: Index) -> Index:
        """Inverse of (page_owner, local_page)."""
        return widen(local_page) * self.shards + widen(owner)

    def page_locs(self, page: int) -> range:
        """Locations of one page, in order."""
        return range(page * self.page_size, (page + 1) * self.page_size)

    def byte_offset(self, loc: Index, row_bytes: int) -> Index:
        """Offset in bytes of a location's row inside its owner's buffer; exact beyond 2**31 and 2**32."""
        return self.local_row(loc) * row_bytes

    def class_counts(self, start_class: int, pages: int) -> list[int]:
        """Pages per owner class of a cyclic run of `pages` pages whose first page belongs to `start_class`."""
        if pages < 0:
            raise GeometryError(f"class_counts of {pages} pages, expected 0 or more")
        full, rest = divmod(pages, self.shards)
        counts = [full + 1] * rest + [full] * (self.shards - rest)  # of classes start, start + 1, ...
        cut = self.shards - start_class % self.shards
        return counts[cut:] + counts[:cut]


def add(left: Iterable[int], right: Iterable[int]) -> list[int]:
    """Counts class by class."""
    return [one + other for one, other in zip(left, right, strict=True)]


def subtract(left: Iterable[int], right: Iterable[int]) -> list[int]:
    """Counts class by class."""
    return [one - other for one, other in zip(left, right, strict=True)]

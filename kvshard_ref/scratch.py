"""Size of the scratch slots into which a prefill batch gathers its prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshard_ref.errors import GeometryError

if TYPE_CHECKING:
    from kvshard_ref.placement import Placement

SLOTS = 2
"""Scratch slots, used in turn: layer % SLOTS."""


@dataclass(frozen=True, slots=True)
class ScratchSize:
    """Rows of one scratch slot, in tokens (sglang 0.5.23, mem_cache/page_interleave.py).

    One slot holds one layer::

        [0, prefix_tokens)                      gathered prefix of the batch
        [prefix_tokens, prefix+chunk_tokens)    current chunk
        [prefix+chunk, prefix+chunk+page_size)  trash page

    Raises GeometryError when a region is negative or not a multiple of the page size.
    """

    prefix_tokens: int
    chunk_tokens: int
    page_size: int

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise GeometryError(f"scratch: page_size is {self.page_size}, expected at least 1 token")
        for field, tokens in (("prefix_tokens", self.prefix_tokens), ("chunk_tokens", self.chunk_tokens)):
            if tokens < 0 or tokens % self.page_size:
                raise GeometryError(
                    f"scratch: {field} is {tokens}, expected a multiple of page_size {self.page_size}; "
                    "ScratchSize.sized rounds up"
                )

    @classmethod
    def sized(cls, placement: Placement, context_tokens: int, chunk_tokens: int, contexts: int = 8) -> ScratchSize:
        """The size that holds `contexts` whole contexts and one chunk budget.

        The context is aligned to N*page_size *before* it is multiplied; a chunk budget only to page_size.
        """
        for field, count in (
            ("context_tokens", context_tokens),
            ("chunk_tokens", chunk_tokens),
            ("contexts", contexts),
        ):
            if count < 1:
                raise GeometryError(f"scratch: {field} is {count}, expected at least 1")
        ps = placement.page_size
        prefix_tokens = contexts * _ceil_align(context_tokens, placement.shards * ps)
        return cls(prefix_tokens, _ceil_align(chunk_tokens, ps), ps)

    @property
    def rows(self) -> int:
        """Rows of one slot."""
        return self.prefix_tokens + self.chunk_tokens + self.page_size

    @property
    def prefix_pages(self) -> int:
        """Pages of the prefix region; also the scratch page of the first chunk page."""
        return self.prefix_tokens // self.page_size

    @property
    def chunk_pages(self) -> int:
        """Pages of the chunk region."""
        return self.chunk_tokens // self.page_size

    @property
    def trash_page(self) -> int:
        """The scratch page that takes rows of reserved and off-plan pages."""
        return self.prefix_pages + self.chunk_pages

    def bytes(self, row_bytes: int, runners: int = 1) -> int:
        """Bytes on one rank: all slots of all model runners (an MTP draft is a second runner)."""
        return SLOTS * self.rows * row_bytes * runners


def _ceil_align(count: int, quantum: int) -> int:
    return -(-count // quantum) * quantum

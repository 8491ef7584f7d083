"""Size of the scratch slots into which a prefill batch gathers its prefix."""

from __future__ import annotations

from dataclasses import dataclass

from kvshard_ref.checks import at_least
from kvshard_ref.errors import GeometryError
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
        at_least(1, "scratch", page_size=self.page_size)
        at_least(0, "scratch", prefix_tokens=self.prefix_tokens, chunk_tokens=self.chunk_tokens)
        if self.prefix_tokens % self.page_size or self.chunk_tokens % self.page_size:
            raise GeometryError(
                f"{self}: expected multiples of page_size {self.page_size}; ScratchSize.sized rounds up"
            )

    @classmethod
    def sized(cls, placement: Placement, context_tokens: int, chunk_tokens: int, contexts: int = 8) -> ScratchSize:
        """The size that holds `contexts` whole contexts and one chunk budget.

        The context is aligned to N*page_size *before* it is multiplied; a chunk budget only to page_size.
        """
        at_least(1, "scratch", context_tokens=context_tokens, chunk_tokens=chunk_tokens, contexts=contexts)
        ps = placement.page_size
        group = placement.shards * ps
        return cls(contexts * -(-context_tokens // group) * group, -(-chunk_tokens // ps) * ps, ps)

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

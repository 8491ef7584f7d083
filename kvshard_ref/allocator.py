"""Free pages per owner class, drawn in rotation. Mirrored: every rank holds the same lists in the same order.

    page ids   [0, N) reserved   [N, N * (pages_per_rank + 1)) the pool; class = page mod N

Rules: sglang 0.5.23, mem_cache/allocator/page_interleave.py. Our choices: a double free is an error, and pages freed
together are drawn again in the order in which they were freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvshard_ref.checks import at_least
from kvshard_ref.errors import DoubleFreeError, ForeignPageError
from kvshard_ref.placement import Placement


class PageAllocator:
    """Free lists of N classes with `pages_per_rank` pages each."""

    def __init__(self, placement: Placement, pages_per_rank: int) -> None:
        at_least(1, "PageAllocator", pages_per_rank=pages_per_rank)
        self.placement = placement
        self.pages_per_rank = pages_per_rank
        shards = placement.shards
        # One stack per class, its head at the end of the list: ascending local pages are drawn first.
        self._stacks = [[local * shards + owner for local in range(pages_per_rank, 0, -1)] for owner in range(shards)]
        self._is_free = bytearray(shards) + bytearray(b"\1") * (shards * pages_per_rank)

    def free_counts(self) -> list[int]:
        """Free pages per owner class."""
        return [len(stack) for stack in self._stacks]

    def free_pages(self) -> list[list[int]]:
        """Free page ids per owner class, in the order in which they will be drawn (copies)."""
        return [stack[::-1] for stack in self._stacks]

    def draw_run(self, start_class: int, count: int) -> list[int] | None:
        """`count` pages of one chain, the first one of class `start_class` mod N, or None with nothing drawn."""
        needs = self.placement.class_counts(start_class, count)
        if any(need > len(stack) for need, stack in zip(needs, self._stacks, strict=True)):
            return None
        shards = self.placement.shards
        pages = [0] * count
        # positions j, j + N, j + 2N, ... take the next heads of class start + j
        for first in range(min(shards, count)):
            stack = self._stacks[(start_class + first) % shards]
            cut = len(stack) - len(range(first, count, shards))
            pages[first::shards] = stack[: cut - 1 if cut else None : -1]
            del stack[cut:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Put pages back at the heads of their classes.

        Raises ForeignPageError or DoubleFreeError before any list has changed.
        """
        self._check_owned(pages)
        shards = self.placement.shards
        for page in reversed(pages):
            self._is_free[page] = 1
            self._stacks[page % shards].append(page)

    def _check_owned(self, pages: Sequence[int]) -> None:
        first, end = self.placement.shards, len(self._is_free)
        if pages and not first <= min(pages) <= max(pages) < end:
            foreign = next(page for page in pages if not first <= page < end)
            raise ForeignPageError(
                f"free of page {foreign}: expected a page of the pool, {first}..{end - 1}; free only what was drawn"
            )
        if len(set(pages)) != len(pages):
            twice = next(page for at, page in enumerate(pages) if page in pages[:at])
            raise DoubleFreeError(f"free names page {twice} twice, expected each page once; free it where it is owned")
        if any(map(self._is_free.__getitem__, pages)):
            twice = next(page for page in pages if self._is_free[page])
            raise DoubleFreeError(
                f"free of page {twice}: it is free already, expected a drawn page; find the second owner that frees it"
            )

"""Free pages per owner class, drawn in rotation. Mirrored: every rank holds the same lists in the same order.

    page ids   [0, N) reserved   [N, N * (pages_per_rank + 1)) the pool; class = page mod N

Rules: sglang 0.5.23, mem_cache/allocator/page_interleave.py. Our choices: a double free is an error, and pages freed
together are drawn again in the order in which they were freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvshard_ref.errors import DoubleFreeError, ForeignPageError, GeometryError
from kvshard_ref.placement import Placement


@dataclass(slots=True)
class Run:
    """Demand of one chain: `new_pages` pages that continue `prefix_pages` pages from rotation base `base`."""

    base: int | None
    """None: a new chain; a draw puts the base it chose here."""
    prefix_pages: int
    new_pages: int


class PageAllocator:
    """Free lists of N classes with `pages_per_rank` pages each."""

    def __init__(self, placement: Placement, pages_per_rank: int) -> None:
        if pages_per_rank < 1:
            raise GeometryError(f"pages_per_rank={pages_per_rank}, expected at least 1")
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

    def floor_tokens(self) -> int:
        """Tokens that one chain can surely draw: the scarcest class times N."""
        return self.placement.shards * self.placement.page_size * min(self.free_counts())

    def aggregate_tokens(self) -> int:
        """Tokens of all free pages together; an upper bound that no single chain need reach."""
        return self.placement.page_size * sum(self.free_counts())

    def roomiest_class(self, counts: Sequence[int]) -> int:
        """Class with the most pages in `counts`, ties to the lowest id: where a new chain begins."""
        return max(range(len(counts)), key=counts.__getitem__)

    def draw(self, runs: Sequence[Run]) -> list[list[int]] | None:
        """Pages of each run by position, or None with every list unchanged: the whole batch or nothing.

        Bases that are None are resolved in place, in batch order over the counts that earlier runs leave, also when
        the draw then returns None.
        """
        left = self.free_counts()
        starts = []
        for run in runs:
            if run.base is None:
                run.base = self.roomiest_class(left)
            starts.append((run.base + run.prefix_pages) % self.placement.shards)
            needs = self.placement.class_counts(starts[-1], run.new_pages)
            left = [have - need for have, need in zip(left, needs, strict=True)]
        if min(left) < 0:
            return None
        return [self._pop(start, run.new_pages) for start, run in zip(starts, runs, strict=True)]

    def draw_run(self, start_class: int, count: int) -> list[int] | None:
        """`count` pages of one chain whose first page belongs to `start_class`, or None with nothing drawn."""
        drawn = self.draw([Run(start_class, 0, count)])
        return drawn[0] if drawn else None

    def free(self, pages: Sequence[int]) -> None:
        """Put pages back at the heads of their classes.

        Raises ForeignPageError or DoubleFreeError before any list has changed.
        """
        self._check_owned(pages)
        shards = self.placement.shards
        for page in reversed(pages):
            self._is_free[page] = 1
            self._stacks[page % shards].append(page)

    def _pop(self, start_class: int, count: int) -> list[int]:
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

    def _check_owned(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        first, end = self.placement.shards, len(self._is_free)
        if min(pages) < first or max(pages) >= end:
            foreign = next(page for page in pages if not first <= page < end)
            raise ForeignPageError(
                f"free of page {foreign}: expected a page of the pool, {first}..{end - 1} "
                f"(0..{first - 1} are reserved); free only pages that a draw returned"
            )
        if len(set(pages)) != len(pages):
            twice = next(page for at, page in enumerate(pages) if page in pages[:at])
            raise DoubleFreeError(
                f"free names page {twice} twice, expected each page once; free a page only where it is owned"
            )
        if any(map(self._is_free.__getitem__, pages)):
            twice = next(page for page in pages if self._is_free[page])
            raise DoubleFreeError(
                f"free of page {twice}: it is free already, expected a drawn page; find the second owner that frees it"
            )

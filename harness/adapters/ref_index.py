"""The reference's allocator and prefix tree, as the capacity replay drives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.capacity import IndexCache, NotAdmittedError, Sizing
from kvshard_ref.cache import PageCache
from kvshard_ref.errors import RefusedError
from kvshard_ref.placement import Placement
from kvshard_ref.scratch import ScratchSize


class RefIndexCache:
    """IndexCache over PageCache. One request is one chunk: the replay counts pages, not forwards."""

    def __init__(self, placement: Placement, pages_per_rank: int) -> None:
        self._cache = PageCache(placement, pages_per_rank)
        self._allocator = self._cache.allocator
        self._pages_per_rank = pages_per_rank

    def open(self, number: int, keys: Sequence[int], tokens: int, prompt_tokens: int) -> int:
        try:
            return self._cache.open(str(number), keys, tokens, prompt_tokens).cached
        except RefusedError as error:
            raise NotAdmittedError(error.why) from error

    def extend(self, number: int) -> None:
        name = str(number)
        request = self._cache.requests[name]
        try:
            self._cache.extend([(name, request.tokens - request.cached)])
        except RefusedError as error:
            raise NotAdmittedError(error.why) from error
        self._cache.checkpoint(name)

    def finish(self, number: int) -> None:
        self._cache.finish(str(number))

    def abort(self, number: int) -> None:
        self._cache.abort(str(number))

    def used_pages(self) -> list[int]:
        return [self._pages_per_rank - free for free in self._allocator.free_counts()]

    def evicted_pages(self) -> int:
        return self._cache.stats.evicted_pages


@dataclass(frozen=True, slots=True)
class RefIndexEngine:
    """IndexEngine of the reference; shards = 1 is its replicated layout."""

    name: str = "ref"

    def scratch_bytes(self, shards: int, sizing: Sizing) -> int:
        placement = Placement(shards, sizing.page_size)
        return ScratchSize.sized(placement, sizing.context_tokens, sizing.chunk_tokens).bytes(sizing.row_bytes)

    def cache(self, shards: int, page_size: int, pages_per_rank: int) -> IndexCache:
        return RefIndexCache(Placement(shards, page_size), pages_per_rank)

"""Prompts of one page key per letter, for tests of PageCache."""

from __future__ import annotations

from kvshard_ref.cache import PageCache
from kvshard_ref.placement import Placement
from kvshard_ref.request import Request
from kvshard_ref.scratch import ScratchSize

PS = 16


def cache(shards: int = 4, pages_per_rank: int = 32, scratch: ScratchSize | None = None) -> PageCache:
    return PageCache(Placement(shards, PS), pages_per_rank, scratch)


def opened(pages: PageCache, name: str, keys: str, tail: int = 0) -> Request:
    """Open a prompt of one page key per letter and a tail of less than a page."""
    return pages.open(name, keys, len(keys) * PS + tail)


def run(pages: PageCache, name: str, keys: str, tail: int = 0) -> Request:
    """Open a prompt and compute it in one chunk."""
    request = opened(pages, name, keys, tail)
    pages.extend([(name, request.tokens - request.computed)])
    return request


def owners(request: Request, shards: int = 4) -> list[int]:
    return [page % shards for page in request.pages]

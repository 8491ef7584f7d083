"""What a request keeps while a transfer reads its pages."""

from __future__ import annotations

from kvshard_ref.cache import PageCache
from kvshard_ref.placement import Placement

PS = 4


def test_duplicates_that_a_transfer_reads_are_not_freed() -> None:
    """Pages that another request has cached meanwhile stay the sender's own until its transfer has ended."""
    cache = PageCache(Placement(1, PS), 8)
    sent, rival = cache.open("sent", "ab", 2 * PS), cache.open("rival", "ab", 2 * PS)
    cache.extend([("sent", 2 * PS), ("rival", 2 * PS)])
    own = sent.pages.copy()
    sent.sending = True
    cache.checkpoint("rival")
    free = cache.allocator.free_counts()

    cache.checkpoint("sent")
    assert (own, free) == (sent.pages, cache.allocator.free_counts())

    cache.sent("sent")
    cache.checkpoint("sent")
    assert rival.pages == sent.pages
    assert [free[0] + 2] == cache.allocator.free_counts()

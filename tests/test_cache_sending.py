"""What a request keeps while a transfer reads its pages."""

from __future__ import annotations

import pytest

from ci.register import register_cpu_ci
from kvshard_ref.cache import PageCache
from kvshard_ref.placement import Placement

register_cpu_ci(est_time=10, stage="commit")

PS = 4


@pytest.mark.parametrize("pages", [1, 2])
def test_duplicates_that_a_transfer_reads_are_not_freed(pages: int) -> None:
    """Pages that another request has cached meanwhile stay the sender's own until its transfer has ended."""
    cache = PageCache(Placement(1, PS), 8)
    sent, rival = cache.open("sent", "ab"[:pages], pages * PS), cache.open("rival", "ab"[:pages], pages * PS)
    cache.extend([("sent", pages * PS), ("rival", pages * PS)])
    own = sent.pages.copy()
    sent.sending = True
    cache.checkpoint("rival")
    free = cache.allocator.free_counts()

    cache.checkpoint("sent")
    assert (own, free) == (sent.pages, cache.allocator.free_counts())

    cache.sent("sent")
    cache.checkpoint("sent")
    assert rival.pages == sent.pages
    assert [free[0] + pages] == cache.allocator.free_counts()


def test_a_finish_counts_where_the_transfer_leaves_it() -> None:
    """A selective policy counts a finished request on all the pages that it is cached with once its transfer ends."""
    cache = PageCache(Placement(1, PS), 8, None, "tight", 8, "write_through_selective")
    sent = cache.open("sent", "ab", 2 * PS)
    cache.open("rival", "ab", 2 * PS)
    cache.extend([("sent", 2 * PS), ("rival", 2 * PS)])
    sent.sending = True
    cache.finish("rival")
    cache.finish("sent")
    assert [1] == [node.hits for node in cache.tree.nodes()]

    cache.sent("sent")
    assert [2] == [node.hits for node in cache.tree.nodes()]

    alone = cache.open("alone", "cd", 2 * PS)
    cache.extend([("alone", 2 * PS)])
    alone.sending = True
    cache.finish("alone")
    cache.sent("alone")
    assert [2, 1] == [node.hits for node in cache.tree.nodes()]


def test_what_an_ended_request_was_promised_is_free_at_once() -> None:
    """A request that ends in mid-prompt leaves what it has not drawn to others, while a transfer keeps what it has."""
    cache = PageCache(Placement(1, PS), 4)
    sent = cache.open("sent", "abcd", 4 * PS)
    cache.extend([("sent", PS)])
    sent.sending = True
    assert [3] == cache.promised

    cache.abort("sent")
    assert ([0], [3]) == (cache.promised, cache.allocator.free_counts())

    cache.sent("sent")
    assert ([0], [4]) == (cache.promised, cache.allocator.free_counts())

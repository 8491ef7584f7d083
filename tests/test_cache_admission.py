from __future__ import annotations

import pytest

from ci.register import register_cpu_ci
from kvshard_ref.cache import PageCache
from kvshard_ref.errors import (
    RefusedError,
)
from kvshard_ref.placement import Placement
from kvshard_ref.scratch import ScratchSize
from tests.cache_prompts import PS, cache, opened, owners, run

register_cpu_ci(est_time=10, stage="commit")


@pytest.mark.parametrize(
    ("shards", "pages_per_rank", "rounds", "long_pages"),
    [(2, 7, 5, 6), (3, 6, 4, 9), (4, 5, 3, 12), (4, 64, 40, 110), (4, 4, 4, 4)],
)
def test_admission_counts_every_class(shards: int, pages_per_rank: int, rounds: int, long_pages: int) -> None:
    """One class held, the others evictable: a long request is refused before anything is evicted, then served.

    Budgets that add the scarcest class times N to all evictable pages admit this request, evict the whole cache and
    then cannot draw.
    """
    pages = cache(shards, pages_per_rank)
    held = []
    for step in range(shards * rounds):
        name = chr(1000 + step)
        request = run(pages, name, name)
        if request.base == shards - 1:
            held.append(name)
        else:
            pages.finish(name)
    assert rounds == len(held)
    free, evictable = pages.allocator.free_counts(), pages.tree.evictable_counts()
    budget = shards * min(free) + sum(evictable)
    assert budget >= long_pages
    long_keys = "".join(chr(5000 + step) for step in range(long_pages))
    opened(pages, "long", long_keys)
    before = pages.digest()
    [why] = pages.review([("long", PS)])
    assert why is not None
    assert f"free {free} + evictable {evictable} - promised {[0] * shards}" in why
    with pytest.raises(RefusedError, match="'long' needs"):
        pages.extend([("long", long_pages * PS)])
    assert (before, 0) == (pages.digest(), pages.stats.evicted_pages)

    for name in held:
        pages.finish(name)
        if pages.review([("long", PS)]) == [None]:
            break
    pages.extend([("long", long_pages * PS)])
    assert long_pages * PS == pages.finish("long")


def test_locked_class_refuses_or_serves_but_never_raises() -> None:
    """Sixteen cached one-page chains, the four of class 3 locked: no request of 4 pages, but every one of 3, fits."""
    pages = cache(pages_per_rank=4)
    for step in range(16):
        run(pages, f"r{step}", chr(1000 + step))
        pages.finish(f"r{step}")
    for step in range(3, 16, 4):
        assert PS == opened(pages, f"locked {step}", chr(1000 + step), tail=1).cached
    assert ([0, 0, 0, 0], [4, 4, 4, 0]) == (pages.allocator.free_counts(), pages.tree.evictable_counts())
    opened(pages, "long", "abcd")
    assert [True] == ["[4, 4, 4, 0]" in (why or "") for why in pages.review([("long", 4 * PS)])]
    assert 0 == pages.stats.evicted_pages
    assert [0, 1, 2] == owners(run(pages, "shorter", "efg"))
    assert 3 == pages.stats.evicted_pages


def test_eviction_stops_at_the_short_classes() -> None:
    """With one class mostly held, requests of 1, 4 and 5 pages evict the two pages that are short and nothing else."""
    pages = cache(pages_per_rank=8)
    for step in range(24):
        name = f"r{step}"
        if run(pages, name, chr(1000 + step)).base != 3:
            pages.finish(name)
    assert ([2, 2, 2, 2], [6, 6, 6, 0]) == (pages.allocator.free_counts(), pages.tree.evictable_counts())
    for keys in ("a", "bcde", "fghij"):
        run(pages, keys, keys)
        pages.finish(keys)
    assert 2 == pages.stats.evicted_pages
    # 18 + 1 + 4 + 5 pages were cached, the two oldest of classes 0 and 1 are gone
    assert 26 == sum(pages.tree.evictable_counts())
    assert ([], []) == (pages.tree.match(chr(1000)).pages, pages.tree.match(chr(1001)).pages)
    assert 24 == sum(len(pages.tree.match(chr(1000 + step)).pages) for step in range(24) if step % 4 != 3) + 8


def test_open_leaves_promised_pages_alone() -> None:
    """A lock that would take evictable pages promised to an admitted request is refused; nothing changes."""
    pages = cache(shards=2, pages_per_rank=4)
    run(pages, "cached", "abcdefg")
    pages.finish("cached")
    opened(pages, "admitted", "stuvwxyz")
    pages.extend([("admitted", PS)])
    assert ([0, 0], [4, 3], [4, 3]) == (
        pages.allocator.free_counts(),
        pages.tree.evictable_counts(),
        pages.promised,
    )
    before = pages.digest()
    with pytest.raises(RefusedError, match=r"'again' takes \[3, 3\].*promised \[4, 3\] leaves \[0, 0\]"):
        opened(pages, "again", "abcdefg")
    assert before == pages.digest()
    pages.extend([("admitted", 7 * PS)])
    assert 8 * PS == pages.finish("admitted")


def test_batches_are_admitted_greedily() -> None:
    """Review counts each admissible request against the ones after it, and skips what does not fit."""
    pages = cache(shards=2, pages_per_rank=4)
    for name, keys in (("a", "abc"), ("b", "defghi"), ("c", "jklmn")):
        opened(pages, name, keys)
    wants = [("a", 3 * PS), ("b", PS), ("c", PS)]
    assert [None, False, None] == [why and "'b' needs 6" not in why for why in pages.review(wants)]
    before = pages.digest()
    with pytest.raises(RefusedError, match="'b' needs 6 more pages"):
        pages.extend(wants)
    assert before == pages.digest()
    assert ["a", "c"] == [extent.request.name for extent in pages.extend([wants[0], wants[2]])]


def test_prompts_larger_than_the_pool_are_refused() -> None:
    """A prompt of more pages than the pool is refused at open with both numbers; one of exactly its size is served."""
    pages = cache(shards=2, pages_per_rank=2)
    with pytest.raises(RefusedError, match="'big' needs 5 pages, the pool has 4"):
        opened(pages, "big", "abcd", tail=1)
    assert 4 * PS == len(run(pages, "whole", "abcd").pages) * PS
    assert [0, 0] == pages.allocator.free_counts()


def test_scratch_limits_a_batch() -> None:
    """Prefix block and chunk pages of a batch must fit scratch; what does not fit is refused with the numbers."""
    pages = cache(shards=2, scratch=ScratchSize(prefix_tokens=4 * PS, chunk_tokens=3 * PS, page_size=PS))
    for name, keys in (("a", "abc"), ("d", "def"), ("g", "ghi")):
        run(pages, name, keys)
        pages.finish(name)
    for name, keys in (("b", "abcB"), ("e", "defE"), ("h", "ghiH")):
        opened(pages, name, keys)
    # prefixes of 3 pages from bases 0, 1, 0: the owners hold 2 + 1 pages of b's and e's, 2 + 2 of b's and h's
    refusals = [pages.review([("b", PS), (other, PS)])[1] for other in "eh"]
    assert refusals == [
        f"with request '{other}' the batch needs {needs} prefix pages of scratch, there are 4; requests before it in "
        "the batch: 1"
        for other, needs in (("e", 6), ("h", 8))
    ]
    opened(pages, "new", "wxyz")
    assert pages.review([("b", PS), ("new", 3 * PS)]) == [
        None,
        "with request 'new' the batch needs 4 chunk pages of scratch, there are 3; requests before it in the batch: 1",
    ]
    assert [None, None] == pages.review([("b", PS), ("new", 2 * PS)])


def test_shared_prefixes_count_once_in_tight_padding() -> None:
    """Requests on one cached page share its scratch page; per-request padding charges N pages for each of them."""
    scratch = ScratchSize(prefix_tokens=4 * PS, chunk_tokens=8 * PS, page_size=PS)
    for padding, admissible in (("tight", 3), ("per_request", 1)):
        pages = PageCache(Placement(4, PS), 8, scratch, padding)
        run(pages, "seed", "a")
        pages.finish("seed")
        for name in "xyz":
            opened(pages, name, f"a{name}")
        assert admissible == pages.review([(name, PS) for name in "xyz"]).count(None)


def test_prefix_that_never_fits_scratch_is_refused_at_open() -> None:
    """A prompt whose last chunk would have a prefix larger than the scratch is refused before it holds anything."""
    pages = cache(shards=2, scratch=ScratchSize(prefix_tokens=2 * PS, chunk_tokens=PS, page_size=PS))
    opened(pages, "fits", "ab", tail=1)
    with pytest.raises(RefusedError, match="'long' needs 4 prefix pages of scratch, there are 2"):
        opened(pages, "long", "abc", tail=1)

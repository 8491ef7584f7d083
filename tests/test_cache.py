from __future__ import annotations

import pytest

from ci.register import register_cpu_ci
from kvshard_ref.cache import PageCache
from kvshard_ref.errors import (
    DuplicateRequestError,
    GeometryError,
    RefusedError,
    UnalignedError,
    UnknownRequestError,
)
from kvshard_ref.placement import Placement
from kvshard_ref.request import Request
from kvshard_ref.scratch import ScratchSize
from tests.cache_prompts import PS, cache, opened, owners, run

register_cpu_ci(est_time=10, stage="commit")


def test_two_turns_of_a_conversation() -> None:
    """Turns of 122 and 244 tokens: the second hits 112, continues the rotation and draws the freed tail page."""
    pages = cache()
    first = run(pages, "turn 1", "abcdefg", tail=10)
    assert (122, 0) == (first.tokens, first.cached)
    assert [0, 1, 2, 3, 0, 1, 2, 3] == owners(first)
    assert [30, 30, 30, 30] == pages.allocator.free_counts()
    assert 112 == pages.finish("turn 1")
    assert [30, 30, 30, 31] == pages.allocator.free_counts()

    second = opened(pages, "turn 2", "abcdefghijklmno", tail=4)
    assert (244, 112, first.pages[:7]) == (second.tokens, second.cached, second.pages)
    [extent] = pages.extend([("turn 2", 132)])
    assert (112, 244) == (extent.start, extent.end)
    assert (first.pages[:7], second.pages[7:]) == (extent.prefix_pages, extent.chunk_pages)
    assert [3, 0, 1, 2, 3, 0, 1, 2, 3] == owners(second)[7:]
    assert first.pages[7] == second.pages[7]
    assert [28, 28, 28, 28] == pages.allocator.free_counts()
    assert 240 == pages.finish("turn 2")
    assert 240 == pages.flush()
    assert [32, 32, 32, 32] == pages.allocator.free_counts()


@pytest.mark.parametrize(("tokens", "cached"), [(64, 48), (65, 64), (63, 48), (17, 16), (16, 0), (1, 0)])
def test_one_token_is_always_computed(tokens: int, cached: int) -> None:
    """A warm repeat hits floor((n - 1) / ps) pages: never the whole prompt."""
    pages = cache()
    keys = "abcdefgh"[: tokens // PS]
    for name, expected in (("cold", 0), ("warm", cached)):
        request = opened(pages, name, keys, tail=tokens % PS)
        assert expected == request.cached
        pages.extend([(name, tokens - expected)])
        pages.finish(name)


def test_answers_do_not_raise_the_match() -> None:
    """The match is capped by the prompt, also where prompt and answer are opened as one."""
    pages = cache()
    run(pages, "a", "abcdef")
    pages.finish("a")
    assert 32 == pages.open("b", "abcdef", 6 * PS, prompt_tokens=40).cached
    assert 16 == pages.open("c", "abcdef", 6 * PS, prompt_tokens=32).cached
    assert 0 == pages.open("d", "abcdef", 6 * PS, prompt_tokens=1).cached


def test_chunks_draw_page_by_page() -> None:
    """A chunked prompt draws what each chunk needs, in rotation, and promises the rest until it is drawn."""
    pages = cache(shards=2, pages_per_rank=4)
    opened(pages, "a", "abcde", tail=3)
    assert [0, 0] == pages.promised
    chunks = []
    for count, promised in ((32, [2, 2]), (16, [1, 2]), (35, [0, 0])):
        [extent] = pages.extend([("a", count)])
        chunks.append((extent.start, extent.end, [page % 2 for page in extent.chunk_pages]))
        assert promised == pages.promised
        pages.checkpoint("a")
    assert [(0, 32, [0, 1]), (32, 48, [0]), (48, 83, [1, 0, 1])] == chunks


def test_new_chains_begin_where_promises_leave_most_room() -> None:
    """The base of a new chain is the class with most free pages net of promises, ties to the lowest."""
    pages = cache()
    first, second, third = (opened(pages, name, keys) for name, keys in (("a", "abcdef"), ("b", "ghi"), ("c", "j")))
    pages.extend([("a", PS), ("b", PS), ("c", PS)])
    # a promises two pages of classes 0 and 1; b then begins at 2 and takes 2, 3, 0; class 1 is roomier than 0
    assert [0, 2, 1] == [request.base for request in (first, second, third)]


def test_bases_of_one_batch_follow_each_other() -> None:
    """New chains of one batch begin where the ones before them leave most pages: at 3, then at 2."""
    pages = cache()
    run(pages, "seed", "s")  # base 0
    first = run(pages, "first", "ab")
    second, third = opened(pages, "second", "cde"), opened(pages, "third", "f")
    before = pages.allocator.free_counts()
    assert (1, [31, 31, 31, 32]) == (first.base, before)
    pages.extend([("second", 3 * PS), ("third", PS)])
    assert ([3, 0, 1], [2]) == (owners(second), owners(third))


def test_one_page_chains_stay_level() -> None:
    """Nine one-page chains leave the classes at most one page apart after each of them."""
    pages = cache()
    for step in range(9):
        run(pages, f"r{step}", chr(1000 + step))
        free = pages.allocator.free_counts()
        assert max(free) - min(free) <= 1
    assert [29, 30, 30, 30] == free


def test_infeasible_bases_give_way() -> None:
    """Where a chain from the roomiest class is infeasible, the next base that carries it is taken."""
    pages = cache(shards=2, pages_per_rank=4)
    for name in "abcdefg":  # classes 0 1 0 1 0 1 0
        run(pages, name, name)
    for name in "aceg":
        pages.finish(name)  # class 0: free 0, evictable 4; class 1: free 1, evictable 0
    assert ([0, 1], [4, 0]) == (pages.allocator.free_counts(), pages.tree.evictable_counts())
    request = run(pages, "three", "uvw")  # base 1 would need two pages of class 1
    assert (0, [0, 1, 0]) == (request.base, owners(request, 2))


def conflict(pages: PageCache) -> tuple[Request, Request]:
    """Two requests that share 2 pages, planned in one batch before either is inserted; the first one is inserted."""
    first, second = opened(pages, "first", "abc"), opened(pages, "second", "abxyz")
    pages.extend([("first", first.tokens), ("second", 3 * PS)])
    pages.checkpoint("first")
    return first, second


def test_foreign_base_declines_the_unfinished_insert() -> None:
    """A declined checkpoint frees nothing, keeps the request's own row and protects nothing."""
    pages = cache()
    first, second = conflict(pages)
    assert (0, 3) == (first.base, second.base)
    before, row = pages.digest(), second.pages.copy()
    pages.checkpoint("second")
    assert (before, row, 0) == (pages.digest(), second.pages, second.protected)
    assert 1 == pages.stats.declined_inserts


def test_foreign_base_declines_the_finished_insert() -> None:
    """A declined finish frees the whole own row; a later match stays at the other chain's overlap."""
    pages = cache()
    _, second = conflict(pages)
    pages.extend([("second", 2 * PS)])
    held = sum(pages.allocator.free_counts())
    assert 0 == pages.finish("second")
    assert held + len(second.pages) == sum(pages.allocator.free_counts())
    assert 2 * PS == opened(pages, "third", "abxyz").cached


def test_same_base_frees_only_the_duplicates() -> None:
    """The control: with the same base the overlap's duplicates go, the tail is cached and the row is rewritten."""
    pages = cache(shards=3)
    first, second = conflict(pages)
    assert (0, 0) == (first.base, second.base)
    free, row = sum(pages.allocator.free_counts()), second.pages.copy()
    pages.checkpoint("second")
    assert free + 2 == sum(pages.allocator.free_counts())
    assert first.pages[:2] + row[2:] == second.pages
    assert (3, 2, 0) == (second.protected, pages.stats.duplicate_pages, pages.stats.declined_inserts)
    pages.extend([("second", 2 * PS)])
    assert 5 * PS == pages.finish("second")


def test_declined_requests_are_cached_once_the_conflict_is_gone() -> None:
    """A declined request keeps its base; when the other chain is evicted, its next checkpoint inserts everything."""
    pages = cache()
    conflict(pages)
    pages.checkpoint("second")
    pages.finish("first")
    pages.evict(3 * PS)
    pages.extend([("second", 2 * PS)])
    assert 5 * PS == pages.finish("second")
    assert 3 == pages.tree.match("abxyz").node.base


def test_abort_keeps_checkpoints_only() -> None:
    """An aborted request leaves what it checkpointed in the tree, evictable, and gives back everything else."""
    pages = cache(shards=2, pages_per_rank=4)
    request = opened(pages, "a", "abcde")
    pages.extend([("a", 2 * PS)])
    pages.checkpoint("a")
    pages.extend([("a", 2 * PS)])
    pages.abort("a")
    assert request.pages[:2] == pages.tree.match("abcde").pages
    assert ([1, 1], [3, 3], [0, 0]) == (
        pages.tree.evictable_counts(),
        pages.allocator.free_counts(),
        pages.promised,
    )
    assert 0 == pages.used_tokens()


def test_used_tokens_are_zero_when_idle() -> None:
    """Used tokens count what live requests hold, shared prefix pages once: cached pages of nobody are not used."""
    pages = cache()
    run(pages, "a", "a")
    assert (PS, 4 * 32 * PS) == (pages.used_tokens(), pages.capacity_tokens())
    pages.finish("a")
    assert 0 == pages.used_tokens()
    opened(pages, "b", "a", tail=1)
    opened(pages, "c", "a", tail=1)
    assert PS == pages.used_tokens()


def test_evict_and_flush() -> None:
    """Evict frees whole leaves and returns their tokens; flush is refused while a request lives."""
    pages = cache()
    run(pages, "a", "abc")
    pages.finish("a")
    run(pages, "b", "de")
    pages.finish("b")
    assert 0 == pages.evict(0)
    assert 3 * PS == pages.evict(1)
    opened(pages, "c", "de", tail=1)
    assert 0 == pages.evict(1000)
    with pytest.raises(RefusedError, match=r"live requests \['c'\]"):
        pages.flush()
    pages.abort("c")
    assert 2 * PS == pages.flush()


def test_finish_before_the_end_caches_what_is_computed() -> None:
    """A request may finish after any chunk, also before its first one."""
    pages = cache()
    opened(pages, "a", "abcd")
    pages.extend([("a", 2 * PS)])
    assert 2 * PS == pages.finish("a")
    opened(pages, "b", "abcd")
    assert 2 * PS == pages.finish("b")
    opened(pages, "c", "xyz")
    assert 0 == pages.finish("c")
    assert ([0, 0, 0, 0], 0) == (pages.promised, pages.used_tokens())


def test_misuse_is_named_and_changes_nothing() -> None:
    """Every misuse raises its named error, with value and expectation, and leaves the digest alone."""
    pages = cache()
    opened(pages, "a", "abc", tail=5)
    before = pages.digest()
    with pytest.raises(DuplicateRequestError, match="'a' is live already"):
        opened(pages, "a", "x")
    with pytest.raises(GeometryError, match="0 prompt tokens of 0 tokens"):
        pages.open("b", "", 0)
    with pytest.raises(GeometryError, match="40 prompt tokens of 32 tokens"):
        pages.open("b", "xy", 32, prompt_tokens=40)
    with pytest.raises(GeometryError, match="has 3 page keys, expected 2: one per whole page of 33 tokens"):
        pages.open("b", "xyz", 33)
    with pytest.raises(UnknownRequestError, match=r"'b' is not live, expected one of \['a'\]"):
        pages.extend([("b", 1)])
    with pytest.raises(UnknownRequestError, match="'b' is not live"):
        pages.finish("b")
    with pytest.raises(GeometryError, match=r"chunk of 0 tokens for request 'a', expected 1\.\.53"):
        pages.extend([("a", 0)])
    with pytest.raises(GeometryError, match=r"chunk of 54 tokens for request 'a', expected 1\.\.53"):
        pages.review([("a", 54)])
    with pytest.raises(UnalignedError, match=r"ends at token 17, expected a multiple of page_size 16 or .* end 53"):
        pages.extend([("a", 17)])
    with pytest.raises(DuplicateRequestError, match=r"\['a', 'a'\], expected each request once"):
        pages.extend([("a", 16), ("a", 16)])
    assert before == pages.digest()
    with pytest.raises(GeometryError, match="padding is 'loose', expected one of"):
        PageCache(Placement(2, PS), 4, padding="loose")
    with pytest.raises(GeometryError, match=r"scratch\.page_size=8, expected 16"):
        cache(scratch=ScratchSize(16, 16, 8))


def test_digest_sees_each_mirrored_part() -> None:
    """Free list order, locks, access order, requests and promises each change the digest."""
    seen = []

    def note(pages: PageCache) -> None:
        seen.append(pages.digest())

    base = cache(shards=2, pages_per_rank=4)
    note(base)
    base.allocator.free(base.allocator.draw_run(0, 4) or [])
    assert seen == [base.digest()]
    base.allocator.free((base.allocator.draw_run(0, 4) or [])[::-1])
    note(base)  # the same pages in another order
    run(base, "a", "abc")
    note(base)
    base.checkpoint("a")
    note(base)
    base.finish("a")
    note(base)
    handle = base.tree.lock(base.tree.match("abc"))
    note(base)
    base.tree.unlock(handle)
    note(base)  # same locks as before, but another access time
    opened(base, "b", "xy")
    note(base)
    base.extend([("b", PS)])
    note(base)
    base.promised[1] += 1
    note(base)
    assert len(seen) == len(set(seen))


def test_digest_sees_the_order_of_access() -> None:
    """Two caches that differ only in which chain was used last differ in their digest."""
    digests = []
    for order in ("ab", "ba"):
        pages = cache()
        for keys in "ab":
            run(pages, keys, keys)
        for keys in "ab":
            pages.finish(keys)
        for keys in order:
            pages.tree.unlock(pages.tree.lock(pages.tree.match(keys)))
        digests.append(pages.digest())
    assert digests[0] != digests[1]


def test_broken_bookkeeping_raises_with_the_counts() -> None:
    """Should an admitted request ever fail to draw, the error shows free, evictable and promised pages per class."""
    pages = cache(shards=2, pages_per_rank=2)
    opened(pages, "a", "ab")
    pages.extend([("a", PS)])
    pages.allocator.draw_run(1, 3)  # behind the cache's back
    with pytest.raises(RuntimeError, match=r"\[0, 1\].*free \[0, 0\], evictable \[0, 0\], promised \[0, 1\]"):
        pages.extend([("a", PS)])

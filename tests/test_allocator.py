from __future__ import annotations

import pytest

from ci.register import register_cpu_ci
from kvshard_ref.allocator import PageAllocator
from kvshard_ref.errors import DoubleFreeError, ForeignPageError, GeometryError
from kvshard_ref.placement import Placement

register_cpu_ci(est_time=10, stage="commit")


def allocator(pages_per_rank: int = 32, shards: int = 4) -> PageAllocator:
    return PageAllocator(Placement(shards, 16), pages_per_rank)


def owners(pages: list[int], shards: int = 4) -> list[int]:
    return [page % shards for page in pages]


def draw(pool: PageAllocator, start_class: int, count: int) -> list[int]:
    pages = pool.draw_run(start_class, count)
    assert pages is not None
    return pages


def test_heads_are_drawn_in_ascending_order() -> None:
    """A fresh pool holds local pages 1..pages_per_rank of every class, ascending; reserved pages are never drawn."""
    pool = allocator(3, shards=2)
    assert [[2, 4, 6], [3, 5, 7]] == pool.free_pages()
    assert [3, 2, 5, 4] == draw(pool, 1, 4)
    assert [[6], [7]] == pool.free_pages()


def test_two_turns_reuse_the_freed_tail() -> None:
    """122 tokens, then 244 with a prefix of 112, go round the classes; the second turn begins with the freed page."""
    pool = allocator()
    first = draw(pool, 0, 8)
    assert [0, 1, 2, 3, 0, 1, 2, 3] == owners(first)
    assert [30, 30, 30, 30] == pool.free_counts()
    pool.free(first[7:])
    assert [30, 30, 30, 31] == pool.free_counts()
    second = draw(pool, 0 + 7, 9)
    assert [3, 0, 1, 2, 3, 0, 1, 2, 3] == owners(second)
    assert first[7] == second[0]
    assert [28, 28, 28, 28] == pool.free_counts()
    pool.free(first[:7])
    pool.free(second)
    assert [32, 32, 32, 32] == pool.free_counts()


def test_all_pages_or_none() -> None:
    """A chain of 9 pages at 2 pages per rank draws nothing, though 8 are free, and so does one of another start."""
    pool = allocator(2)
    before = pool.free_pages()
    for start_class in range(4):
        assert pool.draw_run(start_class, 9) is None
    assert before == pool.free_pages()
    draw(pool, 1, 1)
    assert pool.draw_run(1, 5) is None
    assert [2, 1, 2, 2] == pool.free_counts()


def test_the_scarcest_class_decides() -> None:
    """With four one-page chains on class 3 no chain of N pages fits while 12 pages are free; one freed page lets it."""
    pool = allocator(4)
    held = [draw(pool, 3, 1)[0] for _ in range(4)]
    assert [4, 4, 4, 0] == pool.free_counts()
    assert pool.draw_run(0, 4) is None
    pool.free(held[:1])
    assert [4, 4, 4, 1] == pool.free_counts()
    assert [0, 1, 2, 3] == owners(draw(pool, 0, 4))


def test_freed_pages_are_drawn_first_and_in_order() -> None:
    """Free is LIFO per class; pages freed together come back in the order in which they were freed."""
    pool = allocator(4, shards=2)
    first, second = draw(pool, 0, 4), draw(pool, 0, 2)
    pool.free(second)
    pool.free(first)
    assert first + second == draw(pool, 0, 6)


def test_double_free_changes_nothing() -> None:
    """A page that is free, or named twice, is a DoubleFreeError that names it; no other page of the call is freed."""
    pool = allocator()
    pages = draw(pool, 0, 4)
    pool.free(pages[3:])
    before = pool.free_pages()
    with pytest.raises(DoubleFreeError, match=f"page {pages[3]}: it is free already, expected a drawn page"):
        pool.free(pages)
    with pytest.raises(DoubleFreeError, match=f"page {pages[1]} twice, expected each page once"):
        pool.free([pages[0], pages[1], pages[1]])
    assert before == pool.free_pages()
    pool.free(pages[:3])
    assert [32, 32, 32, 32] == pool.free_counts()


@pytest.mark.parametrize("page", [0, 3, -1, 132, 4000])
def test_foreign_pages_change_nothing(page: int) -> None:
    """Reserved pages 0..N-1 and ids outside the pool are a ForeignPageError that shows the legal range."""
    pool = allocator()
    pages = draw(pool, 0, 4)
    before = pool.free_pages()
    with pytest.raises(ForeignPageError, match=rf"page {page}: expected a page of the pool, 4\.\.131"):
        pool.free([*pages, page])
    assert before == pool.free_pages()


def test_free_of_nothing_is_fine() -> None:
    """An empty free and an empty draw change nothing."""
    pool = allocator(1)
    pool.free([])
    assert [] == pool.draw_run(3, 0)
    assert [1, 1, 1, 1] == pool.free_counts()


def test_the_last_page_can_be_drawn() -> None:
    """Every page of the pool can be drawn, the highest id included, and no id comes twice."""
    pool = allocator(5, shards=3)
    assert set(range(3, 18)) == set(draw(pool, 2, 15))
    assert [0, 0, 0] == pool.free_counts()
    assert pool.draw_run(0, 1) is None


def test_an_empty_pool_is_refused() -> None:
    """A pool without pages is a GeometryError."""
    with pytest.raises(GeometryError, match="pages_per_rank is 0, expected at least 1"):
        allocator(0)

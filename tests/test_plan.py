from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from kvshard_ref.errors import CyclicOrderError, ForeignPageError, GeometryError, ScratchOverflowError
from kvshard_ref.placement import Placement
from kvshard_ref.plan import PADDINGS, GatherPlan, block_pages, plan_gather
from kvshard_ref.scratch import ScratchSize

register_cpu_ci(est_time=15, stage="commit")

FOUR = Placement(4, 16)
SCRATCH = ScratchSize(4096, 512, 16)


def plans(
    prefixes: list[list[int]],
    chunks: list[list[int]],
    padding: str = "per_request",
    scratch: ScratchSize = SCRATCH,
    placement: Placement = FOUR,
) -> list[GatherPlan]:
    return [plan_gather(placement, rank, prefixes, chunks, scratch, padding) for rank in range(placement.shards)]


def chain(base: int, pages: int, local_page: int = 1, shards: int = 4) -> list[int]:
    """A chain whose pages have ascending local pages in every owner class."""
    return [(local_page + position // shards) * shards + (base + position) % shards for position in range(pages)]


def test_seven_pages_of_a_base_2_chain() -> None:
    """Slots follow the owner, send lists pad with local page 0, the chunk starts at page 256, trash is page 288."""
    prefix = [22, 23, 20, 21, 26, 27, 24]
    ranks = plans([prefix], [[25, 30]])
    assert ranks[0].slots == {20: 0, 24: 1, 21: 2, 22: 4, 26: 5, 23: 6, 27: 7, 25: 256, 30: 257}
    assert [plan.send_pages for plan in ranks] == [[5, 6], [5, 0], [5, 6], [5, 6]]
    assert (ranks[0].block, ranks[0].chunk_first, ranks[0].trash_page) == (2, 256, 288)
    assert all(plan.slots == ranks[0].slots for plan in ranks)


def test_requests_share_pages() -> None:
    """A page of several prefixes has one scratch page; per_request padding still counts every request."""
    shared = [20, 21, 22, 23, 24]
    ranks = plans([shared[:3], shared[:5], [82, 83]], [[40], [41, 42], [43]])
    assert ranks[0].block == 1 + 2 + 1
    prefix_slots = {page: slot for page, slot in ranks[0].slots.items() if slot < ranks[0].chunk_first}
    assert prefix_slots == {20: 0, 24: 1, 21: 4, 22: 8, 82: 9, 23: 12, 83: 13}
    assert [ranks[0].slots[page] for page in (40, 41, 42, 43)] == [256, 257, 258, 259]
    assert [plan.send_pages for plan in ranks] == [[5, 6, 0, 0], [5, 0, 0, 0], [5, 20, 0, 0], [5, 20, 0, 0]]


def test_tight_block_is_the_fullest_owner() -> None:
    """Tight padding sends only as many pages as the fullest owner has."""
    shared = [20, 21, 22, 23, 24]
    ranks = plans([shared[:3], shared[:5], [82, 83]], [[], [], []], "tight")
    assert [plan.send_pages for plan in ranks] == [[5, 6], [5, 0], [5, 20], [5, 20]]


def test_send_order_is_by_local_page() -> None:
    """A page reused out of order is sent by its local page, not by its position."""
    ranks = plans([[36, 21, 22, 23, 12]], [[]])
    assert ranks[0].send_pages == [3, 9]
    assert (ranks[0].slots[12], ranks[0].slots[36]) == (0, 1)


def test_no_prefix() -> None:
    """Without any prefix page nothing is sent."""
    ranks = plans([[], []], [[4], [5, 6]])
    assert [(plan.block, plan.send_pages) for plan in ranks] == [(0, [])] * 4
    assert ranks[0].slots == {4: 256, 5: 257, 6: 258}


@pytest.mark.parametrize(
    ("lengths", "pages"), [([7], 8), ([3, 5, 2], 16), ([1] * 8, 32), ([2048], 2048), ([2047, 1], 2052)]
)
def test_padding_cost(lengths: list[int], pages: int) -> None:
    """per_request padding rounds every request up to the ranks."""
    assert 4 * block_pages([chain(0, length) for length in lengths], FOUR, "per_request") == pages


@pytest.mark.parametrize(("shards", "requests_max"), [(4, 128), (8, 64)])
@pytest.mark.parametrize("pages", ["1", "N"])
def test_tiny_prefixes_exhaust_scratch(shards: int, requests_max: int, pages: str) -> None:
    """At context 4096 and page size 64 the prefix region holds 128 requests of 1..N pages at N=4, and 64 at N=8."""
    placement = Placement(shards, 64)
    scratch = ScratchSize.sized(placement, 4096, 64)
    length = 1 if pages == "1" else shards
    prefixes = [chain(0, length, local_page=1 + index, shards=shards) for index in range(requests_max + 1)]
    fits = plan_gather(placement, 0, prefixes[:-1], [], scratch, "per_request")
    assert fits.block * shards == scratch.prefix_pages
    with pytest.raises(ScratchOverflowError, match=rf"{(requests_max + 1) * shards} pages of the prefix region"):
        plan_gather(placement, 0, prefixes, [], scratch, "per_request")


def test_tight_padding_lifts_the_tiny_prefix_limit() -> None:
    """Spread over the owners, tight padding fills scratch with pages only."""
    placement = Placement(4, 64)
    scratch = ScratchSize.sized(placement, 4096, 64)
    prefixes = [[4 + index] for index in range(512)]
    assert plan_gather(placement, 0, prefixes, [], scratch, "tight").block * 4 == 512
    with pytest.raises(ScratchOverflowError, match="516 pages of the prefix region of scratch, which has 512"):
        plan_gather(placement, 0, [*prefixes, [516]], [], scratch, "tight")


def test_chunk_overflow() -> None:
    """A chunk beyond its region is an error with both numbers."""
    with pytest.raises(ScratchOverflowError, match="33 pages of the chunk region of scratch, which has 32"):
        plans([[]], [list(range(4, 37))])


@pytest.mark.parametrize("padding", PADDINGS)
def test_cyclic_guard(padding: str) -> None:
    """Swapped prefix pages are an error that names the page."""
    with pytest.raises(CyclicOrderError, match=r"page 1 of the batch's request 1 is page 20 of owner 0.*cyclic"):
        plans([[4], [22, 20, 23]], [[], []], padding)


@pytest.mark.parametrize(
    ("prefixes", "chunks", "match"),
    [
        ([[20, 21]], [[21]], r"chunk pages \[21\]"),
        ([[], []], [[30], [30]], r"chunk pages \[30\]"),
        ([[3, 4]], [[]], "page 3 is in the batch"),
        ([[]], [[0]], "page 0 is in the batch"),
    ],
)
def test_pages_that_no_batch_may_hold(prefixes: list[list[int]], chunks: list[list[int]], match: str) -> None:
    """Reserved pages and chunk pages that are not fresh are errors."""
    with pytest.raises(ForeignPageError, match=match):
        plans(prefixes, chunks)


def test_unknown_padding() -> None:
    """A padding that does not exist is an error that lists those that do."""
    with pytest.raises(GeometryError, match=r"'loose', expected one of \('tight', 'per_request'\)"):
        block_pages([[4]], FOUR, "loose")


@settings(max_examples=150, deadline=None)
@given(
    shards=st.integers(1, 8),
    padding=st.sampled_from(PADDINGS),
    lengths=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=4),
    random=st.randoms(use_true_random=False),
)
def test_every_scratch_page_gets_the_page_it_stands_for(
    shards: int, padding: str, lengths: list[tuple[int, int, int]], random: Random
) -> None:
    """What the ranks send, laid out rank by rank, puts every prefix page where the plan says; chunk pages follow."""
    placement = Placement(shards, 4)
    free = [random.sample(range(1, 65), 64) for _ in range(shards)]

    def draw_chain(base: int, pages: int) -> list[int]:
        return [free[(base + p) % shards].pop() * shards + (base + p) % shards for p in range(pages)]

    prefixes, chunks = [], []
    for prefix, shared, chunk in lengths:
        prefixes.append(draw_chain(random.randrange(shards), prefix))
        prefixes.append(prefixes[-1][:shared])
        chunks += [draw_chain(random.randrange(shards), chunk), []]
    scratch = ScratchSize(4 * 8 * (7 + shards), 4 * 12, 4)
    ranks = plans(prefixes, chunks, padding, scratch, placement)

    gathered = [placement.page_id(rank, local) for rank, plan in enumerate(ranks) for local in plan.send_pages]
    distinct = {page for pages in prefixes for page in pages}
    assert all(gathered[ranks[0].slots[page]] == page for page in distinct)
    fresh = [page for pages in chunks for page in pages]
    assert [ranks[0].slots[page] for page in fresh] == [scratch.prefix_pages + j for j in range(len(fresh))]
    assert len(set(ranks[0].slots.values())) == len(distinct) + len(fresh)
    assert all(len(plan.send_pages) == plan.block == ranks[0].block for plan in ranks)
    assert block_pages(prefixes, placement, "tight") <= block_pages(prefixes, placement, "per_request")

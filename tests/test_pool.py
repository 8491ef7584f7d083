from __future__ import annotations

import pytest
import torch

from ci.register import register_cpu_ci
from kvshard_ref.allocator import PageAllocator
from kvshard_ref.components import Component, total_row_bytes
from kvshard_ref.errors import ForeignPageError, GeometryError
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool

register_cpu_ci(est_time=10, stage="commit")

COMPONENTS = (
    Component("kv", 3, torch.int64),
    Component("index_keys", 5, torch.uint8),
    Component("index_scales", 1, torch.float32),
)


def pool_of(rank: int = 0, shards: int = 4, ps: int = 4, pages: int = 6, layers: int = 2) -> ShardPool:
    return ShardPool(rank, Placement(shards, ps), pages, layers, COMPONENTS)


def write(pool: ShardPool, layer: int, component: str, locs: torch.Tensor, rows: torch.Tensor) -> int:
    return pool.write(layer, component, pool.owned(locs.numpy()), rows)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_planned_bytes_are_allocated(shards: int) -> None:
    """The bytes promised before construction are the bytes that the tensors take."""
    placement = Placement(shards, 16)
    planned = ShardPool.planned_bytes(placement, 7, 3, COMPONENTS)
    assert planned == (7 + 1) * 16 * 3 * (24 + 5 + 4)
    assert ShardPool(shards - 1, placement, 7, 3, COMPONENTS).bytes == planned


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_last_location_is_inside_every_buffer(shards: int) -> None:
    """The last location the allocator can give fits its owner's buffers exactly, in rows and in bytes."""
    placement = Placement(shards, 4)
    allocator = PageAllocator(placement, 6)
    last_page = max(page for pages in allocator.free_pages() for page in pages)
    last_loc = placement.page_locs(last_page)[-1]
    for rank in range(shards):
        pool = ShardPool(rank, placement, 6, 2, COMPONENTS)
        written = write(pool, 1, "kv", torch.tensor([last_loc]), torch.full((1, 3), 9))
        assert written == (rank == placement.owner(last_loc))
        assert pool.rows == placement.local_row(last_loc) + 1
        for component in COMPONENTS:
            end = placement.byte_offset(last_loc, component.row_bytes) + component.row_bytes
            assert pool.rows_of(1, component.name).rows.nbytes == end
        assert int(pool.rows_of(1, "kv").rows[-1, 0]) == 9 * written


def test_each_rank_writes_exactly_its_own_rows() -> None:
    """Of one chunk every location is stored once, by its owner, and no other row of any rank changes."""
    placement = Placement(4, 4)
    locs = torch.tensor([loc for page in (11, 12, 6, 25) for loc in placement.page_locs(page)][:-1])
    rows = torch.arange(1, len(locs) * 3 + 1).view(-1, 3)
    total = 0
    for rank in range(4):
        pool = pool_of(rank)
        total += write(pool, 0, "kv", locs, rows)
        expected = torch.zeros(pool.rows, 3, dtype=torch.int64)
        for loc, row in zip(locs.tolist(), rows, strict=True):
            if placement.owner(loc) == rank:
                expected[placement.local_row(loc)] = row
        assert pool.rows_of(0, "kv").rows.tolist() == expected.tolist()
        assert pool.rows_of(1, "kv").rows.count_nonzero() == 0
        assert pool.rows_of(0, "index_keys").rows.count_nonzero() == 0
        assert pool.written_rows == int(expected[:, 0].count_nonzero())
    assert total == len(locs)


def test_locations_changed_in_place_are_filtered_again() -> None:
    """The owner filter keeps nothing of an earlier content of the same tensor."""
    pool = pool_of(rank=1)
    locs = torch.tensor([20, 21])  # page 5, owner 1
    assert write(pool, 0, "kv", locs, torch.ones(2, 3, dtype=torch.int64)) == 2
    locs += 4
    assert write(pool, 0, "kv", locs, torch.ones(2, 3, dtype=torch.int64)) == 0


def test_int32_locations() -> None:
    """Narrow locations address the same rows."""
    pool = pool_of(rank=1)
    assert write(pool, 0, "kv", torch.tensor([20, 23], dtype=torch.int32), torch.full((2, 3), 7)) == 2
    assert torch.nonzero(pool.rows_of(0, "kv").rows[:, 0]).flatten().tolist() == [4, 7]


def test_pages_are_the_memory_of_the_rows() -> None:
    """A page of the pool holds its rows one after the other, and what is written to it is read from them."""
    pool = pool_of(ps=2, pages=3)
    buffer, pages = pool.rows_of(1, "kv").rows, pool.pages(1, "kv")
    pages.copy_(torch.arange(pages.numel()).view_as(pages))
    assert [[12, 13, 14], [15, 16, 17]] == buffer[4:6].tolist()
    assert pages.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("loc", [-1, 4 * 7 * 4])
def test_foreign_locations(loc: int) -> None:
    """A location outside the pool is an error on every rank, not a write elsewhere."""
    for rank in range(4):
        with pytest.raises(ForeignPageError, match="expected 0 <= loc < 112"):
            write(pool_of(rank), 0, "kv", torch.tensor([16, loc]), torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(("rank", "pages", "layers"), [(4, 6, 2), (-1, 6, 2), (0, 0, 2), (0, 6, 0)])
def test_impossible_shapes(rank: int, pages: int, layers: int) -> None:
    """A pool without pages or layers, or of a rank outside the group, is an error."""
    with pytest.raises(GeometryError, match="expected"):
        pool_of(rank, pages=pages, layers=layers)


@pytest.mark.parametrize("names", [[], ["kv", "kv"]])
def test_component_names_are_distinct(names: list[str]) -> None:
    """Components need distinct names, and there is at least one."""
    with pytest.raises(GeometryError, match="own name"):
        ShardPool(0, Placement(1, 1), 1, 1, [Component(name, 1, torch.int8) for name in names])


def test_component_needs_a_width() -> None:
    """A component without a name or of width 0 is an error."""
    with pytest.raises(GeometryError, match="width=0"):
        Component("kv", 0, torch.int8)
    assert total_row_bytes(COMPONENTS) == 33

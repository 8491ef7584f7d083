from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ci.register import register_cpu_ci
from kvshard_ref.errors import GeometryError
from kvshard_ref.placement import Placement

register_cpu_ci(est_time=10, stage="commit")

GEOMETRIES = [(1, 4), (2, 16), (3, 5), (4, 64), (8, 16)]


@pytest.mark.parametrize(
    ("loc", "page", "owner", "local_row"),
    [
        (0, 0, 0, 0),
        (63, 0, 0, 63),
        (64, 1, 1, 0),
        (255, 3, 3, 63),
        (256, 4, 0, 64),
        (300, 4, 0, 108),
        (511, 7, 3, 127),
        (512, 8, 0, 128),
    ],
)
def test_worked_examples(loc: int, page: int, owner: int, local_row: int) -> None:
    """At N=4, ps=64 the locations next to page and group borders have the owners and rows worked out by hand."""
    place = Placement(4, 64)
    assert (page, owner, local_row) == (place.page(loc), place.owner(loc), place.local_row(loc))
    assert loc == place.loc(owner, local_row)
    assert (owner, local_row // 64) == (place.page_owner(page), place.local_page(page))
    assert page == place.page_id(owner, local_row // 64)
    assert loc in place.page_locs(page)


@pytest.mark.parametrize(("shards", "page_size"), GEOMETRIES)
def test_round_trip(shards: int, page_size: int) -> None:
    """Locations survive the trip to (owner, local row) and back, over 37 groups and a partial one."""
    place = Placement(shards, page_size)
    locs = torch.arange(37 * shards * page_size + 5)
    assert torch.equal(locs, place.loc(place.owner(locs), place.local_row(locs)))
    ints = [place.loc(place.owner(loc), place.local_row(loc)) for loc in locs.tolist()]
    assert locs.tolist() == ints
    pages = np.arange(37 * shards + 1)
    np.testing.assert_array_equal(pages, place.page_id(place.page_owner(pages), place.local_page(pages)))


@pytest.mark.parametrize(("shards", "page_size"), GEOMETRIES)
def test_equal_disjoint_parts(shards: int, page_size: int) -> None:
    """Whole groups fall into N equal parts with the same local rows on all ranks; rank r owns [r*ps, (r+1)*ps)."""
    place = Placement(shards, page_size)
    span = shards * page_size
    locs = torch.arange(3 * span, 10 * span)
    rows = [place.local_row(locs[place.owner(locs) == rank]) for rank in range(shards)]
    assert [list(range(3 * page_size, 10 * page_size))] * shards == [each.tolist() for each in rows]
    for rank in range(shards):
        owned = locs[place.owner(locs) == rank] - 3 * span
        expected = [group * span + rank * page_size + offset for group in range(7) for offset in range(page_size)]
        assert expected == owned.tolist()


@pytest.mark.parametrize("row_bytes", [1, 656, 1152, 65536])
def test_byte_offset_is_exact_around_powers_of_two(row_bytes: int) -> None:
    """Byte offsets equal unbounded integers around 2**31 and 2**32, for ints, int32 and int64 tensors and arrays."""
    shards, ps = 4, 64
    place = Placement(shards, ps)
    locs = sorted(
        {
            near // row_bytes * shards + step
            for near in (2**31, 2**32, 2**33)
            for step in range(-2 * shards * ps, 2 * shards * ps, 37)
            if near // row_bytes * shards < 2**31 - 4 * shards * ps
        }
    )
    if row_bytes == 1:
        locs = list(range(2**31 - 300, 2**31, 7))
    expected = [(loc // (shards * ps) * ps + loc % ps) * row_bytes for loc in locs]
    assert row_bytes == 1 or max(expected) > 2**32 > 2**31 > min(expected)
    assert expected == [place.byte_offset(loc, row_bytes) for loc in locs]
    for dtype in (torch.int32, torch.int64):
        assert expected == place.byte_offset(torch.tensor(locs, dtype=dtype), row_bytes).tolist()
    for array in (np.array(locs, np.int32), np.array(locs, np.int64)):
        scalars: list[Any] = list(array)
        assert expected == place.byte_offset(array, row_bytes).tolist()
        assert expected == [place.byte_offset(loc, row_bytes) for loc in scalars]


def test_narrow_inputs_are_widened_everywhere() -> None:
    """int32 owners, rows and pages give 64-bit results: page ids and locations beyond 2**31 do not wrap."""
    place = Placement(8, 64)
    rows = torch.tensor([2**30, 2**31 - 1], dtype=torch.int32)
    owners = torch.tensor([7, 7], dtype=torch.int32)
    expected = [(row // 64 * 8 + 7) * 64 + row % 64 for row in (2**30, 2**31 - 1)]
    assert expected == place.loc(owners, rows).tolist()
    assert [8 * (2**31 - 1) + 7] == place.page_id(owners[:1], rows[1:]).tolist()


def test_locations_beyond_32_bits() -> None:
    """A location beyond 2**32 has the same owner and row as an int and as an int64 tensor."""
    place = Placement(3, 16)
    locs = [2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5, 2**40 + 11]
    assert [loc // 16 % 3 for loc in locs] == place.owner(torch.tensor(locs)).tolist()
    assert [place.local_row(loc) for loc in locs] == place.local_row(torch.tensor(locs)).tolist()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_class_counts(shards: int) -> None:
    """class_counts counts the owners of a cyclic run page by page, for every start and length."""
    place = Placement(shards, 16)
    for start in range(2 * shards):
        for pages in range(3 * shards + 2):
            owners = [(start + position) % shards for position in range(pages)]
            assert [owners.count(owner) for owner in range(shards)] == place.class_counts(start, pages)


def test_bad_geometry_is_named() -> None:
    """A placement without ranks or tokens, a negative run and locations that are no integers are refused by name."""
    with pytest.raises(GeometryError, match=r"Placement\(shards=0, page_size=16\).*at least 1"):
        Placement(0, 16)
    with pytest.raises(GeometryError, match="-1 pages, expected 0 or more"):
        Placement(2, 16).class_counts(0, -1)
    with pytest.raises(GeometryError, match=r"float32.*expected integers"):
        Placement(2, 16).owner(torch.tensor([1.0]))
    with pytest.raises(GeometryError, match=r"float64.*expected integers"):
        Placement(2, 16).owner(np.array([1.0]))


def test_pages_of_a_transfer_are_paired_by_position_then_split_by_owner() -> None:
    """Pages [4, 9, 12] for [70, 71, 72] at N=4: rank 0 has (1, 70) and (3, 72), rank 1 (2, 71), the others nothing."""
    place = Placement(4, 64)
    pairs = list(zip([4, 9, 12], [70, 71, 72], strict=True))
    shares = [
        [(place.local_page(page), there) for page, there in pairs if place.page_owner(page) == rank]
        for rank in range(4)
    ]
    assert [[(1, 70), (3, 72)], [(2, 71)], [], []] == shares

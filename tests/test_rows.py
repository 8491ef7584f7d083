from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from kvshard_ref.components import Component
from kvshard_ref.errors import GeometryError
from kvshard_ref.rows import RowBuffer

register_cpu_ci(est_time=10, stage="commit")

TOKEN_MAJOR = Component("kv", 5, torch.uint8)
PAGE_MAJOR = Component("index", 5, torch.uint8, scales=2)


def numbered(component: Component, pages: int = 4, page_size: int = 3) -> RowBuffer:
    """Row r holds 10 * r + column."""
    buffer = RowBuffer(component, pages, page_size, "cpu")
    rows = torch.arange(pages * page_size)
    values = (10 * rows.unsqueeze(1) + torch.arange(component.width)).to(torch.uint8)
    buffer.put(rows, values)
    return buffer


def test_page_major_memory() -> None:
    """A page-major page holds the keys of all its tokens, then the scales of all its tokens."""
    page = numbered(PAGE_MAJOR).pages[1].tolist()
    assert [30, 31, 32, 40, 41, 42, 50, 51, 52, 33, 34, 43, 44, 53, 54] == page


def test_token_major_memory() -> None:
    """A token-major page holds one whole row after the other."""
    page = numbered(TOKEN_MAJOR).pages[1].tolist()
    assert [30, 31, 32, 33, 34, 40, 41, 42, 43, 44, 50, 51, 52, 53, 54] == page


@pytest.mark.parametrize("component", [TOKEN_MAJOR, PAGE_MAJOR], ids=["token-major", "page-major"])
@given(rows=st.lists(st.integers(0, 11), max_size=8))
def test_rows_come_back(component: Component, rows: list[int]) -> None:
    """Any rows are read as they were written, in the order asked for, repeated ones included."""
    buffer = numbered(component)
    expected = [[10 * row + column for column in range(5)] for row in rows]
    index = torch.tensor(rows, dtype=torch.int64)
    assert expected == buffer.take(index).tolist()
    out = torch.zeros(len(rows), 5, dtype=torch.uint8)
    assert expected == buffer.take(index, out).tolist() == out.tolist()
    assert expected == buffer.rows[index].tolist()


@pytest.mark.parametrize("component", [TOKEN_MAJOR, PAGE_MAJOR], ids=["token-major", "page-major"])
def test_pages_move_whole(component: Component) -> None:
    """Rows read the same after their page was moved to another place of another buffer."""
    source, target = numbered(component), RowBuffer(component, 6, 3, "cpu")
    moved = source.take_pages(torch.tensor([3, 1]))
    target.put_pages(torch.tensor([0, 5]), moved)
    rows = torch.tensor([9, 10, 11, 3, 4, 5])
    assert source.take(rows).tolist() == target.take(torch.tensor([0, 1, 2, 15, 16, 17])).tolist()
    assert [0] * 15 == target.pages[1].tolist()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("scales", [0, 1])
def test_any_dtype(dtype: torch.dtype, scales: int) -> None:
    """Rows of every dtype come back bit by bit."""
    values = torch.arange(6 * 4, dtype=torch.int32).view(6, 4).to(dtype)
    buffer = RowBuffer(Component("kv", 4, dtype, scales), 2, 3, "cpu")
    buffer.put(torch.arange(6), values)
    assert values.view(torch.uint8).tolist() == buffer.take(torch.arange(6)).view(torch.uint8).tolist()
    assert values.view(torch.uint8).tolist() == buffer.rows.view(torch.uint8).tolist()


@pytest.mark.parametrize("scales", [-1, 5, 6])
def test_scales_leave_keys(scales: int) -> None:
    """A row has at least one key element."""
    with pytest.raises(GeometryError, match=f"scales={scales}"):
        Component("index", 5, torch.uint8, scales=scales)

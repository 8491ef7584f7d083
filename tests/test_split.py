from __future__ import annotations

import pytest
import torch

from ci.register import register_cpu_ci
from kvshard_ref.split import padded, places, restore, share

register_cpu_ci(est_time=10, stage="commit")


def gathered_shares(rows: torch.Tensor, size: int, split: str) -> torch.Tensor:
    return torch.cat([share(rows, rank, size, split) for rank in range(size)])


@pytest.mark.parametrize("split", ["interleave", "zigzag"])
@pytest.mark.parametrize("size", range(1, 9))
def test_restore_of_all_shares_is_the_identity(size: int, split: str) -> None:
    """Split, gather and restore give back every token in order, for all lengths up to 4N."""
    for count in range(1, 4 * size + 1):
        rows = torch.arange(2 * count).view(count, 2)
        assert restore(gathered_shares(rows, size, split), count, size, split).tolist() == rows.tolist()


@pytest.mark.parametrize("split", ["interleave", "zigzag"])
@pytest.mark.parametrize("size", range(1, 9))
def test_places_are_the_tokens_of_a_share(size: int, split: str) -> None:
    """A share is the rows of its places, then padding; together the ranks have every token once."""
    for count in range(1, 4 * size + 1):
        rows = torch.arange(1, count + 1).view(count, 1)
        mine = [list(places(count, rank, size, split)) for rank in range(size)]
        missing = [padded(count, size, split) - len(each) for each in mine]
        expected = [[at + 1 for at in each] + [0] * more for each, more in zip(mine, missing, strict=True)]
        assert [share(rows, rank, size, split).flatten().tolist() for rank in range(size)] == expected
        assert sorted(at for each in mine for at in each) == list(range(count))


def test_zigzag() -> None:
    """Rank r has blocks r and 2N - 1 - r of 2N; a block is the same number of tokens, the last ones may be short."""
    rows = torch.arange(7).view(7, 1)
    expected = [[0, 1, 0, 0], [2, 3, 0, 0], [4, 5, 6, 0]]
    assert [share(rows, rank, 3, "zigzag").flatten().tolist() for rank in range(3)] == expected


def test_whole() -> None:
    """In tensor parallel prefill every rank has every token."""
    rows = torch.arange(7).view(7, 1)
    assert [share(rows, rank, 3, "whole").flatten().tolist() for rank in range(3)] == [list(range(7))] * 3


@pytest.mark.parametrize(("count", "padded"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_shares_are_equal_and_padded(count: int, padded: int) -> None:
    """Every rank contributes the same number of rows, also with an empty share."""
    rows = torch.ones(count, 3, dtype=torch.int64)
    assert [tuple(share(rows, rank, 4).shape) for rank in range(4)] == [(padded, 3)] * 4


def test_interleaving() -> None:
    """Token i belongs to rank i mod N."""
    rows = torch.arange(7).view(7, 1)
    assert [share(rows, rank, 3).flatten().tolist() for rank in range(3)] == [[0, 3, 6], [1, 4, 0], [2, 5, 0]]


def test_only_the_own_share_is_read() -> None:
    """Rows of other ranks do not leak into a share."""
    rows = torch.arange(8).view(8, 1)
    poisoned = rows.clone()
    poisoned[torch.arange(8) % 4 != 2] = -1
    assert share(poisoned, 2, 4).tolist() == share(rows, 2, 4).tolist()


def test_all_layers_at_once() -> None:
    """A share of [layers, count, width] is the share of each layer."""
    rows = torch.arange(2 * 5 * 3).view(2, 5, 3)
    for rank in range(4):
        assert share(rows, rank, 4).tolist() == [share(rows[layer], rank, 4).tolist() for layer in range(2)]

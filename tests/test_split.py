from __future__ import annotations

import pytest
import torch

from kvshard_ref.split import restore, share


def gathered_shares(rows: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([share(rows, rank, size) for rank in range(size)])


@pytest.mark.parametrize("size", range(1, 9))
def test_restore_of_all_shares_is_the_identity(size: int) -> None:
    """Split, gather and restore give back every token in order, for all lengths up to 4N."""
    for count in range(1, 4 * size + 1):
        rows = torch.arange(2 * count).view(count, 2)
        assert restore(gathered_shares(rows, size), count, size).tolist() == rows.tolist()


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

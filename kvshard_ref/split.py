"""Split: the ranks of a group compute a chunk's tokens together (context parallel prefill), each its share.

The schemes, for 3 ranks and 7 tokens; every share is padded to the longest one::

    interleave   rank 0  0 3 6      zigzag  rank 0  0 1 .  .      6 blocks of 2 tokens: rank r has blocks r and 5 - r,
                 rank 1  1 4 .              rank 1  2 3 .  .      so that early and late tokens, which read little and
                 rank 2  2 5 .              rank 2  4 5 6  .      much, are mixed
    whole        every rank computes all tokens, as in tensor parallel prefill: nothing is exchanged

Every rank takes part, also with an empty share, because the exchange is a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SPLITS = ("interleave", "zigzag", "whole")


def places(count: int, rank: int, size: int, split: str) -> Sequence[int]:
    """The tokens of a chunk of `count` that are this rank's, ascending."""
    if split == "zigzag":
        block = -(-count // (2 * size))
        firsts = (rank * block, (2 * size - 1 - rank) * block)
        return [at for first in firsts for at in range(min(first, count), min(first + block, count))]
    return range(rank, count, size) if split == "interleave" else range(count)


def padded(count: int, size: int, split: str) -> int:
    """Rows of every rank's share."""
    if split == "zigzag":
        return 2 * -(-count // (2 * size))
    return -(-count // size) if split == "interleave" else count


def share(rows: torch.Tensor, rank: int, size: int, split: str = "interleave") -> torch.Tensor:
    """Rows [..., count, width] to this rank's padded share [..., padded, width]; reads no other row."""
    count = rows.shape[-2]
    mine = rows[..., rank::size, :] if split == "interleave" else rows[..., places(count, rank, size, split), :]
    missing = padded(count, size, split) - mine.shape[-2]
    return torch.nn.functional.pad(mine, (0, 0, 0, missing)) if missing else mine.contiguous()


def restore(gathered: torch.Tensor, count: int, size: int, split: str = "interleave") -> torch.Tensor:
    """All shares [size * padded, width] in rank order to the chunk's rows [count, width]."""
    shares = gathered.view(size, -1, gathered.shape[1])
    if split == "interleave":
        return shares.transpose(0, 1).flatten(0, 1)[:count]
    early, late = shares.chunk(2, dim=1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)[:count]

"""Split: the ranks of a group compute a chunk's tokens together, token i on rank i mod size (context parallel prefill).

chunk tokens  0 1 2 3 4 5 6         size 3, 7 tokens: every share is padded to 3 rows
rank 0        0 3 6                 gathered  0 3 6 | 1 4 . | 2 5 .
rank 1        1 4 .                 restored  0 1 2 3 4 5 6
rank 2        2 5 .

Every rank takes part, also with an empty share, because the exchange is a collective.
"""

from __future__ import annotations

import torch


def share(rows: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rows [..., count, width] to this rank's padded share [..., ceil(count / size), width]; reads no other row."""
    mine = rows[..., rank::size, :]
    missing = -(-rows.shape[-2] // size) - mine.shape[-2]
    return torch.nn.functional.pad(mine, (0, 0, 0, missing)) if missing else mine.contiguous()


def restore(gathered: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """All shares [size * ceil(count / size), width] in rank order to the chunk's rows [count, width]."""
    return gathered.view(size, -1, gathered.shape[1]).transpose(0, 1).flatten(0, 1)[:count]

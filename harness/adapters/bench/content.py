"""Content: random rows that any rank can make anew, so that what arrived is compared with what was sent."""

from __future__ import annotations

import torch

from kvshard_ref.pool import ShardPool


def pages_of(pool: ShardPool, rank: int, layer: int, seed: int) -> torch.Tensor:
    """The pages [pages_per_rank + 1, elements] of a rank's pool in one layer, any bit pattern, on the pool's device."""
    like = pool.pages(layer, pool.components[0].name)
    generator = torch.Generator(device=pool.device).manual_seed((seed * 4096 + rank) * 4096 + layer)
    bits = torch.randint(-(2**15), 2**15, like.shape, dtype=torch.int16, device=pool.device, generator=generator)
    return bits.view(like.dtype)


def fill(pool: ShardPool, seed: int) -> None:
    """Give a pool its content."""
    for layer in range(pool.layers):
        pool.pages(layer, pool.components[0].name).copy_(pages_of(pool, pool.rank, layer, seed))


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit, also where bits mean NaN."""
    return torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))

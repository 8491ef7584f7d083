"""From logits to tokens and log probabilities. The same on every rank: all have the same logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from kvshard_ref.server.api import Ask, Logprob


def pick(ask: Ask, position: int, logits: Tensor) -> int:
    """The token after `position`, from logits [vocab].

    Above temperature 0 it is drawn with noise that depends on seed and position alone (Gumbel's trick): the same token
    with and without a draft, in any batch, and on any worker.
    """
    if ask.temperature == 0:
        return int(logits.argmax())
    key = hashlib.blake2b(f"{ask.seed} {position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64).clamp_min(1e-300)
    return int((logits.double().cpu() / ask.temperature - (-uniform.log()).log()).argmax())


def logprobs(tokens: Sequence[int], logits: Tensor, top: int) -> list[Logprob]:
    """Of each of tokens [n], from the logits [n, vocab] before it."""
    values = logits.float().log_softmax(dim=-1)
    own = values.gather(1, torch.tensor(tokens, device=values.device)[:, None])[:, 0].tolist()
    best = values.topk(top, dim=-1) if top else None
    tops: list[tuple[tuple[float, int], ...]] = [()] * len(tokens)
    if best is not None:
        tops = [tuple(zip(v, i, strict=True)) for v, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
    return [Logprob(token, value, each) for token, value, each in zip(tokens, own, tops, strict=True)]

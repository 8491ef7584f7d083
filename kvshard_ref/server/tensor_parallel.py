"""Tensor parallel ranks: each computes its part of the heads and of the MLP; sums over the ranks make a layer whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvshard_ref.errors import GeometryError
from kvshard_ref.group import Group
from kvshard_ref.model import Layer, Reduce, TinyModel


def sliced(model: TinyModel, rank: int, size: int) -> TinyModel:
    """The part of `model` that rank computes. Latent rows and the indexer are the same on all ranks.

    Raises GeometryError when heads or MLP do not divide.
    """
    g = model.geometry
    if g.heads % size or g.gate_width % size:
        raise GeometryError(f"tp size {size}: expected a divisor of {g.heads} heads and of gate width {g.gate_width}")
    if size == 1:
        return model
    part = TinyModel(replace(g, heads=g.heads // size, gate_width=g.gate_width // size))
    weights = dict(model.state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, Layer):
            weights |= {f"{name}.{key}": value for key, value in _part(layer, rank, size).items()}
    part.load_state_dict(weights)
    return part.to(next(model.parameters()).device, next(model.parameters()).dtype)


def _part(layer: Layer, rank: int, size: int) -> dict[str, Tensor]:
    attention = layer.attention
    gate, up = layer.gate_up.weight.chunk(2)
    return {
        "attention.query_up.weight": attention.query_up.weight.chunk(size)[rank],
        "attention.key_up": attention.key_up.chunk(size)[rank],
        "attention.value_up": attention.value_up.chunk(size)[rank],
        "attention.out.weight": attention.out.weight.chunk(size, dim=1)[rank],
        "gate_up.weight": torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]]),
        "down.weight": layer.down.weight.chunk(size, dim=1)[rank],
    }


def summed(group: Group) -> Reduce | None:
    """Adds up the parts of all ranks, in rank order, so that every rank has the same bits; None for one rank."""
    if group.size == 1:
        return None

    def reduce(part: Tensor) -> Tensor:
        flat = part.reshape(-1, part.shape[-1])
        gathered = flat.new_empty(group.size * flat.shape[0], flat.shape[1])
        group.all_gather(gathered, flat.contiguous())
        return gathered.view(group.size, *part.shape).sum(dim=0)

    return reduce

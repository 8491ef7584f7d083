"""Exact memory of an access: which bytes of a storage, as runs of equal length.

A run is a row where whole rows are touched, and an element where it must be; so shadow cells can be as coarse as the
program allows and still be exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints: TypeAlias = npt.NDArray[np.int64]

# taken before a simulated device replaces the method to see host reads
_numpy = torch.Tensor.numpy


class Block(NamedTuple):
    """Bytes [start, start + run) of a storage."""

    start: int
    run: int


class Runs(NamedTuple):
    """Bytes [s, s + run) for every s of `starts`, in any order, repeats allowed. `grain` divides all starts and run."""

    starts: Ints
    run: int
    grain: int


Cells: TypeAlias = Block | Runs


def values(tensor: Tensor) -> Ints:
    """The integers of an index tensor, in its shape; booleans as 0 and 1."""
    array: Ints = _numpy(tensor.detach()).astype(np.int64, copy=False)
    return array


def extent(tensor: Tensor) -> Cells:
    """The elements of a strided tensor."""
    item = tensor.element_size()
    start = int(tensor.storage_offset()) * item
    if tensor.is_contiguous():
        return Block(start, tensor.numel() * item)
    return spread(start, zip(tensor.shape, tensor.stride(), strict=True), item)


def spread(start: int, dims: Iterable[tuple[int, int]], item: int) -> Cells:
    """The elements of `item` bytes from byte `start` along (size, stride in elements) per dimension, in any order."""
    run = item
    rest: list[tuple[int, int]] = []  # (size, stride in bytes)
    for stride, size in sorted((stride * item, size) for size, stride in dims if size != 1 and stride):
        if stride == run and not rest:
            run *= size
        else:
            rest.append((size, stride))
    if not rest:
        return Block(start, run)
    starts = np.full(1, start, np.int64)
    for size, stride in rest:
        starts = np.add.outer(np.arange(0, size * stride, stride, dtype=np.int64), starts).reshape(-1)
    return Runs(starts, run, gcd(start, run, *[stride for _, stride in rest]))


def shifted(cells: Cells, offsets: Ints, grain: int) -> Cells:
    """The cells moved by each of `offsets` (bytes, any shape, all multiples of `grain`)."""
    flat = offsets.reshape(-1)
    if isinstance(cells, Block):
        return Runs(flat + cells.start, cells.run, gcd(cells.start, cells.run, grain))
    return Runs(np.add.outer(flat, cells.starts).reshape(-1), cells.run, gcd(cells.grain, grain))


def rows(tensor: Tensor, dim: int, index: Tensor) -> Cells:
    """What `index_select`, `index_copy_` and the like touch of `tensor`: the slices `index` along `dim`."""
    if not tensor.dim():
        return extent(tensor)
    item, dims = tensor.element_size(), list(zip(tensor.shape, tensor.stride(), strict=True))
    stride = dims.pop(dim % len(dims))[1] * item
    return shifted(spread(int(tensor.storage_offset()) * item, dims, item), values(index) * stride, stride)


def at(tensor: Tensor, indices: Sequence[Tensor | None]) -> Cells:
    """What `tensor[indices]` touches: integer tensors that broadcast, masks, None for a whole dimension."""
    item, sizes, strides = tensor.element_size(), tensor.shape, tensor.stride()
    offsets: Ints = np.zeros((), np.int64)
    grain, taken, dim = 0, set(), 0
    for index in indices:
        if index is None:
            dim += 1
            continue
        array = values(index)
        mask = index.dtype in {torch.bool, torch.uint8}
        if mask and not index.dim():
            return extent(tensor)
        for column in np.nonzero(array) if mask else (array,):
            stride, size = strides[dim] * item, sizes[dim]
            offsets = offsets + np.where(column < 0, column + size, column) * stride
            grain = gcd(grain, stride)
            taken.add(dim)
            dim += 1
    rest = [(sizes[other], strides[other]) for other in range(len(sizes)) if other not in taken]
    return shifted(spread(int(tensor.storage_offset()) * item, rest, item), offsets, grain)


def along(tensor: Tensor, dim: int, index: Tensor) -> Cells:
    """What `gather` and `scatter_` touch: at each position of `index`, the element it names along `dim`."""
    if not tensor.dim() or not index.dim():
        return extent(tensor)
    dim, item = dim % tensor.dim(), tensor.element_size()
    offsets = values(index) * (tensor.stride(dim) * item)
    grain = gcd(*[stride * item for stride in tensor.stride()])
    for other, size in enumerate(index.shape):
        if other != dim:
            shape = [1] * index.dim()
            shape[other] = size
            offsets = offsets + np.arange(size, dtype=np.int64).reshape(shape) * (tensor.stride(other) * item)
    return shifted(Block(int(tensor.storage_offset()) * item, item), offsets, grain)


def flat(tensor: Tensor, index: Tensor) -> Cells:
    """What `take` and `put_` touch: elements by their position in the flattened tensor."""
    positions = values(index).reshape(-1)
    positions = np.where(positions < 0, positions + tensor.numel(), positions)
    item = tensor.element_size()
    offsets, grain = np.zeros(len(positions), np.int64), 0
    for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
        offsets += positions % size * (stride * item)
        positions = positions // size
        grain = gcd(grain, stride * item)
    return shifted(Block(int(tensor.storage_offset()) * item, item), offsets, grain)


def where(tensor: Tensor, mask: Tensor) -> Cells:
    """What `masked_fill_` touches: the elements where the mask, broadcast to the tensor, is true."""
    return at(tensor, [mask.expand(tensor.shape)])


def corner(tensor: Tensor, shape: Sequence[int]) -> Cells:
    """The elements below `shape`: `scatter_` reads no more of its source than its index covers."""
    item = tensor.element_size()
    return spread(int(tensor.storage_offset()) * item, zip(shape, tensor.stride(), strict=True), item)


def spans(starts: Ints) -> list[tuple[int, int]]:
    """Sorted integers as half-open intervals [first, end)."""
    if not len(starts):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(starts) > 1) + 1).tolist(), len(starts)]
    return [(int(starts[first]), int(starts[end - 1]) + 1) for first, end in pairwise(cuts)]

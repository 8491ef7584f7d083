"""Which memory is the host's: all tensors are on the CPU, so it is a mark on their storage."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness.sim.defer import tensors_in

MARK = "kvshard_host"


def mark_host(tensor: Tensor, *, pinned: bool) -> Tensor:
    """The tensor, whose memory is the host's from now on."""
    setattr(tensor.untyped_storage(), MARK, pinned)
    return tensor


def is_host(tensor: Tensor) -> bool:
    """Whether the tensor's memory is marked as the host's."""
    return getattr(tensor.untyped_storage(), MARK, None) is not None


def is_pinned(tensor: Tensor) -> bool:
    """Whether the tensor's memory is marked as the host's and pinned."""
    return getattr(tensor.untyped_storage(), MARK, False) is True


def places(args: Any, kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Whether any of the arguments' tensors is in host memory, and whether any is in device memory."""
    found = {is_host(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
    return True in found, False in found


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    first, second = (tensor.untyped_storage()._cdata for tensor in (one, other))  # noqa: SLF001 - a storage's identity
    return bool(first == second)

"""A shard group within one process: ranks are threads that run one at a time, in a fixed order (see `harness.ring`).

The n-th collective of every rank is known before it happens: a difference is an error that names both sides, where real
ranks would hang.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from harness import ring
from harness.ring import CollectiveMismatch, LockstepMisuseError, Post, RankStuck, Ring

__all__ = ["CollectiveMismatch", "Lockstep", "LockstepGroup", "LockstepMisuseError", "RankStuck"]

T = TypeVar("T")


class LockstepGroup:
    """One rank's end of the shard group: rank, size, collectives, and the log of the collectives it made."""

    def __init__(self, ring: Ring, rank: int, size: int) -> None:
        self._ring = ring
        self.rank = rank
        self.size = size
        self.log: list[str] = []

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Copy the `part` [n, ...] of rank r, for every rank r, into rows [r*n, (r+1)*n) of every rank's `out`.

        Both are contiguous. `part` may be this rank's own block of its `out`; any other overlap, dtype or shape is a
        `LockstepMisuseError`, raised by `run` after all ranks brought the same shapes.
        """
        self.log.append(f"all_gather {_shape(out)}")
        signature = ("out", out.dtype, tuple(out.shape), "part", part.dtype, tuple(part.shape))
        self.meet("all_gather", signature, (out, part), _gather)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The elementwise minimum over the ranks; every rank gives the same number of values."""
        self.log.append(f"minimum int64[{len(values)}]")
        return list(self.meet("minimum", ("values", len(values)), list(values), _minimum))

    def meet(
        self,
        kind: str,
        signature: tuple[object, ...],
        payload: Any,
        complete: Callable[[list[Any]], T],
    ) -> T:
        """The collective under all others: `complete` gets the payloads in rank order, once; all ranks get its result.

        `kind` and `signature` must be equal on all ranks. A simulated device builds its own collectives on this.
        """
        result: T = self._ring.meet(self.rank, Post(kind, signature, payload, complete, _call_site()))
        return result


class Lockstep:
    """A shard group of `ranks` ranks within this process.

    `groups[r]` is the group object of rank r and stays the same for all runs. Threads start at the first run and end
    with `close()`. Objects share nothing, so several can be in use at once.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            msg = f"Lockstep(ranks={ranks}): a shard group has at least 1 rank; pass the number of ranks to simulate"
            raise LockstepMisuseError(msg)
        self._ring = Ring(ranks)
        self.groups = [LockstepGroup(self._ring, rank, ranks) for rank in range(ranks)]

    @property
    def usable(self) -> bool:
        """Whether another run is possible: not after `close`, nor when a rank was left behind stuck."""
        return not self._ring.closed

    def run(self, program: Callable[[int, LockstepGroup], T], seconds_max: float | None = None) -> list[T]:
        """Run `program(rank, group)` on every rank and return the results in rank order.

        The caller's grad and inference modes hold in all ranks; other thread-local modes, such as a
        `TorchDispatchMode`, are entered by the program. An exception of a program is raised here, that of the lowest
        rank first; if another rank waits in a collective meanwhile it is a `CollectiveMismatch` from that exception.
        A run longer than `seconds_max` is a `RankStuck` that names rank and place. Either way all ranks are unwound,
        and the next run starts afresh.
        """
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def job(rank: int) -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return program(rank, self.groups[rank])

        return self._ring.run(job, seconds_max)

    def close(self) -> None:
        """End the threads. Ranks that still run are released at their next collective. May be called again."""
        self._ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _gather(payloads: list[tuple[Tensor, Tensor]]) -> None:
    size = len(payloads)
    for rank, (out, part) in enumerate(payloads):
        wrong = _unfit(rank, size, out, part)
        if wrong:
            msg = f"all_gather on rank {rank} of {size}: out {_shape(out)}, part {_shape(part)}: {wrong}"
            raise LockstepMisuseError(msg)
    # inference mode may write into normal and into inference tensors alike, whatever mode the ranks are in
    with torch.inference_mode():
        gathered = torch.cat([part for _, part in payloads])
        for out, _ in payloads:
            out.copy_(gathered)


def _unfit(rank: int, size: int, out: Tensor, part: Tensor) -> str | None:
    if not part.dim() or out.shape != (size * part.shape[0], *part.shape[1:]) or out.dtype != part.dtype:
        return f"out must have the dtype and width of a part [n, ...] and {size}*n rows"
    if not (out.is_contiguous() and part.is_contiguous()):
        return f"strides {out.stride()} and {part.stride()}: both must be contiguous, call .contiguous() first"
    if not part.numel() or out.untyped_storage().data_ptr() != part.untyped_storage().data_ptr():
        return None
    # bytes from the first of out: out = [0, size*length), its block r = [r*length, (r+1)*length),
    # part = [start, start+length), which is this rank's block or lies outside of out
    length = part.numel() * part.element_size()
    start = part.data_ptr() - out.data_ptr()
    if start == rank * length or start <= -length or start >= size * length:
        return None
    return f"part overlaps out from byte {start}; only this rank's own block, at byte {rank * length}, may be shared"


def _minimum(payloads: list[list[int]]) -> list[int]:
    return [min(values) for values in zip(*payloads, strict=True)]


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def _call_site() -> tuple[str, int]:
    """File and line of the nearest frame outside of the lockstep."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in {__file__, ring.__file__}:
        frame = frame.f_back
    return ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)

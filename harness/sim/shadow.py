"""Shadow cells of one storage: the last write of each cell, and the last read of each cell by each line.

Memory that is always used whole needs no cells: one tick per line says it all. Cells come with the first partial
access, as coarse as it allows, and become finer when a later one asks for it; a write of everything ends them.
"""

from __future__ import annotations

from math import gcd
from typing import Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.sim.cells import Block, Cells, Ints, spans
from harness.sim.clock import LINE_BITS, Clock

Selection: TypeAlias = slice | Ints
EVERYTHING = slice(None)
NAME = "kvshard_shadow"


class Owner(Protocol):
    """The check that keeps shadows."""

    def freed(self, shadow: Shadow) -> None:
        """The storage of a shadow goes now."""


class Shadow:
    """What is known of one storage of `nbytes` bytes; it is an attribute of the storage and goes with it.

    `last_write` and `last_read` hold per line the last tick that touched any cell since the last write of everything.
    """

    __slots__ = ("grain", "home", "last_read", "last_write", "made", "nbytes", "owner", "reads", "recorded", "writers")

    def __init__(self, owner: Owner, nbytes: int, made: tuple[int, int], home: int | None) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.made = made  # line and tick of the first operation that touched it
        self.home = home  # the line that allocated it, None if it came from outside
        self.recorded: set[int] = set()
        self.last_write: dict[int, int] = {}
        self.last_read: dict[int, int] = {}
        self.grain = nbytes  # bytes of a cell
        self.writers: Ints | None = None  # per cell tick and line of the last write; 0 for none
        self.reads: dict[int, Ints] = {}  # per line, per cell the tick of the last read since that write

    def __del__(self) -> None:
        if self.home is not None:
            self.owner.freed(self)

    @classmethod
    def on(cls, storage: torch.UntypedStorage) -> Self | None:
        """The shadow of a storage, if it has one."""
        shadow = getattr(storage, NAME, None)
        return shadow if isinstance(shadow, cls) else None

    def drop(self, storage: torch.UntypedStorage) -> None:
        """Take it off its storage, without a word about a lifetime."""
        self.home = None
        delattr(storage, NAME)

    def select(self, cells: Cells) -> Selection:
        """The cells of an access, after a refinement if they are too coarse."""
        run = cells.run
        if isinstance(cells, Block):
            start = cells.start
            if start == 0 and run == self.nbytes:
                return EVERYTHING
            if self.writers is None or start % self.grain or run % self.grain:
                self._refine(gcd(start, run))
            return slice(start // self.grain, (start + run) // self.grain)
        if self.writers is None or cells.grain % self.grain:
            self._refine(cells.grain)
        firsts = cells.starts // self.grain
        if run == self.grain:
            return firsts
        return np.add.outer(firsts, np.arange(run // self.grain)).reshape(-1)

    def settled(self, clock: Clock, *, write: bool) -> bool:
        """Whether no cell at all can hold a conflict: all that was done is known to `clock`."""
        line, seen = clock.line, clock.seen
        width = len(seen)
        for other, tick in self.last_write.items():
            if other != line and (other >= width or tick > seen[other]):
                return False
        if write:
            for other, tick in self.last_read.items():
                if other != line and (other >= width or tick > seen[other]):
                    return False
        return True

    def wrote(self, where: Selection, line: int, tick: int, code: int) -> None:
        """Remember a write that was ordered after all it had to follow."""
        if where is EVERYTHING:
            self.last_write = {line: tick}
            self.last_read = {}
            self.writers, self.reads, self.grain = None, {}, self.nbytes
            return
        self.last_write[line] = tick
        if self.writers is not None:
            self.writers[where] = code
        for ticks in self.reads.values():
            ticks[where] = 0

    def read(self, where: Selection, line: int, tick: int) -> None:
        """Remember a read that was ordered after the writes of its cells."""
        self.last_read[line] = tick
        if self.writers is not None:
            ticks = self.reads.get(line)
            if ticks is None:
                ticks = self.reads[line] = np.zeros(len(self.writers), np.int64)
            ticks[where] = tick

    def last_writers(self, where: Selection) -> Ints:
        """Per selected cell tick and line of its last write."""
        if self.writers is None:
            return np.array([tick << LINE_BITS | line for line, tick in self.last_write.items()] or [0], np.int64)
        return self.writers[where]

    def last_reads(self, line: int, where: Selection) -> Ints:
        """Per selected cell the tick of its last read by a line since its last write."""
        if self.writers is None:
            return np.array([self.last_read[line]], np.int64)
        ticks = self.reads.get(line)
        return np.zeros_like(self.writers[where]) if ticks is None else ticks[where]

    def describe(self, tensor: Tensor, where: Selection, late: npt.NDArray[np.bool_]) -> str:
        """Shape of the tensor and the rows of it that are in conflict."""
        shape = f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"
        numbers = np.arange(self.nbytes // self.grain)[where] if self.writers is not None else np.zeros(1, np.int64)
        starts = np.unique(numbers[late]) * self.grain
        amount = f"{len(starts) * self.grain} of {self.nbytes} bytes of its storage"
        item = tensor.element_size()
        pitch = tensor.stride(0) * item if tensor.dim() else 0
        size = tensor.shape[0] if tensor.dim() else 1
        if not pitch or self.writers is None:
            return f"{shape}, all of it" if self.writers is None else f"{shape}, {amount}"
        starts -= int(tensor.storage_offset()) * item
        firsts, ends = starts // pitch, (starts + self.grain - 1) // pitch
        if firsts.min() < 0 or ends.max() >= size:
            return f"{shape}, {amount}"
        touched = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(firsts, ends, strict=True)]))
        listed = ", ".join(str(a) if b == a + 1 else f"{a}..{b - 1}" for a, b in spans(touched)[:8])
        more = ", ..." if len(spans(touched)) > 8 else ""
        what = {1: "element", 2: "row"}.get(tensor.dim(), "slice") + ("s" if len(touched) > 1 else "")
        return f"{shape}, {what} {listed}{more} ({amount})"

    def _refine(self, grain: int) -> None:
        """Cells of a size that divides `grain`, the present size and the storage."""
        grain = gcd(grain, self.grain)
        count = self.nbytes // grain
        if self.writers is None:
            first = next(((tick << LINE_BITS | line) for line, tick in self.last_write.items()), 0)
            self.writers = np.full(count, first, np.int64)
            self.reads = {line: np.full(count, tick, np.int64) for line, tick in self.last_read.items()}
        else:
            self.writers = self.writers.repeat(self.grain // grain)
            self.reads = {line: ticks.repeat(self.grain // grain) for line, ticks in self.reads.items()}
        self.grain = grain


def shadow_of(owner: Owner, tensor: Tensor, made: tuple[int, int], *, fresh: bool) -> Shadow:
    """The shadow of a tensor's storage, a new one if it has none of this owner.

    It hangs on the Python object of the storage, which torch keeps as long as the storage: an address that is used
    again has no past. A storage of another size than before has new memory. `fresh` memory is allocated by `made`.
    """
    storage = tensor.untyped_storage()
    shadow = getattr(storage, NAME, None)
    nbytes = storage.nbytes()
    if isinstance(shadow, Shadow):
        if shadow.owner is not owner:
            shadow.home = None  # of an earlier simulation, and not freed now
        elif shadow.nbytes == nbytes:
            return shadow
    shadow = Shadow(owner, nbytes, made, made[0] if fresh else None)
    setattr(storage, NAME, shadow)
    return shadow

"""PrefillWorker: one rank of a prefill worker, cache and rows together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvshard_ref.cache import PageCache
from kvshard_ref.components import Component, total_row_bytes
from kvshard_ref.device import DeviceModule
from kvshard_ref.errors import GeometryError, MisuseError, RefusedError
from kvshard_ref.gather import PrefixGather
from kvshard_ref.group import Group, SoloGroup
from kvshard_ref.placement import Placement
from kvshard_ref.plan import PADDINGS
from kvshard_ref.pool import ShardPool
from kvshard_ref.request import Extent
from kvshard_ref.scratch import ScratchSize
from kvshard_ref.split import restore, share

LAYOUTS = ("sharded", "replicated")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Shape of a prefill worker, equal on all its ranks.

    layout "sharded": the ranks hold one copy of the cache between them. "replicated": every rank holds a whole copy,
    by the same code with one shard per rank. Either way the ranks compute each chunk together.
    """

    ranks: int
    page_size: int
    pages_per_rank: int
    layers: int
    components: tuple[Component, ...]
    chunk_tokens: int
    context_tokens: int
    scratch_contexts: int = 8
    layout: str = "sharded"
    padding: str = "tight"

    def __post_init__(self) -> None:
        for field, choice, choices in (("layout", self.layout, LAYOUTS), ("padding", self.padding, PADDINGS)):
            if choice not in choices:
                raise GeometryError(f"WorkerSpec: {field} is {choice!r}, expected one of {choices}")
        if self.ranks < 1:
            raise GeometryError(f"WorkerSpec: ranks is {self.ranks}, expected at least 1")

    @property
    def placement(self) -> Placement:
        """The index space; a replicated worker's ranks each have their own, equal ones."""
        return Placement(self.ranks if self.layout == "sharded" else 1, self.page_size)

    @property
    def scratch(self) -> ScratchSize:
        """Size of a scratch slot."""
        return ScratchSize.sized(self.placement, self.context_tokens, self.chunk_tokens, self.scratch_contexts)

    @property
    def pool_bytes(self) -> int:
        """Bytes of one rank's pool."""
        return ShardPool.planned_bytes(self.placement, self.pages_per_rank, self.layers, self.components)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of one rank's scratch slots."""
        return self.scratch.bytes(total_row_bytes(self.components))


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a request and what the model computes for them.

    `rows` holds per component a tensor [layers, count, width]. A rank uses only its own share (see split).
    """

    name: str
    count: int
    rows: dict[str, torch.Tensor]


class Extended(NamedTuple):
    """What one forward did for a request: the tokens [start, end) were computed."""

    start: int
    end: int
    reads: dict[str, torch.Tensor]
    """Per component [layers, end, width]: the rows that attention reads for the positions [0, end)."""


class Location(NamedTuple):
    """Where a token's rows live."""

    owner: int
    local_row: int
    byte_offset: dict[str, int]
    """Per component the offset of the row inside a buffer of the owner."""


class PrefillWorker:
    """One rank. Every rank of the group makes the same calls in the same order; all decide alike.

    `device` holds the tensors, `device_module` orders the work on it (torch.cuda by default for a GPU). The gathers
    go over `gather_group` if given, so that they can overlap the exchange of chunks on a communicator of their own.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        group: Group,
        *,
        device: torch.device | str = "cpu",
        device_module: DeviceModule | None = None,
        gather_group: Group | None = None,
    ) -> None:
        if group.size != spec.ranks:
            raise GeometryError(f"worker: the group has {group.size} ranks, the spec {spec.ranks}; expected the same")
        sharded = spec.layout == "sharded"
        self.spec = spec
        self.group = group
        self.cache = PageCache(spec.placement, spec.pages_per_rank, spec.scratch, spec.padding)
        self.pool = ShardPool(
            group.rank if sharded else 0, spec.placement, spec.pages_per_rank, spec.layers, spec.components, device
        )
        self._offsets = np.arange(spec.page_size)
        gather_group = gather_group or group if sharded else SoloGroup()
        self.gather = PrefixGather(self.pool, gather_group, spec.scratch, spec.padding, device_module)

    def open(self, name: str, tokens: Sequence[int]) -> int:
        """Match and lock the cached prefix of a prompt. Returns the tokens that need no computing.

        Raises RefusedError when the prompt can never fit, or cannot be locked now.
        """
        ps = self.spec.page_size
        prompt = tuple(tokens)
        keys = [prompt[start : start + ps] for start in range(0, len(prompt) - ps + 1, ps)]
        return self.cache.open(name, keys, len(prompt)).cached

    def extend(self, chunks: Sequence[Chunk]) -> list[Extended | RefusedError]:
        """One batch: compute a chunk of each request. A refused request is unchanged, the others go on without it.

        Raises MisuseError, with nothing changed, for an unknown or repeated request or a chunk of the wrong shape.
        """
        wants = [(chunk.name, chunk.count) for chunk in chunks]
        reasons = self.cache.review(wants)
        for chunk in chunks:
            self._check_rows(chunk)
        if not chunks:
            return []
        # one rank's refusal is everybody's
        flags = self.group.minimum([int(reason is None) for reason in reasons])
        replies: list[Extended | RefusedError] = [
            RefusedError(reason or f"request {want[0]!r} was refused by another rank")
            for reason, want in zip(reasons, wants, strict=True)
        ]
        admitted = [index for index, flag in enumerate(flags) if flag]
        if not admitted:
            return replies
        extents = self.cache.extend([wants[index] for index in admitted])
        reads = self._forward(extents, [chunks[index] for index in admitted])
        for index, extent, read in zip(admitted, extents, reads, strict=True):
            self.cache.checkpoint(extent.request.name)
            replies[index] = Extended(extent.start, extent.end, read)
        return replies

    def finish(self, name: str) -> int:
        """Leave what was computed to the cache and end the request. Returns its tokens that are now cached."""
        return self.cache.finish(name)

    def abort(self, name: str) -> None:
        """End the request; only earlier chunks stay cached."""
        self.cache.abort(name)

    def evict(self, tokens: int) -> int:
        """Evict at least `tokens` if possible, least recently used first. Returns the tokens freed."""
        return self.cache.evict(tokens)

    def flush(self) -> int:
        """Evict everything. Returns the tokens freed; raises RefusedError while a request is live."""
        return self.cache.flush()

    def settle(self) -> None:
        """Wait for all work on the device."""
        self.gather.settle()

    def locate(self, loc: int) -> Location:
        """Where a location's rows live."""
        placement = self.pool.placement
        offsets = {c.name: placement.byte_offset(loc, c.row_bytes) for c in self.spec.components}
        return Location(placement.owner(loc), placement.local_row(loc), offsets)

    def _forward(self, extents: Sequence[Extent], chunks: Sequence[Chunk]) -> list[dict[str, torch.Tensor]]:
        """Per layer: stage the batch's chunk, persist the owned rows, read. Index tensors are made once, before."""
        locs = [self._locs([*e.prefix_pages, *e.chunk_pages], e.end) for e in extents]
        chunk_locs = np.concatenate([part[e.start :] for part, e in zip(locs, extents, strict=True)])
        owned = self.pool.owned(chunk_locs)
        self.gather.begin([e.prefix_pages for e in extents], [e.chunk_pages for e in extents])
        # [0, read tokens) of all requests, then [read tokens, + chunk tokens)
        every = torch.from_numpy(np.concatenate([*locs, chunk_locs])).to(self.pool.device)
        scratch_rows = self.gather.translate(every)
        read_rows, chunk_rows = scratch_rows[: -len(chunk_locs)], scratch_rows[-len(chunk_locs) :]
        shares = {c.name: self._share([chunk.rows[c.name] for chunk in chunks]) for c in self.spec.components}
        reads = {
            c.name: torch.empty(self.spec.layers, len(read_rows), c.width, dtype=c.dtype, device=self.pool.device)
            for c in self.spec.components
        }
        for layer in range(self.spec.layers):
            rows = {name: self._exchange(part[layer], len(chunk_rows)) for name, part in shares.items()}
            for name, fresh in rows.items():
                self.gather.stage(layer, name, chunk_rows, fresh)
            for name, fresh in rows.items():
                self.pool.write(layer, name, owned, fresh)
            for name, out in reads.items():
                self.gather.read(layer, name, read_rows, out=out[layer])
        self.gather.end()
        # request i reads [ends[i-1], ends[i]) of the batch
        lengths = [extent.end for extent in extents]
        split = {name: read.split(lengths, dim=1) for name, read in reads.items()}
        return [{name: parts[index] for name, parts in split.items()} for index in range(len(extents))]

    def _locs(self, pages: Sequence[int], count: int) -> npt.NDArray[Any]:
        """Locations of the first `count` tokens on these pages."""
        firsts = np.asarray(pages, np.int64)[:, None] * self.spec.page_size
        locs: npt.NDArray[Any] = firsts + self._offsets
        return locs.reshape(-1)[:count]

    def _share(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's share [layers, padded, width] of the batch's chunk."""
        batch = rows[0] if len(rows) == 1 else torch.cat(list(rows), dim=1)
        return share(batch, self.group.rank, self.group.size).to(self.pool.device)

    def _exchange(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """All ranks' parts [padded, width] of one layer as the chunk's rows [count, width]."""
        if self.group.size == 1:
            return part
        gathered = part.new_empty(self.group.size * part.shape[0], part.shape[1])
        self.group.all_gather(gathered, part)
        return restore(gathered, count, self.group.size)

    def _check_rows(self, chunk: Chunk) -> None:
        expected = {c.name: (c.dtype, (self.spec.layers, chunk.count, c.width)) for c in self.spec.components}
        given = {name: (rows.dtype, tuple(rows.shape)) for name, rows in chunk.rows.items()}
        if given != expected:
            raise MisuseError(
                f"worker: the chunk of request {chunk.name!r} has rows {given}, expected {expected} "
                "(per component dtype and [layers, count, width])"
            )

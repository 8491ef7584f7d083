"""PrefillWorker: one rank of a prefill worker, cache and rows of all its models and tiers together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from kvshard_ref.cache import PageCache
from kvshard_ref.device import DeviceModule, device_module_of
from kvshard_ref.errors import GeometryError, RefusedError
from kvshard_ref.exports import Exports
from kvshard_ref.group import Group, SoloGroup
from kvshard_ref.host_pool import HostPool
from kvshard_ref.pool import ShardPool
from kvshard_ref.request import Extent
from kvshard_ref.runner import Compute, Runner
from kvshard_ref.sender import KVSender
from kvshard_ref.spec import WorkerSpec
from kvshard_ref.transport import Transport


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a request; `rows` is what the model wants to be given for them, if anything."""

    name: str
    count: int
    rows: dict[str, torch.Tensor] = field(default_factory=dict)


class Extended(NamedTuple):
    """What one forward did for a request: the tokens [start, end) were computed."""

    start: int
    end: int
    reads: dict[str, torch.Tensor]
    """What the model tells of what it read."""


class Model(Protocol):
    """What computes batches."""

    def compute(self, runner: Runner, extents: Sequence[Extent], chunks: Sequence[Chunk]) -> Compute:
        """One batch; asked for each runner in turn."""

    def check(self, spec: WorkerSpec, chunk: Chunk) -> None:
        """Raises MisuseError for a chunk that cannot be computed."""


class PrefillWorker:
    """One rank. Every rank of the group makes the same calls in the same order; all decide alike.

    `device` holds the tensors, `device_module` orders the work on it (torch.cuda by default for a GPU). The gathers
    go over `gather_group` if given, so that they can overlap the exchange of chunks on a communicator of their own.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        group: Group,
        model: Model,
        *,
        device: torch.device | str = "cpu",
        device_module: DeviceModule | None = None,
        gather_group: Group | None = None,
        transport: Transport | None = None,
    ) -> None:
        if group.size != spec.ranks:
            raise GeometryError(f"worker: the group has {group.size} ranks, the spec {spec.ranks}; expected the same")
        self.spec, self.group, self._model = spec, group, model
        self.cache = PageCache(
            spec.placement, spec.pages_per_rank, spec.scratch, spec.padding, spec.host_pages_per_rank, spec.host_policy
        )
        self._device_module = device_module or device_module_of(torch.device(device))
        rank, gathers = (group.rank, gather_group or group) if spec.layout == "sharded" else (0, SoloGroup())
        pools = [
            ShardPool(rank, spec.placement, spec.pages_per_rank, layers, components, device)
            for layers, components in spec.models
        ]
        self.runners = [Runner(pool, group, gathers, spec, self._device_module) for pool in pools]
        self.host = HostPool(pools, spec.host_pages_per_rank, self._device_module) if self.cache.host else None
        self.exports = Exports(self.cache, group, KVSender(pools, transport) if transport else None)
        self._copied: list[Any] = []  # an event for each copy in flight, in order
        self._loads: list[Any] = []  # per target layer an event, while a batch's prefix comes from the host
        if self.cache.host:
            self.cache.host.drain = self._drain

    @property
    def pool(self) -> ShardPool:
        """The target's pool."""
        return self.runners[0].pool

    def open(self, name: str, tokens: Sequence[int], hit_max: int | None = None) -> int:
        """Match and lock the cached prefix of a prompt. Returns the tokens that need no computing, at most `hit_max`.

        Raises RefusedError when the prompt can never fit, or cannot be locked now.
        """
        ps, ahead = self.spec.page_size, self.spec.ahead_tokens
        prompt = tuple(tokens)
        keys = [prompt[start : start + ps + ahead] for start in range(0, len(prompt) - ps + 1, ps)]
        asked = len(prompt) if hit_max is None else min(hit_max + 1, len(prompt))
        return self.cache.open(name, keys, len(prompt), asked).cached

    def extend(self, chunks: Sequence[Chunk]) -> list[Extended | RefusedError]:
        """One batch: compute a chunk of each request. A refused request is unchanged, the others go on without it.

        Raises MisuseError, with nothing changed, for an unknown or repeated request or a chunk of the wrong shape.
        """
        wants = [(chunk.name, chunk.count) for chunk in chunks]
        reasons = self.cache.review(wants)
        for chunk in chunks:
            self._model.check(self.spec, chunk)
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
        self.progress()
        return replies

    def finish(self, name: str) -> int:
        """Leave what was computed to the cache and end the request. Returns its tokens that are now cached."""
        kept = self.cache.finish(name)
        self.exports.leave(name, aborted=False)
        self.progress()
        return kept

    def abort(self, name: str) -> None:
        """End the request; only earlier chunks stay cached."""
        self.cache.abort(name)
        self.exports.leave(name, aborted=True)
        self.progress()

    def send(self, name: str, peer: str, room: int) -> None:
        """Send to a room of a decode worker what is computed and not sent yet, once its rows are written; see Exports.

        Right after `open` that is the cached prefix, as far as it is on the device.
        """
        ready = self._device_module.Event()
        ready.record(self._device_module.current_stream())
        self.exports.send(name, peer, room, ready)
        self.progress()

    def evict(self, tokens: int, tier: str = "device") -> int:
        """Evict at least `tokens` from a tier if possible, least recently used first. Returns the tokens freed."""
        freed = self.cache.evict(tokens, tier)
        self.progress()
        return freed

    def flush(self) -> int:
        """Evict everything. Returns the tokens freed; raises RefusedError while a request is live."""
        return self.cache.flush()

    def settle(self) -> None:
        """Wait for all work on the device, and for every rank's copies between the tiers."""
        self._device_module.synchronize()
        self.progress()

    def close(self) -> None:
        """Wait for the device: nothing may use the rows any more when the worker is dropped."""
        self._device_module.synchronize()

    def _forward(self, extents: Sequence[Extent], chunks: Sequence[Chunk]) -> list[dict[str, torch.Tensor]]:
        """All models in turn: restore, gather, attention, layer by layer."""
        self._copy()
        loads, self._loads = self._loads, []
        reads: list[dict[str, torch.Tensor]] = [{} for _ in extents]
        for runner in self.runners:
            # a draft's layer d comes with target layer min(d, L - 1)
            its = [loads[min(layer, len(loads) - 1)] for layer in range(runner.pool.layers)] if loads else []
            compute = self._model.compute(runner, extents, chunks)
            runner.forward(extents, compute, its)
            for read, more in zip(reads, compute.reads(), strict=True):
                read.update(more)
        return reads

    def _copy(self) -> None:
        """Carry out the planned copies between the tiers, backups first: their pages may be in use again already."""
        if self.host is None or self.cache.host is None:
            return
        planned = self.cache.host.take_planned()
        backups = [copy for copy in planned if copy.kind == "backup"]
        restores = [copy for copy in planned if copy.kind == "restore"]
        events: dict[str, Any] = {}
        if backups:
            events["backup"] = self.host.backup(backups)
            if self.spec.host_policy == "write_back":  # pages evicted meanwhile are written by the next forward
                self._device_module.current_stream().wait_event(events["backup"])
        if restores:
            self._loads = self.host.restore(restores)
            events["restore"] = self._loads[-1]
        self._copied.extend(events[copy.kind] for copy in planned)

    def progress(self) -> None:
        """Carry out what was planned, acknowledge the oldest copies that are complete on every rank, move transfers."""
        self._copy()
        if self._copied:
            done = next((at for at, event in enumerate(self._copied) if not event.query()), len(self._copied))
            self._acknowledge(self.group.minimum([done])[0])
        self.exports.poll()

    def _drain(self) -> None:
        """Wait for all copies between the tiers. Every rank comes here at the same point."""
        self._copy()
        for event in self._copied:
            event.synchronize()
        self._acknowledge(len(self._copied))

    def _acknowledge(self, count: int) -> None:
        del self._copied[:count]
        if self.cache.host:
            self.cache.host.acknowledge(count)

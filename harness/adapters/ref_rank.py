"""One rank of the embedded reference behind the contract's values: ops in, replies and views out.

The same object runs in a rank thread of one process and in a process of its own; it never knows which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

from harness import types as t
from harness import views as v
from harness.adapter import ConfigError, OpSession
from harness.adapters.ref_given import GivenModel
from harness.adapters.ref_rows import COMPONENTS, RowCodec
from harness.adapters.ref_ways import Ways
from harness.transports.losable import Losable
from kvshard_ref.components import Component
from kvshard_ref.device import DeviceModule
from kvshard_ref.errors import (
    DuplicateRequestError,
    GeometryError,
    MisuseError,
    RefusedError,
    UnalignedError,
    UnknownRequestError,
)
from kvshard_ref.group import Group
from kvshard_ref.pool import ShardPool
from kvshard_ref.spec import DraftSpec, WorkerSpec
from kvshard_ref.transport import Transport
from kvshard_ref.worker import Chunk, Extended, PrefillWorker

PEER = "decode"
"""Name of the decode worker's end."""
# What a caller of the contract can get wrong. Any other misuse error is a fault inside of the worker and is not hidden.
CALLERS_FAULT = (DuplicateRequestError, GeometryError, UnalignedError, UnknownRequestError)


def spec_of(config: t.Config, ways: Ways) -> WorkerSpec:
    """The worker that a config asks for. Raises `ConfigError`."""
    unknown = [name for name in config.components if name not in COMPONENTS]
    if unknown or not config.components or config.components[0].startswith("draft"):
        raise ConfigError(
            f"components {config.components}; expected some of {tuple(COMPONENTS)}, a draft's never first"
        )
    target = tuple(COMPONENTS[name] for name in config.components if not name.startswith("draft"))
    draft = tuple(COMPONENTS[name] for name in config.components if name.startswith("draft"))
    try:
        return WorkerSpec(
            ranks=config.shards,
            page_size=config.page_size,
            pages_per_rank=config.pages_per_rank,
            layers=config.layers,
            components=target,
            chunk_tokens=config.chunk_tokens,
            context_tokens=config.context_tokens,
            scratch_contexts=config.scratch_contexts,
            layout=config.layout,
            padding=ways.padding,
            split=ways.split,
            draft=DraftSpec(config.draft_layers, draft) if draft else None,
            host_pages_per_rank=config.host_pages_per_rank,
            host_policy=config.host_policy,
        )
    except MisuseError as error:
        raise ConfigError(str(error)) from error


class RefRank(OpSession):
    """One rank: a prefill worker, and stamps in and out of its rows."""

    def __init__(
        self,
        config: t.Config,
        group: Group,
        ways: Ways = Ways(),  # noqa: B008  # it is frozen
        device: str = "cpu",
        *,
        device_module: DeviceModule | None = None,
        codec: RowCodec | None = None,
        transport: Callable[[], Transport] | None = None,
    ) -> None:
        self._config = config
        self._group = group
        self._spec = spec_of(config, ways)
        self._device = device
        self._codec = codec or RowCodec(device)
        self._device_module = device_module
        self._connect = transport
        self._transport: Transport | None = None
        self._worker = self._started()

    def apply(self, op: t.AnyOp) -> t.AnyReply:
        """Carry out one op on this rank; `Extended.reads` holds this rank's reads alone."""
        self._group.log.clear()
        try:
            return super().apply(op)
        except (RefusedError, *CALLERS_FAULT) as error:
            return t.Refused(str(error))

    def do_open(self, op: t.Open) -> t.AnyReply:
        if not op.tokens:
            return t.Refused(f"request {op.request!r} has an empty prompt; expected at least one token")
        cached = self._worker.open(op.request, op.tokens)
        on_host = self._worker.cache.requests[op.request].slots
        return t.Ok(t.Opened(cached, len(on_host) * self._config.page_size))

    def do_extend(self, op: t.Extend) -> t.AnyReply:
        return self._batch([op])[0]

    def do_together(self, op: t.Together) -> t.AnyReply:
        chunks = [one for one in op.ops if isinstance(one, t.Extend)]
        if len(chunks) < len(op.ops):
            return t.Refused("a worker runs only chunks together; expected nothing but extend ops")
        return t.Replies(tuple(self._batch(chunks)))

    def do_finish(self, op: t.Finish) -> t.AnyReply:
        return t.Ok(t.Finished(self._worker.finish(op.request)))

    def do_abort(self, op: t.Abort) -> t.AnyReply:
        self._worker.abort(op.request)
        return t.Ok(t.Done())

    def do_evict(self, op: t.Evict) -> t.AnyReply:
        if op.tokens < 1:
            return t.Refused(f"evict of {op.tokens} tokens; expected at least 1")
        return t.Ok(t.Evicted(self._worker.evict(op.tokens, op.tier)))

    def do_flush(self, op: t.Flush) -> t.AnyReply:
        return t.Ok(t.Evicted(self._worker.flush()))

    def do_restart(self, op: t.Restart) -> t.AnyReply:
        self.close()
        self._worker = self._started()
        return t.Ok(t.Done())

    def do_settle(self, op: t.Settle) -> t.AnyReply:
        self._worker.settle()
        return t.Ok(t.Done())

    def do_send(self, op: t.Send) -> t.AnyReply:
        self._worker.send(op.request, PEER, op.room)
        return t.Ok(t.Done())

    def do_lose(self, op: t.Lose) -> t.AnyReply:
        if not 0 <= op.rank < self._config.shards:
            return t.Refused(f"lose rank {op.rank}; expected 0..{self._config.shards - 1}, or -1 for the decode worker")
        if op.rank == self._group.rank and self._transport is not None:
            self._transport.close()
        self._worker.progress()
        return t.Ok(t.Done())

    def do_locate(self, op: t.Locate) -> t.AnyReply:
        first, placement = self._spec.components[0], self._spec.placement
        places = tuple(
            t.Place(placement.owner(loc), placement.local_row(loc), placement.byte_offset(loc, first.row_bytes))
            for loc in op.locs
        )
        return t.Ok(t.Located(places, first.row_bytes))

    def close(self) -> None:
        """Leave the network, and wait for the device before the rows go."""
        if self._transport is not None:
            self._transport.close()
        self._worker.close()

    def view(self) -> v.RankView:
        """Everything that this rank can show."""
        cache, host, exports = self._worker.cache, self._worker.host, self._worker.exports
        page_size = self._config.page_size
        return v.RankView(
            rank=self._group.rank,
            capacity=(cache.allocator.pages_per_rank,) * cache.placement.shards,
            free=tuple(tuple(pages) for pages in cache.allocator.free_pages()),
            requests={
                request.name: v.RequestView(
                    tokens=request.tokens,
                    computed=request.computed,
                    cached=request.cached,
                    pages=tuple(request.pages),
                    base=request.base,
                    host_pages=tuple(request.slots),
                    room=exports.live[request.name][0] if request.name in exports.live else None,
                )
                for request in cache.requests.values()
            },
            nodes=tuple(self._nodes()),
            host_free=tuple(tuple(slots) for slots in cache.host.allocator.free_pages()) if cache.host else (),
            moved=v.MovedView(
                backup_tokens=cache.stats.backup_pages * page_size,
                backup_bytes=host.backup_bytes if host else 0,
                restored_tokens=cache.stats.restored_pages * page_size,
                restored_bytes=host.restored_bytes if host else 0,
                sent_bytes=exports.sender.link.sent_bytes if exports.sender else 0,
            ),
            tokens_max=cache.capacity_tokens(),
            tokens_used=cache.used_tokens(),
            buffers={
                component.name: self._buffer(runner.pool, component)
                for runner in self._worker.runners
                for component in runner.pool.components
            },
            plan={
                component.name: runner.pool.planned_bytes(
                    runner.pool.placement, runner.pool.pages_per_rank, 1, (component,)
                )
                for runner in self._worker.runners
                for component in runner.pool.components
            },
            collectives=tuple(self._group.log),
            digest=cache.digest(),
        )

    def _started(self) -> PrefillWorker:
        self._transport = Losable(self._connect()) if self._connect else None
        return PrefillWorker(
            self._spec,
            self._group,
            GivenModel(),
            device=self._device,
            device_module=self._device_module,
            transport=self._transport,
        )

    def _buffer(self, pool: ShardPool, component: Component) -> v.BufferView:
        return v.BufferView(
            rows=pool.rows,
            row_bytes=component.row_bytes,
            allocated_bytes=pool.pages(0, component.name).nbytes,
        )

    def _nodes(self) -> list[v.NodeView]:
        views: list[v.NodeView] = []
        ends: dict[int, int] = {}
        for node in self._worker.cache.tree.nodes():
            parent = node.parent.id if node.parent is not None else None
            start = ends.get(parent, 0) if parent is not None else 0
            ends[node.id] = start + len(node.keys)
            below_root = parent is None or parent not in ends
            views.append(
                v.NodeView(
                    node=node.id,
                    parent=None if below_root else parent,
                    start=start,
                    tokens=tuple(itertools.chain.from_iterable(cast("list[tuple[int, ...]]", node.keys))),
                    pages=tuple(node.pages),
                    base=node.base,
                    locks=node.locks,
                    host_pages=tuple(node.slots),
                    pins=node.pins,
                )
            )
        return views

    def _batch(self, ops: Sequence[t.Extend]) -> list[t.AnyReply]:
        for op in ops:
            wrong = self._wrong_rows(op)
            if wrong:
                return [t.Refused(wrong)] * len(ops)
        chunks = [Chunk(op.request, op.count, self._codec.encode(op)) for op in ops]
        return [self._told(answer) for answer in self._worker.extend(chunks)]

    def _wrong_rows(self, op: t.Extend) -> str | None:
        shape = {name: [len(stamps) for stamps in layers] for name, layers in op.rows.items()}
        expected = {name: [op.count] * t.layers_of(self._config, name) for name in self._config.components}
        if shape == expected:
            return None
        return f"extend of {op.request!r} by {op.count}: rows per component and layer are {shape}; expected {expected}"

    def _told(self, answer: Extended | RefusedError) -> t.AnyReply:
        if isinstance(answer, RefusedError):
            return t.Refused(str(answer))
        return t.Ok(t.Extended(answer.start, answer.end, (self._codec.decode(answer.reads),)))

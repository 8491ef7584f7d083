"""A miniature engine: one rank, one dict, correct; and variants of it that each do one thing wrong.

    prompt   [0 ............ cached) [cached ... computed) [computed ... tokens)
    pages    shared with the cache   own, freed or kept     none yet

The cache maps the tokens of a whole-page prefix to the page of its last ps tokens; a chain is its prefixes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.adapter import ConfigError, OpSession
from harness.types import (
    Abort,
    AnyOp,
    AnyReply,
    Axes,
    Config,
    Done,
    Evict,
    Evicted,
    Extend,
    Extended,
    Finish,
    Finished,
    Flush,
    Manifest,
    Ok,
    Open,
    Opened,
    Refused,
    Replies,
    Restart,
    Rows,
    Settle,
    Together,
    Unsupported,
)
from harness.views import NodeView, RankView, RequestView, Snapshot

MANIFEST = Manifest(
    name="miniature",
    version="1.0",
    ops=("open", "extend", "finish", "abort", "evict", "flush", "restart", "settle", "together"),
    shows=("capacity", "free", "requests", "nodes", "tokens_max", "tokens_used"),
    promises=("deterministic", "refuses_misuse"),
    axes=Axes(shards=(1,), page_sizes=(2, 4)),
)


@dataclass
class Request:
    tokens: tuple[int, ...]
    cached: int
    pages: list[int]
    computed: int = field(init=False)

    def __post_init__(self) -> None:
        self.computed = self.cached


class MiniatureSession(OpSession):
    """Keeps everything in dicts; every op checks first and then acts, so that a refusal changes nothing."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ps = config.page_size
        self.do_restart(Restart())

    def do_restart(self, op: Restart) -> AnyReply:
        self.free = list(range(1, self.config.pages_per_rank + 1))
        self.cache: dict[tuple[int, ...], int] = {}
        self.stamps: dict[tuple[str, int, int, int], int] = {}  # component, layer, page, offset
        self.requests: dict[str, Request] = {}
        return Ok(Done())

    def do_open(self, op: Open) -> AnyReply:
        if op.request in self.requests or not op.tokens:
            return Refused(f"{op.request} lives already, or its prompt is empty")
        if len(op.tokens) > self.config.context_tokens:
            return Refused(f"{len(op.tokens)} tokens; the context has {self.config.context_tokens}")
        cached = 0
        while cached + self.ps < len(op.tokens) and op.tokens[: cached + self.ps] in self.cache:
            cached += self.ps
        pages = [self.cache[op.tokens[:end]] for end in range(self.ps, cached + 1, self.ps)]
        for end in range(self.ps, cached + 1, self.ps):
            self.cache[op.tokens[:end]] = self.cache.pop(op.tokens[:end])  # used last
        self.requests[op.request] = Request(op.tokens, cached, pages)
        return Ok(Opened(cached))

    def do_extend(self, op: Extend) -> AnyReply:
        request = self.requests.get(op.request)
        if request is None:
            return Refused(f"no request {op.request}")
        end = request.computed + op.count
        if not 0 < op.count <= self.config.chunk_tokens or end > len(request.tokens):
            return Refused(f"a chunk of {op.count} tokens")
        if end % self.ps and end != len(request.tokens):
            return Refused(f"a chunk that ends at {end}, which is inside of a page")
        if not self._shaped(op):
            return Refused("rows of another shape than [component][layer][token]")
        need = -(-end // self.ps) - len(request.pages)
        if need > len(self.free) + len(self._evictable()):
            return Refused(f"{need} pages needed, {len(self.free)} free")
        self._evict(need - len(self.free))
        request.pages += [self.free.pop(0) for _ in range(need)]
        for component, layers in op.rows.items():
            for layer, stamps in enumerate(layers):
                for position, stamp in enumerate(stamps, request.computed):
                    self.stamps[component, layer, request.pages[position // self.ps], position % self.ps] = stamp
        start, request.computed = request.computed, end
        return Ok(Extended(start, end, (self._read(request),)))

    def do_finish(self, op: Finish) -> AnyReply:
        request = self.requests.pop(op.request, None)
        if request is None:
            return Refused(f"no request {op.request}")
        kept = request.computed // self.ps * self.ps
        for index, page in enumerate(request.pages):
            prefix = request.tokens[: (index + 1) * self.ps]
            if index * self.ps < request.cached:
                continue
            if (index + 1) * self.ps <= kept and prefix not in self.cache:
                self.cache[prefix] = page
            else:
                self.free.append(page)  # the tail, or another request has kept the same tokens already
        return Ok(Finished(kept))

    def do_abort(self, op: Abort) -> AnyReply:
        request = self.requests.pop(op.request, None)
        if request is None:
            return Refused(f"no request {op.request}")
        self.free += request.pages[request.cached // self.ps :]
        return Ok(Done())

    def do_evict(self, op: Evict) -> AnyReply:
        if op.tokens <= 0:
            return Refused(f"{op.tokens} tokens")
        return Ok(Evicted(self._evict(-(-op.tokens // self.ps)) * self.ps))

    def do_flush(self, op: Flush) -> AnyReply:
        if self.requests:
            return Refused(f"{len(self.requests)} requests live")
        self.free += self.cache.values()
        self.cache = {}
        return Ok(Done())

    def do_settle(self, op: Settle) -> AnyReply:
        return Ok(Done())

    def do_together(self, op: Together) -> AnyReply:
        """One after the other; a chunk beyond the batch's budget is refused."""
        left, replies = self.config.chunk_tokens, []
        for one in op.ops:
            reply = self.apply(one)
            if isinstance(one, Extend):
                reply = Refused("the batch is full") if one.count > left else reply
                left -= one.count
            replies.append(reply)
        return Replies(tuple(replies))

    def snapshot(self) -> Snapshot:
        held = {page for request in self.requests.values() for page in request.pages}
        view = RankView(
            rank=0,
            capacity=(self.config.pages_per_rank,),
            free=(tuple(self.free),),
            requests={name: self._view(request) for name, request in self.requests.items()},
            nodes=tuple(self._nodes()),
            tokens_max=self.config.pages_per_rank * self.ps,
            tokens_used=len(held) * self.ps,
        )
        return Snapshot((view,))

    def close(self) -> None:
        self.requests = {}

    def _shaped(self, op: Extend) -> bool:
        shapes = {len(stamps) for layers in op.rows.values() for stamps in layers}
        layers_all = {len(layers) for layers in op.rows.values()}
        return (
            set(op.rows) == set(self.config.components) and shapes == {op.count} and layers_all == {self.config.layers}
        )

    def _read(self, request: Request) -> Rows:
        places = [(request.pages[at // self.ps], at % self.ps) for at in range(request.computed)]
        return {
            component: tuple(
                tuple(self.stamps[component, layer, page, offset] for page, offset in places)
                for layer in range(self.config.layers)
            )
            for component in self.config.components
        }

    def _locks(self, prefix: tuple[int, ...]) -> int:
        return sum(
            request.cached >= len(prefix) and request.tokens[: len(prefix)] == prefix
            for request in self.requests.values()
        )

    def _evictable(self) -> list[tuple[int, ...]]:
        """The prefixes that nobody holds, a chain's end before its start."""
        return [prefix for prefix in sorted(self.cache, key=len, reverse=True) if not self._locks(prefix)]

    def _evict(self, pages: int) -> int:
        gone = self._evictable()[: max(0, pages)]
        self.free += [self.cache.pop(prefix) for prefix in gone]
        return len(gone)

    def _view(self, request: Request) -> RequestView:
        return RequestView(
            tokens=len(request.tokens),
            computed=request.computed,
            cached=request.cached,
            pages=tuple(request.pages),
            base=0 if request.pages else None,
        )

    def _nodes(self) -> list[NodeView]:
        return [
            NodeView(
                node=page,
                parent=self.cache.get(prefix[: -self.ps]),
                start=len(prefix) // self.ps - 1,
                tokens=prefix[-self.ps :],
                pages=(page,),
                base=0,
                locks=self._locks(prefix),
            )
            for prefix, page in sorted(self.cache.items(), key=lambda item: len(item[0]))
        ]


class Wrong(MiniatureSession):
    """Reads the stamp of its first token everywhere."""

    def _read(self, request: Request) -> Rows:
        return {
            component: tuple((stamps[0],) * len(stamps) for stamps in layers)
            for component, layers in super()._read(request).items()
        }


class Refuses(MiniatureSession):
    """Declares extend and does not take it."""

    def do_extend(self, op: Extend) -> AnyReply:
        return Unsupported("not built yet")


class Hides(MiniatureSession):
    """Declares free pages and shows none."""

    def snapshot(self) -> Snapshot:
        (view,) = super().snapshot().ranks
        shown = {name: getattr(view, name) for name in MANIFEST.shows if name != "free"}
        return Snapshot((RankView(rank=0, **shown),))


class Raises(MiniatureSession):
    """Raises when a request finishes."""

    def do_finish(self, op: Finish) -> AnyReply:
        raise RuntimeError("finish is broken")


class Dies(MiniatureSession):
    """Takes the whole process with it."""

    def do_open(self, op: Open) -> AnyReply:
        os._exit(7)


class Slow(MiniatureSession):
    """Takes its time."""

    def apply(self, op: AnyOp) -> AnyReply:
        time.sleep(0.05)
        return super().apply(op)


@dataclass
class Miniature:
    """The engine; `session` is the variant that it opens."""

    session: Callable[[Config], MiniatureSession] = MiniatureSession
    manifest: Manifest = MANIFEST
    closed: int = 0

    def describe(self) -> Manifest:
        return self.manifest

    def open(self, config: Config) -> MiniatureSession:
        axes = self.manifest.axes
        for name, value, possible in (
            ("shards", config.shards, axes.shards),
            ("page_size", config.page_size, axes.page_sizes),
            ("layout", config.layout, axes.layouts),
        ):
            if value not in possible:
                raise ConfigError(f"{name} {value!r}; this engine has {possible}")
        return self.session(config)

    def close(self) -> None:
        self.closed += 1


def correct(**options: str) -> Miniature:
    """The correct engine; takes `name` and `version`."""
    unknown = set(options) - {"name", "version"}
    if unknown:
        raise ValueError(f"unknown option {sorted(unknown)}; there is name and version")
    return Miniature(manifest=_manifest(**options))


def wrong() -> Miniature:
    return Miniature(Wrong, _manifest(name="wrong"))


def refuses() -> Miniature:
    return Miniature(Refuses, _manifest(name="refuses"))


def hides() -> Miniature:
    return Miniature(Hides, _manifest(name="hides"))


def raises() -> Miniature:
    return Miniature(Raises, _manifest(name="raises"))


def dies() -> Miniature:
    return Miniature(Dies, _manifest(name="dies"))


def slow() -> Miniature:
    return Miniature(Slow, _manifest(name="slow"))


def modest() -> Miniature:
    """Claims nothing at all, though it can do everything."""
    return Miniature(manifest=_manifest(name="modest", ops=(), shows=(), promises=()))


def boastful() -> Miniature:
    """Claims an op that it does not have."""
    return Miniature(manifest=_manifest(name="boastful", ops=(*MANIFEST.ops, "locate")))


instance = Miniature()


def _manifest(**changes: object) -> Manifest:
    fields = {name: getattr(MANIFEST, name) for name in MANIFEST.__struct_fields__}
    return Manifest(**{**fields, **changes})

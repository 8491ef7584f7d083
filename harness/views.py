"""The snapshot of a session in plain values. All survive a JSON round trip (see types.encode)."""

from __future__ import annotations

import msgspec


class RequestView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One live request. `pages` is by position and includes the pages it shares with the cache."""

    tokens: int  # of the prompt
    computed: int  # tokens whose rows exist, cached ones included
    cached: int  # tokens matched when it was opened
    pages: tuple[int, ...]
    base: int | None  # rotation base; None while no page is held
    host_pages: tuple[int, ...] = ()  # behind `pages`: of the cached part that is on the host only
    room: int | None = None  # that it is sent to, until every rank has finished with it; it may have ended otherwise


class NodeView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node of the radix tree. `start` is the position, in pages, of its first page in the chain."""

    node: int
    parent: int | None  # None below the root
    start: int
    tokens: tuple[int, ...]  # its own, page_size for each page
    pages: tuple[int, ...]  # on the device; none when it is on the host only
    base: int | None
    locks: int
    host_pages: tuple[int, ...] = ()  # its copy on the host; none without one
    pins: int = 0  # copies between the tiers that are not acknowledged by all ranks


class BufferView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The buffer of one component and layer on one rank."""

    rows: int
    row_bytes: int
    allocated_bytes: int  # by the tensor


class MovedView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What moved between the tiers and to decode so far: tokens of the whole group, bytes of this rank alone."""

    backup_tokens: int = 0
    backup_bytes: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    sent_bytes: int = 0


class RankView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank. A field that cannot be seen is None."""

    rank: int
    capacity: tuple[int, ...] | None = None  # pages per owner class
    free: tuple[tuple[int, ...], ...] | None = None  # free page ids per owner class
    requests: dict[str, RequestView] | None = None
    nodes: tuple[NodeView, ...] | None = None  # parents before children
    host_free: tuple[tuple[int, ...], ...] | None = None  # free host page ids per owner class; () without a host tier
    moved: MovedView | None = None
    tokens_max: int | None = None  # capacity as the engine reports it
    tokens_used: int | None = None  # neither free nor evictable, as the engine reports it
    buffers: dict[str, BufferView] | None = None  # per component
    plan: dict[str, int] | None = None  # bytes of a layer that the memory plan charges, per component
    collectives: tuple[str, ...] | None = None  # of the last op, in order
    digest: str | None = None  # of everything that must be mirrored
    role: str = ""  # of the server that the rank is part of: "prefill" or "decode" in a P/D pair
    counters: dict[str, float] | None = None  # a server's, by name; those that end in _total only grow


class RoomView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One room of the decode worker. `pages` is by position."""

    state: str  # "waiting", "complete", "aborting" (ranks may still write) or "failed" (its pages are free)
    tokens: int
    pages: tuple[int, ...]


class DecodeView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The decode worker."""

    free: tuple[int, ...]  # page ids
    rooms: dict[int, RoomView]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be seen of a session, one view per rank that shows itself. Looking changes nothing."""

    ranks: tuple[RankView, ...]
    decode: DecodeView | None = None

"""The contract's plain values: ops, replies, manifest, snapshot, verdict. All survive a JSON round trip.

A run is a list of ops, so recording, replaying, shrinking and sending one over a wire need no further code. A new
feature is a new op, not a new method. `encode` and `decode` are the JSON forms of every struct in this file.
"""

from __future__ import annotations

import enum
from typing import TypeVar

import msgspec

# Stamps are signed 64-bit and never negative, so that every JSON reader and every int64 tensor holds them exactly.
Stamps = tuple[int, ...]
Rows = dict[str, tuple[Stamps, ...]]  # component -> layer -> token


class Op(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower, forbid_unknown_fields=True):
    """One thing that is asked of a session."""


class Open(Op, frozen=True):
    """Match the longest cached prefix of a prompt, whole pages and at most all but one token, and lock it."""

    request: str
    tokens: tuple[int, ...]


class Extend(Op, frozen=True):
    """Compute the next `count` tokens of a request: admit, allocate, gather the prefix, read, write.

    `rows` holds the stamps of exactly these tokens, as [component][layer][token]. A chunk ends on a page or at the
    prompt's end.
    """

    request: str
    count: int
    rows: Rows


class Finish(Op, frozen=True):
    """Keep the computed whole pages in the cache, release everything else the request holds."""

    request: str


class Abort(Op, frozen=True):
    """Drop a request at any point; pages that are not in the cache become free."""

    request: str


class Evict(Op, frozen=True):
    """Evict at least `tokens` cached tokens that nobody holds from a tier, or all there are.

    What is evicted from the device may stay on the host; a copy evicted from the host may stay on the device.
    """

    tokens: int
    tier: str = "device"


class Flush(Op, frozen=True):
    """Drop the whole cache; refused while requests live."""


class Restart(Op, frozen=True):
    """Lose all state, as a worker that is stopped and started again."""


class Settle(Op, frozen=True):
    """Finish all pending work: copies, acknowledgements, deferred frees."""


class Locate(Op, frozen=True):
    """Where the engine keeps these locs: owner, local row, byte offset. Pure; no memory needs to stand behind a loc."""

    locs: tuple[int, ...]


class Together(Op, frozen=True):
    """Ops that run concurrently, one reply each, in order. Several `Extend` are one batch."""

    ops: tuple[AnyOp, ...]


AnyOp = Open | Extend | Finish | Abort | Evict | Flush | Restart | Settle | Locate | Together
OPS: tuple[type[Op], ...] = (Open, Extend, Finish, Abort, Evict, Flush, Restart, Settle, Locate, Together)


def op_name(op: Op | type[Op]) -> str:
    """The op's name on the wire, such as `extend`."""
    return str(op.__struct_config__.tag)


class Value(msgspec.Struct, frozen=True, tag_field="value", tag=str.lower, forbid_unknown_fields=True):
    """What a successful op returns; `Done` when there is nothing to say."""


class Done(Value, frozen=True):
    """The op is carried out."""


class Opened(Value, frozen=True):
    """`cached` tokens of the prompt need no computing: they are in the cache and locked.

    The last `from_host` of them are on the host only, and are brought back with the request's first chunk.
    """

    cached: int
    from_host: int = 0


class Extended(Value, frozen=True):
    """Tokens [start, end) were computed; `reads` is what attention read for [0, end).

    As [rank][component][layer][token].
    """

    start: int
    end: int
    reads: tuple[Rows, ...]


class Finished(Value, frozen=True):
    """`kept` tokens of the prompt, counted from its start, stay in the cache."""

    kept: int


class Evicted(Value, frozen=True):
    """`tokens` left the tier, or the cache when it was flushed."""

    tokens: int


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one loc lives; `offset` in bytes inside the first component's buffer of one layer on `owner`."""

    owner: int
    row: int
    offset: int


class Located(Value, frozen=True):
    """One place per loc; `row_bytes` is the stride of the buffer that the offsets point into."""

    places: tuple[Place, ...]
    row_bytes: int


def values_of(op: Op | str) -> tuple[type[Value], ...]:
    """What a successful op returns, one of these; nothing for `together`, whose ops reply one by one."""
    by_name: dict[str, tuple[type[Value], ...]] = {
        "open": (Opened,),
        "extend": (Extended,),
        "finish": (Finished,),
        "evict": (Evicted,),
        "flush": (Evicted, Done),
        "locate": (Located,),
        "together": (),
    }
    return by_name.get(op if isinstance(op, str) else op_name(op), (Done,))


AnyValue = Done | Opened | Extended | Finished | Evicted | Located


class Reply(msgspec.Struct, frozen=True, tag_field="reply", tag=str.lower, forbid_unknown_fields=True):
    """The answer to one op."""


class Ok(Reply, frozen=True):
    """It is done."""

    value: AnyValue


class Refused(Reply, frozen=True):
    """Definite: it is not done and nothing has changed."""

    why: str


class Unknown(Reply, frozen=True):
    """Indefinite: perhaps it is done. A timeout is unknown."""

    why: str


class Unsupported(Reply, frozen=True):
    """The engine does not take this op. Saying so of a declared op is an error of the engine."""

    why: str


class Replies(Reply, frozen=True):
    """The answers to the ops of a `Together`, in their order."""

    replies: tuple[AnyReply, ...]


AnyReply = Ok | Refused | Unknown | Unsupported | Replies


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a session is opened with. Sizes are per rank and in the unit of their name's last word."""

    shards: int = 1  # ranks of the shard group, N
    page_size: int = 4  # tokens
    pages_per_rank: int = 8  # allocatable, the reserved page not counted
    layout: str = "sharded"  # or "replicated": one whole copy per rank
    layers: int = 2
    components: tuple[str, ...] = ("kv",)
    chunk_tokens: int = 32  # of one batch
    context_tokens: int = 64
    scratch_contexts: int = 8  # contexts whose prefixes fit the gather's prefix region together
    draft_layers: int = 1  # of the components whose name begins with "draft"
    host_pages_per_rank: int = 0  # 0: no host tier
    host_policy: str = "write_through"  # or "write_through_selective", "write_back"
    schedule: tuple[tuple[int, int], ...] = ()  # of a simulated device: (operation, what runs from there on)


def layers_of(config: Config, component: str) -> int:
    """Layers that have rows of a component."""
    return config.draft_layers if component.startswith("draft") else config.layers


class Axes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a session of this engine can be opened with."""

    shards: tuple[int, ...]
    page_sizes: tuple[int, ...]
    layouts: tuple[str, ...] = ("sharded",)
    components: tuple[str, ...] = ("kv",)
    layers_max: int = 2
    host_policies: tuple[str, ...] = ()  # none: no host tier
    schedules: bool = False  # a simulated device runs what the config's schedule says


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Identity and claims of an engine, by the names of `harness.capabilities`; `kvshard smoke` tries every claim."""

    name: str
    version: str
    ops: tuple[str, ...]
    shows: tuple[str, ...]  # snapshot fields
    promises: tuple[str, ...]
    axes: Axes


class RequestView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One live request. `pages` is by position and includes the pages it shares with the cache."""

    tokens: int  # of the prompt
    computed: int  # tokens whose rows exist, cached ones included
    cached: int  # tokens matched when it was opened
    pages: tuple[int, ...]
    base: int | None  # rotation base; None while no page is held
    host_pages: tuple[int, ...] = ()  # behind `pages`: of the cached part that is on the host only


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
    planned_bytes: int  # by the memory plan
    allocated_bytes: int  # by the tensor


class MovedView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What moved between the tiers so far: tokens of the whole group, bytes of this rank alone."""

    backup_tokens: int = 0
    backup_bytes: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0


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
    collectives: tuple[str, ...] | None = None  # of the last op, in order
    digest: str | None = None  # of everything that must be mirrored


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be seen of a session, one view per rank that shows itself. Looking changes nothing."""

    ranks: tuple[RankView, ...]


class Verdict(enum.StrEnum):
    """Nothing passes by absence: no run, no hit where one is needed, no observation is never a pass."""

    PASS = "pass"
    FAIL = "fail"  # a counterexample exists
    UNKNOWN = "unknown"  # it ran, but what had to be seen was not seen
    SKIP = "skip"  # the engine does not claim what the case needs
    ERROR = "error"  # the harness or the engine's adapter is broken


T = TypeVar("T")


def encode(value: object) -> bytes:
    """JSON of any struct of this file."""
    return msgspec.json.encode(value)


def decode(data: bytes | str, kind: type[T] | object) -> T:
    """The struct behind JSON; raises `msgspec.ValidationError` with the path of the wrong field."""
    return msgspec.json.decode(data, type=kind)

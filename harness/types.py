"""The contract's plain values: ops, replies, manifest, snapshot, verdict. All survive a JSON round trip.

A run is a list of ops, so recording, replaying, shrinking and sending one over a wire need no further code. A new
feature is a new op, not a new method. `encode` and `decode` are the JSON forms of every struct in this file.
"""

from __future__ import annotations

import enum
from typing import TypeVar, get_args

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
    """Drop a request at any point; pages that are not in the cache become free.

    Beside a `Generate` it waits until that many tokens of the answer are there.
    """

    request: str
    after_tokens: int = 0


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

    role: str = ""  # of servers "prefill" or "decode" alone, "": all


class Kill(Op, frozen=True):
    """End a process of a server at once: a worker, or one rank of it, which its worker must not outlive.

    It is done when the worker is gone. Beside a `Generate` it waits until each answer before it has so many tokens.
    """

    role: str = ""  # of a P/D pair "prefill" or "decode"
    what: str = "worker"  # or "rank"
    after_tokens: int = 0


class Settle(Op, frozen=True):
    """Finish all pending work: copies, acknowledgements, transfers."""


class Reserve(Op, frozen=True):
    """The decode worker draws pages for a prompt of `tokens` tokens, and tells the prefill ranks the room's pages."""

    room: int
    tokens: int


class Send(Op, frozen=True):
    """Every rank sends its pages of what a request has computed and not sent yet to a room; the last chunk concludes.

    Right after `Open` this is the cached prefix, as far as it is on the device. Refused until all ranks know the room.
    """

    request: str
    room: int


class Receive(Op, frozen=True):
    """The rows that the decode worker has got for a room; refused unless they are all there."""

    room: int


class Release(Op, frozen=True):
    """The decode worker gives a room up, at any time: what is under way is aborted, the pages become free."""

    room: int


class Lose(Op, frozen=True):
    """The connection of one end is gone: that of a prefill rank until a restart, or of the decode worker for good.

    `rank` -1 is the decode worker.
    """

    rank: int


class Locate(Op, frozen=True):
    """Where the engine keeps these locs: owner, local row, byte offset. Pure; no memory needs to stand behind a loc."""

    locs: tuple[int, ...]


class Generate(Op, frozen=True, kw_only=True):
    """Continue a prompt, as one request to a server; it always makes `max_new_tokens` tokens.

    The answer's tokens get log probabilities where the engine has them.
    """

    request: str
    tokens: tuple[int, ...]
    max_new_tokens: int = 8
    temperature: float = 0.0
    seed: int = 0
    logprob_start: int = -1  # prompt tokens from here on get a log probability; -1: none
    arm: str = ""  # the engine that is judged, or "control": the same one unsharded and without P/D
    leave_after: int = -1  # tokens after which the client leaves, 0: as soon as it has asked; -1: it stays
    salt: str = ""  # of the cache: a hit only on what was computed with the same one
    half: str = ""  # of a P/D pair that alone is asked, "prefill" or "decode"; "": both


class Together(Op, frozen=True):
    """Ops that run concurrently, one reply each, in order. Several `Extend` are one batch.

    Beside a `Generate`, a `Flush` comes once each answer before it has begun.
    """

    ops: tuple[AnyOp, ...]


WorkerOp = Open | Extend | Finish | Evict | Reserve | Send | Receive | Release | Lose | Locate
AnyOp = WorkerOp | Abort | Flush | Restart | Kill | Settle | Generate | Together
OPS: tuple[type[Op], ...] = get_args(AnyOp)


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


class Received(Value, frozen=True):
    """The rows of all tokens of the prompt, as [component][layer][token]."""

    rows: Rows


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one loc lives; `offset` in bytes inside the first component's buffer of one layer on `owner`."""

    owner: int
    row: int
    offset: int


class Located(Value, frozen=True):
    """One place per loc; `row_bytes` is the stride of the buffer that the offsets point into."""

    places: tuple[Place, ...]
    row_bytes: int


class Generated(Value, frozen=True, kw_only=True):
    """One answer. What the engine does not tell is None."""

    finish: str  # "length", "stop", "abort", or "left": the client was gone before the end
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    logprobs: tuple[float, ...] | None = None  # of `tokens`
    input_logprobs: tuple[float | None, ...] | None = None  # of the prompt's tokens from `logprob_start` on
    first: int | None = None  # of a P/D pair: the token after the prompt, as the prefill worker has it
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt
    cached_device: int | None = None
    cached_host: int | None = None
    accept_length: float | None = None  # tokens for each pass that verified a draft
    verify_calls: int | None = None


AnyValue = Done | Opened | Extended | Finished | Evicted | Received | Located | Generated


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


class NetworkPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the network between prefill and decode does; number k of each list is for write or message k, in turn.

    In ticks; every look of any end for messages is one.
    """

    write_ticks: tuple[int, ...] = (0,)  # from a write to its end
    message_ticks: tuple[int, ...] = (0,)  # on the way
    repeat_ticks: tuple[int, ...] = (0,)  # not 0: the message comes again, so much later
    torn: bool = False  # the first half of a write lands at once, the rest at its end


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
    decode_pages: int = 0  # 0: no decode worker
    decode_page_size: int = 0  # 0: as the prefill worker's
    network: NetworkPlan = NetworkPlan()
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
    draft_layers_max: int = 2
    host_policies: tuple[str, ...] = ()  # none: no host tier
    decode: bool = False  # a decode worker that takes transfers
    networks: bool = False  # a simulated network does what the config's plan says
    schedules: bool = False  # a simulated device runs what the config's schedule says
    fixed: Config | None = None  # of a server that runs: the one config that all of its sessions have


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server that runs already, as it describes itself. What it does not tell is None."""

    token_ids: tuple[int, int]  # prompts are made of these: the first, and the one after the last
    pair: bool = False  # prefill and decode are workers of their own
    draft: bool = False
    tokens_max: int | None = None  # that requests can get, all ranks of the prefill worker together
    rank_tokens_max: int | None = None  # of one rank
    wait_seconds: float | None = None  # that one half of a pair waits for the other
    logprob_near: float = 1e-3  # by this, log probabilities of one token differ legally: rounding
    logprob_far: float = 0.05  # and by this, now and then: a tie in what attention selects


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Identity and claims of an engine, by the names of `harness.capabilities`; `kvshard smoke` tries every claim."""

    name: str
    version: str
    ops: tuple[str, ...]
    shows: tuple[str, ...]  # snapshot fields
    promises: tuple[str, ...]
    axes: Axes
    service: Service | None = None  # of a server


class Verdict(enum.StrEnum):
    """Nothing passes by absence: no run, no hit where one is needed, no observation is never a pass."""

    PASS = "pass"
    FAIL = "fail"  # a counterexample exists
    KNOWN = "known"  # one that is listed with a reason, and still fails
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

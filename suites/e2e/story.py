"""What a session of a server has answered so far: what later answers are compared with, and what must be cached."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.types import (
    Abort,
    AnyOp,
    AnyReply,
    Config,
    Flush,
    Generate,
    Generated,
    Kill,
    Manifest,
    Ok,
    Refused,
    Restart,
    Service,
    Settle,
)
from harness.views import RankView, Snapshot
from suites.story import parts

Tokens = tuple[int, ...]


class Key(NamedTuple):
    """What an answer depends on, and nothing else."""

    tokens: Tokens
    max_new_tokens: int
    temperature: float
    seed: int


def key_of(op: Generate) -> Key:
    """What the answer to this depends on."""
    return Key(op.tokens, op.max_new_tokens, op.temperature, op.seed)


class Kept(NamedTuple):
    """What may be hit, and by whom."""

    salt: str
    tokens: Tokens


def stays(op: Generate) -> bool:
    """Whether it is a whole request, whose answer must come."""
    return op.leave_after < 0 and not op.half


def is_whole(reply: AnyReply) -> bool:
    """Whether it says that it is a whole answer."""
    return isinstance(reply, Ok) and isinstance(reply.value, Generated) and reply.value.finish == "length"


@dataclass(slots=True)
class Story:
    """`seen` counts the events that the cases' non-vacuity conditions name."""

    config: Config
    manifest: Manifest
    references: dict[Key, tuple[Generate, Generated]] = field(default_factory=dict)
    scores: dict[Tokens, dict[int, float]] = field(default_factory=dict)  # prompt -> position -> log probability
    served: list[Kept] = field(default_factory=list)  # prompts of the judged arm since its cache was dropped
    answered: list[Kept] = field(default_factory=list)  # those with their answers
    left: list[Generate] = field(default_factory=list)  # whose client has gone while they were answered
    unnoticed: set[str] = field(default_factory=set)  # the last of them in a row whose answers were made to the end
    made: float | None = None  # tokens that were counted before the last of them, until all is settled
    told: Counter[str] = field(default_factory=Counter)  # cached tokens by tier and of all, as answers have it
    given_up: bool = False  # a request has not come to its end: counters know more than answers
    facts: dict[Tokens, tuple[int, Tokens]] = field(default_factory=dict)  # by prompt: page asked about, and answer
    known: set[Tokens] = field(default_factory=set)  # of these the ones that the control arm has answered
    passes: dict[Tokens, int] = field(default_factory=dict)  # and how many passes it took
    flips: list[Key] = field(default_factory=list)  # where another token came than in the reference
    down: set[str] = field(default_factory=set)  # roles of workers that were killed and are not back
    first: Snapshot | None = None
    page_bytes: float = 0.0  # that are sent of one page
    names: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    looked_at: float = field(default_factory=time.monotonic)

    @property
    def service(self) -> Service:
        """The server as it describes itself."""
        return self.manifest.service or Service(token_ids=(0, 1))

    def new_name(self) -> str:
        """A name that no request had yet."""
        self.names += 1
        return f"r{self.names}"

    def promises(self, name: str) -> bool:
        """Whether the engine claims it."""
        return name in self.manifest.promises

    def cached_bounds(self, op: Generate) -> tuple[int, int]:
        """Tokens of a prompt that must be in the cache while nothing was evicted, and that can be at most.

        A draft's row depends on the token behind it, too: of what two prompts share, the last one may not count.
        """
        page, most, ahead = self.config.page_size, len(op.tokens) - 1, int(self.service.draft)
        served, answered = ([its for salt, its in kept if salt == op.salt] for kept in (self.served, self.answered))
        least = max((min(common(op.tokens, its) - ahead, len(its)) for its in served), default=0)
        more = max((common(op.tokens, its) for its in answered), default=0)
        if op.logprob_start >= 0:
            least = 0  # what is scored is computed anew
        return max(0, min(least, most)) // page * page, min(max(least, more), most) // page * page

    def tell(self, op: AnyOp, reply: AnyReply, before: Snapshot | None) -> None:
        """One more op happened."""
        self.first = self.first or before
        told = list(parts(op, reply))
        self.seen["together"] += len(told) > 1
        dies, was_down = any(isinstance(one, Kill) for one, _ in told), bool(self.down)
        for one, its in told:
            if isinstance(one, Generate):
                self._generated(one, its)
                if len(told) == 1 and one.leave_after > 0 and not one.arm:
                    self.left.append(one)
                    self.made = generated(before)
                self.seen["cut off"] += dies and not is_whole(its)
                self.seen["turned away"] += was_down and not is_whole(its)
            elif isinstance(one, Kill | Restart):
                self._down_and_up(one, its)
            elif isinstance(one, Flush):
                self.seen["flush refused in flight"] += len(told) > 1 and isinstance(its, Refused)
                self.seen["flushed"] += isinstance(its, Ok)
                if isinstance(its, Ok):
                    self.served.clear()
                    self.answered.clear()
            elif isinstance(one, Settle):
                self.made = None
            elif isinstance(one, Abort):
                self.seen["abort asked"] += isinstance(its, Ok)
        self.looked_at = time.monotonic()

    def _down_and_up(self, op: Kill | Restart, reply: AnyReply) -> None:
        self.given_up = True  # counters begin anew
        if isinstance(op, Kill):
            self.down.add(op.role)
            self.seen[f"{op.what} killed"] += isinstance(reply, Ok)
        elif isinstance(reply, Ok):
            self.seen["restarted"] += 1
            self.down -= {op.role} if op.role else self.down
            if op.role != "decode":  # which keeps no prompt for others
                self.served.clear()
                self.answered.clear()

    def _generated(self, op: Generate, reply: AnyReply) -> None:
        if not isinstance(reply, Ok) or not isinstance(reply.value, Generated):
            self.given_up = self.given_up or op.arm == ""
            self.seen["orphan ended"] += bool(op.half) and isinstance(reply, Refused)
            return
        value = reply.value
        if op.half:
            self._half(op, value)
            return
        self.seen["aborted"] += value.finish == "abort"
        self.seen["left"] += value.finish == "left"
        self.seen["ended in prefill"] += value.finish in {"abort", "left"} and not value.tokens
        self.seen["ended in decode"] += value.finish in {"abort", "left"} and bool(value.tokens)
        whole = value.finish == "length"
        if op.arm == "":
            self.given_up = self.given_up or not whole
            self._cached(op, value, whole=whole)
        if whole:
            self.references.setdefault(key_of(op), (op, value))
            for position, score in scored(op, value):
                self.scores.setdefault(op.tokens, {}).setdefault(position, score)
            self.seen["answered"] += 1

    def _half(self, op: Generate, value: Generated) -> None:
        """An answer of one half alone says nothing of the whole one; the prompt may be in the cache since."""
        self.given_up = True
        whole = value.finish == "length"
        self.seen["handed over"] += whole and op.half == "prefill"
        self.seen["taken over"] += whole and op.half == "decode"
        self.answered.append(Kept(op.salt, op.tokens + (value.tokens or ())))

    def _cached(self, op: Generate, value: Generated, *, whole: bool) -> None:
        page, count = self.config.page_size, len(op.tokens)
        self.told[""] += value.cached_tokens or 0
        self.told["device"] += value.cached_device or 0
        self.told["host"] += value.cached_host or 0
        least, _ = self.cached_bounds(op)
        device = value.cached_tokens if value.cached_device is None else value.cached_device
        self.seen["evicted"] += device is not None and device < least
        self.seen["with another salt"] += any(tokens == op.tokens and salt != op.salt for salt, tokens in self.served)
        self.seen["hit"] += bool(value.cached_tokens)
        self.seen["cold"] += value.cached_tokens == 0
        self.seen["host hit"] += bool(value.cached_host)
        self.seen["exact pages"] += count % page == 0
        self.seen["tail"] += page == 1 or count % page != 0  # where a page is a token, each length is all there is
        self.seen["fewer tokens than ranks"] += count < self.config.shards
        self.seen["several chunks"] += count > self.config.chunk_tokens
        self.seen["accepted a draft"] += (value.accept_length or 0) > 1
        if whole:
            self.served.append(Kept(op.salt, op.tokens))
            self.answered.append(Kept(op.salt, op.tokens + (value.tokens or ())))


def scored(op: Generate, value: Generated) -> Iterator[tuple[int, float]]:
    """Position in the prompt and log probability of each scored prompt token; the first token has none."""
    if op.logprob_start < 0 or value.input_logprobs is None:
        return
    for at, score in enumerate(value.input_logprobs):
        if score is not None:
            yield op.logprob_start + at, score


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def ranks(snapshot: Snapshot | None, role: str = "prefill") -> list[RankView]:
    """The ranks of one side of a pair; of a plain server all are on both sides."""
    return [rank for rank in (snapshot.ranks if snapshot else ()) if rank.role in {"", role}]


def grown(before: Snapshot | None, after: Snapshot | None, name: str, role: str = "prefill") -> list[float]:
    """By how much a counter has grown, on each rank of a side."""
    pairs = zip(ranks(before, role), ranks(after, role), strict=True)
    return [(new.counters or {}).get(name, 0.0) - (old.counters or {}).get(name, 0.0) for old, new in pairs]


def generated(snapshot: Snapshot | None) -> float | None:
    """Tokens that the side which answers has made so far; None where nothing counts them."""
    counted = [(rank.counters or {}).get("generation_tokens_total") for rank in ranks(snapshot, "decode")]
    return max((count for count in counted if count is not None), default=None)

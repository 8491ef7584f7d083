"""What passes between the HTTP face of a worker and its ranks: plain values, and the face's view of the ranks.

The flow::

    client  --HTTP-->  face (one process)  --Ask, abort, flush-->  rank 0  --> all ranks, in one order
    client  <--HTTP--  face                <--Step, Stats-------   rank 0, Stats of every rank
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

LENGTH, STOP, ABORT = "length", "stop", "abort"
"""Why a generation is over; "abort" also when it failed, with `Step.error`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt to continue. Lengths in tokens."""

    rid: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the likeliest token, of equal ones the lowest."""
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    """Any of them ends the answer and is its last token."""
    logprobs: bool = False
    """Of the answer's tokens."""
    logprob_start: int = -1
    """Prompt tokens from here on get a log probability; -1: none. They are computed anew, not taken from the cache."""
    top_logprobs: int = 0
    """The likeliest tokens to tell beside each log probability."""
    room: int | None = None
    """Identity of the transfer, the same at the prefill and at the decode worker; None on a plain worker."""
    source: str = ""
    """Decode workers: "host:port" of the prefill worker's bootstrap."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's; `top` are the likeliest (log probability, token), best first. None: no token before it."""

    token: int
    value: float | None
    top: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What is new of one answer. The last one has `finished`; the first one of a worker that prefilled, `cached`."""

    rid: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    input_logprobs: tuple[Logprob, ...] = ()
    cached_device: int = 0
    """Prompt tokens that were found on the device; so far, in every step."""
    cached_host: int = 0
    drafted: int = 0
    """Draft tokens proposed, accepted and target passes that verified them; so far, in every step."""
    accepted: int = 0
    verified: int = 0
    finished: str = ""
    error: str = ""
    """What went wrong, for the user; with `status`, the HTTP status that says whose fault it was."""
    status: int = 200


@dataclass(frozen=True, slots=True)
class Stats:
    """One rank's counters since its start and gauges of now; names as in /metrics without their prefix."""

    rank: int
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Info:
    """What a worker is, fixed once it is ready."""

    args: dict[str, Any]
    """Launch arguments by the name of their field, resolved."""
    model: dict[str, Any]
    """At least: model_path, vocab_size, context_length, parameters."""
    mode: str
    """"null" (plain), "prefill" or "decode"."""
    max_total_num_tokens: int
    """Tokens of all pages that requests can get, all ranks together."""
    token_capacity: int
    """The same of one rank."""
    eos: tuple[int, ...] = ()
    version: str = ""


class RefusedAsk(Exception):  # noqa: N818  # it is an answer, not a fault
    """The worker does not take an ask; the text is for the user."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


class Backend(Protocol):
    """The ranks, as the HTTP face sees them. All methods are called on the face's event loop."""

    info: Info

    def generate(self, ask: Ask) -> AsyncIterator[Step]:
        """Steps until one is finished. RefusedAsk comes before the first. Closing the iterator early aborts the ask."""

    async def abort(self, rid: str) -> None:
        """End the ask, or every one whose rid begins with it; "" ends all. Unknown ones are no error."""

    async def flush(self, wait_seconds: float) -> str:
        """Drop the cache. Why it could not be done, or ""; waits at most so long for requests in flight to end."""

    async def stats(self) -> Sequence[Stats]:
        """Now, of every rank."""

    def broken(self) -> str:
        """Why no answer can come any more (a rank is gone), or "" while all is well."""

"""What must hold of a server when its requests have ended: how soon they do, and what is left of them."""

from __future__ import annotations

from harness.types import Flush, Ok, Service, Settle
from suites.claim import expect, require
from suites.e2e.claim import Step

LEVELS = (
    *("num_used_tokens", "kv_used_tokens", "kv_available_tokens", "kv_evictable_tokens", "decode_free_pages"),
    *("hicache_host_used_tokens", "num_running_reqs", "num_queue_reqs", "num_prefill_inflight_queue_reqs"),
    *("num_decode_running_reqs", "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"),
)
LATE = 2.0  # times the wait that the server says, and
LATE_SECONDS = 5.0  # seconds more, is too late
ALONE_SECONDS = 10.0  # in place of that wait, where there is no other half
WAIT_SECONDS_MAX = 60.0
SMOKE_WAIT_SECONDS_MAX = 30.0


def late_seconds(service: Service) -> float:
    """After which a request that cannot be answered must have ended."""
    return ((service.wait_seconds or 0.0) if service.pair else ALONE_SECONDS) * LATE + LATE_SECONDS


def at_rest(step: Step) -> None:
    """Once all is settled and the cache is dropped, every level is what it was when the session began.

    A worker that is down has none.
    """
    reply = step.reply
    if isinstance(step.op, Settle):
        seen = f"settle: {type(reply).__name__.lower()}: {getattr(reply, 'why', '')}"
        require(isinstance(reply, Ok), seen, "nothing under way", "every request has ended")
    if not isinstance(step.op, Flush):
        return
    why = getattr(reply, "why", "")
    require(isinstance(reply, Ok), f"a flush that is refused: {why}", "carried out", "every request has ended")
    before, after = step.first, step.after
    for old, new in zip(before.ranks, after.ranks, strict=True) if before and after else ():
        for name in LEVELS if new.role not in step.story.down else ():
            if name in (old.counters or {}):
                now, then = (new.counters or {}).get(name), (old.counters or {})[name]
                expect(now, then, f"{name} of {new.role} rank {new.rank}", "so it was before the first request")
    step.story.seen["at rest"] += any(rank.role not in step.story.down for rank in (after.ranks if after else ()))

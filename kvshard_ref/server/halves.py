"""The two halves of a worker on one rank: what computes prompts, and what continues them. A plain worker has both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvshard_ref.allocator import PageAllocator
from kvshard_ref.pool import ShardPool
from kvshard_ref.server.api import Ask, Step
from kvshard_ref.server.generate import Generation, Generator, tokens_needed
from kvshard_ref.server.prefill import Job, Prefiller
from kvshard_ref.transfer import regions

Numbers = dict[str, float]
RUNNING_MAX = 64
COUNTERS = (
    "generation_tokens_total",
    "num_requests_total",
    "spec_verify_calls_total",
    "spec_accepted_tokens_total",
    "spec_drafted_tokens_total",
)


@dataclass(slots=True)
class PrefillHalf:
    """A prefiller, and what it shows."""

    prefiller: Prefiller

    def stats(self) -> tuple[Numbers, Numbers]:
        """Counters and gauges. Tokens are of the whole worker, bytes of this rank."""
        worker, ps = self.prefiller.worker, self.prefiller.worker.spec.page_size
        cache, host, sender = worker.cache, worker.host, worker.exports.sender
        counters = {name: float(value) for name, value in self.prefiller.counters.items()}
        counters |= {
            "evicted_tokens_total": cache.stats.evicted_pages * ps,
            "hicache_backup_tokens_total": cache.stats.backup_pages * ps,
            "hicache_backup_bytes_total": host.backup_bytes if host else 0,
            "load_back_tokens_total": cache.stats.restored_pages * ps,
            "load_back_bytes_total": host.restored_bytes if host else 0,
            "kv_transfer_bytes_total": sender.link.sent_bytes if sender else 0,
        }
        free = cache.placement.shards * min(cache.allocator.free_counts()) * ps
        evictable = sum(cache.tree.evictable_counts()) * ps
        gauges: Numbers = {
            "max_total_num_tokens": cache.capacity_tokens(),
            "kv_available_tokens": free,
            "kv_evictable_tokens": evictable,
            "num_used_tokens": cache.used_tokens(),
            "token_usage": cache.used_tokens() / cache.capacity_tokens(),
            "page_size": ps,
            "num_running_reqs": len(self.prefiller.jobs),
            "num_queue_reqs": len(self.prefiller.waiting),
            "num_prefill_inflight_queue_reqs": len(worker.exports.live),
        }
        if cache.host:
            slots = worker.spec.host_pages_per_rank * cache.placement.shards
            gauges["hicache_host_total_tokens"] = slots * ps
            gauges["hicache_host_used_tokens"] = (slots - sum(cache.host.allocator.free_counts())) * ps
        return counters, gauges


@dataclass(slots=True)
class DecodeHalf:
    """Answers on their way. `allocator`: on a plain worker each rank draws pages itself, alike on all.

    `spread` brings pages [n, elements] of the first rank to all, in place; needed where only that one gets rows.
    """

    generator: Generator
    allocator: PageAllocator | None = None
    spread: Callable[[Tensor], None] | None = None
    running: dict[str, Generation] = field(default_factory=dict)
    pages: dict[str, list[int]] = field(default_factory=dict)
    counters: Numbers = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))

    @property
    def busy(self) -> bool:
        """Whether there are answers to continue."""
        return bool(self.running)

    def begin(self, ask: Ask, pages: Sequence[int], *, relay: bool = False) -> None:
        """Continue a prompt whose rows are on these pages, with `relay` on those of the first rank."""
        if relay and self.spread is not None:
            count = -(-len(ask.tokens) // self.generator.pools[0].placement.page_size)
            for region in regions(self.generator.pools).values():
                rows = region[list(pages[:count])]
                self.spread(rows)
                region[list(pages[:count])] = rows
        self.running[ask.rid] = self.generator.begin(ask, pages)

    def take_over(self, job: Job, sources: Sequence[ShardPool], prompt_pages: Sequence[int]) -> bool:
        """On a plain worker: copy a prompt's rows from the prefill pools, if there is room; whether there was."""
        place = self.generator.pools[0].placement
        count = -(-tokens_needed(job.ask, self.generator.drafts) // place.page_size)
        if self.allocator is None or len(self.running) >= RUNNING_MAX:
            return False
        pages = self.allocator.draw_run(0, count)
        if pages is None:
            return False
        here = regions(self.generator.pools)
        for name, region in regions(sources).items():
            here[name][pages[: len(prompt_pages)]] = region[list(prompt_pages)]
        self.pages[job.ask.rid] = pages
        self.begin(job.ask, pages)
        return True

    def abort(self, rid: str) -> None:
        """An answer ends early."""
        if self.running.pop(rid, None):
            self._free(rid)

    def step(self) -> list[Step]:
        """One pass of every answer."""
        steps = [self.generator.advance(each) for each in self.running.values()]
        for step in steps:
            self.counters["generation_tokens_total"] += len(step.tokens)
            if step.finished:
                self.counters["num_requests_total"] += 1
                self.counters["spec_verify_calls_total"] += step.verified
                self.counters["spec_accepted_tokens_total"] += step.accepted
                self.counters["spec_drafted_tokens_total"] += step.drafted
                self.abort(step.rid)
        return steps

    def stats(self) -> tuple[Numbers, Numbers]:
        """Counters and gauges of this rank."""
        gauges: Numbers = {"num_decode_running_reqs": len(self.running)}
        if self.allocator:
            gauges["decode_free_pages"] = sum(self.allocator.free_counts())
        return dict(self.counters), gauges

    def _free(self, rid: str) -> None:
        pages = self.pages.pop(rid, None)
        if pages and self.allocator:
            self.allocator.free(pages)

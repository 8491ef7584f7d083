"""A request at index level, timed: matching, evicting, allocating, inserting and freeing pages, without rows.

All engines get the same tokens, one request after the other, and must report the same hits and evictions. A round is
one run of each on a fresh cache; the order turns round from round to round, so that a slow moment of the machine is not
always the same engine's.

    parts    tree and allocator by themselves: name, match, evict, allocate, insert, free, and their sum, "cycle"
    worker   the whole request as the engine's worker runs it, with admission and bookkeeping
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np

from harness.capacity import CapacityError, IndexCache, IndexEngine, NotAdmittedError

PARTS = ("name", "match", "evict", "allocate", "insert", "free")
CYCLE = "cycle"
WORKER = "worker"
FIGURES = (*PARTS, CYCLE, WORKER)
_SHARE_AGAIN = 0.5  # of the requests that begin as an earlier one does

Hits = list[tuple[int, int]]  # of each request: tokens hit, pages evicted


class IndexParts(Protocol):
    """An engine's tree and allocator, one request after the other; each takes the calls in this order, once."""

    def match(self, keys: Any, tokens: int) -> int:
        """Find and lock the longest cached prefix, at most the whole pages of `tokens - 1`; returns its tokens."""

    def evict(self) -> int:
        """Evict the least recently used leaves until every class has what a rest of this length may need of it.

        Returns pages.
        """

    def allocate(self) -> bool:
        """Draw the pages of the rest; whether there were enough."""

    def insert(self) -> None:
        """Cache the whole pages, free those that were cached already, and lock the chain in place of the prefix."""

    def free(self) -> None:
        """Free the page that is not whole, and unlock."""


class BenchEngine(IndexEngine, Protocol):
    """An engine whose parts can be driven by themselves too."""

    def parts(self, shards: int, page_size: int, pages_per_rank: int) -> IndexParts:
        """Empty ones. pages_per_rank leaves out the reserved page."""

    def named(self, tokens: array[int], page_size: int) -> Any:
        """What its parts and its cache take for a prompt of these tokens. This is timed."""


class Workload(msgspec.Struct, frozen=True):
    """What is asked of every engine. Prompts share prefixes of whole pages with earlier ones."""

    shards: int = 4
    page_size: int = 64
    requests: int = 200
    prompt_tokens: int = 8_192
    pages_per_rank: int = 2_048
    rounds: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", self.page_size), ("rounds", 3)):
            if (value := getattr(self, name)) < least:
                raise CapacityError(f"{name} is {value}; expected at least {least}")
        # workers ask for a page of each class more than the prompt has, and twice as many because classes fill unevenly
        pages = -(-self.prompt_tokens // self.page_size)
        least = 2 * (-(-pages // self.shards) + 2)
        if self.pages_per_rank < least:
            raise CapacityError(
                f"pages per rank is {self.pages_per_rank}; expected at least {least} for a prompt of {pages} pages on "
                f"{self.shards} ranks: more pages or shorter prompts"
            )

    def prompts(self) -> list[list[int]]:
        """Page keys of each prompt, one per whole page; the same for the same seed."""
        draw = random.Random(self.seed)
        whole = self.prompt_tokens // self.page_size
        prompts: list[list[int]] = []
        fresh = 0
        for _ in range(self.requests):
            shared = draw.randint(0, whole) if prompts and draw.random() < _SHARE_AGAIN else 0
            keys = draw.choice(prompts)[:shared] if shared else []
            prompts.append([*keys, *range(fresh, fresh + whole - shared)])
            fresh += whole - shared
        return prompts


class Times(msgspec.Struct, frozen=True):
    """One engine: of each figure the seconds of every round, for all requests together."""

    engine: str
    seconds: dict[str, list[float]]

    def microseconds(self, figure: str, requests: int) -> float:
        """Of one request, in the median round."""
        return statistics.median(self.seconds[figure]) / requests * 1e6


class Ratio(msgspec.Struct, frozen=True):
    """Seconds of an engine over those of the first one in the same round: quartiles over the rounds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, first: Sequence[float], other: Sequence[float]) -> Ratio | None:
        """None where the first one took no time: nothing was evicted, for example."""
        if min(first) <= 0:
            return None
        ratios = [ours / theirs for theirs, ours in zip(first, other, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(low, median, high)


class BenchReport(msgspec.Struct, frozen=True):
    """Everything that the table and the files show. The ratios are those of the engines after the first one."""

    workload: Workload
    versions: dict[str, str]
    hit_tokens: int
    evicted_pages: int
    worker_evicted_pages: int
    times: list[Times]
    ratios: dict[str, dict[str, Ratio | None]]  # engine -> figure
    missing: list[str]  # engines that were left out, and why


def tokens_of(keys: Sequence[int], tokens: int, page_size: int) -> array[int]:
    """`tokens` tokens that begin with the pages of these keys: equal keys, equal pages; none is negative."""
    numbers = np.array(keys, dtype=np.int64)
    first = np.where(numbers < 0, -2 * numbers - 1, 2 * numbers) * page_size
    named = array("q", (first[:, None] + np.arange(page_size)).tobytes())
    named.extend([0] * (tokens - len(named)))
    return named


def rest_counts(pages: int, shards: int) -> list[int]:
    """Most pages that `pages` pages in rotation take of each class, wherever they begin."""
    return [-(-pages // shards)] * shards


def measure(
    workload: Workload, engines: Sequence[BenchEngine], advance: Any = lambda _: None
) -> tuple[list[Times], tuple[Hits, Hits]]:
    """Times of every engine, and what all of them hit by their parts and as workers.

    advance(1): one run of one engine is done. CapacityError when two engines did not do the same work.
    """
    prompts = [tokens_of(keys, workload.prompt_tokens, workload.page_size) for keys in workload.prompts()]
    seconds: list[dict[str, list[float]]] = [{figure: [] for figure in FIGURES} for _ in engines]
    agreed: tuple[Hits, Hits] | None = None
    for number in range(-1, workload.rounds):  # the first one warms up, and is not counted
        order = range(len(engines)) if number % 2 else reversed(range(len(engines)))
        for place in order:
            taken, seen = run_once(workload, engines[place], prompts)
            agreed = agreed or seen
            check_same(agreed, seen, engines[place].name)
            for figure in FIGURES if number >= 0 else ():
                seconds[place][figure].append(taken[figure])
            advance(1)
    if agreed is None:
        raise CapacityError("no engine to measure")
    return [Times(engine.name, each) for engine, each in zip(engines, seconds, strict=True)], agreed


def run_once(
    workload: Workload, engine: BenchEngine, prompts: Sequence[array[int]]
) -> tuple[dict[str, float], tuple[Hits, Hits]]:
    """Seconds of each figure, and the hits by parts and as a worker, each from an empty cache."""
    shape = (workload.shards, workload.page_size, workload.pages_per_rank)
    parts, cache = engine.parts(*shape), engine.cache(*shape)
    with _no_collection():
        taken, seen = run_parts(workload, engine, parts, prompts)
    with _no_collection():
        taken[WORKER], worker = run_worker(workload, engine, cache, prompts)
    return taken, (seen, worker)


def run_worker(
    workload: Workload, engine: BenchEngine, cache: IndexCache, prompts: Sequence[array[int]]
) -> tuple[float, Hits]:
    """Seconds of the requests one after the other, through the engine's cache."""
    tokens, seen, evicted = workload.prompt_tokens, Hits(), 0
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        try:
            hit = cache.open(number, engine.named(prompt, workload.page_size), tokens, tokens)
            cache.extend(number)
        except NotAdmittedError as error:
            raise CapacityError(f"{engine.name} does not admit request {number}: {error}; give more --pages") from error
        cache.finish(number)
        before, evicted = evicted, cache.evicted_pages()
        seen.append((hit, evicted - before))
    return time.perf_counter() - start, seen


def run_parts(
    workload: Workload, engine: BenchEngine, parts: IndexParts, prompts: Sequence[array[int]]
) -> tuple[dict[str, float], Hits]:
    """The requests one after the other, with the clock read between the parts."""
    clock, tokens, page_size = time.perf_counter, workload.prompt_tokens, workload.page_size
    sums = [0.0] * len(PARTS)
    seen: Hits = []
    for number, prompt in enumerate(prompts):
        times = [clock()]
        keys = engine.named(prompt, page_size)
        times.append(clock())
        hit = parts.match(keys, tokens)
        times.append(clock())
        evicted = parts.evict()
        times.append(clock())
        drawn = parts.allocate()
        times.append(clock())
        if not drawn:
            raise CapacityError(f"request {number} got no pages after an eviction; give more --pages")
        parts.insert()
        times.append(clock())
        parts.free()
        times.append(clock())
        seen.append((hit, evicted))
        for place in range(len(PARTS)):
            sums[place] += times[place + 1] - times[place]
    return {**dict(zip(PARTS, sums, strict=True)), CYCLE: sum(sums)}, seen


def check_same(agreed: tuple[Hits, Hits], seen: tuple[Hits, Hits], engine: str) -> None:
    """Raises CapacityError at the first request that went otherwise: times of different work mean nothing."""
    for run, first, other in zip(("its parts", "a worker"), agreed, seen, strict=True):
        for number, (expected, found) in enumerate(zip(first, other, strict=True)):
            if expected != found:
                raise CapacityError(
                    f"the engines did different work, so their times are not compared: by {run}, {engine} hit "
                    f"{found[0]} tokens and evicted {found[1]} pages at request {number}; expected {expected[0]} and "
                    f"{expected[1]}, as the first engine did"
                )


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection falls into what is timed; it is as before afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def report(
    workload: Workload, versions: dict[str, str], times: list[Times], hits: tuple[Hits, Hits], missing: list[str]
) -> BenchReport:
    """All of it, with the ratios."""
    first = times[0]
    ratios = {
        each.engine: {figure: Ratio.of(first.seconds[figure], each.seconds[figure]) for figure in FIGURES}
        for each in times[1:]
    }
    return BenchReport(
        workload=workload,
        versions=versions,
        hit_tokens=sum(hit for hit, _ in hits[0]),
        evicted_pages=sum(evicted for _, evicted in hits[0]),
        worker_evicted_pages=sum(evicted for _, evicted in hits[1]),
        times=times,
        ratios=ratios,
        missing=missing,
    )

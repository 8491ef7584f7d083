"""What sharding buys: request traffic replayed through an engine's page allocator and prefix tree.

No rows and no model: a page is an id. The cache is an engine's own (IndexCache), the traffic is `harness.traffic`.

A request's pages, by position (ps tokens each; L = input_length, A = output_length):

    [0, L // ps)                 whole prompt pages, key = block id * (512 / ps) + page inside the block
    [L // ps, (L + A) // ps)     the page that mixes prompt and answer, and the answer's: a fresh key each,
                                 since no later prompt can be shown to contain them; cached all the same
    the rest, if any             a partial page, never cached

At most (L - 1) // ps pages hit: at least one prompt token is always computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Protocol, TypeVar

import msgspec

from harness.traffic import BLOCK_TOKENS, Request

GIB = 1 << 30
_PROGRESS_EVERY = 64  # requests

_T = TypeVar("_T")


class CapacityError(Exception):
    """An option or a combination that cannot work; the message is one line for the user."""


class NotAdmittedError(Exception):
    """The cache cannot take a request now. Its state is unchanged."""


class IndexCache(Protocol):
    """An engine's allocator and prefix tree on page ids, as far as the replay needs them.

    Requests go by number. `open` matches a prefix and locks it, `extend` admits the request, draws its pages (evicting
    what is short) and caches the computed ones, `finish` unlocks them, `abort` gives up an opened request.
    """

    def open(self, number: int, keys: Any, tokens: int, prompt_tokens: int) -> int:
        """Tokens matched, at most those of the whole pages in `prompt_tokens - 1`. NotAdmittedError.

        keys: what the engine's `prompt` made of the page keys of `tokens` (prompt and answer).
        """

    def extend(self, number: int) -> None:
        """Compute the rest of the request. NotAdmittedError: opened still, nothing drawn, nothing evicted."""

    def finish(self, number: int) -> None:
        """The request's pages stay cached, unlocked."""

    def abort(self, number: int) -> None:
        """Forget a request that was opened and not extended."""

    def used_pages(self) -> list[int]:
        """Pages of each rank that are not free."""

    def evicted_pages(self) -> int:
        """Pages evicted since the start, all ranks."""


class IndexEngine(Protocol):
    """Makes caches of one engine. Instances travel to worker processes, so they pickle."""

    @property
    def name(self) -> str:
        """The engine's name, as reports show it."""

    def scratch_bytes(self, shards: int, sizing: Sizing) -> int:
        """Bytes of a rank's scratch slots: what gathering a sharded prefix costs. Asked for sharded layouts only."""

    def cache(self, shards: int, page_size: int, pages_per_rank: int) -> IndexCache:
        """An empty cache. pages_per_rank leaves out the reserved page."""

    def prompt(self, keys: list[int], tokens: int, page_size: int) -> Any:
        """The engine's own form of a request's page keys, one per whole page of `tokens`. No clock runs meanwhile."""


class Sizing(msgspec.Struct, frozen=True):
    """What turns memory into pages. row_bytes: per token and layer; default 708, the fp8 DSA latent (576 + 132)."""

    page_size: int = 64
    row_bytes: int = 708
    layers: int = 78
    context_tokens: int = 131_072
    chunk_tokens: int = 8_192

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if (value := getattr(self, field)) < 1:
                raise CapacityError(f"{field} is {value}; expected at least 1")
        if BLOCK_TOKENS % self.page_size:
            raise CapacityError(
                f"page size {self.page_size} does not divide {BLOCK_TOKENS}, the tokens of one prefix block "
                "of the traffic; choose 1, 2, 4, ... 512"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers, on the rank that stores it."""
        return self.page_size * self.row_bytes * self.layers


class Layout(msgspec.Struct, frozen=True):
    """shards = 1: every rank keeps a whole copy. Else so many ranks hold one copy between them."""

    shards: int

    @property
    def name(self) -> str:
        """As reports show it."""
        return "replicated" if self.shards == 1 else f"sharded N={self.shards}"


class Replay(msgspec.Struct, frozen=True):
    """What one replay saw. Rates count the input tokens of all requests, not admitted ones too.

    skew: fullest minus emptiest rank, in used pages as a share of pages per rank, sampled at every request.
    used_pages_max: of the fullest rank. seconds: in the engine's calls; what names the pages for it does not count.
    """

    hit_tokens: int
    hit_rate: float
    evicted_pages: int
    evicted_tokens: int
    skew_mean: float
    skew_max: float
    used_pages_max: int
    not_admitted: dict[str, int]
    seconds: float
    tokens_per_second: float


class Row(msgspec.Struct, frozen=True):
    """One layout at one memory per rank. replay is None when nothing could be replayed, and note says why."""

    layout: str
    shards: int
    memory_bytes: int
    scratch_bytes: int
    pages_per_rank: int
    capacity_tokens: int
    replay: Replay | None = None
    note: str = ""


class Bound(msgspec.Struct, frozen=True):
    """An infinite cache on the same traffic.

    blocks, hit_blocks: block occurrences, and those seen before. hit_tokens: whole pages, with the caps of the replay.
    """

    blocks: int
    hit_blocks: int
    block_rate: float
    input_tokens: int
    hit_tokens: int
    hit_rate: float


class Report(msgspec.Struct, frozen=True):
    """Everything the table, the JSON file and the plot show."""

    title: str
    engine: str
    generated: bool
    requests: int
    input_tokens: int
    in_flight: int
    sizing: Sizing
    bound: Bound
    rows: list[Row]
    others: list[Report] = []  # the same of the other engines in the run


def bound(requests: Iterable[Request], page_size: int) -> Bound:
    """What a cache that never evicts would hit; no layout can do better."""
    pages_per_block = BLOCK_TOKENS // page_size
    seen: dict[int, int] = {}  # block id -> whole pages of it seen
    blocks = hit_blocks = input_tokens = hit_tokens = 0
    for request in requests:
        whole, hit, running = request.input_length // page_size, 0, True
        for place, block in enumerate(request.hash_ids):
            inside = min(pages_per_block, whole - place * pages_per_block)
            known = seen.get(block)
            hit_blocks += known is not None
            if running:
                match = min(inside, known or 0)
                hit += match
                running = match == pages_per_block
            seen[block] = max(inside, known or 0)
        blocks += len(request.hash_ids)
        input_tokens += request.input_length
        hit_tokens += min(hit, (request.input_length - 1) // page_size) * page_size
    return Bound(
        blocks=blocks,
        hit_blocks=hit_blocks,
        block_rate=_share(hit_blocks, blocks),
        input_tokens=input_tokens,
        hit_tokens=hit_tokens,
        hit_rate=_share(hit_tokens, input_tokens),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def page_keys(request: Request, page_size: int, fresh: Iterator[int]) -> list[int]:
    """The request's page keys (see the module's drawing); `fresh` gives keys that no block has."""
    pages_per_block = BLOCK_TOKENS // page_size
    first_keys = [block * pages_per_block for block in request.hash_ids]
    keys = list(chain.from_iterable(range(key, key + pages_per_block) for key in first_keys))
    del keys[request.input_length // page_size :]
    keys.extend(next(fresh) for _ in range((request.input_length + request.output_length) // page_size - len(keys)))
    return keys


def budget(layout: Layout, memory_bytes: int, sizing: Sizing, engine: IndexEngine) -> Row:
    """Pages per rank that `memory_bytes` leaves after scratch and the reserved page; if none, the note says why."""
    scratch = engine.scratch_bytes(layout.shards, sizing) if layout.shards > 1 else 0
    pages = (memory_bytes - scratch) // sizing.page_bytes - 1
    note = ""
    if scratch > memory_bytes:
        note = f"scratch does not fit: {scratch / GIB:.3f} GiB of {memory_bytes / GIB:.3f} GiB"
    elif pages < 1:
        left = (memory_bytes - scratch) / GIB
        note = (
            f"no page fits: {left:.3f} GiB left, 2 pages (one is reserved) take {2 * sizing.page_bytes / GIB:.3f} GiB"
        )
    pages = max(0, pages)
    tokens = pages * layout.shards * sizing.page_size
    return Row(layout.name, layout.shards, memory_bytes, scratch, pages, tokens, note=note)


@dataclass(slots=True)
class _Samples:
    """Page balance over the replay: of each request, the ranks' used pages once its own are drawn."""

    count: int = 0
    skew_sum: int = 0
    skew_max: int = 0
    used_max: int = 0

    def add(self, used: Sequence[int]) -> None:
        fullest = max(used)
        skew = fullest - min(used)
        self.count += 1
        self.skew_sum += skew
        self.skew_max = max(self.skew_max, skew)
        self.used_max = max(self.used_max, fullest)


class Replayer:
    """Puts requests through one cache in arrival order.

    A request finishes when the in_flight-th later request arrives; its pages are locked until then. One that does not
    fit waits: the oldest in flight finish, in order, until it does. Only one that does not fit alone is not admitted.
    """

    def __init__(
        self,
        cache: IndexCache,
        row: Row,
        sizing: Sizing,
        in_flight: int,
        prompt: Callable[[list[int], int, int], Any] = lambda keys, *_: keys,
    ) -> None:
        self.cache, self.row, self.sizing, self.in_flight, self.prompt = cache, row, sizing, in_flight, prompt
        self.live: deque[int] = deque()
        self.fresh = count(-1, -1)
        self.samples = _Samples()
        self.hit_tokens = 0
        self.not_admitted: dict[str, int] = {}
        self.naming_seconds = 0.0

    def run(self, requests: Sequence[Request], advance: Callable[[int], None]) -> Replay:
        """Replay all. advance(n): n more requests are done; called every 64."""
        start = time.perf_counter()
        for number, request in enumerate(requests):
            while self.live and self.live[0] + self.in_flight <= number:
                self.cache.finish(self.live.popleft())
            self._serve(number, request)
            if (number + 1) % _PROGRESS_EVERY == 0:
                advance(_PROGRESS_EVERY)
        advance(len(requests) % _PROGRESS_EVERY)
        seconds = time.perf_counter() - start - self.naming_seconds
        return self._result(sum(request.input_length for request in requests), seconds)

    def _serve(self, number: int, request: Request) -> None:
        ps, tokens = self.sizing.page_size, request.input_length + request.output_length
        if tokens > self.sizing.context_tokens:
            self._refuse("longer than the context")
            return
        if tokens > self.row.capacity_tokens:
            self._refuse("longer than the cache")
            return
        start = time.perf_counter()
        keys = self.prompt(page_keys(request, ps, self.fresh), tokens, ps)
        self.naming_seconds += time.perf_counter() - start
        try:
            cached = self._queue(lambda: self.cache.open(number, keys, tokens, request.input_length))
        except NotAdmittedError:
            self._refuse("prefix cannot be locked")
            return
        try:
            self._queue(lambda: self.cache.extend(number))
        except NotAdmittedError:
            self.cache.abort(number)
            self._refuse("too few pages in an owner class")
            return
        self.hit_tokens += cached
        self.live.append(number)
        self.samples.add(self.cache.used_pages())

    def _queue(self, step: Callable[[], _T]) -> _T:
        """What `step` returns, once the oldest in flight made room for it. NotAdmittedError: it does not fit alone."""
        while True:
            try:
                return step()
            except NotAdmittedError:
                if not self.live:
                    raise
            self.cache.finish(self.live.popleft())

    def _refuse(self, kind: str) -> None:
        self.not_admitted[kind] = self.not_admitted.get(kind, 0) + 1

    def _result(self, input_tokens: int, seconds: float) -> Replay:
        evicted, samples, pages = self.cache.evicted_pages(), self.samples, self.row.pages_per_rank
        return Replay(
            hit_tokens=self.hit_tokens,
            hit_rate=_share(self.hit_tokens, input_tokens),
            evicted_pages=evicted,
            evicted_tokens=evicted * self.sizing.page_size,
            skew_mean=_share(samples.skew_sum, samples.count * pages),
            skew_max=samples.skew_max / pages,
            used_pages_max=samples.used_max,
            not_admitted=self.not_admitted,
            seconds=seconds,
            tokens_per_second=input_tokens / seconds if seconds else 0.0,
        )


def replay(
    row: Row,
    requests: Sequence[Request],
    sizing: Sizing,
    in_flight: int,
    engine: IndexEngine,
    advance: Callable[[int], None] = lambda _: None,
) -> Row:
    """`row` with its replay; unchanged when its note says that nothing fits."""
    if row.note:
        return row
    # more pages than all requests together can draw change nothing, and a page costs memory here too
    pages_max = sum(
        -(-min(request.input_length + request.output_length, sizing.context_tokens) // sizing.page_size)
        for request in requests
    )
    cache = engine.cache(row.shards, sizing.page_size, min(row.pages_per_rank, max(1, pages_max)))
    seen = Replayer(cache, row, sizing, in_flight, engine.prompt).run(requests, advance)
    return msgspec.structs.replace(row, replay=seen)

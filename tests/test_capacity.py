"""The capacity replay: hand-computed traces, budgets, the bound."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from ci.register import register_cpu_ci
from harness.adapters.ref_index import RefIndexEngine
from harness.capacity import (
    GIB,
    CapacityError,
    Layout,
    NotAdmittedError,
    Replay,
    Replayer,
    Row,
    Sizing,
    bound,
    budget,
    page_keys,
    replay,
)
from harness.capacity_jobs import Task, replay_grid
from harness.traffic import Request, generate, read_trace

register_cpu_ci(est_time=50, stage="commit")

ENGINE = RefIndexEngine()
BLOCKS = Sizing(page_size=512, row_bytes=1, layers=1, context_tokens=8192, chunk_tokens=512)  # a page is one block


def ask(tokens: int, *blocks: int, answer: int = 0) -> Request:
    return Request(0, tokens, answer, blocks)


def row(shards: int, pages_per_rank: int, page_size: int = 512) -> Row:
    return Row("", shards, 0, 0, pages_per_rank, shards * pages_per_rank * page_size)


def replayed(
    requests: Sequence[Request], shards: int, pages: int, sizing: Sizing = BLOCKS, in_flight: int = 1
) -> Replay:
    seen = replay(row(shards, pages, sizing.page_size), requests, sizing, in_flight, ENGINE).replay
    assert seen is not None
    return seen


def test_page_keys_of_prompt_and_answer() -> None:
    """Whole prompt pages are named by block and place, mixed and answer pages by keys no block has; a rest by none."""
    fresh = itertools.count(-1, -1)
    assert page_keys(ask(513 + 128 + 1, 7, 9, answer=126), 64, fresh) == [*range(56, 64), 72, 73, -1, -2]
    assert page_keys(ask(512, 7, answer=63), 64, fresh) == [*range(56, 64)]
    assert page_keys(ask(63, 7, answer=1), 64, fresh) == [-3]


def test_bound_by_hand() -> None:
    """Blocks count every block seen before; tokens count whole pages of a leading run, and one token is always left."""
    requests = [ask(1024, 0, 1), ask(1536, 0, 1, 2), ask(1024, 0, 1), ask(700, 0, 3), ask(1100, 0, 3, 4)]
    best = bound(requests, 512)
    assert (best.blocks, best.hit_blocks) == (12, 7)
    assert (best.input_tokens, best.hit_tokens) == (5384, 1024 + 512 + 512 + 512)
    # smaller pages: the partial block 3 holds 188 tokens, two pages of 64 whole; 1023 // 64 pages of the third prompt
    assert bound(requests, 64).hit_tokens == 1024 + 15 * 64 + 512 + 512 + 128


def test_bound_counts_a_prefix_only() -> None:
    """A known block after an unknown one counts as a block seen before, not as tokens that a prefix cache serves."""
    best = bound([ask(1100, 0, 1, 2), ask(1100, 5, 1, 6)], 512)
    assert (best.hit_blocks, best.hit_tokens) == (1, 0)


def test_bound_of_an_identical_prompt() -> None:
    """The same prompt twice hits all whole pages but the last token's."""
    assert bound([ask(600, 0, 1), ask(600, 0, 1)], 64).hit_tokens == 576
    assert bound([ask(576, 0, 1), ask(576, 0, 1)], 64).hit_tokens == 512


def test_hits_and_evictions_by_hand() -> None:
    """Three pages; prompts of one whole and one partial page. Least recently used chains go, a hit renews its chain."""
    requests = [ask(513, 0, 90), ask(513, 1, 91), ask(513, 2, 92), ask(513, 1, 93), ask(513, 0, 94)]
    # draws 2, 2, 2 (evicts 0), 1 (hits 1), 2 (evicts 2, since 1 was renewed); the partial page is freed at finish
    seen = replayed(requests, shards=1, pages=3)
    assert (seen.hit_tokens, seen.evicted_pages, seen.evicted_tokens) == (512, 2, 1024)
    assert seen.hit_rate == 512 / (5 * 513)
    assert (seen.used_pages_max, seen.skew_max, seen.not_admitted) == (3, 0.0, {})


def test_last_prompt_token_is_computed() -> None:
    """A prompt that is cached to its end, with an answer to come, hits all its pages but the last."""
    assert replayed([ask(1024, 0, 1, answer=600)] * 2, shards=1, pages=9).hit_tokens == 512


def test_sharded_pages_add_up_by_hand() -> None:
    """Two ranks of two pages keep what four pages keep: the fourth prompt evicts, the same replicated evicts sooner."""
    requests = [ask(1024, 0, 1), ask(1024, 2, 3), ask(1025, 0, 1, 4)]
    assert replayed(requests, shards=2, pages=2).hit_tokens == 1024
    assert replayed(requests, shards=1, pages=4).hit_tokens == 1024
    assert replayed(requests, shards=1, pages=3).hit_tokens == 0


def test_skew_by_hand() -> None:
    """Three pages from rank 0 leave rank 1 one page behind; the next chain starts on rank 1 and evens it out."""
    seen = replayed([ask(1536, 0, 1, 2), ask(512, 3)], shards=2, pages=4)
    assert (seen.skew_mean, seen.skew_max, seen.used_pages_max) == (0.5 / 4, 1 / 4, 2)


def test_answer_is_cached_but_never_hit() -> None:
    """An answer takes pages and evicts others; the prompt of the next turn hits the old prompt's whole pages only."""
    turns = [ask(512, 0, answer=512), ask(1536, 0, 1, 2)]
    assert replayed(turns, shards=1, pages=8).hit_tokens == 512
    assert replayed(turns, shards=1, pages=8).used_pages_max == 1 + 1 + 2
    assert replayed([*turns, ask(513, 0, 3)], shards=1, pages=4).evicted_pages == 1


class RecordingCache:
    """Room for so many requests at a time; remembers the calls."""

    def __init__(self, room: int) -> None:
        self.room, self.calls, self.live = room, list[str](), set[int]()

    def open(self, number: int, keys: Sequence[int], tokens: int, prompt_tokens: int) -> int:
        self.calls.append(f"open {number}")
        return 0

    def extend(self, number: int) -> None:
        if len(self.live) == self.room:
            raise NotAdmittedError("full")
        self.calls.append(f"extend {number}")
        self.live.add(number)

    def finish(self, number: int) -> None:
        self.calls.append(f"finish {number}")
        self.live.remove(number)

    def abort(self, number: int) -> None:
        self.calls.append(f"abort {number}")

    def used_pages(self) -> list[int]:
        return [len(self.live)]

    def evicted_pages(self) -> int:
        return 0


def calls(room: int, in_flight: int, requests: int) -> tuple[list[str], Replay]:
    cache = RecordingCache(room)
    seen = Replayer(cache, row(1, 9), BLOCKS, in_flight).run([ask(512, n) for n in range(requests)], lambda _: None)
    return cache.calls, seen


def test_in_flight_requests_finish_when_the_kth_later_one_arrives() -> None:
    """K = 1 is one after the other; K = 2 keeps one more."""
    assert " ".join(calls(9, 1, 3)[0]) == "open 0 extend 0 finish 0 open 1 extend 1 finish 1 open 2 extend 2"
    assert " ".join(calls(9, 2, 3)[0]) == "open 0 extend 0 open 1 extend 1 finish 0 open 2 extend 2"
    assert calls(9, 3, 9)[1].used_pages_max == 3


def test_a_request_that_does_not_fit_waits_for_the_oldest() -> None:
    """With room for one, the request in flight finishes early; nobody is refused."""
    made, seen = calls(1, 2, 2)
    assert " ".join(made) == "open 0 extend 0 open 1 finish 0 extend 1"
    assert seen.not_admitted == {}


def test_a_request_that_does_not_fit_alone_is_not_admitted() -> None:
    """It is given up, its tokens count as input, and the reasons are counted by kind."""
    made, seen = calls(0, 2, 1)
    assert (made, seen.not_admitted) == (["open 0", "abort 0"], {"too few pages in an owner class": 1})
    requests = [ask(8192, *range(16), answer=1), ask(1500, 0, 1, 2), ask(1024, 20, 21, answer=513), ask(1024, 30, 31)]
    full = replayed(requests, shards=1, pages=2)
    assert full.not_admitted == {"longer than the context": 1, "longer than the cache": 2}
    assert full.used_pages_max == 2


def test_locked_pages_survive_in_flight() -> None:
    """A prefix in flight is not evicted for others: the one that waits takes the oldest, not the shared one."""
    requests = [ask(1024, 0, 1), ask(1025, 0, 1, 2), ask(1536, 5, 6, 7)]
    assert replayed(requests, shards=1, pages=3, in_flight=3).hit_tokens == 1024
    assert replayed(requests, shards=1, pages=3, in_flight=3).evicted_pages == 2


def test_budget_of_worked_example() -> None:
    """A GLM-5.2 DSA worker at context 131072, 8 GiB per rank: pages after scratch, less the reserved page."""
    whole, sharded = (budget(Layout(shards), 8 * GIB, Sizing(), ENGINE) for shards in (1, 4))
    assert (whole.scratch_bytes, whole.pages_per_rank) == (0, 2429)
    assert (sharded.scratch_bytes, sharded.pages_per_rank) == (1_496_474_112, 2006)
    assert sharded.capacity_tokens == 4 * 2006 * 64
    assert (whole.layout, sharded.layout, whole.note, sharded.note) == ("replicated", "sharded N=4", "", "")


def test_too_little_memory_is_a_note() -> None:
    """Memory below scratch, or too small for a page, is told with the numbers; such a row is not replayed."""
    no_scratch, no_page = (budget(Layout(4), memory, Sizing(), ENGINE) for memory in (GIB, 1_496_474_112 + 3_534_336))
    assert no_scratch.note == "scratch does not fit: 1.394 GiB of 1.000 GiB"
    assert no_page.note == "no page fits: 0.003 GiB left, 2 pages (one is reserved) take 0.007 GiB"
    assert replay(no_page, [ask(5, 0)], Sizing(), 1, ENGINE) == no_page


@pytest.mark.parametrize("page_size", [0, 3, 96, 1024])
def test_page_size_must_divide_a_block(page_size: int) -> None:
    """A page never straddles two prefix blocks of the traffic."""
    with pytest.raises(CapacityError, match=str(page_size)):
        Sizing(page_size=page_size)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("page_size", [16, 64, 512])
def test_a_cache_that_never_evicts_reaches_the_bound(shards: int, page_size: int) -> None:
    """With room for everything, every layout hits exactly what the bound says, in flight or not."""
    requests = list(generate(4, 120))
    sizing = Sizing(page_size=page_size)
    for in_flight in (1, 7):
        seen = replayed(requests, shards, 10**9, sizing, in_flight)
        assert (seen.hit_tokens, seen.evicted_pages) == (bound(requests, page_size).hit_tokens, 0)


def test_sharding_is_worth_its_pages() -> None:
    """Sharded over N ranks hits about what one rank with N times the pages hits, and never more than the bound."""
    requests = list(generate(5, 600))
    best = bound(requests, 64).hit_tokens
    for shards in (2, 4):
        sharded = replayed(requests, shards, 4096, Sizing())
        whole = replayed(requests, 1, shards * 4096, Sizing())
        assert sharded.evicted_pages > 0
        assert sharded.hit_tokens == pytest.approx(whole.hit_tokens, rel=0.02)
        assert replayed(requests, 1, 4096, Sizing()).hit_tokens < sharded.hit_tokens <= best


def test_processes_change_nothing() -> None:
    """The grid gives the same rows, in the same order, in one process and in two; rows with a note pass through."""
    requests = list(generate(6, 100))
    task = Task(requests, Sizing(), 2, ENGINE)
    memories = (GIB, 4 * GIB)
    rows = [budget(Layout(shards), memory, Sizing(), ENGINE) for shards in (1, 2) for memory in memories]
    advanced: list[int] = []
    one, two = (replay_grid(task, rows, jobs, advanced.append) for jobs in (1, 2))

    def timeless(each: Row) -> Row:
        seen = each.replay and msgspec.structs.replace(each.replay, seconds=0.0, tokens_per_second=0.0)
        return msgspec.structs.replace(each, replay=seen)

    assert [timeless(each) for each in two] == [timeless(each) for each in one]
    assert [each.replay is None for each in one] == [False, False, True, False]
    assert sum(advanced) == 2 * 3 * len(requests)


class _DyingEngine(RefIndexEngine):
    def cache(self, shards: int, page_size: int, pages_per_rank: int) -> RecordingCache:
        os._exit(7)


def test_a_worker_that_dies_is_an_error() -> None:
    """A process that ends without a result is named with its exit code, instead of waited for."""
    task = Task([ask(5, 0)], BLOCKS, 1, _DyingEngine())
    with pytest.raises(CapacityError, match="exit code 7"):
        replay_grid(task, [row(1, 9), row(2, 9)], 2, lambda _: None)


def test_real_trace() -> None:
    """On an hour of real traffic: the published 36.6 % of blocks, and sharding is worth its pages."""
    path = Path(os.environ.get("KVSHARD_DATA", "")) / "mooncake_conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("KVSHARD_DATA names no folder with mooncake_conversation_trace.jsonl")
    requests = list(read_trace(path))
    best = bound(requests, 64)
    assert (len(requests), best.input_tokens) == (12_031, 144_793_823)
    assert (best.blocks, best.hit_blocks) == (288_500, 288_500 - 182_790)
    assert f"{best.block_rate:.1%}" == "36.6%"
    sharded = replayed(requests, 4, 9297, Sizing())
    whole = replayed(requests, 1, 4 * 9297, Sizing())
    assert sharded.evicted_pages > 1_000_000
    assert sharded.hit_tokens == pytest.approx(whole.hit_tokens, rel=0.02)
    assert sharded.not_admitted == whole.not_admitted == {}

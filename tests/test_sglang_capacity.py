"""The capacity replay through sglang's own allocator, tree and admission."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from ci.register import register_cpu_ci
from harness.adapters.ref_index import RefIndexEngine
from harness.adapters.sglang_index import SglangIndexEngine, index_engine
from harness.capacity import CapacityError, IndexEngine, NotAdmittedError, Replay, Row, Sizing, bound, replay
from harness.cli import main
from harness.traffic import Request, generate, read_trace

register_cpu_ci(est_time=40, stage="commit", runner="ubuntu-sglang")

pytestmark = [
    pytest.mark.slow,  # sglang takes many seconds to import
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
LIKE = RefIndexEngine("ref like sglang", "sglang")
IN_FLIGHT = 8


def sglang(tree: str = "python") -> SglangIndexEngine:
    return SglangIndexEngine(tree, in_flight=IN_FLIGHT)


def replayed(
    engine: IndexEngine, requests: Sequence[Request], shards: int, pages: int, in_flight: int = 1, page_size: int = 64
) -> Replay:
    row = Row("", shards, 0, 0, pages, shards * pages * page_size)
    seen = replay(row, requests, Sizing(page_size=page_size), in_flight, engine).replay
    assert seen is not None
    return msgspec.structs.replace(seen, seconds=0.0, tokens_per_second=0.0)


@pytest.mark.parametrize("in_flight", [1, IN_FLIGHT])
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_by_the_same_rules_all_numbers_agree(shards: int, in_flight: int) -> None:
    """Hits, evictions, balance and what is not admitted: the reference by sglang's rules, and both cores of sglang."""
    requests = list(generate(9, 150))
    first, *others = [
        replayed(engine, requests, shards, 3000 // shards, in_flight) for engine in (LIKE, sglang(), sglang("rust"))
    ]
    assert others == [first, first]
    assert first.hit_tokens > 0
    assert first.evicted_pages > 0


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("page_size", [16, 128])
def test_without_pressure_rules_do_not_matter(shards: int, page_size: int) -> None:
    """With room for everything sglang hits what the bound says, as the reference does by its own rules."""
    requests = list(generate(4, 60))
    own, theirs = (replayed(engine, requests, shards, 10**6, 1, page_size) for engine in (RefIndexEngine(), sglang()))
    assert own == theirs
    assert (theirs.hit_tokens, theirs.evicted_pages) == (bound(requests, page_size).hit_tokens, 0)


def test_own_rules_differ_by_little() -> None:
    """By its own rules, which evict for a class and leave the rest, the reference hits about what sglang hits."""
    requests = list(generate(2, 200))
    own, theirs = (replayed(engine, requests, 4, 1000) for engine in (RefIndexEngine(), sglang()))
    assert own.hit_tokens != theirs.hit_tokens
    assert own.hit_tokens == pytest.approx(theirs.hit_tokens, rel=0.05)


def test_start_of_the_real_trace() -> None:
    """On real traffic, with a cache that is much too small, all numbers agree by the same rules."""
    path = Path(os.environ.get("KVSHARD_DATA", "")) / "mooncake_conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("KVSHARD_DATA names no folder with mooncake_conversation_trace.jsonl")
    requests = list(itertools.islice(read_trace(path), 400))
    first, *others = [replayed(engine, requests, 4, 4000) for engine in (LIKE, sglang(), sglang("rust"))]
    assert others == [first, first]
    assert first.hit_tokens > 0
    assert first.evicted_pages > 0


def test_admitted_and_then_without_pages_is_told() -> None:
    """Requests hold all of class 1, the adder counts tokens: it admits six pages and then there are none."""
    cache = SglangIndexEngine(context_tokens=64, in_flight=32).cache(2, 4, 7)

    def serve(number: int, pages: int) -> None:
        cache.open(number, sglang().prompt(list(range(10 * number, 10 * number + pages)), 4 * pages, 4), 4 * pages, 4)
        cache.extend(number)

    for number in range(10):
        serve(number, 1)
        if number % 2 == 0:
            cache.finish(number)  # of class 0; the next one is of class 1 and stays
    with pytest.raises(CapacityError, match=r"request 10 was admitted and then there were no pages for it"):
        serve(10, 6)


def test_what_the_adder_refuses_changes_nothing() -> None:
    """A request that does not fit is not admitted, evicts nothing, and can be given up."""
    cache = sglang().cache(1, 4, 4)
    cache.open(0, sglang().prompt([0, 1], 8, 4), 8, 8)
    cache.extend(0)
    cache.finish(0)
    cache.open(1, sglang().prompt([5, 6, 7, 8], 16, 4), 16, 16)
    with pytest.raises(NotAdmittedError, match="NO_TOKEN"):
        cache.extend(1)
    cache.abort(1)
    assert (cache.used_pages(), cache.evicted_pages()) == ([2], 0)


def test_several_engines_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One report holds the grid of each engine, and the last table shows every other one beside the first."""
    engines = "ref,ref?like=sglang,sglang"
    command = ["capacity", "--generate", "40", "--shards", "2", "--memory-per-rank", "2GiB", "--engine", engines]
    assert main([*command, "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    hits = [[row["replay"]["hit_tokens"] for row in each["rows"]] for each in (report, *report["others"])]
    assert [each["engine"] for each in (report, *report["others"])] == ["ref", "ref like sglang", sglang().name]
    assert hits[1] == hits[2]
    shown = capsys.readouterr().out.partition("compared with ref, on the same requests")[2]
    layouts = [line[1:12].strip() for line in shown.splitlines() if line.startswith((" replicated", " sharded"))]
    assert layouts == ["replicated", "replicated", "sharded N=2", "sharded N=2"]


def test_bad_options_are_told() -> None:
    """A page of one token and a token table beyond memory are refused, with what was expected."""
    with pytest.raises(CapacityError, match="page size 1 on sglang: its launch gate refuses it; expected 2 or more"):
        sglang().cache(2, 1, 9)
    with pytest.raises(CapacityError, match=r"1000001 requests of up to 131072 tokens on sglang: its token table"):
        index_engine({}, context_tokens=131072, in_flight=10**6).cache(2, 64, 10**7)

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from kvshard_ref.host_tier import POLICIES
from kvshard_ref.scratch import ScratchSize
from tests.cache_driver import HOST_VERBS, PS, VERBS, Driver, Op, check, digests, random_ops

register_cpu_ci(est_time=35, stage="commit")

OPS = st.lists(
    st.tuples(st.sampled_from(VERBS), st.integers(0, 63), st.integers(0, 11), st.integers(0, 7)),
    min_size=5,
    max_size=60,
)
HOST_OPS = st.lists(
    st.tuples(st.sampled_from(HOST_VERBS), st.integers(0, 63), st.integers(0, 11), st.integers(0, 7)),
    min_size=5,
    max_size=80,
)
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@settings(max_examples=120, deadline=None, database=None)
@given(ops=OPS, pages_per_rank=st.integers(1, 7))
def test_any_history_conserves_pages_and_lets_admitted_requests_finish(
    shards: int, ops: list[Op], pages_per_rank: int
) -> None:
    """After every step free + cached + own pages are the pool, once each; every admitted request then finishes."""
    driver = Driver(shards, pages_per_rank)
    for op in ops:
        driver.apply(op)
        check(driver.cache)
    driver.drain()


@settings(max_examples=120, deadline=None, database=None)
@given(ops=OPS)
def test_any_history_respects_scratch(ops: list[Op]) -> None:
    """With little scratch, batches are cut or refused but admitted requests still finish."""
    driver = Driver(2, 5, ScratchSize(prefix_tokens=8 * PS, chunk_tokens=3 * PS, page_size=PS))
    for op in ops:
        driver.apply(op)
        check(driver.cache)
    driver.drain()


@settings(max_examples=30, deadline=None, database=None)
@given(ops=OPS, shards=st.sampled_from([1, 2, 4]))
def test_equal_calls_give_equal_digests(ops: list[Op], shards: int) -> None:
    """Two instances that are told the same things agree on everything mirrored, after every step."""
    ranks = [Driver(shards, 5), Driver(shards, 5)]
    for op in ops:
        for rank in ranks:
            rank.apply(op)
        assert ranks[0].cache.digest() == ranks[1].cache.digest()


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=250, deadline=None, database=None)
@given(
    ops=HOST_OPS, shards=st.sampled_from([2, 1, 3, 4]), pages_per_rank=st.integers(1, 5), host_pages=st.integers(1, 8)
)
def test_any_history_with_a_host_tier(
    policy: str, ops: list[Op], shards: int, pages_per_rank: int, host_pages: int
) -> None:
    """With copies in flight, in any order of acknowledgements, every page of both tiers holds what it must."""
    driver = Driver(shards, pages_per_rank, None, host_pages, policy)
    for op in ops:
        driver.apply(op)
        check(driver.cache)
    driver.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_host_histories_reach_what_they_claim_to_test(policy: str) -> None:
    """The random histories do back up, hit the host, restore, evict copies and split what is in flight."""
    seen: set[str] = set()
    for seed in range(60):
        driver = Driver(2 + seed % 3, 2 + seed % 3, None, 3 + seed % 5, policy)
        for op in random_ops(seed, 80, HOST_VERBS):
            splits, pinned = driver.cache.stats.splits, sum(node.pins > 0 for node in driver.cache.tree.nodes())
            driver.apply(op)
            check(driver.cache)
            split = driver.cache.stats.splits > splits
            seen |= (
                {"split in flight"} if split and pinned < sum(n.pins > 0 for n in driver.cache.tree.nodes()) else set()
            )
        seen |= {event for event, count in driver.log.items() if count}
        driver.drain()
    assert {"backup", "restore", "host hit", "host evicted", "split in flight"} <= seen


def test_histories_reach_what_they_claim_to_test() -> None:
    """The random histories do hit, evict under pressure, decline inserts, free duplicates, split and refuse."""
    seen: set[str] = set()
    for seed in range(80):
        driver = Driver(2 + seed % 3, 3 + seed % 4)
        for op in random_ops(seed, 80):
            driver.apply(op)
            check(driver.cache)
        stats = driver.cache.stats
        seen |= {field for field in ("declined_inserts", "duplicate_pages", "splits") if getattr(stats, field)}
        seen |= {event for event, count in driver.log.items() if count}
        driver.drain()
    events = {"hit", "finish", "open refused", "lock refused", "extend refused", "batch cut", "evicting extend"}
    assert events | {"declined_inserts", "duplicate_pages", "splits"} == seen


def test_digests_do_not_depend_on_the_hash_seed() -> None:
    """A process with another hash seed makes the same decisions and the same digests, with string page keys."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    code = "from tests.cache_driver import digests; print(*digests(4, 5) + digests(3, 6))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert digests(4, 5) + digests(3, 6) == done.stdout.split()
    assert len(set(done.stdout.split())) > 60

"""Ranks act as one: the same state, the same collectives."""

from __future__ import annotations

from harness.register import register_cpu_ci
from suites.claim import Step, case, expect
from suites.configs import Bounds, configs
from suites.machine import MIXED, either, machine, splits

register_cpu_ci(est_time=10, stage="cases")

SEVERAL = configs(Bounds(shards=(2, 3, 4, 8)))


@case(
    "mirror.same_digest",
    invariants=("I07",),
    needs=("snapshot.digest",),
    seen={"raced": 1, "extended": 3, "finished": 3, "refused": 1},
    plan=machine(),
    configs=SEVERAL,
)
def test_same_digest(step: Step) -> None:
    """After every op the digest of everything that must be mirrored is equal on all ranks.

    Decisions from rank-local clocks, hash seeds, occupancy or eviction results (sglang#33442, sglang#28429).
    """
    digests = [rank.digest for rank in step.after.ranks]
    expect(
        digests,
        [digests[0]] * len(digests),
        f"digests of ranks 0..{len(digests) - 1}",
        "every rank keeps the same tree and pool",
    )


@case(
    "mirror.same_state",
    invariants=("I07",),
    needs=("snapshot.free", "snapshot.requests", "snapshot.nodes"),
    seen={"extended": 3, "finished": 3, "evicted": 1, "split": 1},
    plan=either(machine(kinds=("fork", "fresh", "repeat")), splits),
    configs=SEVERAL,
)
def test_same_state(step: Step) -> None:
    """After every op free lists with their order, request rows and radix tree are equal on all ranks.

    Free lists that hold the same pages in another order: the next draw gives every rank other pages (sglang#33442).
    """
    first = step.after.ranks[0]
    for rank in step.after.ranks[1:]:
        for name in ("free", "host_free", "requests", "nodes"):
            expect(getattr(rank, name), getattr(first, name), f"{name} of rank {rank.rank}", "rank 0 has this")


@case(
    "mirror.same_collectives",
    invariants=("I08",),
    needs=("snapshot.collectives",),
    seen={"extended": 3, "tiny": 1, "few new tokens": 1, "batch": 1},
    plan=machine({**MIXED, "batch": 8}),
    configs=SEVERAL,
)
def test_same_collectives(step: Step) -> None:
    """In every op all ranks run the same collectives with the same shapes in the same order.

    A rank that owns or computes nothing and leaves early: the others wait for it for ever (sglang#19656, sglang#28429).
    """
    first = step.after.ranks[0]
    for rank in step.after.ranks[1:]:
        expect(rank.collectives, first.collectives, f"collectives of rank {rank.rank}", "rank 0 ran these")

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from ci.register import register_cpu_ci
from kvshard_ref.components import Component
from kvshard_ref.device import HostDevice
from kvshard_ref.errors import GeometryError
from kvshard_ref.host_pool import HostPool
from kvshard_ref.host_tier import POLICIES, Copy
from kvshard_ref.node import Node
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.spec import DraftSpec, WorkerSpec
from kvshard_ref.worker import PrefillWorker
from tests.worker_rig import DRAFT, PROMPT, PS, Rig, planned_bytes, spec_of

register_cpu_ci(est_time=20, stage="commit")


def _evict(worker: PrefillWorker, tier: str) -> int:
    return worker.evict(PS * 6, tier)


@pytest.fixture
def rigs() -> Iterator[Callable[[WorkerSpec], Rig]]:
    made: list[Rig] = []

    def rig(spec: WorkerSpec) -> Rig:
        made.append(Rig(spec))
        return made[-1]

    yield rig
    for each in made:
        each.lockstep.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_restored_rows_are_the_rows_of_before(rigs: Callable[[WorkerSpec], Rig], ranks: int, policy: str) -> None:
    """A prompt that was evicted to the host, its device pages used by others, is hit again and reads its own rows."""
    pages = -(-8 // ranks) + 1  # little more than the prompt needs
    rig = rigs(spec_of(ranks, draft=DRAFT, pages_per_rank=pages, host_pages_per_rank=4 * pages, host_policy=policy))
    for round_ in range(2):  # the second use makes the prompt worth a copy to the selective policy
        rig.prefill(f"a{round_}", PROMPT)
        rig.finish(f"a{round_}")
    rig.agreed(lambda worker: worker.evict(1000))
    for round_ in range(2):
        rig.prefill(f"b{round_}", [1000 * (round_ + 1) + token for token in range(ranks * pages * PS - 1)])
        rig.abort(f"b{round_}")
    rig.agreed(lambda worker: worker.evict(1000))
    assert 24 == rig.prefill("c", PROMPT)
    assert 6 == rig.workers[0].cache.stats.restored_pages
    rig.finish("c")
    rig.agreed(lambda worker: worker.flush())
    assert 0 == rig.workers[0].cache.used_tokens()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("layout", "ranks"), [("sharded", 1), ("sharded", 2), ("sharded", 3), ("replicated", 2)])
def test_random_traffic_over_both_tiers(
    rigs: Callable[[WorkerSpec], Rig], layout: str, ranks: int, policy: str
) -> None:
    """Under traffic that overflows the device, every read gives the stamps, whichever tier the prefix came from."""
    pages = 12 // (ranks if layout == "sharded" else 1)
    rig = rigs(spec_of(ranks, layout, "tight", pages, DRAFT, pages, policy))
    rng = random.Random(ranks)
    hits = 0
    for step in range(60):
        trunk = [rng.randrange(2)] * 8 + [rng.randrange(3)] * 8
        tokens = trunk[: rng.randrange(5, 17)] + [rng.randrange(2)] * rng.randrange(1, 9)
        hits += rig.prefill(f"r{step}", tokens, rng.choice((4, 8, 32))) > 0
        rig.finish(f"r{step}")
        if rng.random() < 0.5:
            tier = rng.choice(("device", "device", "device", "host"))
            rig.agreed(partial(_evict, tier=tier))
        if rng.random() < 0.1:
            rig.agreed(lambda worker: worker.settle())
    stats = rig.workers[0].cache.stats
    assert hits > 5
    assert stats.backup_pages > 5
    assert stats.restored_pages > 3


def test_each_rank_copies_its_own_pages() -> None:
    """Logical pages are counted once; each rank moves the bytes of its own, of keys, scales and draft alike."""
    placement = Placement(4, 4)
    layers = 3
    components = (Component("kv", 576, torch.uint8), Component("index", 132, torch.uint8, scales=4))
    node = Node(1, [0, 1, 2, 3], [4, 5, 9, 6], 0, None, 0)
    copy = Copy("backup", node, [4, 5, 9, 6], [8, 5, 13, 10])  # same owners
    moved = []
    for rank in range(4):
        pool = ShardPool(rank, placement, 8, layers, components)
        host = HostPool([pool], 8, HostDevice())
        host.backup([copy])
        host.restore([copy])
        moved.append((host.backup_bytes, host.restored_bytes))
    page_bytes = 4 * layers * (576 + 132)
    assert [(page_bytes, page_bytes), (16992, 16992), (page_bytes, page_bytes), (0, 0)] == moved
    assert 16992 == 2 * page_bytes


def test_restore_order_is_layer_by_layer_with_the_draft_inside() -> None:
    """A layer is ready after all its components and the draft layers that come with it; the last takes the rest."""
    placement = Placement(1, PS)
    target = ShardPool(0, placement, 4, 2, (Component("kv", 1, torch.int64), Component("index", 1, torch.int64)))
    draft = ShardPool(0, placement, 4, 3, (Component("draft", 1, torch.int64),))
    host = HostPool([target, draft], 4, HostDevice())
    names = [[device.component.name for device, _ in rows] for rows in host.rows]
    assert [["kv", "index", "draft"], ["kv", "index", "draft", "draft"]] == names


def test_host_bytes_are_planned(rigs: Callable[[WorkerSpec], Rig]) -> None:
    """Device pools, host pools and scratch of target and draft take the bytes that the spec plans."""
    spec = spec_of(2, draft=DRAFT, host_pages_per_rank=20)
    worker = rigs(spec).workers[1]
    assert worker.host is not None
    planned = planned_bytes(spec)
    assert planned["host"] == worker.host.bytes
    assert planned["pool"] == sum(runner.pool.bytes for runner in worker.runners)
    assert planned["scratch"] == sum(runner.gather.bytes for runner in worker.runners)


@pytest.mark.parametrize(
    ("draft", "text"),
    [
        (DraftSpec(1, DRAFT.components, placement=Placement(4, PS)), r"shards=4.*of the target Placement\(shards=2"),
        (DraftSpec(1, DRAFT.components, placement=Placement(2, 8)), r"page_size=8.*page_size=4"),
        (DraftSpec(1, DRAFT.components, pages_per_rank=7), "pages_per_rank of the draft is 7, of the target 12"),
        (DraftSpec(1, (Component("kv", 1, torch.int64),)), r"both have components \['kv'\]"),
    ],
)
def test_a_draft_of_another_layout_is_refused(draft: DraftSpec, text: str) -> None:
    """A draft inherits the target's layout; another one is refused with both values."""
    with pytest.raises(GeometryError, match=text):
        spec_of(2, draft=draft)
    same = DraftSpec(1, DRAFT.components, placement=Placement(2, PS), pages_per_rank=12)
    assert planned_bytes(spec_of(2, draft=same)) == planned_bytes(spec_of(2, draft=DRAFT))


@pytest.mark.parametrize(("policy", "pages"), [("write_around", 4), ("write_back", -1)])
def test_impossible_host_tiers(policy: str, pages: int) -> None:
    """An unknown policy or a negative size is an error with the value and what is possible."""
    with pytest.raises(GeometryError, match=f"{'write_around' if pages > 0 else -1}.*expected"):
        spec_of(1, host_pages_per_rank=pages, host_policy=policy)


def test_evict_names_the_tiers(rigs: Callable[[WorkerSpec], Rig]) -> None:
    """An unknown tier is an error that names the possible ones."""
    worker = rigs(spec_of(1)).workers[0]
    with pytest.raises(GeometryError, match=r"'disk'.*'device', 'host'"):
        worker.evict(4, "disk")

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch

from ci.register import register_cpu_ci
from harness.adapters.ref_given import GivenModel
from kvshard_ref.errors import GeometryError, MisuseError, RefusedError, UnalignedError, UnknownRequestError
from kvshard_ref.group import SoloGroup
from kvshard_ref.placement import Placement
from kvshard_ref.spec import WorkerSpec
from kvshard_ref.worker import Chunk, Extended, PrefillWorker
from tests.worker_rig import COMPONENTS, LAYERS, PROMPT, PS, Rig, bits, planned_bytes, same, spec_of, stamps

register_cpu_ci(est_time=10, stage="commit")


@pytest.fixture
def rigs() -> Iterator[Callable[[WorkerSpec], Rig]]:
    made: list[Rig] = []

    def make(spec: WorkerSpec) -> Rig:
        made.append(Rig(spec))
        return made[-1]

    yield make
    for rig in made:
        rig.lockstep.close()


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_chunked_unchunked_and_warm_reads_agree(rigs: Callable[[WorkerSpec], Rig], ranks: int, layout: str) -> None:
    """Cold, in one chunk or page by page, and after a hit, attention reads the same rows on every rank."""
    whole, paged = rigs(spec_of(ranks, layout)), rigs(spec_of(ranks, layout))
    assert whole.prefill("cold", PROMPT) == 0
    assert paged.prefill("cold", PROMPT, chunk=PS) == 0
    assert whole.finish("cold") == 24
    assert whole.prefill("warm", PROMPT) == 24
    assert whole.prefill("fork", [*PROMPT[:13], 7, 8, 9]) == 12
    assert paged.prefill("fork", [*PROMPT[:13], 7, 8, 9], chunk=PS) == 12


@pytest.mark.parametrize("padding", ["tight", "per_request"])
@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, "sharded"), (2, "sharded"), (4, "sharded"), (8, "sharded"), (3, "replicated")]
)
def test_random_traffic_reads_what_was_written(
    rigs: Callable[[WorkerSpec], Rig], ranks: int, layout: str, padding: str
) -> None:
    """Under batches, forks, aborts and evictions every read gives the stamps, and all ranks agree throughout."""
    random = Random(f"{ranks} {layout} {padding}")
    rig = rigs(spec_of(ranks, layout, padding, pages_per_rank=max(2, 24 // ranks)))
    hits = evicted = refused = 0
    for step in range(40):
        live = list(rig.workers[0].cache.requests)
        if len(live) < 3:
            # prompts of few tokens: they share prefixes often
            tokens = [random.randrange(2) for _ in range(random.randrange(1, 8))]
            try:
                hits += (
                    rig.open(f"r{step}", [token for token in tokens for _ in range(PS)][: random.randrange(1, 30)]) > 0
                )
            except RefusedError:
                refused += 1
            continue
        wants = []
        for name in random.sample(live, random.randrange(1, len(live) + 1)):
            left = len(rig.prompts[name]) - rig.computed(name)
            if left:
                wants.append((name, min(left, PS * random.randrange(1, 4))))
        if wants:
            refused += sum(isinstance(reply, RefusedError) for reply in rig.extend(*wants))
        done = [name for name in live if rig.computed(name) == len(rig.prompts[name])]
        for name in done:
            rig.finish(name)
        if not done and random.random() < 0.2:
            rig.abort(live[0])
        if random.random() < 0.2:
            evicted += rig.agreed(lambda worker: worker.evict(PS * 3))
    for name in list(rig.workers[0].cache.requests):
        rig.abort(name)
    rig.agreed(lambda worker: worker.flush())
    assert rig.workers[0].cache.used_tokens() == 0
    assert hits > 0
    assert evicted + rig.workers[0].cache.stats.evicted_pages > 0


def test_a_batch_of_requests_that_share_a_prefix(rigs: Callable[[WorkerSpec], Rig]) -> None:
    """Requests of one batch read their own rows, whether prefixes are shared, own or empty, and twins end up as one."""
    rig = rigs(spec_of(4))
    rig.prefill("seed", PROMPT[:16])
    for name, tokens in [("a", PROMPT), ("b", [*PROMPT[:9], 1, 2]), ("c", [5] * 9), ("twin", [5] * 9)]:
        rig.open(name, tokens)
    rig.extend(("a", 8), ("b", 3), ("c", 8), ("twin", 8))
    rig.extend(("twin", 1), ("a", 3), ("c", 1))
    for name in ("a", "b", "c", "twin", "seed"):
        rig.finish(name)
    # 6 + 2 pages of a and the one of b that differs is partial, 2 of c
    assert rig.workers[0].cache.used_tokens() == 0
    assert sum(len(node.pages) for node in rig.workers[0].cache.tree.nodes()) == 6 + 2


@pytest.mark.parametrize(("layout", "copies"), [("sharded", 1), ("replicated", 4)])
def test_who_stores_what(rigs: Callable[[WorkerSpec], Rig], layout: str, copies: int) -> None:
    """Sharded ranks store one copy of every row between them, each its own pages; replicated ranks store one each."""
    spec = spec_of(4, layout)
    rig = rigs(spec)
    rig.prefill("a", PROMPT, chunk=12)
    assert sum(worker.pool.written_rows for worker in rig.workers) == copies * LAYERS * len(COMPONENTS) * len(PROMPT)
    expected = stamps(PROMPT, 0, len(PROMPT))
    pages = rig.workers[0].cache.requests["a"].pages
    for worker in rig.workers:
        for layer in range(LAYERS):
            for component in COMPONENTS:
                rows = torch.zeros(worker.pool.rows, component.width, dtype=component.dtype)
                for position in range(len(PROMPT)):
                    loc = pages[position // PS] * PS + position % PS
                    local_row = spec.placement.local_row(loc)
                    if layout == "replicated" or spec.placement.owner(loc) == worker.group.rank:
                        rows[local_row] = expected[component.name][layer, position]
                assert bits(worker.pool.rows_of(layer, component.name).rows) == bits(rows)


def test_collectives_of_both_layouts(rigs: Callable[[WorkerSpec], Rig]) -> None:
    """Per layer and component a sharded rank gathers chunk and prefix, a replicated one the chunk only."""
    logs = []
    for layout in ("sharded", "replicated"):
        rig = rigs(spec_of(2, layout))
        rig.prefill("a", PROMPT[:16], chunk=8)
        assert [group.log for group in rig.lockstep.groups] == [rig.lockstep.groups[0].log] * 2
        logs.append(rig.lockstep.groups[0].log)
    chunk = ["all_gather int64[8,1]", "all_gather float8_e4m3fn[8,5]"]
    prefix = ["all_gather int64[2,4]", "all_gather float8_e4m3fn[2,20]"]  # 2 pages, one of each owner
    assert logs[0] == ["minimum int64[1]", *chunk * 2, "minimum int64[1]", *prefix, *chunk, *prefix, *chunk]
    assert logs[1] == ["minimum int64[1]", *chunk * 2] * 2


def test_capacity_of_both_layouts(rigs: Callable[[WorkerSpec], Rig]) -> None:
    """With the same bytes per rank a sharded worker holds N times the tokens."""
    sharded, replicated = rigs(spec_of(4)), rigs(spec_of(4, "replicated"))
    assert sharded.workers[0].pool.bytes == replicated.workers[0].pool.bytes
    assert sharded.workers[0].cache.capacity_tokens() == 4 * replicated.workers[0].cache.capacity_tokens() == 4 * 48


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_planned_bytes_are_allocated(rigs: Callable[[WorkerSpec], Rig], layout: str) -> None:
    """Pool and scratch take the bytes that the spec plans."""
    spec = spec_of(3, layout)
    worker = rigs(spec).workers[2]
    assert {"pool": worker.pool.bytes, "host": 0, "scratch": worker.runners[0].gather.bytes} == planned_bytes(spec)


def test_a_refused_request_leaves_the_others_alone(rigs: Callable[[WorkerSpec], Rig]) -> None:
    """In one batch the admissible requests run, and a refused one can run when there is room."""
    rig = rigs(spec_of(2, pages_per_rank=4))  # 8 pages
    rig.open("big", PROMPT[:24])
    rig.open("small", [1] * 8)
    rig.open("late", [2] * 12)
    replies = rig.extend(("big", 8), ("late", 12), ("small", 8))
    assert [type(reply).__name__ for reply in replies] == ["Extended", "RefusedError", "Extended"]
    assert rig.computed("late") == 0
    rig.abort("big")
    assert isinstance(rig.extend(("late", 12))[0], Extended)


def test_one_rank_can_refuse_for_all(rigs: Callable[[WorkerSpec], Rig]) -> None:
    """A request that a single rank cannot take runs on no rank, and the others are told so."""
    rig = rigs(spec_of(2))
    rig.open("a", PROMPT)
    rig.open("b", PROMPT[5:])
    review = rig.workers[1].cache.review
    rig.workers[1].cache.review = lambda wants: ["busy", *review(wants[1:])]  # type: ignore[method-assign]  # the fault
    chunks = [Chunk(name, 8, stamps(rig.prompts[name], 0, 8)) for name in ("a", "b")]
    replies = rig.all(lambda worker: worker.extend(chunks))
    assert [str(reply[0]) for reply in replies] == ["request 'a' was refused by another rank", "busy"]
    assert [type(reply[1]) for reply in replies] == [Extended] * 2
    assert (rig.computed("a"), rig.computed("b")) == (0, 8)


def test_an_empty_batch(rigs: Callable[[WorkerSpec], Rig]) -> None:
    """A batch without a chunk does nothing and says nothing."""
    rig = rigs(spec_of(2))
    assert rig.agreed(lambda worker: worker.extend([])) == []
    assert rig.lockstep.groups[0].log == []


@pytest.mark.parametrize(
    ("chunk", "error", "match"),
    [
        (Chunk("b", 8, stamps(PROMPT, 0, 8)), UnknownRequestError, "'b'"),
        (Chunk("a", 7, stamps(PROMPT, 0, 7)), UnalignedError, "token 7"),
        (Chunk("a", 8, stamps(PROMPT, 0, 4)), MisuseError, r"chunk of request 'a' has rows .*\(2, 4, 1\)"),
        (Chunk("a", 8, {"kv": stamps(PROMPT, 0, 8)["kv"]}), MisuseError, "expected .*index_keys"),
    ],
    ids=["name", "count", "rows", "component"],
)
def test_misuse_changes_nothing(
    rigs: Callable[[WorkerSpec], Rig], chunk: Chunk, error: type[Exception], match: str
) -> None:
    """A batch with a wrong chunk is an error on every rank, before anything is said or changed."""
    rig = rigs(spec_of(1))
    rig.open("a", PROMPT)
    before = rig.workers[0].cache.digest()
    with pytest.raises(error, match=match):
        rig.all(lambda worker: worker.extend([chunk]))
    assert (rig.workers[0].cache.digest(), rig.lockstep.groups[0].log) == (before, [])
    rig.extend(("a", 8))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layout": "striped"}, r"layout is 'striped', expected one of \('sharded', 'replicated'\)"),
        ({"padding": "loose"}, "padding is 'loose'"),
        ({"ranks": 0}, "ranks is 0"),
    ],
)
def test_impossible_specs(change: dict[str, object], match: str) -> None:
    """A spec that names no known layout or padding, or no ranks, is an error."""
    shape: dict[str, object] = {"ranks": 2, "page_size": 4, "pages_per_rank": 4, "layers": 1, "components": COMPONENTS}
    with pytest.raises(GeometryError, match=match):
        WorkerSpec(**{**shape, "chunk_tokens": 8, "context_tokens": 8, **change})  # type: ignore[arg-type]  # wrong on purpose


def test_the_group_must_have_the_ranks_of_the_spec() -> None:
    """A worker of two ranks cannot run alone."""
    with pytest.raises(GeometryError, match="the group has 1 ranks, the spec 2"):
        PrefillWorker(spec_of(2), SoloGroup(), GivenModel())


def test_a_solo_worker() -> None:
    """One rank without any process group runs the same program."""
    worker = PrefillWorker(spec_of(1), SoloGroup(), GivenModel())
    assert worker.pool.placement == Placement(1, PS)
    for cached in (0, 24):
        assert worker.open("a", PROMPT) == cached
        (reply,) = worker.extend([Chunk("a", 27 - cached, stamps(PROMPT, cached, 27))])
        assert isinstance(reply, Extended)
        assert same(reply.reads, stamps(PROMPT, 0, 27))
        assert worker.finish("a") == 24
    assert (worker.evict(24), worker.flush()) == (24, 0)


def test_all_gather_checks_shapes() -> None:
    """An output that the parts do not fill is an error with both shapes."""
    with pytest.raises(GeometryError, match=r"1 parts .*int64\[2,1\] into .*int64\[4,1\]"):
        SoloGroup().all_gather(torch.zeros(4, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64))


def solo_log() -> list[str]:
    group = SoloGroup()
    part = torch.ones(2, 3)
    out = torch.zeros(2, 3)
    group.all_gather(out, part)
    assert torch.equal(out, part)
    assert group.minimum([3, True]) == [3, 1]
    return group.log


def test_log_of_collectives() -> None:
    """The log has one entry per collective with dtype and shape of its result."""
    assert solo_log() == ["all_gather float32[2,3]", "minimum int64[2]"]

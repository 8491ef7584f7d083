from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from ci.register import register_cpu_ci
from harness.lockstep import Lockstep
from kvshard_ref.components import Component, total_row_bytes
from kvshard_ref.device import HostDevice
from kvshard_ref.errors import (
    DoubleBeginError,
    ForeignPageError,
    GeometryError,
    LayerOrderError,
    OutsideBatchError,
    ScratchOverflowError,
)
from kvshard_ref.gather import PrefixGather
from kvshard_ref.group import Group, SoloGroup
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.scratch import ScratchSize

register_cpu_ci(est_time=10, stage="commit")

PS = 4
PAGES_PER_RANK = 12
LAYERS = 3
KV = Component("kv", 2, torch.int64)
INDEX = Component("index_keys", 3, torch.int32)
COMPONENTS = (KV, INDEX)


def gather_of(group: Group, padding: str = "tight", device_module: Any = None) -> PrefixGather:
    placement = Placement(group.size, PS)
    pool = ShardPool(group.rank, placement, PAGES_PER_RANK, LAYERS, COMPONENTS)
    return PrefixGather(
        pool, group, ScratchSize(PS * 8 * group.size, PS * 6, PS), padding, device_module or HostDevice()
    )


def locs_of(*pages: int) -> torch.Tensor:
    return torch.tensor([loc for page in pages for loc in range(page * PS, (page + 1) * PS)])


def stored(layer: int, component: Component, locs: torch.Tensor) -> torch.Tensor:
    """What the tests store at locations: differs by location, layer, component and column."""
    columns = torch.arange(component.width)
    value = (locs[:, None] * 100 + layer * 10 + columns) * (-1 if component is INDEX else 1)
    return value.to(component.dtype)


def fill(gather: PrefixGather) -> None:
    pool = gather.pool
    locs = torch.arange(pool.placement.shards * PS, pool.placement.shards * pool.rows)
    for layer in range(LAYERS):
        for component in COMPONENTS:
            pool.write(layer, component.name, pool.owned(locs.numpy()), stored(layer, component, locs))


def run_batch(gather: PrefixGather, prefixes: list[list[int]], chunks: list[list[int]]) -> None:
    """One forward; the chunk's rows are those that the tests store there. Asserts what is read."""
    gather.begin(prefixes, chunks)
    chunk_locs = locs_of(*[page for chunk in chunks for page in chunk])
    read_locs = locs_of(*[page for pair in zip(prefixes, chunks, strict=True) for pages in pair for page in pages])
    for layer in range(LAYERS):
        for component in COMPONENTS:
            rows = stored(layer, component, chunk_locs)
            gather.stage(layer, component.name, gather.translate(chunk_locs), rows)
        for component in COMPONENTS:
            seen = gather.read(layer, component.name, gather.translate(read_locs))
            assert seen.tolist() == stored(layer, component, read_locs).tolist()
    gather.end()


def chain(shards: int, base: int, local_pages: list[int]) -> list[int]:
    return [local * shards + (base + position) % shards for position, local in enumerate(local_pages)]


@pytest.mark.parametrize("padding", ["tight", "per_request"])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_every_rank_reads_what_the_owners_stored(shards: int, padding: str) -> None:
    """In batch after batch, every rank reads every row of prefix and chunk, in all layers and components."""
    first = chain(shards, shards - 1, [3, 1, 4, 2, 5, 9, 6])
    second = chain(shards, 0, [8])
    fresh = chain(shards, 0, [11, 12, 10])

    def program(rank: int, group: Group) -> list[str]:
        gather = gather_of(group, padding)
        fill(gather)
        run_batch(gather, [first], [fresh[:1]])
        run_batch(gather, [second, first[:3]], [fresh[:2], fresh[2:]])  # rotates the slots: LAYERS is odd
        run_batch(gather, [[]], [fresh[:1]])
        run_batch(gather, [first[:1]], [fresh[:3]])
        return group.log

    with Lockstep(shards) as lockstep:
        logs = lockstep.run(program)
    assert logs == [logs[0]] * shards
    assert len(logs[0]) == (3 * LAYERS * len(COMPONENTS) if shards > 1 else 0)


def test_gathered_bytes() -> None:
    """A gather moves N * block pages of every component, padding included; a batch without prefix moves nothing."""

    def program(rank: int, group: Group) -> tuple[int, int]:
        gather = gather_of(group, "per_request")
        run_batch_without_rows(gather, [[]], [[4]])
        empty = gather.gathered_bytes
        run_batch_without_rows(gather, [chain(4, 0, [1, 1, 1, 1, 2]), [8]], [[], []])
        return empty, gather.gathered_bytes

    with Lockstep(4) as lockstep:
        assert lockstep.run(program) == [(0, LAYERS * 4 * (2 + 1) * PS * total_row_bytes(COMPONENTS))] * 4


def run_batch_without_rows(gather: PrefixGather, prefixes: list[list[int]], chunks: list[list[int]]) -> None:
    gather.begin(prefixes, chunks)
    for layer in range(LAYERS):
        gather.read(layer, "kv", torch.empty(0, dtype=torch.int64))
    gather.end()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_translation_equals_brute_force(dtype: torch.dtype) -> None:
    """Every location of the pool translates as the plan says, to int64; reserved and off-plan pages to the trash."""

    def program(rank: int, group: Group) -> None:
        gather = gather_of(group)
        prefix, chunk = chain(4, 2, [5, 5, 5, 5, 6, 6, 6]), [30, 31]
        plan = gather.begin([prefix], [chunk])
        locs = torch.arange(4 * gather.pool.rows, dtype=dtype)
        rows = gather.translate(locs)
        expected = [plan.slots.get(loc // PS, plan.trash_page) * PS + loc % PS for loc in range(len(locs))]
        assert (rows.dtype, rows.tolist()) == (torch.int64, expected)
        assert rows[: 4 * PS].tolist() == [plan.trash_page * PS + offset % PS for offset in range(4 * PS)]
        planned = rows[locs_of(*prefix, *chunk)]
        assert len(set(planned.tolist())) == 9 * PS
        assert int(planned.max()) < plan.trash_page * PS
        assert set((rows[::PS] % PS).tolist()) == {0}
        assert gather.translate(locs.view(-1, PS)).tolist() == rows.view(-1, PS).tolist()

    with Lockstep(4) as lockstep:
        lockstep.run(program)


def test_translation_has_no_memory() -> None:
    """A location tensor changed in place, and a new plan, translate anew."""
    gather = gather_of(SoloGroup())
    plan = gather.begin([[3, 5]], [[7]])
    locs = locs_of(3)
    before = gather.translate(locs).tolist()
    locs += 2 * PS
    assert gather.translate(locs).tolist() == [row + PS for row in before]
    finish_reads(gather)
    gather.begin([[]], [[5]])
    assert gather.translate(locs).tolist() == [plan.chunk_first * PS + offset for offset in range(PS)]
    assert gather.translate(locs_of(3)).tolist() == [plan.trash_page * PS + offset for offset in range(PS)]


def finish_reads(gather: PrefixGather) -> None:
    for layer in range(LAYERS):
        gather.read(layer, "kv", torch.empty(0, dtype=torch.int64))
    gather.end()


def test_double_begin() -> None:
    """A second begin is an error and leaves the open batch as it was."""
    gather = gather_of(SoloGroup())
    fill(gather)
    plan = gather.begin([[3]], [[7]])
    with pytest.raises(DoubleBeginError, match="batch 1 is open"):
        gather.begin([[4]], [[8]])
    assert (gather.plan, gather.epoch) == (plan, 1)
    assert gather.read(0, "kv", gather.translate(locs_of(3))).tolist() == stored(0, KV, locs_of(3)).tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda gather: gather.read(0, "kv", locs_of(0)),
        lambda gather: gather.stage(0, "kv", locs_of(0), stored(0, KV, locs_of(0))),
        lambda gather: gather.translate(locs_of(0)),
        lambda gather: gather.prefetch(0),
        lambda gather: gather.end(),
    ],
    ids=["read", "stage", "translate", "prefetch", "end"],
)
def test_nothing_works_outside_a_batch(call: Callable[[PrefixGather], object]) -> None:
    """Before begin and after end every use of the slots is an error that says so."""
    gather = gather_of(SoloGroup())
    with pytest.raises(OutsideBatchError, match=r"outside a batch, expected begin\(\)"):
        call(gather)
    gather.begin([[3]], [[7]])
    finish_reads(gather)
    with pytest.raises(OutsideBatchError, match=r"outside a batch, expected begin\(\)"):
        call(gather)


def test_layers_are_read_in_order() -> None:
    """A skipped, an earlier or a missing layer is an error that names both layers."""
    gather = gather_of(SoloGroup())
    none = torch.empty(0, dtype=torch.int64)
    gather.begin([[3]], [[7]])
    with pytest.raises(LayerOrderError, match="read of layer 1 after layer -1 was read, expected layer 0 or 0 of 3"):
        gather.read(1, "kv", none)
    with pytest.raises(LayerOrderError, match="read of layer -1"):
        gather.read(-1, "kv", none)
    gather.read(0, "kv", none)
    gather.read(0, "index_keys", none)
    gather.read(1, "kv", none)
    for wrong in (0, 3):
        with pytest.raises(LayerOrderError, match=f"read of layer {wrong} after layer 1 was read"):
            gather.read(wrong, "kv", none)
        with pytest.raises(LayerOrderError, match=f"stage of layer {wrong} after layer 1 was read"):
            gather.stage(wrong, "kv", none, torch.empty(0, 2, dtype=torch.int64))
        with pytest.raises(LayerOrderError, match=f"prefetch of layer {wrong} after layer 1 was read"):
            gather.prefetch(wrong)
    gather.read(2, "kv", none)
    with pytest.raises(LayerOrderError, match="read of layer 3 after layer 2 was read"):
        gather.read(3, "kv", none)
    gather.end()


@pytest.mark.parametrize("prefix", [[], [3]])
def test_end_with_an_unread_layer(prefix: list[int]) -> None:
    """A rank that leaves a layer unread gets an error, and the next batch works."""
    gather = gather_of(SoloGroup())
    fill(gather)
    gather.begin([prefix], [[7]])
    gather.read(0, "kv", torch.empty(0, dtype=torch.int64))
    with pytest.raises(LayerOrderError, match="layer 1 of 3 never read"):
        gather.end()
    run_batch(gather, [[4, 5]], [[8]])


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    """After an overflow or a foreign page no batch is open, and nothing was gathered."""
    gather = gather_of(SoloGroup())
    with pytest.raises(ScratchOverflowError):
        gather.begin([list(range(1, 10))], [[12]])
    with pytest.raises(ForeignPageError, match="page 13 is in the batch, expected pages below 13"):
        gather.begin([[3]], [[13]])
    assert (gather.plan, gather.epoch, gather.gathered_bytes) == (None, 0, 0)


def test_the_group_must_be_the_pools() -> None:
    """A pool of one placement cannot be gathered over another group."""
    pool = ShardPool(1, Placement(2, PS), 3, 1, COMPONENTS)
    with pytest.raises(GeometryError, match="rank 0 of 1, the pool rank 1 of 2"):
        PrefixGather(pool, SoloGroup(), ScratchSize(PS, PS, PS), "tight", HostDevice())


def test_scratch_bytes_are_allocated() -> None:
    """The two slots take the bytes that the scratch size plans."""
    gather = gather_of(SoloGroup())
    assert gather.bytes == gather.scratch.bytes(total_row_bytes(COMPONENTS))


class Tape:
    """A device module that writes down what waits for what; work itself is done in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = TapeStream(self, "compute")

    def Stream(self) -> TapeStream:  # noqa: N802 - torch.cuda's name
        return TapeStream(self, "gather")

    def Event(self) -> TapeEvent:  # noqa: N802 - torch.cuda's name
        return TapeEvent(self)

    def current_stream(self) -> TapeStream:
        return self.current

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def stream(self, stream: TapeStream) -> AbstractContextManager[None]:
        @contextmanager
        def inside() -> Iterator[None]:
            before, self.current = self.current, stream
            yield
            self.current = before

        return inside()


class TapeStream:
    def __init__(self, tape: Tape, name: str) -> None:
        self.tape, self.name = tape, name

    def wait_stream(self, stream: TapeStream) -> None:
        self.tape.calls.append(f"{self.name} waits for {stream.name}")

    def wait_event(self, event: TapeEvent) -> None:
        self.tape.calls.append(f"{self.name} waits for {event.holds}")


class TapeEvent:
    def __init__(self, tape: Tape) -> None:
        self.tape, self.holds = tape, "nothing"

    def record(self, stream: TapeStream) -> None:
        self.holds = self.tape.calls[-1]
        self.tape.calls.append(f"event on {stream.name}")


class TapeGroup(SoloGroup):
    """Two ranks, of which the other one has nothing to say."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.size = 2
        self.tape = tape

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        self.tape.calls.append(f"all_gather {len(self.log)} on {self.tape.current.name}")
        self.log.append("all_gather")


def test_order_of_streams_and_events() -> None:
    """Each gather waits for the compute stream, each first read waits for its own gather, then kicks the next."""
    tape = Tape()
    gather = gather_of(TapeGroup(tape), device_module=tape)
    gather.begin([[2]], [[3]])
    gathers = [
        ["gather waits for compute", f"all_gather {n} on gather", f"all_gather {n + 1} on gather", "event on gather"]
        for n in (0, 2, 4)
    ]
    assert tape.calls == gathers[0]
    expected = [
        ["compute waits for all_gather 1 on gather", *gathers[1]],
        ["compute waits for all_gather 3 on gather", *gathers[2]],
        ["compute waits for all_gather 5 on gather"],
    ]
    for layer in range(LAYERS):
        tape.calls.clear()
        gather.stage(layer, "kv", gather.translate(locs_of(3)), stored(layer, KV, locs_of(3)))
        gather.prefetch(layer)  # resident already
        assert tape.calls == []
        gather.read(layer, "kv", gather.translate(locs_of(2)))
        gather.read(layer, "index_keys", gather.translate(locs_of(2)))
        assert tape.calls == expected[layer]
    tape.calls.clear()
    gather.end()
    gather.begin([[]], [[3]])
    finish_reads(gather)
    assert tape.calls == []


def test_end_waits_for_a_gather_that_nobody_read() -> None:
    """When a batch ends early, its pending gather is ordered before the next batch."""
    tape = Tape()
    gather = gather_of(TapeGroup(tape), device_module=tape)
    gather.begin([[2]], [[3]])
    tape.calls.clear()
    with pytest.raises(LayerOrderError):
        gather.end()
    assert tape.calls == ["compute waits for all_gather 1 on gather"]

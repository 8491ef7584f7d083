from __future__ import annotations

import gc
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from ci.register import register_cpu_ci
from harness.sim import access
from harness.sim.race import Race, SimFinding, StaleLifetime, UnknownOp
from harness.sim.shadow import Shadow
from tests.sim_bench import Bench
from tests.sim_brute import STEPS, Step, replay

register_cpu_ci(est_time=15, stage="commit")


def race_of(program: Callable[[Bench], object]) -> Race:
    bench = Bench()
    with bench, pytest.raises(Race) as caught:
        program(bench)
    return caught.value


def clean(program: Callable[[Bench], object]) -> None:
    bench = Bench()
    with bench:
        program(bench)
    bench.check.settle()


def test_read_before_write() -> None:
    """The story of a read that does not wait: rows, both operations, and the wait that is missing."""

    def program(bench: Bench) -> None:
        slot = torch.zeros(6, 4)
        bench.wait("side", "main")
        with bench.on("side"):
            slot[2:5].fill_(1)
        slot.index_select(0, torch.tensor([0, 3]))

    race = race_of(program)
    fill, select = re.findall(r"test_sim_order.py:\d+ in program", str(race))[:2]
    assert str(race) == (
        "race: read of 'stream main' not ordered after write of 'stream side'\n"
        "  memory    float32[6,4], row 3 (16 of 96 bytes of its storage)\n"
        f"  earlier   write by aten.fill_.Scalar on 'stream side' at {fill}\n"
        f"  later     read by aten.index_select.default on 'stream main' at {select}\n"
        f"  missing   nothing makes 'stream main' wait for 'stream side' between {fill} and {select}: a wait_stream, "
        "or an event recorded after the first and wait_event before the second\n"
        "  known     'stream main' never waited for anything on 'stream side'\n"
        "  effect    the read may see the rows as they were before that write"
    )
    assert ("stream side", "stream main") == (race.earlier.line, race.later.line)


def test_write_before_read_is_done() -> None:
    """Reuse of memory that another stream still reads is a race of the write, and says how far the last wait went."""

    def program(bench: Bench) -> None:
        slot = torch.zeros(6)
        bench.wait("side", "main")
        with bench.on("side"):
            slot.sum()
            early = bench.record("side")
            slot.mean()
        bench.wait("main", early)
        slot.zero_()

    story = str(race_of(program))
    assert "race: write of 'stream main' not ordered after read of 'stream side'" in story
    assert "earlier   read by aten.mean.default" in story
    site = r"test_sim_order.py:\d+ in program"
    known = f"is ordered, by its wait at {site}, after aten.sum.default on 'stream side' at {site}, not after what came"
    assert re.search(known, story)
    assert "effect    the write may replace rows that are still to be read" in story


def test_two_writes() -> None:
    """Two writes of the same elements need an order."""

    def program(bench: Bench) -> None:
        slot = torch.zeros(6)
        bench.wait("side", "main")
        slot[1:4].fill_(1)
        with bench.on("side"):
            slot[::2].fill_(2)

    assert "memory    float32[3], element 1 (4 of 24 bytes of its storage)" in str(race_of(program))


def test_host_reads_need_a_synchronisation() -> None:
    """The host sees a copy only after it waited for its stream, and may reuse the source only then."""

    def copied(bench: Bench, *, wait: bool, write: bool) -> None:
        pinned, rows = torch.zeros(4), torch.ones(4)
        with bench.on("main"):
            pinned.copy_(rows)
        if wait:
            bench.synchronize("main")
        use = access.write(rows) if write else access.read(pinned)
        bench.check.ran("tolist", "here.py:1", bench.clocks.host_op(bench.host), [use])

    for write in (False, True):
        clean(lambda bench, write=write: copied(bench, wait=True, write=write))  # type: ignore[misc]  # a default that binds the loop variable
        story = str(race_of(lambda bench, write=write: copied(bench, wait=False, write=write)))  # type: ignore[misc]  # a default that binds the loop variable
        assert "nothing makes the host wait for 'stream main' between test_sim_order.py" in story
        assert "event.synchronize()" in story


def test_two_host_threads() -> None:
    """Host threads are ordered by what they exchange, as streams are."""
    bench = Bench()
    other = bench.clocks.line("another host")
    shared = torch.zeros(3)
    bench.check.ran("write", "a.py:1", bench.clocks.host_op(bench.host), [access.write(shared)])
    with pytest.raises(Race, match=r"nothing orders the two threads between a.py:1 and b.py:2"):
        bench.check.ran("read", "b.py:2", bench.clocks.host_op(other), [access.read(shared)])
    with pytest.raises(Race, match="nothing tells 'stream main' that the other host thread is done"):
        bench.check.ran("read", "c.py:3", bench.clocks.issue(bench.current, other), [access.read(shared)])


def third_stream(bench: Bench, slot: Tensor) -> None:
    bench.wait("third", "side")
    bench.wait("main", "third")


ORDERED: dict[str, Callable[[Bench, Tensor], object]] = {
    "wait_stream": lambda bench, slot: bench.wait("main", "side"),
    "wait_event": lambda bench, slot: bench.wait("main", bench.record("side")),
    "through a third stream": third_stream,
    "through the host": lambda bench, slot: bench.synchronize("side"),
    "on the same stream": lambda bench, slot: setattr(bench, "current", bench.line("side")),
}


@pytest.mark.parametrize("wait", ORDERED.values(), ids=ORDERED.keys())
def test_every_way_to_wait(wait: Callable[[Bench, Tensor], object]) -> None:
    """Whatever orders the read after the write is enough."""

    def program(bench: Bench) -> None:
        slot = torch.zeros(6)
        bench.wait("side", "main")
        with bench.on("side"):
            slot.fill_(1)
        wait(bench, slot)
        slot.sum()
        bench.wait("main", "side")  # before the slot goes

    clean(program)


def test_other_rows_are_no_conflict() -> None:
    """Streams may use different rows, columns, or bytes of one tensor at once, and may all read."""

    def program(bench: Bench) -> None:
        slot, rows = torch.zeros(6, 4), torch.ones(2, 4)
        bench.wait("side", "main")
        with bench.on("side"):
            slot.index_copy_(0, torch.tensor([1, 4]), rows)
            rows.sum()
        slot.index_copy_(0, torch.tensor([0, 5]), rows)
        slot[2:4, ::2].fill_(2)
        with bench.on("side"):
            slot[2:4, 1::2].fill_(2)
            slot.view(torch.uint8)[1, 3:5].fill_(3)
        slot.view(torch.uint8)[0, 3:5].fill_(3)
        rows.sum()
        bench.wait("main", "side")  # before they go

    clean(program)


def test_new_memory_is_allocated_by_its_stream() -> None:
    """A tensor made on one stream and filled on another needs a wait, even if never written: its memory was reused."""

    def program(bench: Bench) -> None:
        fresh = torch.empty(3)
        with bench.on("side"):
            fresh.fill_(1)

    assert "earlier   write by aten.empty.memory_format on 'stream main'" in str(race_of(program))


def test_storage_that_grows() -> None:
    """An output that is resized has new memory, with no past."""

    def program(bench: Bench) -> None:
        with bench.on("side"):
            out = torch.empty(0)
        torch.add(torch.ones(3), 1, out=out)

    clean(program)


# ---- lifetimes


def temporary(bench: Bench, rescue: str) -> None:
    temp = torch.ones(3)
    bench.wait("side", "main")
    with bench.on("side"):
        temp.sum()
    if rescue == "record_stream":
        bench.check.record_stream(temp, bench.line("side"))
    elif rescue == "wait":
        bench.wait("main", "side")
    elif rescue == "synchronize":
        bench.synchronize("side")
    elif rescue == "forget":
        bench.check.forget(temp.untyped_storage())
    del temp
    gc.collect()


@pytest.mark.parametrize("rescue", ["record_stream", "wait", "synchronize", "forget"])
def test_memory_may_go_after_its_last_use(rescue: str) -> None:
    """What is freed after a wait, or is known to the allocator, is no finding."""
    clean(lambda bench: temporary(bench, rescue))


def test_memory_that_goes_too_early() -> None:
    """Memory freed while another stream may read it is a finding at the next operation, and names the use."""
    bench = Bench()
    with bench:
        temporary(bench, "")
        with pytest.raises(StaleLifetime) as caught:
            torch.ones(1)
    story = str(caught.value)
    assert "memory of 'stream main' was given back while 'stream side' may still use it" in story
    assert "a storage of 12 bytes, allocated by aten.ones.default at test_sim_order.py" in story
    assert "last use  read by aten.sum.default on 'stream side' at test_sim_order.py" in story
    assert re.search(r"freed     at tests/test_sim_order.py:\d+ in temporary", story)
    assert "record_stream(<stream side>)" in story


def test_lifetimes_can_be_left_out() -> None:
    """Where deferred work keeps tensors alive, only accesses are checked."""
    bench = Bench()
    bench.check.lifetimes = False
    with bench:
        temporary(bench, "")
    bench.check.settle()


def test_simulations_do_not_mix() -> None:
    """What an earlier simulation did to a tensor is no history of a later one, and no lifetime of the earlier."""
    slot = torch.zeros(3)
    benches = [Bench(), Bench()]
    for bench in benches:
        with bench, bench.on("side"):
            slot.fill_(1)
        with bench, bench.on("side"):
            made = torch.ones(2)
    with benches[0]:
        made.sum()
    for bench in benches:
        bench.check.settle()


def test_other_layouts() -> None:
    """A tensor whose memory is not modelled is an error that names the operation."""
    bench = Bench()
    with pytest.raises(
        UnknownOp, match=r"mul at here.py:1: a tensor of layout torch.sparse_coo, expected torch.strided"
    ):
        bench.check.ran("mul", "here.py:1", bench.clocks.host_op(bench.host), [access.read(torch.eye(2).to_sparse())])


# ---- against brute force


@settings(max_examples=400, deadline=None)
@given(STEPS)
def test_the_check_agrees_with_brute_force(steps: list[Step]) -> None:
    """For any program of streams, events, waits and partial views: a race is found where a graph search finds one."""
    count, racing, race = replay(steps)
    assert bool(racing) == (race is not None)
    if race is not None:
        assert f"access {count - 1}" == race.later.site
        assert race.earlier.site in {f"access {other}" for other in racing}


def test_brute_force_sees_a_broken_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above notices a check that forgets reads, and one that takes all of a storage for one cell."""
    read: Step = ("read", "side", 0, "all")
    write: Step = ("write", "main", 0, "upper rows")
    other: Step = ("write", "side", 0, "lower rows")
    with monkeypatch.context() as patch:
        patch.setattr(Shadow, "read", lambda *_: None)
        assert (2, {0}, None) == replay([read, write])
    with monkeypatch.context() as patch:
        patch.setattr(Shadow, "select", lambda *_: slice(None))
        count, racing, race = replay([write, other])
        assert (2, set()) == (count, racing)
        assert isinstance(race, SimFinding)

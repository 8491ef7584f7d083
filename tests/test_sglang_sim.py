"""The real sglang components on simulated devices: silent as released, and told where a wait is taken out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from ci.register import register_cpu_ci
from harness import types as t
from harness.adapter import EngineFault
from harness.adapters.ref_sim import NO_HIDDEN_WAIT, ORDERED
from harness.adapters.sglang import SglangEngine, SglangSession
from harness.adapters.sglang_forward import TwoStreams
from harness.adapters.sglang_memory import AT, HostMemory
from harness.adapters.sglang_sim import LateEvent, SimModule
from harness.fault import Edit, planted
from harness.fault_files import Library, library
from harness.sim import Simulation
from harness.sim.memory import is_host
from harness.sim.schedule import LAZY, Schedule, without
from harness.smoke import stamps

register_cpu_ci(est_time=25, stage="commit", runner="ubuntu-sglang")

NEEDS_SGLANG = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
FAULTS = Path(__file__).parent.parent / "fixtures" / "faults" / "sglang"
POOL = "sglang.srt.mem_cache.page_interleave_pool:PageInterleaveKVPoolMixin"
CONFIG = t.Config(
    shards=2, page_size=4, pages_per_rank=8, layers=3, chunk_tokens=112, context_tokens=128, host_pages_per_rank=16
)
PROMPT = tuple(range(1, 26))
Opener = Callable[..., SglangSession]


@cache
def faults() -> Library:
    return library(str(FAULTS), checked=False)


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens sessions that are closed at the end."""
    sessions: list[SglangSession] = []

    def make(config: t.Config = CONFIG, **options: str) -> SglangSession:
        sessions.append(SglangEngine(options).open(config))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def rows(tokens: tuple[int, ...], start: int, end: int) -> t.Rows:
    return {name: tuple(layer[start:end] for layer in layers) for name, layers in stamps(tokens, CONFIG).items()}


def value(reply: t.AnyReply) -> t.AnyValue:
    assert isinstance(reply, t.Ok), reply
    return reply.value


def serve(session: SglangSession, name: str, tokens: tuple[int, ...]) -> tuple[t.Rows, ...]:
    """A whole request in one chunk behind its hit; what attention read, by rank."""
    hit = value(session.apply(t.Open(name, tokens)))
    assert isinstance(hit, t.Opened)
    count = len(tokens) - hit.cached
    done = value(session.apply(t.Extend(name, count, rows(tokens, hit.cached, len(tokens)))))
    assert isinstance(done, t.Extended)
    session.apply(t.Finish(name))
    return done.reads


def served_from_host(session: SglangSession) -> tuple[t.Rows, ...]:
    """A prompt is computed and copied, leaves the device to another one, and comes back from the host."""
    serve(session, "first", PROMPT)
    session.apply(t.Settle())
    session.apply(t.Evict(1000))
    serve(session, "other", tuple(range(100, 150)))
    session.apply(t.Settle())
    session.apply(t.Evict(1000))
    return serve(session, "again", PROMPT)


@NEEDS_SGLANG
@pytest.mark.slow  # sglang takes many seconds to import
class TestOrder:
    @pytest.mark.parametrize("attention", ["mha", "mla"])
    def test_released_code(self, opened: Opener, attention: str) -> None:
        """The released code gives no alarm from the first chunk to a load from the host, and reads every row."""
        session = opened(device="order", attention=attention)
        assert (rows(PROMPT, 0, 25),) * 2 == served_from_host(session)

    @pytest.mark.parametrize(
        "fault",
        [
            "sglang.gather-wait-dropped",
            "sglang.gather-ignores-compute",
            "sglang.ready-not-recorded",
            "sglang.gather-ignores-load",
            "sglang.load-event-not-recorded",
            "sglang.copy-start-unawaited",
            "sglang.indices-not-kept",
        ],
    )
    def test_removed_wait(self, opened: Opener, fault: str) -> None:
        """Each of these waits and events, taken out, is an alarm in one run."""
        session = opened(device="order")
        with planted(faults().faults[fault].changes), pytest.raises(EngineFault) as alarm:
            served_from_host(session)
        assert alarm.value.claim == ORDERED

    @pytest.mark.parametrize(
        "fault", ["sglang.gather-waits-once", "sglang.copy-start-unawaited", "sglang.indices-not-kept"]
    )
    def test_order_of_work_hides_it(self, opened: Opener, fault: str) -> None:
        """Where work is done in the order of its issue such a fault reads every row, and only the check tells."""
        session = opened()
        with planted(faults().faults[fault].changes):
            assert (rows(PROMPT, 0, 25),) * 2 == served_from_host(session)
        session = opened(device="order")
        with (
            planted(faults().faults[fault].changes),
            pytest.raises(EngineFault, match=r"not ordered after|freed too early"),
        ):
            served_from_host(session)

    def test_another_order(self, opened: Opener) -> None:
        """The next gather kicked before the wait for this one is another order, and as good."""
        session = opened(device="order")
        with planted(faults().variants["sglang.prefetch-before-wait"].changes):
            assert (rows(PROMPT, 0, 25),) * 2 == served_from_host(session)

    def test_host_that_waits(self, opened: Opener) -> None:
        """A host that waits for the device where sglang does not is told, for it would hide a missing wait."""
        change = Edit(f"{POOL}._prefetch_layer", "block = send_rows.numel()", "block = len(send_rows.tolist())")
        session = opened(device="order")
        with planted([change]), pytest.raises(EngineFault) as alarm:
            served_from_host(session)
        assert alarm.value.claim == NO_HIDDEN_WAIT


@NEEDS_SGLANG
@pytest.mark.slow  # sglang takes many seconds to import
class TestAdversary:
    @pytest.mark.parametrize("schedule", [(), LAZY, ((0, without(1)),), ((0, without(2)),), ((0, without(4)),)])
    def test_released_code(self, opened: Opener, schedule: Schedule) -> None:
        """Whatever runs late, the released code reads every row."""
        session = opened(replace(CONFIG, schedule=schedule), device="adversary")
        assert (rows(PROMPT, 0, 25),) * 2 == served_from_host(session)

    def test_removed_wait(self, opened: Opener) -> None:
        """Attention that does not wait for its gather reads other rows when the gathers run late."""
        session = opened(replace(CONFIG, schedule=((0, without(2)),)), device="adversary")
        with planted(faults().faults["sglang.gather-wait-dropped"].changes):
            assert (rows(PROMPT, 0, 25),) * 2 != served_from_host(session)


class TestHostMemory:
    def test_by_name_of_the_device(self) -> None:
        """What is made with the device's name is on the device, all else on the host."""
        simulation = Simulation(1, order=True)
        with simulation.devices[0].active(), HostMemory(simulation):
            made = [torch.tensor([1]), torch.zeros(1, device="cpu"), torch.tensor([1], device=AT)]
        assert [True, True, False] == [is_host(tensor) for tensor in made]

    def test_reads(self) -> None:
        """The host reads its own memory without a wait, and waits for what is on the device."""
        simulation = Simulation(1, order=True)
        with simulation.devices[0].active(), HostMemory(simulation):
            own = torch.arange(3)
            int(own[1])
            before = simulation.syncs.total()
            own.to(AT).tolist()
        assert (0, 2) == (before, simulation.syncs.total())  # the copy of pageable memory is waited for, and the read


class TestDevice:
    def test_unrecorded_event(self) -> None:
        """An event that stands for nothing is done."""
        (device,) = Simulation(1, order=True).devices
        assert LateEvent(device, 3).query()

    def test_event_is_late(self) -> None:
        """A recorded event says no for its first looks, unless the host has waited for what it stands for."""
        (device,) = Simulation(1, order=True).devices
        with device.active():
            answers = []
            for waited in (False, True):
                torch.zeros(1)
                event = LateEvent(device, 2)
                event.record()
                if waited:
                    device.synchronize()
                answers.append([event.query() for _ in range(3)])
        assert [[False, False, True], [True, True, True]] == answers

    def test_two_forwards_in_flight(self) -> None:
        """The host waits for the oldest forward before it launches a third one, and for all up to one that it names."""
        simulation = Simulation(1, order=True)
        (device,) = simulation.devices
        with device.active():
            forwards, waits = TwoStreams(SimModule(device)), []
            for _ in range(3):
                with forwards.launch():
                    torch.zeros(1)
                waits.append(simulation.syncs.total())
            forwards.land(3)
        assert ([0, 0, 1], 3) == (waits, simulation.syncs.total())

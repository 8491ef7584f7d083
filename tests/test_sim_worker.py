"""A prefill worker on simulated devices: any schedule gives the right rows, and each lost wait is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings

from ci.register import register_cpu_ci
from harness.sim import Schedule, named, schedules
from harness.sim.device import SimStream
from harness.sim.schedule import IN_ORDER
from tests.sim_rig import SimRig, rig_of
from tests.worker_rig import spec_of

register_cpu_ci(est_time=50, stage="commit")

STREAMS = 2
STREAMS_WITH_A_HOST = 4  # and the two that copy between the tiers
POSITIONS = 800


@pytest.fixture(scope="module")
def pair() -> Iterator[SimRig]:
    with rig_of(2) as rig:
        yield rig


@pytest.fixture(scope="module")
def hosted() -> Iterator[SimRig]:
    with rig_of(2, spec_of(2, pages_per_rank=8, host_pages_per_rank=8)) as rig:
        yield rig


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_named_schedules(ranks: int) -> None:
    """In order, lazy, and with each stream ahead or behind, every read is right, and no host waits for its device."""
    with rig_of(ranks) as rig:
        for schedule in named(STREAMS).values():
            simulation = rig.run(schedule, expected_syncs=[])
            assert simulation.queue.position > 150


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(schedule=schedules(streams=STREAMS, ranks=2, positions=POSITIONS))
def test_any_schedule(pair: SimRig, schedule: Schedule) -> None:
    """Whatever runs when, every read is right."""
    pair.run(schedule)


def test_named_schedules_with_a_host_tier(hosted: SimRig) -> None:
    """The same with copies to the host and back."""
    restored = 0
    for schedule in named(STREAMS_WITH_A_HOST).values():
        hosted.run(schedule)
        for worker in hosted.workers:
            assert worker.host is not None
            restored += worker.host.restored_bytes
    assert restored > 0


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(schedule=schedules(streams=STREAMS_WITH_A_HOST, ranks=2, positions=POSITIONS))
def test_any_schedule_with_a_host_tier(hosted: SimRig, schedule: Schedule) -> None:
    """The same under any schedule."""
    hosted.run(schedule)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(schedule=schedules(streams=STREAMS, ranks=2, positions=POSITIONS))
def test_many_schedules(pair: SimRig, schedule: Schedule) -> None:
    """Whatever runs when, every read is right; more of them."""
    pair.run(schedule)


def lost(monkeypatch: pytest.MonkeyPatch, wait: str, keep: Callable[[int, int], bool]) -> None:
    """Lose those waits of every stream whose stream and number `keep` denies."""
    original = getattr(SimStream, wait)
    counts: dict[SimStream, int] = {}

    def some(self: SimStream, other: Any) -> None:
        counts[self] = counts.get(self, -1) + 1
        if keep(self.lane.index, counts[self]):
            original(self, other)

    monkeypatch.setattr(SimStream, wait, some)


COMPUTE, GATHER, BACKUP = 0, 1, 2
FAULTS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "the gather waits for nothing": ("wait_stream", lambda stream, number: stream != GATHER),
    "the gather of the last layer waits for nothing": ("wait_stream", lambda stream, number: number % 3 < 2),
    "a read does not wait for its gather": ("wait_event", lambda stream, number: stream != COMPUTE),
    "a read of later layers does not wait": ("wait_event", lambda stream, number: number % 3 == 0),
}
HOST_FAULTS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "a backup waits for nothing": ("wait_stream", lambda stream, number: stream != BACKUP),
    "the gather does not wait for what is restored": ("wait_event", lambda stream, number: stream != GATHER),
}


def wrong(rig: SimRig, schedule: Schedule) -> bool:
    """Whether a read is wrong, or work fails on poison."""
    try:
        rig.run(schedule)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_lost_waits_are_seen(fault: str, pair: SimRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lost wait gives wrong rows under a schedule that is found and shrinks to one pair; in order none does."""
    lost(monkeypatch, *FAULTS[fault])
    assert not wrong(pair, IN_ORDER)
    search = settings(derandomize=True, max_examples=300, deadline=None, database=None)
    found = find(
        schedules(streams=STREAMS, ranks=2, positions=POSITIONS),
        lambda schedule: wrong(pair, schedule),
        settings=search,
    )
    assert 1 == len(found), found


@pytest.mark.parametrize("fault", [*FAULTS, *HOST_FAULTS])
def test_a_named_schedule_sees_each(fault: str, hosted: SimRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the named schedules is one that sees each fault, also those of the host tier; in order is never it."""
    lost(monkeypatch, *{**FAULTS, **HOST_FAULTS}[fault])
    seen = {name for name, schedule in named(STREAMS_WITH_A_HOST).items() if wrong(hosted, schedule)}
    assert seen
    assert "in order" not in seen

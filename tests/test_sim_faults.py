"""The order check's own test: changed waits that it must find, each in one run, and changes that it must accept.

In issue order all rows of these programs are right: an ordinary test sees none of the faults.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ci.register import register_cpu_ci
from harness.sim import Schedule
from harness.sim.order import OrderCheck
from harness.sim.race import Race, SimFinding, StaleLifetime
from harness.sim.schedule import LAZY
from harness.sim.shadow import EVERYTHING, Shadow
from tests.sim_copies import COPIES, Pairs, Place, copies
from tests.sim_faults import GATHER_FAULTS, MISPLACED, Change, Fault, gathers, run
from tests.sim_harmless import HARMLESS

register_cpu_ci(est_time=30, stage="commit")


def finding_of(program: Callable[..., Pairs]) -> SimFinding:
    with pytest.raises(SimFinding) as caught:
        run(program, order=True)
    return caught.value


def test_size_of_the_tables() -> None:
    """At least 20 faults of order and 8 harmless changes."""
    assert len(GATHER_FAULTS) + len(COPIES) >= 20
    assert len(HARMLESS) >= 8


@pytest.mark.parametrize("fault", GATHER_FAULTS.values(), ids=GATHER_FAULTS.keys())
def test_gather_faults_are_found(fault: Fault) -> None:
    """A missing or misplaced wait of the gather is found in one run, and the story names both operations."""
    finding = finding_of(gathers(fault.change))
    assert fault.says in str(finding)
    if isinstance(finding, Race):
        assert (fault.earlier, fault.later) == (finding.earlier.name, finding.later.name)
        assert re.search(r"between \S+\.py:\d+ in .* and \S+\.py:\d+ in .*: a wait_stream, or an event", str(finding))
    else:
        assert isinstance(finding, StaleLifetime)
        assert fault.earlier == finding.use.name


@pytest.mark.parametrize("fault", GATHER_FAULTS.values(), ids=GATHER_FAULTS.keys())
def test_gather_faults_give_right_rows_in_order(fault: Fault) -> None:
    """Run in issue order, the same faults read right rows: nothing else here can see them."""
    assert run(gathers(fault.change), order=False) == 0


@pytest.mark.parametrize(("program", "says"), COPIES.values(), ids=COPIES.keys())
def test_copy_faults_are_found(program: Callable[[Place], Pairs], says: str) -> None:
    """Copies, host buffers, temporaries, kernels and collectives: the wrong program is found in one run."""
    assert says in str(finding_of(copies(program, wrong=True)))


@pytest.mark.parametrize(("program", "says"), COPIES.values(), ids=COPIES.keys())
def test_copy_programs_in_order(program: Callable[[Place], Pairs], says: str) -> None:
    """The right program has no finding; in issue order the wrong one computes the same."""
    assert run(copies(program, wrong=False), order=True) == 0
    assert run(copies(program, wrong=True), order=False) == 0


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_harmless_changes_are_accepted(change: Change) -> None:
    """Other waits, streams and events that order the same accesses are no finding."""
    assert run(gathers(change), order=True) == 0


@pytest.mark.parametrize("schedule", [LAZY, ((0, 3),)], ids=["lazy", "only the gather stream"])
@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_deferred_work_is_checked_as_well(change: Change, schedule: Schedule) -> None:
    """The order does not depend on when work runs: harmless changes stay so when it runs late."""
    assert run(gathers(change), order=True, schedule=schedule) == 0


def test_deferred_faults() -> None:
    """A missing wait is found between the same streams when work runs late, whichever comes first then."""
    fault = GATHER_FAULTS["no wait for the gather"]
    with pytest.raises(Race) as caught:
        run(gathers(fault.change), order=True, schedule=LAZY)
    assert {"rank 0 stream 0", "rank 0 stream 1"} == {caught.value.earlier.line, caught.value.later.line}


@pytest.mark.parametrize("change", MISPLACED.values(), ids=MISPLACED.keys())
def test_misplaced_rows(change: Change) -> None:
    """What overwrites rows in issue order already is wrong in any run, and a race as well."""
    assert run(gathers(change), order=False) > 0
    assert isinstance(finding_of(gathers(change)), Race)


def test_whole_storages_would_be_too_coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cells the right gather is a false alarm: it fills the prefix's rows while the chunk's are staged."""
    monkeypatch.setattr(Shadow, "select", lambda *_: EVERYTHING)
    assert isinstance(finding_of(gathers(HARMLESS["nothing"])), Race)


def test_tables_see_a_blind_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that takes everything for ordered finds no race of the tables, so those tests would fail."""
    monkeypatch.setattr(OrderCheck, "_check", lambda *_: None)
    monkeypatch.setattr(OrderCheck, "freed", lambda *_: None)
    assert run(gathers(GATHER_FAULTS["no wait for the gather"].change), order=True) == 0

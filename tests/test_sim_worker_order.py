"""A prefill worker under the order check: no finding, and each lost wait is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.sim.device import SimStream
from harness.sim.race import SimFinding
from harness.sim.schedule import LAZY
from tests.sim_rig import SimRig, rig_of
from tests.worker_rig import spec_of

register_cpu_ci(est_time=15, stage="commit")


@pytest.fixture(scope="module")
def hosted() -> Iterator[SimRig]:
    with rig_of(2, spec_of(2, pages_per_rank=8, host_pages_per_rank=8)) as rig:
        yield rig


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_access_is_ordered(ranks: int) -> None:
    """Requests with prefixes, batches and evictions: all accesses are ordered by waits, whenever the work runs."""
    with rig_of(ranks) as rig:
        rig.run(order=True)
        rig.run(LAZY, order=True)


def test_every_access_is_ordered_with_a_host_tier(hosted: SimRig) -> None:
    """The same with copies to the host and back."""
    hosted.run(order=True)
    hosted.run(LAZY, order=True)


# stream of every rank and kind of wait -> whether its loss is found in these steps
LOST = {
    "compute for a gather": (0, "wait_event", True),
    "gather for compute": (1, "wait_stream", True),
    "gather for a restore": (1, "wait_event", True),
    "backup for compute": (2, "wait_stream", True),
    # the host has seen the event of every backup before it plans a restore, and the backup came after all readers
    "restore for both": (3, "wait_stream", False),
}


@pytest.mark.parametrize(("stream", "method", "found"), LOST.values(), ids=LOST.keys())
def test_lost_waits_are_found(
    hosted: SimRig, monkeypatch: pytest.MonkeyPatch, stream: int, method: str, *, found: bool
) -> None:
    """When one stream of every rank loses its waits of a kind, one run says so, unless others order the same."""
    original: Callable[[SimStream, Any], None] = getattr(SimStream, method)
    lost: list[object] = []

    def wait(self: SimStream, other: Any) -> None:
        if self.lane.index == stream:
            lost.append(other)
        else:
            original(self, other)

    monkeypatch.setattr(SimStream, method, wait)
    with pytest.raises(SimFinding) if found else nullcontext():
        hosted.run(order=True)
    assert lost

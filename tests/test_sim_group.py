from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from ci.register import register_cpu_ci
from harness.lockstep import CollectiveMismatch, Lockstep, LockstepMisuseError
from harness.sim import Schedule, SimGroup, Simulation, named, schedules
from harness.sim.schedule import LAZY, only, without

register_cpu_ci(est_time=10, stage="commit")


class Ranks:
    """Ranks with devices and groups; `program(rank, device, group)` on each."""

    def __init__(self, ranks: int) -> None:
        self.lockstep = Lockstep(ranks)
        self.simulation = Simulation(ranks)

    def run(self, program: Callable[[int, Any, SimGroup], Any], schedule: Schedule | None, **options: Any) -> list[Any]:
        self.simulation = Simulation(len(self.lockstep.groups), schedule, **options)
        devices = self.simulation.devices
        groups = [SimGroup(device, group) for device, group in zip(devices, self.lockstep.groups, strict=True)]
        return self.simulation.run(self.lockstep, lambda rank: program(rank, devices[rank], groups[rank]))


@pytest.fixture
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    with ranks.lockstep:
        yield ranks


def chain(rank: int, device: Any, group: SimGroup) -> torch.Tensor:
    """Compute, gather on a side stream, compute with what came; well ordered."""
    side = device.Stream()
    out = torch.zeros(2 * group.size)
    for step in range(3):
        own = out[2 * rank : 2 * rank + 2]
        own.fill_(10 * rank + step)
        side.wait_stream(device.current_stream())
        with device.stream(side):
            group.all_gather(out, own)
        device.current_stream().wait_stream(side)
        out.add_(1)
    return out


class TestGather:
    @pytest.mark.parametrize("ranks", [1, 2, 3, 8])
    def test_rows(self, ranks: int) -> None:
        """Under every named schedule each rank gets the parts of all ranks, in rank order."""
        group = Ranks(ranks)
        expected = [10 * rank + 3.0 for rank in range(ranks) for _ in range(2)]
        with group.lockstep:
            for schedule in (None, *named(2).values(), ((0, only(1, ranks - 1)),), ((0, without(0, 0)),)):
                assert [expected] * ranks == [out.tolist() for out in group.run(chain, schedule, order=True)]

    def test_stream_operation(self, pair: Ranks) -> None:
        """No host waits for a gather; it runs when it is at the head of every rank's stream."""

        def program(rank: int, device: Any, group: SimGroup) -> list[str]:
            group.all_gather(torch.zeros(2), torch.zeros(1))
            return [entry.name for entry in device.simulation.queue.entries() if entry.lane.rank == rank][-1:]

        assert [["all_gather"]] * 2 == pair.run(program, LAZY)
        assert {} == pair.simulation.syncs

    def test_takes_rows_when_it_runs(self, pair: Ranks) -> None:
        """A rank that writes its part before the gather ran, without a wait, changes what the peers get."""

        def program(rank: int, device: Any, group: SimGroup) -> torch.Tensor:
            part, out = torch.tensor([rank]), torch.tensor([-1, -1])
            side = device.Stream()
            group.all_gather(out, part)
            with device.stream(side):
                part.fill_(9)
            return out

        assert [[0, 1]] * 2 == [out.tolist() for out in pair.run(program, None)]
        assert [[9, 9]] * 2 == [out.tolist() for out in pair.run(program, ((0, only(1)),))]

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint8, torch.bool])
    def test_dtypes(self, dtype: torch.dtype, pair: Ranks) -> None:
        """Any dtype."""

        def program(rank: int, device: Any, group: SimGroup) -> torch.Tensor:
            out = torch.zeros(4, 3, dtype=dtype)
            group.all_gather(out, torch.full((2, 3), rank, dtype=torch.float32).to(dtype))
            return out

        assert [[0] * 6 + [1] * 6] * 2 == [out.float().flatten().tolist() for out in pair.run(program, LAZY)]

    def test_empty(self, pair: Ranks) -> None:
        """Ranks with nothing to give still join."""
        rows = pair.run(lambda rank, device, group: group.all_gather(torch.zeros(0, 2), torch.zeros(0, 2)), LAZY)
        assert [None, None] == rows


class TestMistakes:
    def test_shapes_of_all_ranks(self, pair: Ranks) -> None:
        """One row against two is no collective, and both call sites are named; nothing is spread silently."""

        def program(rank: int, device: Any, group: SimGroup) -> None:
            group.all_gather(torch.zeros(2 * (rank + 1)), torch.zeros(rank + 1))

        with pytest.raises(CollectiveMismatch, match=r"out torch.float32 \(2,\).*test_sim_group.py:\d+") as caught:
            pair.run(program, LAZY)
        assert 2 == str(caught.value).count("tests/test_sim_group.py")

    def test_a_peer_that_never_comes(self, pair: Ranks) -> None:
        """A rank that ends without the collective is named at once."""

        def program(rank: int, device: Any, group: SimGroup) -> None:
            if rank:
                group.all_gather(torch.zeros(2), torch.zeros(1))

        with pytest.raises(CollectiveMismatch, match=r"ranks 0: ended its program"):
            pair.run(program, LAZY)

    @pytest.mark.parametrize(
        ("out", "part", "text"),
        [
            ((3,), slice(0, 1), r"2\*n rows"),
            ((4, 2), (slice(None), slice(0, 1)), r"must be|n rows"),
            ((4,), slice(1, 3), "part overlaps out from element 1; only this rank's own block, at 0"),
        ],
    )
    def test_unfit(self, out: tuple[int, ...], part: Any, text: str, pair: Ranks) -> None:
        """What no communicator could do is an error at the call."""

        def program(rank: int, device: Any, group: SimGroup) -> None:
            given = torch.zeros(out)
            group.all_gather(given, given[part])

        with pytest.raises(LockstepMisuseError, match=text):
            pair.run(program, LAZY)

    def test_strides(self, pair: Ranks) -> None:
        """Both sides must be contiguous."""

        def program(rank: int, device: Any, group: SimGroup) -> None:
            group.all_gather(torch.zeros(4, 2), torch.zeros(2, 2).T)

        with pytest.raises(LockstepMisuseError, match=r"call \.contiguous"):
            pair.run(program, LAZY)


class TestMinimum:
    def test_values(self, pair: Ranks) -> None:
        """The elementwise minimum, and no stream is waited for."""

        def program(rank: int, device: Any, group: SimGroup) -> tuple[list[int], int]:
            torch.zeros(1)
            return group.minimum([rank, 5 - rank]), device.simulation.queue.pending

        assert [([0, 4], 2)] * 2 == pair.run(program, LAZY)
        assert {} == pair.simulation.syncs

    def test_log(self, pair: Ranks) -> None:
        """The log has one entry per collective and is that of the lockstep's group."""

        def program(rank: int, device: Any, group: SimGroup) -> list[str]:
            group.log.clear()
            group.all_gather(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(1, 3, dtype=torch.bfloat16))
            group.minimum([1])
            assert group.log is pair.lockstep.groups[rank].log
            return list(group.log)

        assert [["all_gather bfloat16[2,3]", "minimum int64[1]"]] * 2 == pair.run(program, LAZY)


RANKS = 3


@settings(max_examples=60, deadline=None)
@given(schedules(streams=2, ranks=RANKS, positions=30))
def test_any_schedule(schedule: Schedule) -> None:
    """A well ordered program gives the same rows on every rank under any schedule."""
    ranks = Ranks(RANKS)
    with ranks.lockstep:
        rows = ranks.run(chain, schedule)
    assert [[3.0, 3, 13, 13, 23, 23]] * RANKS == [out.tolist() for out in rows]

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ci.register import register_cpu_ci
from harness.lockstep import Lockstep
from harness.sim import SimDevice, Simulation
from harness.sim.device import POLLS_MAX, SimEvent
from harness.sim.queue import FailedLater
from harness.sim.race import SimFinding, UnexpectedSync
from harness.sim.schedule import HOLD, LAZY, Schedule, named, only, without
from tests.sim_device import device_of, syncs

register_cpu_ci(est_time=10, stage="commit")


class TestStreams:
    def test_current(self, lazy: SimDevice) -> None:
        """Work goes to the stream of the innermost context, and back to the one before."""
        side = lazy.Stream(priority=-1)
        assert lazy.default_stream() is lazy.current_stream()
        with lazy.stream(side), lazy.stream(None):
            assert side is lazy.current_stream()
            torch.zeros(1)
        assert (lazy.default_stream(), 1, 0) == (
            lazy.current_stream(),
            len(side.lane.pending),
            len(lazy.default_stream().lane.pending),
        )

    @pytest.mark.parametrize("how", ["wait_stream", "wait_event", "event.wait", "record_event"])
    @pytest.mark.parametrize("schedule", named(2).values())
    def test_waits_order_streams(self, how: str, schedule: Schedule) -> None:
        """Each way to wait makes the side stream see what the default stream wrote before, under every schedule."""
        device = device_of(schedule)
        x = torch.zeros(3)
        with device.active():
            side = device.Stream()
            x.add_(1)
            if how == "wait_stream":
                side.wait_stream(device.current_stream())
            elif how == "record_event":
                side.wait_event(device.current_stream().record_event())
            else:
                event = device.Event(enable_timing=False)
                event.record()
                if how == "wait_event":
                    side.wait_event(event)
                else:
                    event.wait(side)
            with device.stream(side):
                x.mul_(5)
        device.simulation.finish()
        assert [5] * 3 == x.tolist()

    def test_without_a_wait(self) -> None:
        """Without a wait a schedule exists that runs the side stream first, and in order the rows come out right."""
        found = {}
        for name, schedule in named(2).items():
            device = device_of(schedule)
            x = torch.zeros(1)
            with device.active():
                x.add_(1)
                with device.stream(device.Stream()):
                    x.mul_(5)
            device.simulation.finish()
            found[name] = int(x)
        assert (5, 1) == (found["in order"], found["only stream 1"])

    def test_a_recorded_event_stays(self) -> None:
        """An event stands for what was on the stream when it was recorded, until it is recorded again."""
        device = device_of()
        x = torch.zeros(1)
        with device.active():
            event = device.Event()
            x.add_(1)
            event.record()
            x.add_(10)
            event.synchronize()
        assert ([1], 1) == (x.tolist(), device.simulation.queue.pending)
        with device.active():
            event.record()
            event.synchronize()
        assert [11] == x.tolist()

    def test_a_new_event_holds_nobody_back(self, lazy: SimDevice) -> None:
        """As on a GPU, an event that was never recorded is done."""
        event = lazy.Event()
        torch.zeros(1)
        event.wait()
        event.synchronize()
        assert event.query()
        assert 1 == lazy.simulation.queue.pending

    def test_synchronize(self) -> None:
        """A stream waits for itself alone, the device for all streams of its rank."""
        device = device_of()
        x, y = torch.zeros(1), torch.zeros(1)
        with device.active():
            side = device.Stream()
            x.add_(1)
            with device.stream(side):
                y.add_(1)
            assert not side.query()
            side.synchronize()
            assert side.query()
        assert (0, 1) == (int(x), int(y))
        with device.active():
            device.synchronize()
        assert 1 == int(x)


class TestPolls:
    def test_a_polling_host_ends(self, lazy: SimDevice) -> None:
        """An event stays pending for a number of looks, and then its work runs."""
        x = torch.zeros(1)
        event = lazy.current_stream().record_event()
        looks = 0
        while not event.query():
            looks += 1
        assert (POLLS_MAX - 1, [0]) == (looks, x.tolist())

    def test_the_schedule_moves_on(self) -> None:
        """Each look that finds the event pending is a position of the schedule."""
        device = device_of(((0, HOLD), (3, 0)))
        with device.active():
            torch.zeros(1)
            event = device.current_stream().record_event()
            assert [False, False, True, True] == [event.query() for _ in range(4)]
        assert 4 == device.simulation.queue.position

    def test_recording_again_starts_anew(self, lazy: SimDevice) -> None:
        """The looks at what was recorded before do not count."""
        event = lazy.Event()
        for _ in range(3):
            torch.zeros(1)
            event.record()
            assert [False] * (POLLS_MAX - 1) == [event.query() for _ in range(POLLS_MAX - 1)]

    def test_a_stream_is_polled_alike(self, lazy: SimDevice) -> None:
        """Stream.query() comes to an end too."""
        torch.zeros(1)
        stream = lazy.current_stream()
        assert [False] * (POLLS_MAX - 1) + [True] == [stream.query() for _ in range(POLLS_MAX)]


class TestCallbacks:
    @pytest.mark.parametrize("schedule", [None, *named(2).values()])
    def test_stream_order(self, schedule: Schedule | None) -> None:
        """A Python function runs in stream order, and its torch calls are its own."""
        device = device_of(schedule)
        x = torch.zeros(2)
        seen: list[Any] = []

        def kernel() -> None:
            seen.append(x.tolist())
            x.numpy()[:] *= 3

        with device.active():
            x.add_(2)
            device.host_callback(kernel, reads=[x], writes=[x])
            x.add_(1)
        device.simulation.finish()
        assert ([[2, 2]], [7, 7]) == (seen, x.tolist())
        assert 0 == syncs(device)

    def test_failure(self, lazy: SimDevice) -> None:
        """An exception in the function names where it was issued."""
        lazy.host_callback(lambda: 1 // 0)
        with pytest.raises(FailedLater, match=r"<lambda> on stream 0 .*test_sim_device.py.*ZeroDivisionError"):
            lazy.synchronize()


class TestActive:
    def test_patches_end(self) -> None:
        """When the last thread has left, whatever the order, torch is as it was: its methods and its modes."""
        before = dict(torch.Tensor.__dict__)
        one, other = device_of(), device_of()
        with one.active():
            inside = threading.Event(), threading.Event()

            def work() -> None:
                with other.active():
                    inside[0].set()
                    inside[1].wait()

            thread = threading.Thread(target=work)
            thread.start()
            inside[0].wait()
        assert torch.Tensor.tolist is not torch._C.TensorBase.tolist
        inside[1].set()
        thread.join()
        assert before == dict(torch.Tensor.__dict__)
        assert not is_in_torch_dispatch_mode()

    def test_after_an_error(self) -> None:
        """Also when the work raised."""
        before = dict(torch.Tensor.__dict__)
        with pytest.raises(KeyError), device_of().active():
            raise KeyError
        assert before == dict(torch.Tensor.__dict__)

    def test_twice_in_a_thread(self, lazy: SimDevice) -> None:
        """One thread has one device."""
        with pytest.raises(RuntimeError, match="the device of rank 0 is active"), device_of().active():
            pass

    def test_inactive(self) -> None:
        """What is done outside of active() is data that was there before."""
        device = device_of()
        x = torch.zeros(2)
        with device.active():
            x.add_(1)
        x.add_(5)
        assert [5, 5] == x.tolist()
        device.simulation.finish()
        assert [6, 6] == x.tolist()

    def test_inference_mode(self) -> None:
        """Tensors of inference mode and others mix as they do in plain torch."""
        device = device_of()
        with device.active(), torch.inference_mode():
            x = torch.zeros(2)
            y = x + 1
            x.add_(y)
        device.simulation.finish()
        assert (True, [1, 1]) == (x.is_inference(), x.tolist())

    def test_versions(self, lazy: SimDevice) -> None:
        """A write counts once for autograd, when it is issued."""
        x = torch.zeros(2)
        x.add_(1)
        assert 1 == x._version
        lazy.synchronize()
        assert 1 == x._version

    def test_parameters(self, lazy: SimDevice) -> None:
        """A parameter updated under no_grad is updated when that was issued, whatever mode it runs in."""
        p = torch.nn.Parameter(torch.ones(2))
        with torch.no_grad():
            p.add_(1)
        lazy.synchronize()
        assert [2, 2] == p.tolist()


class TestRun:
    def test_findings_come_through(self) -> None:
        """A finding on one rank is raised as itself, not as a rank that is missing; the cause stays visible."""

        def program(rank: int) -> None:
            if rank == 1:
                torch.zeros(1).tolist()
            lockstep.groups[rank].minimum([0])

        simulation = Simulation(2, LAZY, expected_syncs=[])
        with Lockstep(2) as lockstep, pytest.raises(UnexpectedSync):
            simulation.run(lockstep, program)

    def test_other_errors(self) -> None:
        """Errors of the program are raised as the lockstep raises them."""
        simulation = Simulation(2, LAZY)
        with Lockstep(2) as lockstep, pytest.raises(ZeroDivisionError):
            simulation.run(lockstep, lambda rank: 1 // rank)

    def test_work_left_runs(self) -> None:
        """What no host waited for runs at the end."""
        simulation = Simulation(2, LAZY)
        with Lockstep(2) as lockstep:
            rows = simulation.run(lockstep, lambda rank: torch.full((2,), rank))
        assert [[0, 0], [1, 1]] == [row.tolist() for row in rows]


class TestDeterminism:
    @pytest.mark.parametrize("schedule", [*named(2).values(), ((0, HOLD), (4, only(1, 1)), (9, without(0, 0)))])
    def test_same_execution(self, schedule: Schedule) -> None:
        """The same program under the same schedule runs in the same order and gives the same, races included."""

        def run() -> tuple[list[str], list[Any]]:
            order: list[str] = []
            simulation = Simulation(2, schedule)
            shared = [torch.zeros(4) for _ in range(2)]

            def program(rank: int) -> None:
                device = simulation.devices[rank]
                side, x = device.Stream(), shared[rank]
                for step in range(4):
                    x.add_(step)
                    device.host_callback(lambda step=step: order.append(f"{rank} main {step}"))  # type: ignore[misc]  # a default that binds the loop variable
                    with device.stream(side):
                        x.mul_(2)
                        device.host_callback(lambda step=step: order.append(f"{rank} side {step}"))  # type: ignore[misc]  # a default that binds the loop variable

            with Lockstep(2) as lockstep:
                simulation.run(lockstep, program)
            return order, [x.tolist() for x in shared]

        assert run() == run()


def test_event_of_another_simulation_is_an_event() -> None:
    """Types are plain: a device module of other code can be compared by what it makes."""
    device = device_of()
    assert isinstance(device.Event(), SimEvent)
    assert issubclass(FailedLater, SimFinding)

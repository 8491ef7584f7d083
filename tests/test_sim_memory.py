from __future__ import annotations

import gc

import pytest
import torch

from ci.register import register_cpu_ci
from harness.sim import SimDevice
from harness.sim.race import UnknownOp
from tests.sim_device import device_of, syncs

register_cpu_ci(est_time=10, stage="commit")


class TestHostMemory:
    def test_not_blocking(self) -> None:
        """Copies between device and pinned memory that do not block are work of the stream; the host sees old rows."""
        device = device_of()
        pinned = device.pin(torch.full((2,), 7.0))
        with device.active():
            x = torch.zeros(2)
            pinned.copy_(x, non_blocking=True)
            done = device.current_stream().record_event()
            assert [7, 7] == pinned.tolist()
            assert 0 == syncs(device)
            done.synchronize()
            assert [0, 0] == pinned.tolist()

    def test_blocking(self, lazy: SimDevice) -> None:
        """A copy that blocks makes the host wait for the stream."""
        pinned = lazy.pin(torch.tensor([7.0, 7]))
        pinned.copy_(torch.zeros(2))
        assert (1, [0, 0]) == (syncs(lazy), pinned.tolist())
        x = torch.ones(2)
        x.copy_(pinned)
        assert (2, 0) == (syncs(lazy), lazy.simulation.queue.pending)

    def test_overwritten_in_flight(self) -> None:
        """The host's own writes run now, so a copy that is still in flight takes the new rows."""
        device = device_of()
        pinned = device.pin(torch.full((2,), 7.0))
        with device.active():
            x = torch.zeros(2)
            x.copy_(pinned, non_blocking=True)
            pinned.fill_(9)
        device.simulation.finish()
        assert [9, 9] == x.tolist()

    def test_host_work(self, lazy: SimDevice) -> None:
        """Work on host memory alone runs now and gives host memory, whatever kind of operation it is."""
        pinned = lazy.pin(torch.tensor([0.0, 1, 2, 3]))
        results = [pinned + 1, pinned[pinned > 1], pinned.view(2, 2).T.contiguous(), torch.empty_like(pinned).fill_(2)]
        assert [[1, 2, 3, 4], [2, 3], [[0, 2], [1, 3]], [2, 2, 2, 2]] == [result.tolist() for result in results]
        assert 2 == pinned[2].item()
        assert (0, 0) == (syncs(lazy), lazy.simulation.queue.pending)

    def test_pinned_views(self, lazy: SimDevice) -> None:
        """Memory is pinned as a whole: views are too, copies are not."""
        pinned = lazy.pin(torch.tensor([0.0, 1, 2, 3]))
        assert [True, True, False, False] == [
            t.is_pinned() for t in (pinned, pinned[1:], pinned.clone(), torch.zeros(1))
        ]

    def test_pin_memory_argument(self, lazy: SimDevice) -> None:
        """A factory with pin_memory=True makes pinned memory, at once."""
        pinned = torch.full((2,), 3.0, pin_memory=True)
        assert pinned.is_pinned()
        assert ([3, 3], 0) == (pinned.tolist(), syncs(lazy))

    def test_pin_of_what_a_stream_made(self, lazy: SimDevice) -> None:
        """Memory that work is pending on is no host memory."""
        with pytest.raises(
            ValueError, match=r"pin of a tensor \(3,\) on which aten.zeros.default of tests/test_sim_mem"
        ):
            lazy.pin(torch.zeros(3)[:])

    def test_to_the_device(self, lazy: SimDevice) -> None:
        """A move of host memory to the device: with non_blocking it is work of the stream, without the host waits."""
        pinned = lazy.pin(torch.tensor([0.0, 1]))
        later = pinned.to(lazy.device, non_blocking=True)
        assert (0, 1) == (syncs(lazy), lazy.simulation.queue.pending)
        now = pinned.to(lazy.device)
        assert (1, 0) == (syncs(lazy), lazy.simulation.queue.pending)
        assert [[0, 1], [0, 1]] == [later.tolist(), now.tolist()]
        assert 3 == syncs(lazy)

    def test_to_the_host_without_a_wait(self, lazy: SimDevice) -> None:
        """As in torch, a move to the host that does not block gives pinned memory whose rows come later."""
        x = torch.zeros(2)
        host = x.to("cpu", non_blocking=True)
        assert (0, True) == (syncs(lazy), host.is_pinned())
        lazy.synchronize()
        assert ([0, 0], 1) == (host.tolist(), syncs(lazy))

    def test_cpu_is_a_copy(self, lazy: SimDevice) -> None:
        """What .cpu() gave does not change with the device's tensor; .cpu() of host memory is itself."""
        x = torch.zeros(2)
        host = x.cpu()
        x.add_(1)
        assert ([0, 0], [1, 1]) == (host.tolist(), x.tolist())
        assert host is host.cpu()

    def test_gradient_of_cpu(self, lazy: SimDevice) -> None:
        """A move to the host is part of the graph."""
        x = torch.ones(2, requires_grad=True)
        x.mul(3).cpu().sum().backward()
        assert x.grad is not None
        assert [3, 3] == x.grad.tolist()

    def test_freed_memory_is_not_remembered(self) -> None:
        """The mark of host memory goes with the memory."""
        device = device_of()
        for _ in range(50):
            device.pin(torch.zeros(64))
            gc.collect(0)
            with device.active():
                assert not torch.empty(64).is_pinned()


class TestPointers:
    def test_pending(self, lazy: SimDevice) -> None:
        """An address that is taken while work is pending is an error; what is done there cannot be seen."""
        x = torch.zeros(1)
        with pytest.raises(UnknownOp, match=r"Tensor.data_ptr at tests/test_sim_memory.py.*host_callback"):
            x.data_ptr()
        lazy.synchronize()
        assert x.data_ptr() != 0

    def test_allowed(self) -> None:
        """A call site that only compares addresses can be allowed."""
        device = device_of(pointers=["tests/test_sim_memory.py:*"])
        with device.active():
            x = torch.zeros(2)
            assert x[1:].data_ptr() - x.data_ptr() == 4

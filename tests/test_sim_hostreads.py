from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ci.register import register_cpu_ci
from harness.sim import SimDevice
from harness.sim.race import UnexpectedSync
from harness.sim.schedule import IN_ORDER, LAZY
from tests.sim_device import device_of, syncs

register_cpu_ci(est_time=10, stage="commit")


def dlpack(x: Tensor) -> Any:
    return np.from_dlpack(x).tolist()


def saved(x: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file).tolist()


READS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "tolist": (lambda x: x.tolist(), [3.0, 4.0]),
    "item": (lambda x: x[1].item(), 4.0),
    "bool": (lambda x: bool(x[0] == 3), True),
    "numpy": (lambda x: x.numpy().tolist(), [3.0, 4.0]),
    "numpy of a view": (lambda x: x[1:].numpy().tolist(), [4.0]),
    "asarray": (lambda x: np.asarray(x).tolist(), [3.0, 4.0]),
    "dlpack": (dlpack, [3.0, 4.0]),
    "repr": (repr, "tensor([3., 4.])"),
    "format": (lambda x: f"{x[0]:.2f}", "3.00"),
    "print": (lambda x: f"{x}", "tensor([3., 4.])"),
    "cpu": (lambda x: x.cpu().tolist(), [3.0, 4.0]),
    "to cpu": (lambda x: x.to("cpu").tolist(), [3.0, 4.0]),
    "to cpu by name": (lambda x: x.to(dtype=torch.int64, device="cpu").tolist(), [3, 4]),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)).tolist(), [3.0, 4.0]),  # noqa: S301 - our own bytes
    "save": (saved, [3.0, 4.0]),
    "pin_memory": (lambda x: x.pin_memory().tolist(), [3.0, 4.0]),
    "sum of items": (lambda x: sum(float(value) for value in x), 7.0),
}


class TestHostReads:
    @pytest.mark.parametrize("how", READS)
    def test_right_values(self, how: str, lazy: SimDevice) -> None:
        """Whatever way a host reads a tensor, it waits for its stream, is logged here, and gets the values."""
        read, expected = READS[how]
        x = torch.zeros(2)
        x.add_(torch.arange(2) + 3)
        seen = read(x)
        sites = list(lazy.simulation.syncs)
        assert expected == seen
        assert len(sites) >= 1
        assert all(site.startswith("tests/test_sim_hostreads.py:") for site in sites)

    @pytest.mark.parametrize("how", ["tolist", "numpy", "asarray", "repr", "cpu", "item"])
    def test_one_read_is_one_wait(self, how: str, lazy: SimDevice) -> None:
        """What torch calls inside is not counted again, and the host's own copy is read without a wait."""
        READS[how][0](torch.zeros(2))
        assert 1 == syncs(lazy)

    def test_other_streams_stay(self, lazy: SimDevice) -> None:
        """A read waits for the current stream, not for others."""
        x, y = torch.zeros(1), torch.zeros(1)
        lazy.synchronize()
        with lazy.stream(lazy.Stream()):
            y.add_(1)
        assert [0] == y.tolist()
        assert 1 == lazy.simulation.queue.pending
        assert [0] == x.tolist()

    def test_deepcopy_is_no_read(self, lazy: SimDevice) -> None:
        """A deep copy is made on the device, in stream order."""
        x = torch.zeros(2)
        x.add_(4)
        copied = copy.deepcopy(x)
        x.add_(1)
        assert 0 == syncs(lazy)
        assert ([4, 4], [5, 5]) == (copied.tolist(), x.tolist())

    def test_moves_to_the_device_are_no_reads(self, lazy: SimDevice) -> None:
        """A move to the device's own torch device is a copy on the stream; to where the tensor is, nothing at all."""
        x = torch.from_numpy(np.ones(2))
        moved = x.to(lazy.device)
        assert x is x.to(x.device)
        assert moved is not x
        assert (0, 1) == (syncs(lazy), lazy.simulation.queue.pending)
        assert torch.zeros(1, device=lazy.device).add(1).to(torch.int64, non_blocking=True) is not None

    def test_site(self, lazy: SimDevice) -> None:
        """A call site is path, line and function."""

        def reader() -> None:
            torch.zeros(1).tolist()

        reader()
        here = TestHostReads.test_site.__code__.co_firstlineno + 4
        name = "TestHostReads.test_site.<locals>.reader"
        assert {f"tests/test_sim_hostreads.py:{here} in {name}": 1} == dict(lazy.simulation.syncs)

    def test_another_thread(self, lazy: SimDevice) -> None:
        """A thread without an active device is left alone: it sees what is there."""
        x = torch.zeros(2)
        x.add_(1)
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append((x.tolist(), repr(torch.ones(1)))))
        thread.start()
        thread.join()
        assert [[["nan", "nan"], "tensor([1.])"]] == [[[str(v) for v in seen[0][0]], seen[0][1]]]
        assert 0 == syncs(lazy)


class TestExpectedSyncs:
    def test_unexpected(self) -> None:
        """A wait at a site that nobody expected is an error that names call, site and what is expected."""
        device = device_of(IN_ORDER, expected_syncs=["other.py:* in f"])
        text = r"Tensor.tolist at tests/test_sim_hostreads.py:\d+ in .*test_unexpected makes the host wait.*other.py"
        with device.active(), pytest.raises(UnexpectedSync, match=text):
            torch.zeros(1).tolist()

    @pytest.mark.parametrize("wait", ["item", "stream", "event", "device", "blocking copy"])
    def test_all_waits_count(self, wait: str) -> None:
        """Explicit and implicit waits are treated alike, also on a device where all work is done."""
        device = device_of(None, expected_syncs=[])
        pinned = device.pin(torch.zeros(1))
        calls: dict[str, Callable[[], Any]] = {
            "item": lambda: torch.zeros(1).item(),
            "stream": lambda: device.current_stream().synchronize(),
            "event": lambda: device.Event().synchronize(),
            "device": device.synchronize,
            "blocking copy": lambda: pinned.copy_(torch.zeros(1)),
        }
        with device.active(), pytest.raises(UnexpectedSync):
            calls[wait]()

    def test_expected(self) -> None:
        """Patterns say which sites may wait."""
        device = device_of(LAZY, expected_syncs=["tests/test_sim_hostreads.py:* in TestExpectedSyncs.test_expected"])
        with device.active():
            assert [0] == torch.zeros(1).tolist()
        assert 1 == syncs(device)

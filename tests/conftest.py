"""What several test files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.sim.device import SimDevice
from tests.sim_device import device_of


@pytest.fixture
def lazy() -> Iterator[SimDevice]:
    """A simulated device on which nothing runs unless the host waits, active in this thread."""
    device = device_of()
    with device.active():
        yield device

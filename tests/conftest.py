"""What several test files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.sim.device import SimDevice
from tests.sim_device import device_of


@pytest.fixture(scope="session", autouse=True)
def _one_terminal() -> Iterator[None]:
    """What is printed does not depend on the terminal or the CI system that the tests are started from."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def lazy() -> Iterator[SimDevice]:
    """A simulated device on which nothing runs unless the host waits, active in this thread."""
    device = device_of()
    with device.active():
        yield device

"""One simulated device for a test."""

from __future__ import annotations

from typing import Any

from harness.sim.device import SimDevice, Simulation
from harness.sim.schedule import LAZY, Schedule


def device_of(schedule: Schedule | None = LAZY, **options: Any) -> SimDevice:
    """The device of a simulation of one rank."""
    return Simulation(1, schedule, **options).devices[0]


def syncs(device: SimDevice) -> int:
    """How often its host has waited for it."""
    return sum(device.simulation.syncs.values())

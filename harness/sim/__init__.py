"""Simulated devices: streams, events and collectives on a CPU, with work that runs late and in another order."""

from harness.sim.device import SimDevice, Simulation
from harness.sim.group import SimGroup
from harness.sim.race import SimFinding
from harness.sim.schedule import Schedule, named, schedules

__all__ = ["Schedule", "SimDevice", "SimFinding", "SimGroup", "Simulation", "named", "schedules"]

"""Which GPUs each worker sees: lists are taken as they are, counts get GPUs that no other worker has."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from harness.launch.topology import Topology, TopologyError, Worker

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES spells them; () without any."""
    listed = environment.get(VARIABLE)
    if listed is not None:
        return tuple(device.strip() for device in listed.split(",") if device.strip() not in {"", "-1"})
    if shutil.which("nvidia-smi") is None:
        return ()
    asked = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    return tuple(found.stdout.split()) if found.returncode == 0 else ()


def assigned(topology: Topology, visible: Sequence[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each worker that has the key `gpus`. Raises `TopologyError` when there are too few."""
    listed = {worker.name: _listed(worker, visible, topology.source) for worker in topology.workers}
    taken = {device for devices in listed.values() for device in devices or ()}
    free = [device for device in visible if device not in taken]
    found = {}
    for worker in topology.workers:
        devices = listed[worker.name]
        if isinstance(worker.gpus, int):
            devices, free = free[: worker.gpus], free[worker.gpus :]
            if len(devices) < worker.gpus:
                raise _too_few(worker, len(devices), visible, topology.source)
        if devices is not None:
            found[worker.name] = ",".join(devices)
    return found


def _listed(worker: Worker, visible: Sequence[str], source: str) -> list[str] | None:
    if not isinstance(worker.gpus, tuple):
        return None
    devices = [str(device) for device in worker.gpus]
    for device in devices:
        if device not in visible:
            there = f"this machine shows {', '.join(visible)}" if visible else "this machine shows no GPU"
            step = f"choose from these, or set {VARIABLE}" if visible else "use gpus = 0 for a run on the CPU"
            raise TopologyError(f"{source}: worker {worker.name!r}: gpus names {device!r}, but {there}; {step}")
    return devices


def _too_few(worker: Worker, free: int, visible: Sequence[str], source: str) -> TopologyError:
    there = f"{free} of {len(visible)} are left" if visible else "this machine shows no GPU"
    step = "ask for fewer, or let workers share with lists" if visible else "use gpus = 0 for a run on the CPU"
    return TopologyError(f"{source}: worker {worker.name!r}: gpus = {worker.gpus}, but {there}; {step}")

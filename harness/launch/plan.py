"""A topology with everything filled in: what will be run, with which environment, and where it will answer."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from harness.launch.gpus import VARIABLE, assigned, visible_gpus
from harness.launch.ports import HOST, Ports
from harness.launch.topology import Topology, TopologyError, Worker
from harness.usage import nearest

# Only what looks like a placeholder is one, so that JSON may stand in a command; {{name}} is {name} to the letter.
_PLACEHOLDER = re.compile(r"\{\{(?P<literal>[A-Za-z]\w*(:[\w-]+)?)\}\}|\{(?P<name>[A-Za-z]\w*(:[\w-]+)?)\}")
BUILT_IN = ("host", "log_dir", "name", "ports", "python", "role", "url")

PortsOf = Mapping[str, Mapping[str, int]]  # worker -> name of a port -> port


class Launch(msgspec.Struct, frozen=True):
    """One process to start; `environment` comes on top of this process's own."""

    worker: Worker
    command: tuple[str, ...]
    environment: dict[str, str]
    ports: dict[str, int]

    @property
    def name(self) -> str:
        """The worker's."""
        return self.worker.name

    @property
    def port(self) -> int:
        """Where it answers."""
        return self.ports["port"]

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self.port}"


def prepared(topology: Topology, ports: Ports, log_dir: Path) -> tuple[Launch, ...]:
    """The plan on this machine, with ports reserved for it. Raises `TopologyError` and `PortError`."""
    reserved = {worker.name: {name: ports.reserve() for name in worker.port_names} for worker in topology.workers}
    asks = any(worker.gpus for worker in topology.workers)  # nvidia-smi takes its time
    return plan(topology, reserved, log_dir, visible_gpus(os.environ) if asks else ())


def plan(topology: Topology, ports: PortsOf, log_dir: Path, visible: Sequence[str]) -> tuple[Launch, ...]:
    """All placeholders filled in and GPUs assigned. Raises `TopologyError`."""
    gpus = assigned(topology, visible)
    launches = []
    for worker in topology.workers:
        values = _values(worker, topology, ports, log_dir)
        place = f"{topology.source}: worker {worker.name!r}"
        command = tuple(_filled(text, values, f"{place}: command") for text in worker.command)
        own = {name: _filled(str(text), values, f"{place}: env.{name}") for name, text in worker.env.items()}
        if VARIABLE in own and worker.name in gpus:
            raise TopologyError(f"{place}: env.{VARIABLE} and gpus are both there; keep one of them")
        devices = {VARIABLE: gpus[worker.name]} if worker.name in gpus else {}
        launches.append(Launch(worker, command, own | devices, dict(ports[worker.name])))
    return tuple(launches)


def filled(texts: Sequence[str], topology: Topology, ports: PortsOf, log_dir: Path, place: str) -> list[str]:
    """Texts of nobody's own with the placeholders of all workers, and {entry}, filled in. Raises `TopologyError`."""
    values = _common(topology, ports, log_dir) | {"entry": f"http://{HOST}:{ports[topology.entry]['port']}"}
    return [_filled(text, values, place) for text in texts]


def _common(topology: Topology, ports: PortsOf, log_dir: Path) -> dict[str, str]:
    """Placeholder -> value, as anybody may write them."""
    values = {"python": sys.executable, "log_dir": str(log_dir)}
    for worker in topology.workers:
        values |= {f"{name}:{worker.name}": value for name, value in _places(ports[worker.name]).items()}
    return values


def _places(ports: Mapping[str, int]) -> dict[str, str]:
    there = {name: str(port) for name, port in ports.items()}
    return there | {"host": HOST, "url": f"http://{HOST}:{there['port']}", "ports": ",".join(there.values())}


def _values(worker: Worker, topology: Topology, ports: PortsOf, log_dir: Path) -> dict[str, str]:
    """Placeholder -> value, as worker `worker` may write them."""
    wrong = [name for name in worker.ports if name in BUILT_IN]
    if wrong:
        place = f"{topology.source}: worker {worker.name!r}: ports"
        raise TopologyError(f"{place} has {wrong[0]!r}, which is a placeholder already; choose another name")
    own = {"name": worker.name, "role": worker.role}
    return _common(topology, ports, log_dir) | own | _places(ports[worker.name])


def _filled(text: str, values: Mapping[str, str], place: str) -> str:
    def value(match: re.Match[str]) -> str:
        literal, name = match["literal"], match["name"]
        if literal is not None:
            return f"{{{literal}}}"
        if name not in values:
            known = " ".join(f"{{{one}}}" for one in sorted(values))
            what = f"{place} has the unknown placeholder {{{name}}}{nearest(name, values)}"
            raise TopologyError(f"{what} Known here: {known}. For the text itself write {{{{{name}}}}}")
        return values[name]

    return _PLACEHOLDER.sub(value, text)

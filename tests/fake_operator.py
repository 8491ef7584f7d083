"""A control of fake servers, as that of a `kvshard up`: they die and come back, rightly or with a planted fault."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.launch.control import Control
from harness.launch.deployment import Status
from harness.launch.processes import LaunchError
from tests.fake_server import Makes, Server, made, running
from tests.fake_worker import World


class Operated:
    """The servers by their role, which is also their name."""

    def __init__(self, log_dir: Path, world: World, servers: dict[str, Server], make: Makes) -> None:
        self.log_dir, self.world, self.servers, self.make = log_dir, world, servers, make

    @property
    def statuses(self) -> list[Status]:
        return [
            Status(name, name, None, server.url, "killed" if server.worker.dies else "ready")
            for name, server in self.servers.items()
        ]

    def pid(self, name: str) -> int:
        if self.servers[name].worker.dies:
            raise LaunchError(f"worker {name!r} does not run")
        return 1

    def kill(self, name: str) -> None:
        self.world.lives[name] += 1
        self.servers[name].die()

    def kill_rank(self, name: str) -> None:
        if not self.world.has("lives on without a rank"):
            self.kill(name)

    def restart(self, name: str) -> None:
        before = self.servers[name]
        if not before.worker.dies:
            self.kill(name)
        after = self.make(before.server_address[1], self.world, name)
        if self.world.has("finds the cache of the process before"):
            after.worker.tiers = before.worker.tiers
        self.servers[name] = after
        self.world.lives[name] += 1


@contextmanager
def operated(*faults: str, timeout: float = 20, plain: bool = False, make: Makes = made, **more: Any) -> Iterator[str]:
    """The address of a P/D pair, or of a plain worker, with these faults, and of a control arm without any."""
    world = World(frozenset(faults), **more)
    roles = ("null",) if plain else ("decode", "prefill")
    with (
        tempfile.TemporaryDirectory() as folder,
        running(world, *roles, make=make) as servers,
        running(World(), "null", make=make) as control,
        Control(Operated(Path(folder), world, servers, make)),
    ):
        prefill = "" if plain else f"&prefill={servers['prefill'].url}"
        told = f"timeout={timeout:g}&settle=3&operate={folder}"
        yield f"{servers[roles[0]].url}?control={control['null'].url}{prefill}&{told}"

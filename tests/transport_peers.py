"""Peers for the tests of transports: processes, or ends of the in-process network with the same few calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from harness.transports.host import PeerHost, RemoteError, missing
from harness.transports.memory import Faults, MemoryEnd, Network
from harness.transports.seat import Seat, until

KINDS = ("memory", "tcp", "nixl", "mooncake")
REQUIRED = "KVSHARD_TRANSPORTS"  # names that must be here, as "nixl,mooncake": where they were installed on purpose
FOREVER = 1 << 40


class AnyPeer(Protocol):
    name: str

    def begin(self, op: str, **arguments: Any) -> None: ...
    def answer(self) -> Any: ...
    def call(self, op: str, **arguments: Any) -> Any: ...
    def kill(self) -> None: ...


class MemoryPeer:
    """An end of the in-process network; a command that was begun runs when its answer is wanted."""

    def __init__(self, network: Network, name: str) -> None:
        self.name = name
        self._network = network
        self._end: MemoryEnd = network.end(name)
        self._seat = Seat(self._end)
        self._begun: list[Callable[[], Any]] = []

    def begin(self, op: str, **arguments: Any) -> None:
        self._begun.append(lambda: getattr(self._seat, op)(**arguments))

    def answer(self) -> Any:
        try:
            return self._begun.pop(0)()
        except Exception as error:
            raise RemoteError(type(error).__name__, str(error)) from error

    def call(self, op: str, **arguments: Any) -> Any:
        self.begin(op, **arguments)
        return self.answer()

    def kill(self) -> None:
        self._network.lose(self._end)


class Net:
    """Peers that can reach each other. `kind` is one of KINDS."""

    def __init__(self, kind: str, folder: Path) -> None:
        why = missing(kind)
        if why:
            leave_out(kind, why)
        self.kind = kind
        self.network = Network()
        self.host = None if kind == "memory" else PeerHost(kind, folder)
        self.start("probe").kill()

    def start(self, name: str, **regions: list[int]) -> AnyPeer:
        """A peer with regions name=[pages, page_bytes]; "_" in a name stands for "."."""
        peer = MemoryPeer(self.network, name) if self.host is None else self.host.start(name)
        try:
            peer.call("register", regions={region.replace("_", "."): shape for region, shape in regions.items()})
        except RemoteError as error:
            if error.kind == "MissingLibraryError":
                self.close()
                leave_out(self.kind, str(error))
            raise
        return peer

    def freeze(self, peer: AnyPeer) -> None:
        """From now on a large write to this peer stays under way."""
        if self.host is None:
            self.network.faults = Faults(write_ticks=(FOREVER,))
        else:
            os.kill(pid_of(peer), signal.SIGSTOP)
            assert until(lambda: psutil.Process(pid_of(peer)).status() == psutil.STATUS_STOPPED, 10.0)

    def close(self) -> None:
        if self.host is not None:
            self.host.close()


def pid_of(peer: AnyPeer) -> int:
    pid: int = peer.pid  # type: ignore[attr-defined]  # only asked of processes
    return pid


def leave_out(kind: str, why: str) -> None:
    if kind in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(f"{REQUIRED} names {kind}, but: {why}")
    pytest.skip(why)

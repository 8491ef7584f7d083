"""Ports that are reserved, not guessed: nobody else takes one between its choice and the start of its server.

Each has two guards. A bound socket keeps every other process off until the server is about to start. A locked file
keeps other reservations on this machine off for as long as the holder lives; the kernel lets go of it with the holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Self

from harness.usage import UserError

LOW, HIGH = 20_000, 32_768  # half-open; the kernel's default for ephemeral ports begins at HIGH
HOST = "127.0.0.1"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortError(UserError):
    """No port can be reserved."""


def candidates(ephemeral: Path = EPHEMERAL) -> range:
    """Ports that no client's socket gets by itself: below the ephemeral range, above it where that leaves too few."""
    try:
        first, last = (int(word) for word in ephemeral.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return range(LOW, HIGH)
    below, above = range(max(1024, min(LOW, first // 2)), first), range(last + 1, 65_536)
    best = below if len(below) >= 1000 or len(below) >= len(above) else above
    return best or range(LOW, HIGH)  # where every port is ephemeral, locks and sockets are what there is


def runtime_folder() -> Path:
    """This user's folder of port locks, made when it is missing. Raises `PortError` when it is another user's."""
    folder = Path(tempfile.gettempdir()) / f"kvshard-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise PortError(
            f"{folder} belongs to user {found.st_uid}; expected a folder of your own; set TMPDIR to another"
        )
    return folder


class Ports:
    """The reserved ports of one topology; closing it gives all of them back."""

    def __init__(self, folder: Path | None = None, among: range | None = None) -> None:
        self._folder = runtime_folder() if folder is None else folder
        self._among = candidates() if among is None else among
        self._locks: dict[int, int] = {}  # port -> descriptor of its locked file
        self._sockets: dict[int, socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self) -> int:
        """A port of our own. Raises `PortError` when none is free."""
        start = random.randrange(max(1, len(self._among)))  # reservations at the same time begin at different places
        for port in itertools.chain(self._among[start:], self._among[:start]):
            if port not in self._locks and self._taken(port):
                return port
        where = f"{self._among.start} to {self._among.stop - 1}"
        raise PortError(f"no port of {where} is free; expected one; end servers that are left over (see `ss -ltnp`)")

    def release(self, port: int) -> None:
        """Lets the server bind it, from now on; the lock stays. A second call does nothing."""
        held = self._sockets.pop(port, None)
        if held is not None:
            held.close()

    def close(self) -> None:
        """Gives all back."""
        for port in list(self._locks):
            self.release(port)
            os.close(self._locks.pop(port))

    def _taken(self, port: int) -> bool:
        """Whether it could be reserved."""
        with contextlib.ExitStack() as undo:
            # The files stay: who deletes one may delete it under the hands of another that has just opened it.
            lock = os.open(self._folder / f"{port}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            undo.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            held = socket.socket()
            undo.callback(held.close)
            try:
                # Without SO_REUSEADDR, on purpose: with it, Linux would let any other socket that has it bind the
                # port as well, as long as neither listens. It also passes over ports with connections in TIME_WAIT,
                # which a server without SO_REUSEADDR could not bind. The holder never listens, so the port is free
                # for the server as soon as this socket is closed.
                held.bind((HOST, port))
            except OSError:
                return False
            self._locks[port], self._sockets[port] = lock, held
            undo.pop_all()
        return True

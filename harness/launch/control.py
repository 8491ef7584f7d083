"""The control of a running deployment: a Unix socket in its log folder, through which others end and restart workers.

One connection is one request: a line of JSON, `{"verb": "kill", "worker": "prefill"}`, and a line that answers it.
The socket is the owner's alone, and takes nothing but the names of workers that run already.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self

import msgspec

from harness.launch.deployment import Interrupted, Status
from harness.launch.processes import LaunchError
from harness.usage import UserError, nearest

SOCKET = "_control.sock"  # a name that no worker can have
LIST = "list"


class Workers(Protocol):
    """What is controlled: a `Deployment`."""

    log_dir: Path

    @property
    def statuses(self) -> list[Status]:
        """All workers."""

    def pid(self, name: str) -> int:
        """Raises for one that does not run."""

    def kill(self, name: str) -> None:
        """The worker."""

    def kill_rank(self, name: str) -> None:
        """One process of it."""

    def restart(self, name: str) -> None:
        """And wait until it is ready."""


def _kill(up: Workers, name: str) -> None:
    up.pid(name)
    up.kill(name)


VERBS: Mapping[str, Callable[[Workers, str], None]] = MappingProxyType(
    {"kill": _kill, "kill-rank": lambda up, name: up.kill_rank(name), "restart": lambda up, name: up.restart(name)}
)


class ControlError(Exception):
    """The deployment was asked, and could not do it."""


class Running(msgspec.Struct, frozen=True):
    """A worker as the deployment has it."""

    name: str
    url: str
    state: str


class Ask(msgspec.Struct, frozen=True):
    """One request; `list` is for no worker."""

    verb: str
    worker: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What came of it: all workers as they are now, or why it was not done."""

    workers: tuple[Running, ...] = ()
    error: str = ""
    misused: bool = False  # the request itself is wrong


class Control:
    """Takes requests while it is open."""

    def __init__(self, up: Workers) -> None:
        self._up = up
        self._path = up.log_dir / SOCKET
        self._server: _Server | None = None

    def __enter__(self) -> Self:
        self._path.unlink(missing_ok=True)  # of one that was killed
        with _short(self._path) as path:
            self._server = _Server(path, self._up)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="control", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def tell(log_dir: Path, verb: str, worker: str = "") -> Sequence[Running]:
    """Asks the deployment that writes its logs there, and waits until it is done. Returns its workers.

    Raises `UserError` for what makes no sense, `ControlError` for what could not be done.
    """
    path = log_dir / SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        try:
            with _short(path) as short:
                channel.connect(short)
        except OSError as error:
            step = "expected the log folder of a `kvshard up .. -- COMMAND` that runs"
            raise UserError(f"{log_dir}: nothing is controlled there ({error.strerror}); {step}") from error
        try:
            channel.sendall(msgspec.json.encode(Ask(verb, worker)) + b"\n")
            with channel.makefile("rb") as stream:
                answer = msgspec.json.decode(stream.readline(), type=Answer)
        except (OSError, msgspec.DecodeError) as error:
            raise ControlError(f"{verb} {worker}: `kvshard up` has ended before it answered") from error
    if answer.error:
        raise UserError(answer.error) if answer.misused else ControlError(answer.error)
    return answer.workers


def _answer(up: Workers, line: bytes) -> Answer:
    try:
        ask = msgspec.json.decode(line, type=Ask)
        if ask.verb != LIST:
            if ask.verb not in VERBS:
                raise UserError(f"verb {ask.verb!r}{nearest(ask.verb, VERBS)} There is: {', '.join(VERBS)}")
            VERBS[ask.verb](up, ask.worker)
    except (UserError, msgspec.DecodeError) as error:
        return Answer(error=str(error), misused=True)
    except LaunchError as error:
        return Answer(error=str(error))
    except Interrupted:
        return Answer(error="`kvshard up` is about to end")
    return Answer(tuple(Running(each.name, each.url, each.state) for each in up.statuses))


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)  # noqa: S101  # which makes these
        answer = _answer(self.server.up, self.rfile.readline())
        with contextlib.suppress(OSError):  # who has asked may be gone by now
            self.wfile.write(msgspec.json.encode(answer) + b"\n")


class _Server(socketserver.ThreadingUnixStreamServer):
    """A thread for each request, so that two workers may start at the same time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: str, up: Workers) -> None:
        self.up = up
        super().__init__(path, _Handler)

    def server_bind(self) -> None:
        """Nobody else may connect; nobody can, before it listens."""
        super().server_bind()
        Path(str(self.server_address)).chmod(0o600)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The same file under a name that fits the 108 bytes which the kernel has for that of a socket."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

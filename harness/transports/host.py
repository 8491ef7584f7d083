"""PeerHost: the test's side of peer processes. Starts, asks, kills and, above all, ends them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

END_SECONDS = 2.0
ANSWER_SECONDS = 60.0
# What a library needs in the environment of its process, from the start.
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "nixl": {
        "UCX_TLS": "tcp",  # shared memory is done before a peer can be killed
        "UCX_NET_DEVICES": "lo",
        "UCX_MODULES": "^ib",  # beside the system's libibverbs, this module crashes the process when it exits
        "UCX_LOG_LEVEL": "fatal",
        "NIXL_LOG_LEVEL": "FATAL",
    },
    "mooncake": {"GLOG_minloglevel": "2"},
}
ALONE = ("mooncake",)  # listens on every interface, so it gets a network namespace in which there is none but lo


class PeerGoneError(Exception):
    """The process of a peer ended while it was asked; the text has the last lines that it and its host wrote."""


class RemoteError(Exception):
    """A command failed in the peer's process; `kind` is the name of the error there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Peer:
    """A peer process; `call` runs a command of harness.transports.seat.Seat in it."""

    def __init__(self, name: str, channel: socket.socket, host: PeerHost) -> None:
        self.name = name
        self._channel = channel
        self._stream = channel.makefile("r", encoding="utf-8")
        self._host = host
        self.pid: int = self.answer()
        try:
            self._process = os.pidfd_open(self.pid)  # the process itself: a number may go to another one
        except ProcessLookupError as error:
            raise PeerGoneError(f"peer {name!r} ended as soon as it was there; {host.tail()}") from error

    def begin(self, op: str, **arguments: Any) -> None:
        """Send a command."""
        with contextlib.suppress(OSError):  # a peer that has ended is noticed at the answer
            self._channel.sendall(json.dumps({"op": op, "arguments": arguments}).encode() + b"\n")

    def answer(self) -> Any:
        """The answer to the earliest command without one. Raises RemoteError, PeerGoneError, TimeoutError."""
        try:
            line = self._stream.readline()
        except ConnectionResetError:
            line = ""
        if not line:
            raise PeerGoneError(f"peer {self.name!r} ended; {self._host.tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteError(answer["error"], answer["text"])
        return answer["value"]

    def call(self, op: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer; see `answer`."""
        self.begin(op, **arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL: the process has no time to say anything."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def hang_up(self) -> None:
        """Let the process end by closing its channel."""
        self._stream.close()
        self._channel.close()

    def wait(self, seconds: float) -> bool:
        """Whether the process has ended, at the latest after `seconds`; then this object is of no more use."""
        ended = bool(select.select([self._process], [], [], seconds)[0])
        os.close(self._process)
        return ended


class PeerHost:
    """Peers of one transport, with one address book. Use it in a with statement: after it no process is left."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.peers: list[Peer] = []
        self._closed = False
        self._log = folder / "stderr"
        self._book = folder / "book"
        self._book.mkdir()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "harness.transports.peer", str(theirs.fileno())]
        if kind in ALONE:
            command = ["unshare", "--map-root-user", "--net", *command, "--alone"]
        with self._log.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONFAULTHANDLER": "1", **ENVIRONMENT.get(kind, {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that one signal reaches the host and all its peers
            )

    def start(self, name: str) -> Peer:
        """A new peer process; the name may be that of one that was killed."""
        mine, theirs = socket.socketpair()
        mine.settimeout(ANSWER_SECONDS)
        order = json.dumps({"start": name, "kind": self.kind, "book": str(self._book)}).encode()
        try:
            with theirs:
                socket.send_fds(self._control, [order], [theirs.fileno()])
            self.peers.append(Peer(name, mine, self))
        except OSError as error:
            mine.close()
            raise PeerGoneError(f"the host of peer {name!r} ended ({error}); {self.tail()}") from error
        except PeerGoneError:
            mine.close()
            raise
        return self.peers[-1]

    def tail(self) -> str:
        """The last lines that the processes wrote."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "last lines of its output:\n" + "\n".join(lines)

    def close(self) -> None:
        """End all processes: by closing their channels, and by force what does not end by that; again: nothing."""
        if self._closed:
            return
        self._closed = True
        for peer in self.peers:
            peer.hang_up()
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_SECONDS)
        left = [peer.name for peer in self.peers if not peer.wait(END_SECONDS)]
        self.peers.clear()
        if left:
            raise PeerGoneError(f"the processes of {left} are still there after SIGKILL, expected none; end them")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def missing(kind: str) -> str:
    """Why peers of this transport cannot be started here, apart from its library; empty when they can."""
    if kind not in ALONE:
        return ""
    if shutil.which("unshare") is None:
        return f"{kind} listens on every interface and needs unshare (util-linux) for a network of its own"
    done = subprocess.run(["unshare", "--map-root-user", "--net", "true"], capture_output=True, text=True, check=False)
    return f"{kind} needs a network namespace of its own: {done.stderr.strip()}" if done.returncode else ""

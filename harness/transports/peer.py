"""The process side of test peers: a parent that has imported what is slow, and forks one process per peer.

    python -m harness.transports.peer FD     FD: a socket; one datagram {"start", "kind", "book"} with a socket per peer

Every process ends when the other end of its socket is closed, so none outlives the test that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.transports.mooncake import MooncakeTransport
from harness.transports.nixl import NixlTransport
from harness.transports.seat import Seat
from harness.transports.tcp import TcpTransport
from kvshard_ref.transport import Transport

TRANSPORTS: dict[str, Callable[[str, Path], Transport]] = {
    "tcp": TcpTransport,
    "nixl": NixlTransport,
    "mooncake": MooncakeTransport,
}
ORDER_BYTES_MAX = 1 << 16


def transport(kind: str, name: str, book: Path) -> Transport:
    """A new end."""
    return TRANSPORTS[kind](name, book)


def raise_loopback() -> None:
    """Switch the loopback interface on, which is down in a new network namespace."""
    set_flags, up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, set_flags, struct.pack("16sH22x", b"lo", up_and_running))


def serve(channel: socket.socket, order: dict[str, Any]) -> None:
    """Be a peer: carry out the commands that come, a line each, until the channel is closed."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        with channel.makefile("r", encoding="utf-8") as stream:
            for line in stream:
                lines.put(line)
        os._exit(0)  # whatever the transport's own threads are doing: nobody is there to ask for it

    threading.Thread(target=listen, daemon=True).start()
    channel.sendall(json.dumps({"value": os.getpid()}).encode() + b"\n")
    seat: Seat | None = None
    while True:
        command = json.loads(lines.get())
        try:
            if seat is None:  # the first command, so that an error of the constructor is an answer
                seat = Seat(transport(order["kind"], order["start"], Path(order["book"])))
            answer = {"value": getattr(seat, command["op"])(**command["arguments"])}
        except Exception as error:  # noqa: BLE001 - every error is the caller's to see
            answer = {"error": type(error).__name__, "text": str(error)}
        channel.sendall(json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Fork peers on order until the control socket is closed, then wait for them."""
    control = socket.socket(fileno=int(sys.argv[1]))
    if "--alone" in sys.argv:
        raise_loopback()
    torch.set_num_threads(1)  # a forked process has no threads but its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects dead children
    while True:
        data, channels, _, _ = socket.recv_fds(control, ORDER_BYTES_MAX, 1)
        if not data:
            break
        channel = channels[0]
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            serve(socket.socket(fileno=channel), json.loads(data))
        os.close(channel)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main()

"""Wire: named ends on the loopback interface, frames between them, and the death of a peer as a fact that is noticed.

    frame: bytes of meta (4), bytes of body (8), meta as JSON, body

One thread per end moves all bytes. A frame's body goes straight to where the receiver wants it.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from itertools import islice
from typing import Any, Protocol

from harness.transports.book import Address, AddressBook
from kvshard_ref.errors import MisuseError
from kvshard_ref.transport import PeerLostError

HEAD = struct.Struct("!IQ")
META_BYTES_MAX = 1 << 26
MESSAGE_BYTES_MAX = 1 << 26
DISCARD_BYTES = 1 << 16
CONNECT_SECONDS = 10.0
FLUSH_SECONDS = 1.0
VECTOR = 64  # pieces per system call, far below the limit of any kernel
HOST = "127.0.0.1"

Meta = dict[str, Any]


class BrokenFrameError(Exception):
    """A peer sent what no end sends; its connection is given up."""


class Handler(Protocol):
    """Who understands the frames that are not the wire's own. Called in the wire's thread."""

    def body(self, link: Link, meta: Meta, size: int) -> Iterable[memoryview]:
        """Where the body goes, at most `size` bytes in all; the rest of it is dropped."""

    def arrived(self, link: Link, meta: Meta) -> None:
        """The frame is here, body and all."""


class Link:
    """One connection. `peer`, `incarnation` and `card` are the other end's; it ends once, for good."""

    def __init__(self, sock: socket.socket, dialled: tuple[str, str] | None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer, self.incarnation = dialled or ("", "")
        self.dialled = dialled is not None
        self.card: Meta = {}
        self.adopted = False
        self.alive = True
        self.end_time = math.inf  # by the monotonic clock
        self.out: deque[memoryview] = deque()
        self.need = memoryview(b"")
        self.reader: Generator[memoryview, None, None] | None = None


class Wire:
    """One end: it listens on a port that the system chose, from the start. `name` is unique; the last one wins."""

    def __init__(self, name: str, book: AddressBook, handler: Handler) -> None:
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self._book = book
        self._handler = handler
        self._card: Meta = {}
        self._changed = threading.Condition()  # guards all below
        self._links: list[Link] = []
        self._chosen: dict[str, Link] = {}  # peer -> the link that everything to it goes through
        self._lost: dict[str, float] = {}  # peer -> when
        self._inbox: list[tuple[str, bytes]] = []
        self._fault: BaseException | None = None
        self._closing = False
        self._listener = socket.create_server((HOST, 0))
        self._listener.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"wire {name}", daemon=True)
        self._thread.start()
        book.publish(name, Address(self._listener.getsockname()[1], self.incarnation))

    def set_card(self, card: Meta) -> None:
        """What every peer gets to know about this end, also the peers that are connected."""
        with self._changed:
            self._card = card
            for link in self._links:
                if link.adopted:
                    self._put(link, self._introduction("card"), ())
        self._wake()

    def connect(self, peer: str) -> None:
        """Reach the peer that has the name now; PeerLostError when nobody answers."""
        address = self._book.find(peer)
        with self._changed:
            self._check()
            link = self._chosen.get(peer)
            if link is not None and link.alive and address is not None and link.incarnation == address.incarnation:
                self._lost.pop(peer, None)
                return
        if address is None:
            raise PeerLostError(f"{self.name}: no peer {peer!r} in {self._book.folder}; start it first")
        try:
            sock = socket.create_connection((HOST, address.port), timeout=CONNECT_SECONDS)
        except OSError as error:
            raise PeerLostError(
                f"{self.name}: peer {peer!r} does not answer at {HOST}:{address.port} ({error}); start it anew"
            ) from error
        link = Link(sock, (peer, address.incarnation))
        with self._changed:
            self._put(link, {**self._introduction("hello"), "to": address.incarnation}, ())
            self._links.append(link)
            self._wake()
            self._changed.wait_for(lambda: link.adopted or not link.alive, CONNECT_SECONDS)
            if link.adopted and link.alive:
                self._lost.pop(peer, None)
                return
        raise PeerLostError(
            f"{self.name}: peer {peer!r} took the connection to {HOST}:{address.port} and did not introduce itself "
            f"within {CONNECT_SECONDS} s; it has ended or is not the one the address book names"
        )

    def link(self, peer: str) -> Link:
        """The link that everything to `peer` goes through; PeerLostError, or MisuseError when it never was there."""
        with self._changed:
            self._check()
            link = self._chosen.get(peer)
            if link is None:
                known = sorted(self._chosen)
                raise MisuseError(f"{self.name}: peer {peer!r} was never connected, only {known} were; connect first")
            if link.alive and peer not in self._lost:
                return link
        raise PeerLostError(f"{self.name}: peer {peer!r} is lost; connect again when a new one has that name")

    def send(self, link: Link, meta: Meta, body: Iterable[memoryview] = ()) -> None:
        """Queue a frame; the memory of `body` is read later. Nothing happens on a link that has ended."""
        with self._changed:
            if link.alive:
                self._put(link, meta, body)
        self._wake()

    def notify(self, peer: str, message: bytes) -> None:
        """Queue a message, behind all frames to this peer; PeerLostError."""
        self.send(self.link(peer), {"kind": "message"}, (memoryview(message),))

    def messages(self) -> list[tuple[str, bytes]]:
        """Messages since the last call, by (peer, message)."""
        with self._changed:
            self._check()
            arrived, self._inbox = self._inbox, []
        return arrived

    def lost(self, seconds: float = 0.0) -> set[str]:
        """Peers whose connection ended at least `seconds` ago and to whom nobody connected since."""
        with self._changed:
            self._check()
            return {peer for peer, since in self._lost.items() if time.monotonic() - since >= seconds}

    def close(self) -> None:
        """Send what is queued, for a short while, and leave. May be called again."""
        self._book.withdraw(self.name, self.incarnation)
        with self._changed:
            if self._thread.is_alive():
                self._changed.wait_for(lambda: not any(link.out for link in self._links), FLUSH_SECONDS)
            self._closing = True
        self._wake()
        self._thread.join()

    # From here on: the wire's thread, but for _put, _wake, _check and _introduction.

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._woken:
                        self._woken.recv(4096)
                    else:
                        self._serve(key.data, events)
                self._watch()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised again in the caller's thread
            with self._changed:
                self._fault = error
        finally:
            with self._changed:
                for link in list(self._links):
                    self._drop(link)
                self._changed.notify_all()
            for one in (self._listener, self._woken, self._waker, self._selector):
                one.close()

    def _watch(self) -> None:
        """Ask the system for what each link waits for."""
        with self._changed:
            for link in self._links:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.out else 0)
                if link.reader is None:
                    link.reader = self._frames(link)
                    link.need = next(link.reader)
                    self._selector.register(link.sock, events, link)
                elif self._selector.get_key(link.sock).events != events:
                    self._selector.modify(link.sock, events, link)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        with self._changed:
            self._links.append(Link(sock, None))

    def _serve(self, link: Link, events: int) -> None:
        try:
            if link.alive and events & selectors.EVENT_READ:
                self._read(link)
            if link.alive and events & selectors.EVENT_WRITE:
                self._write(link)
        except (OSError, BrokenFrameError):
            with self._changed:
                self._drop(link)

    def _read(self, link: Link) -> None:
        count = link.sock.recv_into(link.need)
        if not count:
            raise BrokenFrameError
        link.need = link.need[count:]
        while link.alive and link.reader is not None and not link.need:
            link.need = next(link.reader)

    def _write(self, link: Link) -> None:
        sent = link.sock.sendmsg(list(islice(link.out, VECTOR)))
        with self._changed:
            while link.out and sent >= len(link.out[0]):
                sent -= len(link.out.popleft())
            if sent:
                link.out[0] = link.out[0][sent:]
            if not link.out:
                self._changed.notify_all()

    def _frames(self, link: Link) -> Generator[memoryview, None, None]:
        """Yield the memory that the next bytes of this link go to; resumed when it is full."""
        head = bytearray(HEAD.size)
        while True:
            yield memoryview(head)
            meta_size, body_size = HEAD.unpack(head)
            if meta_size > META_BYTES_MAX:
                raise BrokenFrameError
            text = bytearray(meta_size)
            yield memoryview(text)
            meta = _parsed(text)
            if link.adopted and meta["kind"] not in {"hello", "card", "message"}:
                for view in self._handler.body(link, meta, body_size):
                    yield view
                    body_size -= len(view)
                while body_size:
                    view = memoryview(bytearray(min(body_size, DISCARD_BYTES)))
                    yield view
                    body_size -= len(view)
                self._handler.arrived(link, meta)
            elif body_size <= MESSAGE_BYTES_MAX:
                body = bytearray(body_size)
                yield memoryview(body)
                self._own_frame(link, meta, bytes(body))
            else:
                raise BrokenFrameError

    def _own_frame(self, link: Link, meta: Meta, body: bytes) -> None:
        kind = meta["kind"]
        with self._changed:
            if kind == "message" and link.adopted:
                self._inbox.append((link.peer, body))
            elif kind == "hello" and not link.dialled and meta.get("to") == self.incarnation:
                link.peer, link.incarnation = meta["name"], meta["incarnation"]
                self._put(link, self._introduction("card"), ())
                self._adopt(link, meta["card"])
            elif kind == "card" and (link.peer, link.incarnation) == (meta.get("name"), meta.get("incarnation")):
                self._adopt(link, meta["card"])
            else:
                raise BrokenFrameError

    def _adopt(self, link: Link, card: Meta) -> None:
        link.card = card
        if link.adopted:
            return
        link.adopted = True
        # One process per name: what is left of an earlier one is dropped before anything of the new one is read.
        for other in [x for x in self._links if x.peer == link.peer and x.incarnation != link.incarnation]:
            self._drop(other)
        if link.peer not in self._chosen or not self._chosen[link.peer].alive:
            self._chosen[link.peer] = link
        self._changed.notify_all()

    def _drop(self, link: Link) -> None:
        """Give a link up, and with it all links to the same process: from then on nothing of it is read."""
        if not link.alive:
            return
        if link.reader is not None:
            self._selector.unregister(link.sock)
        link.sock.close()
        link.out.clear()
        link.alive = False
        link.end_time = time.monotonic()
        self._links.remove(link)
        if link.adopted:
            self._lost.setdefault(link.peer, link.end_time)
            for other in [x for x in self._links if (x.peer, x.incarnation) == (link.peer, link.incarnation)]:
                self._drop(other)
        self._changed.notify_all()

    def _introduction(self, kind: str) -> Meta:
        return {"kind": kind, "name": self.name, "incarnation": self.incarnation, "card": self._card}

    def _put(self, link: Link, meta: Mapping[str, Any], body: Iterable[memoryview]) -> None:
        text = json.dumps(meta).encode()
        views = [view for view in body if view.nbytes]
        link.out.append(memoryview(HEAD.pack(len(text), sum(view.nbytes for view in views)) + text))
        link.out.extend(views)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough, or has ended
            self._waker.send(b"!")

    def _check(self) -> None:
        if self._fault is not None:
            raise RuntimeError(f"the wire of {self.name!r} has stopped: {self._fault!r}") from self._fault
        if self._closing:
            raise RuntimeError(f"the wire of {self.name!r} is closed, expected no call after close(); make a new end")


def _parsed(text: bytearray) -> Meta:
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise BrokenFrameError from error
    if not isinstance(meta, dict) or not isinstance(meta.get("kind"), str):
        raise BrokenFrameError
    return meta

"""NixlTransport: writes and messages by NIXL, over UCX. The wire tells the peers' metadata, and their end."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.transports.end import FixedTicket, WireEnd, places_of
from harness.transports.library import load
from harness.transports.regions import OutOfRegionError, Place
from harness.transports.wire import Link, Meta
from kvshard_ref.errors import MisuseError
from kvshard_ref.transport import DONE, FAILED, PENDING, Block, PeerLostError, Ticket

MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
INSTALL = "pip install 'kvshard[nixl]'"
LINGER_SECONDS = 0.3  # NIXL does not tell when a message has left; a first one waits for a connection to be made


class NixlTicket:
    """One write."""

    def __init__(self, transport: NixlTransport, link: Link, handle: Any) -> None:
        self._transport = transport
        self._link = link
        self._handle = handle
        self.outcome = PENDING
        self.why = ""

    def poll(self) -> str:
        """PENDING, DONE or FAILED."""
        if self.outcome == PENDING:
            state, self.why = self._transport.state(self._handle)
            over = time.monotonic() - self._link.end_time >= self._transport.settle_seconds
            if state != "PROC" or over:
                self.finish(DONE if state == "DONE" else FAILED)
        return self.outcome

    def finish(self, outcome: str) -> None:
        """Give the transfer back to NIXL; what it cannot cancel at once it keeps until it can."""
        self.outcome = outcome
        with contextlib.suppress(*self._transport.errors):
            self._handle.release()
        self._handle = None


class NixlTransport(WireEnd):
    """One end, with a NIXL agent of its own. Tried with nixl 1.5.1.

    UCX takes its settings from the environment that the process was started with. Listening is one of them.
    """

    settle_seconds = 0.5  # what is in the sockets of the library when the wire ends may land yet

    def __init__(self, name: str, book: Path) -> None:
        """Raises MissingLibraryError; MisuseError when UCX would listen on every interface."""
        api = load("nixl", MODULES, INSTALL)
        if not os.environ.get("UCX_NET_DEVICES"):
            raise MisuseError(
                "nixl: UCX_NET_DEVICES is not set, so UCX would listen on every interface of this machine; expected "
                "lo, or the devices that are meant for it; set it in the environment of the process that you start"
            )
        found = [value for value in vars(api.nixlBind).values() if isinstance(value, type)]
        self.errors: tuple[type[Exception], ...] = tuple(one for one in found if issubclass(one, Exception))
        self._agent = api.nixl_agent(f"{name}#{secrets.token_hex(8)}", api.nixl_agent_config())
        self._last_message = -LINGER_SECONDS
        self._registered: list[Any] = []
        self._tickets: list[NixlTicket] = []
        self._agents: dict[str, tuple[str, str]] = {}  # peer -> its agent's name and metadata
        super().__init__(name, book)

    def card(self) -> Meta:
        """The regions, and NIXL's own description of them and of the way here."""
        return {**super().card(), "nixl": base64.b64encode(self._agent.get_agent_metadata()).decode()}

    def enrol(self, places: Sequence[Place]) -> None:
        """Register memory with NIXL."""
        if places:
            memory = [(place.address, place.pages * place.page_bytes, 0, "") for place in places]
            self._registered.append(self._agent.register_memory(memory, "DRAM"))

    def connect(self, peer: str) -> None:
        """Raises PeerLostError."""
        super().connect(peer)
        try:
            self._agent.make_connection(self._agent_of(self.wire.link(peer)))
        except self.errors as error:
            raise PeerLostError(
                f"{self.name}: NIXL cannot reach {peer!r} ({type(error).__name__}: {error}); start it anew"
            ) from error

    def write(self, peer: str, blocks: Sequence[Block]) -> Ticket:
        """Raises MisuseError when the peer was never connected."""
        try:
            link = self.wire.link(peer)
            spans = self.regions.spans(blocks, places_of(link))
            if not spans:
                return FixedTicket(DONE)
            own = self._agent.get_xfer_descs([(s.src_address, s.size, 0) for s in spans], "DRAM")
            theirs = self._agent.get_xfer_descs([(s.dst_address, s.size, 0) for s in spans], "DRAM")
            handle = self._agent.initialize_xfer("WRITE", own, theirs, self._agent_of(link))
            self._agent.transfer(handle)
        except self.errors as error:
            return FixedTicket(FAILED, f"{type(error).__name__}: {error}")
        except (PeerLostError, OutOfRegionError) as error:
            return FixedTicket(FAILED, f"{type(error).__name__}: {error}")
        ticket = NixlTicket(self, link, handle)
        self._tickets = [old for old in self._tickets if old.outcome == PENDING] + [ticket]
        return ticket

    def notify(self, peer: str, message: bytes) -> None:
        """Raises PeerLostError."""
        link = self.wire.link(peer)
        self._last_message = time.monotonic()
        try:
            self._agent.send_notif(self._agent_of(link), message)
        except self.errors as error:
            raise PeerLostError(
                f"{self.name}: the message to {peer!r} was not taken ({type(error).__name__}: {error}); connect again "
                "when a new one has that name"
            ) from error

    def messages(self) -> list[tuple[str, bytes]]:
        """(peer, message); in order for each peer."""
        self.wire.messages()  # none, but it raises when this end is closed
        arrived = self._agent.get_new_notifs()
        return [(agent.rpartition("#")[0], message) for agent, messages in arrived.items() for message in messages]

    def close(self) -> None:
        """Leave: nothing is written into this end's memory after it."""
        if self._agent is None:
            return
        time.sleep(max(0.0, self._last_message + LINGER_SECONDS - time.monotonic()))
        super().close()
        for ticket in self._tickets:
            if ticket.outcome == PENDING:
                ticket.finish(FAILED)
        for memory in self._registered:
            self._agent.deregister_memory(memory)
        self._tickets, self._registered = [], []
        self._agent = None  # its destructor closes the connections

    def state(self, handle: Any) -> tuple[str, str]:
        """NIXL's word for the state of a transfer, PROC, DONE or ERR, and the reason of an ERR."""
        try:
            return self._agent.check_xfer_state(handle), ""
        except self.errors as error:
            return "ERR", f"{type(error).__name__}: {error}"

    def _agent_of(self, link: Link) -> str:
        """NIXL's name for the other end of a link; NIXL learns its metadata when they are new."""
        metadata = link.card["nixl"]
        known, loaded = self._agents.get(link.peer, ("", ""))
        if loaded != metadata:
            name = self._agent.add_remote_agent(base64.b64decode(metadata))
            if known and known != name:
                with contextlib.suppress(*self.errors):  # of a process that is gone: nothing depends on it
                    self._agent.remove_remote_agent(known)
            self._agents[link.peer] = (name, metadata)
        return self._agents[link.peer][0]

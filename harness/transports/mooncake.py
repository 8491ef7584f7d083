"""MooncakeTransport: writes by Mooncake's transfer engine over TCP. It has no messages: those go over the wire."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.transports.end import FixedTicket, WireEnd, places_of
from harness.transports.library import load
from harness.transports.regions import OutOfRegionError, Place, Span
from harness.transports.wire import Link, Meta
from kvshard_ref.errors import MisuseError
from kvshard_ref.transport import DONE, FAILED, PENDING, Block, PeerLostError, Ticket

INSTALL = "pip install 'kvshard[mooncake]'; apt-get install libibverbs1"
UNDER_WAY_MAX = 1024  # requests of one ticket that the engine holds at once


class MooncakeTicket:
    """One write: a request per span, some at a time. It goes on when it is polled."""

    def __init__(self, transport: MooncakeTransport, link: Link, spans: Sequence[Span]) -> None:
        self._transport = transport
        self._link = link
        self._waiting = deque(spans)
        self._under_way: list[int] = []
        self._failed = False
        self._submit()

    def poll(self) -> str:
        """PENDING, DONE or FAILED."""
        engine = self._transport.engine
        if engine is None:  # closed
            self._under_way, self._failed = [], self._failed or bool(self._under_way)
        states = [(request, engine.transfer_check_status(request)) for request in self._under_way]
        # 0: under way. A request that was seen to end is freed, and must not be asked for again.
        self._under_way = [request for request, state in states if state == 0]
        self._failed = self._failed or any(state < 0 for _, state in states)
        self._submit()
        if self._under_way:
            return PENDING
        return FAILED if self._failed else DONE

    def _submit(self) -> None:
        if self._waiting and not self._link.alive:
            self._failed = True
        if self._failed:
            self._waiting.clear()
        while self._waiting and len(self._under_way) < UNDER_WAY_MAX:
            span = self._waiting.popleft()
            request = self._transport.engine.transfer_submit_write(
                self._link.card["session"], span.src_address, span.dst_address, span.size
            )
            if request > 0:
                self._under_way.append(request)
            else:
                self._failed = True
                self._waiting.clear()


class MooncakeTransport(WireEnd):
    """One end, with a transfer engine of its own. Tried with mooncake-transfer-engine-non-cuda 0.3.13.post1.

    A write is done when the peer's engine has acknowledged it; engines before 0.3.13 may call it done when it is sent.
    """

    settle_seconds = 0.5  # what is in the sockets of the library when the wire ends may land yet

    def __init__(self, name: str, book: Path) -> None:
        """Raises MissingLibraryError; MisuseError where there is an interface but lo, for it listens on all."""
        interfaces = sorted(interface for _, interface in socket.if_nameindex())
        if interfaces != ["lo"]:
            raise MisuseError(
                f"mooncake: its engine listens on every interface, and here are {', '.join(interfaces)}; expected lo "
                "alone; start the process by `unshare --map-root-user --net` and switch lo on"
            )
        self.engine: Any = load("mooncake", ("mooncake.engine",), INSTALL).TransferEngine()
        code = self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        if code:
            raise RuntimeError(f"mooncake: initialize gave {code}, expected 0; its log says why (GLOG_minloglevel=0)")
        self._scrap = torch.zeros(1, dtype=torch.uint8)
        super().__init__(name, book)

    def card(self) -> Meta:
        """The regions, and where the engine listens."""
        return {**super().card(), "session": f"127.0.0.1:{self.engine.get_rpc_port()}"}

    def enrol(self, places: Sequence[Place]) -> None:
        """Register memory with the engine."""
        for place in places:
            code = self.engine.register_memory(place.address, place.pages * place.page_bytes)
            if code:
                raise RuntimeError(
                    f"mooncake: register_memory of {place} gave {code}, expected 0; its log says why "
                    "(GLOG_minloglevel=0)"
                )

    def connect(self, peer: str) -> None:
        """Raises PeerLostError. Reads a byte of the peer: the engine's first request waits for it, a write must not."""
        super().connect(peer)
        link = self.wire.link(peer)
        place = next((place for place in places_of(link).values() if place.pages * place.page_bytes), None)
        if place is None:
            return
        code = self.engine.transfer_sync_read(link.card["session"], self._scrap.data_ptr(), place.address, 1)
        if code:
            raise PeerLostError(
                f"{self.name}: the engine of peer {peer!r} at {link.card['session']} does not answer (code {code}); "
                "start it anew"
            )

    def write(self, peer: str, blocks: Sequence[Block]) -> Ticket:
        """Raises MisuseError when the peer was never connected."""
        try:
            link = self.wire.link(peer)
            spans = self.regions.spans(blocks, places_of(link))
        except (PeerLostError, OutOfRegionError) as error:
            return FixedTicket(FAILED, str(error))
        return MooncakeTicket(self, link, spans) if spans else FixedTicket(DONE)

    def close(self) -> None:
        """Leave: nothing is written into this end's memory after it."""
        super().close()
        self.engine = None  # its destructor ends its threads

"""TcpTransport: writes over the wire itself. No library, and the yardstick for those that bring one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from harness.transports.end import FixedTicket, WireEnd, places_of
from harness.transports.regions import OutOfRegionError
from harness.transports.wire import Link, Meta
from kvshard_ref.transport import DONE, FAILED, PENDING, Block, PeerLostError, Ticket


class TcpTicket:
    """One write; the wire's thread sets `outcome` when the peer has answered."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.outcome = PENDING

    def poll(self) -> str:
        """PENDING, DONE or FAILED."""
        alive = self.link.alive  # read first: an answer that came before the end of the link counts
        return FAILED if self.outcome == PENDING and not alive else self.outcome


class TcpTransport(WireEnd):
    """One end. The peer's wire thread puts the bytes into its pages and answers when the last one is there."""

    def __init__(self, name: str, book: Path) -> None:
        self._numbers = count()
        self._tickets: dict[int, TcpTicket] = {}
        self._refused: dict[Link, bool] = {}  # of the frame that arrives on the link; used by the wire's thread only
        super().__init__(name, book)

    def write(self, peer: str, blocks: Sequence[Block]) -> Ticket:
        """Raises MisuseError when the peer was never connected."""
        try:
            link = self.wire.link(peer)
            spans = self.regions.spans(blocks, places_of(link))
        except (PeerLostError, OutOfRegionError) as error:
            return FixedTicket(FAILED, str(error))
        if not spans:
            return FixedTicket(DONE)
        number, ticket = next(self._numbers), TcpTicket(link)
        self._tickets = {n: old for n, old in self._tickets.items() if old.poll() == PENDING}
        self._tickets[number] = ticket
        meta = {"kind": "write", "number": number, "to": [[b.region, b.dst_page, b.count] for b in blocks]}
        self.wire.send(link, meta, [self.regions.bytes_at(s.region, s.start, s.size) for s in spans])
        return ticket

    def body(self, link: Link, meta: Meta, size: int) -> Iterable[memoryview]:
        """The pages that a write goes to; none when any is not here, so a bad write changes nothing."""
        if meta["kind"] != "write":
            return ()
        views, left = [], size
        try:
            for region, page, pages in meta["to"]:
                views.append(self.regions.pages_at(region, page, pages, left))
                left -= len(views[-1])
        except OutOfRegionError:
            left = -1
        self._refused[link] = left != 0
        return () if left else views

    def arrived(self, link: Link, meta: Meta) -> None:
        """A write is here: answer. An answer is here: its ticket has ended."""
        if meta["kind"] == "write":
            refused = self._refused.pop(link)
            self.wire.send(link, {"kind": "answer", "number": meta["number"], "outcome": FAILED if refused else DONE})
        elif meta["kind"] == "answer" and meta["number"] in self._tickets:
            self._tickets[meta["number"]].outcome = meta["outcome"]

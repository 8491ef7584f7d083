"""Network: a transport within one process, with planned faults and a clock of its own.

Time is counted in ticks; every `messages()` call of any end is one, so a network without calls stands still. Nothing
is random, the same calls give the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvshard_ref.transport import DONE, FAILED, PENDING, Block, PeerLostError


@dataclass(frozen=True, slots=True)
class Faults:
    """What the network does to the k-th write and the k-th message, k modulo the length of each tuple; in ticks."""

    write_ticks: tuple[int, ...] = (0,)
    """From a write to its end. Unequal ones let later writes end first."""
    message_ticks: tuple[int, ...] = (0,)
    """On the way. The messages of one end to another keep their order, and wait for nothing else."""
    repeat_ticks: tuple[int, ...] = (0,)
    """Not 0: the message arrives again, so many ticks later, whatever has arrived in between."""
    torn: bool = False
    """The first half of a write's pages lands at once, the rest at its end. Otherwise all land at the end."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Ends that are gone from a tick on."""


class Landing(NamedTuple):
    """One page that was written."""

    tick: int
    writer: str
    peer: str
    region: str
    src: int
    """The writer's page."""
    dst: int
    """The peer's page."""


class Place:
    """Where an end is. Here copies are made when they land, and a message carries nothing but itself.

    An end on a device of its own makes its copies there, at the write, and its messages say what they come after.
    """

    def stamp(self) -> Any:
        """What this place has done by now."""

    def know(self, stamp: Any) -> None:
        """What is done here from now on comes after `stamp`."""

    def copy(self, work: Callable[[], None]) -> Any:
        """Issue a copy; returns its event. None: not here, copy when it lands."""
        return None


@dataclass(slots=True, eq=False)
class MemoryTicket:
    """One write; see kvshard_ref.transport.Ticket."""

    writer: MemoryEnd
    peer: MemoryEnd
    pages: list[tuple[str, int, int]]
    """(region, own page, peer's page) that have not landed yet."""
    begun: list[torch.Tensor]
    """What these pages held when the write began, unless the copies are made on a device, which sees for itself."""
    end_tick: int
    outcome: str = PENDING
    event: Any = None
    """Behind the copies, when they are made on a device."""

    def poll(self) -> str:
        """PENDING, DONE or FAILED; for the writer."""
        self.writer.network.settle()
        if self.event is not None and self.outcome == PENDING and self.end_tick <= self.writer.network.tick:
            self.outcome = DONE if self.event.query() else PENDING
        return self.outcome


class MemoryEnd:
    """One end; see kvshard_ref.transport.Transport."""

    def __init__(self, network: Network, name: str, place: Place) -> None:
        self.network = network
        self.name = name
        self.place = place
        self.gone = False
        self.regions: dict[str, torch.Tensor] = {}
        self.peers: dict[str, MemoryEnd] = {}
        self.inbox: list[tuple[int, str, bytes, Any]] = []
        """(tick of arrival, sender, message, stamp of the sender's place)"""

    def register(self, regions: Mapping[str, torch.Tensor]) -> None:
        """Name -> contiguous tensor [pages, elements]."""
        for name, pages in regions.items():
            if pages.dim() != 2 or not pages.is_contiguous():
                raise ValueError(
                    f"region {name!r} of shape {tuple(pages.shape)}, expected contiguous [pages, elements]"
                )
        self.regions = dict(regions)

    def connect(self, peer: str) -> None:
        """Raises PeerLostError."""
        self.network.settle()
        other = self.network.ends.get(peer)
        if self.gone or other is None or other.gone:
            raise PeerLostError(f"connect of {self.name!r} to {peer!r}: one of them is gone, or was never there")
        self.peers[peer] = other
        other.peers.setdefault(self.name, self)

    def write(self, peer: str, blocks: Sequence[Block]) -> MemoryTicket:
        """Copy own pages to the peer's."""
        other = self.peers.get(peer)
        if other is None:
            raise ValueError(f"write of {self.name!r} to {peer!r}, which is not connected; connect first")
        return self.network.begin(self, other, blocks)

    def landed(self, pages: Sequence[int]) -> None:
        """Nothing: copies are made in the regions."""

    def notify(self, peer: str, message: bytes) -> None:
        """Raises PeerLostError."""
        self.network.settle()
        other = self.peers.get(peer)
        if self.gone or other is None or other.gone:
            raise PeerLostError(f"message of {self.name!r} to {peer!r}: one of them is gone, or they are not connected")
        self.network.carry(self, other, message)

    def messages(self) -> list[tuple[str, bytes]]:
        """(peer, message) that have arrived; one tick."""
        self.network.tick += 1
        self.network.settle()
        now = self.network.tick
        arrived = sorted((item for item in self.inbox if item[0] <= now), key=lambda item: item[0])
        self.inbox = [item for item in self.inbox if item[0] > now]
        for _, _, _, stamp in arrived:
            self.place.know(stamp)
        return [(sender, message) for _, sender, message, _ in arrived]

    def lost(self) -> set[str]:
        """Peers that are gone; all of them when this end is."""
        self.network.settle()
        return {name for name, peer in self.peers.items() if self.gone or peer.gone}

    def close(self) -> None:
        """Leave the network."""
        self.network.lose(self)


class Network:
    """Ends by name, what is under way between them, what has landed where, and which landed pages had `changed` before.

    `watch` is called at every page that lands, while it does: a test can look whose page it is at that moment.
    """

    def __init__(self, faults: Faults | None = None, watch: Callable[[Landing], None] | None = None) -> None:
        self.faults = faults or Faults()
        self.watch = watch
        self.tick = 0
        self.ends: dict[str, MemoryEnd] = {}
        self.landed: list[Landing] = []
        self.changed: list[Landing] = []
        """Those whose page was not as it was when the write began: who owned it did not keep it until the end."""
        self._writes: list[MemoryTicket] = []
        self._written = 0
        self._sent = 0
        self._last_arrival: dict[tuple[MemoryEnd, MemoryEnd], int] = {}

    def end(self, name: str, place: Place | None = None) -> MemoryEnd:
        """A new end; the one that had the name is gone."""
        if name in self.ends:
            self.lose(self.ends[name])
        self.ends[name] = MemoryEnd(self, name, place or Place())
        return self.ends[name]

    def lose(self, end: MemoryEnd) -> None:
        """The end is gone: its messages under way and the rest of its writes, and of the writes to it, never arrive."""
        end.gone = True
        for ticket in self._writes:
            if end in {ticket.writer, ticket.peer}:
                if ticket.event is not None:
                    ticket.event.synchronize()  # what is gone writes no more
                ticket.outcome = FAILED
        self._writes = [ticket for ticket in self._writes if ticket.outcome == PENDING]
        for other in self.ends.values():
            other.inbox = [item for item in other.inbox if item[0] <= self.tick or item[1] != end.name]
        end.inbox.clear()

    def begin(self, writer: MemoryEnd, peer: MemoryEnd, blocks: Sequence[Block]) -> MemoryTicket:
        """Start a write."""
        ticks = self.faults.write_ticks[self._written % len(self.faults.write_ticks)]
        self._written += 1
        pages = [(b.region, b.src_page + i, b.dst_page + i) for b in blocks for i in range(b.count)]
        ticket = MemoryTicket(writer, peer, pages, [], self.tick + ticks)
        self.settle()
        if writer.gone or peer.gone or not all(self._fits(writer, peer, block) for block in blocks):
            ticket.outcome = FAILED
            return ticket
        ticket.event = writer.place.copy(lambda: self._land(ticket, len(pages)))
        if ticket.event is None:
            ticket.begun = [writer.regions[region][src].clone() for region, src, _ in pages]
        if self.faults.torn and ticket.event is None:
            self._land(ticket, -(-len(pages) // 2))
        self._writes.append(ticket)
        self.settle()
        return ticket

    def carry(self, sender: MemoryEnd, peer: MemoryEnd, message: bytes) -> None:
        """Put a message on its way."""
        ticks, repeat = (plan[self._sent % len(plan)] for plan in (self.faults.message_ticks, self.faults.repeat_ticks))
        self._sent += 1
        arrival = max(self._last_arrival.get((sender, peer), 0), self.tick + ticks)
        self._last_arrival[sender, peer] = arrival
        stamp = sender.place.stamp()
        peer.inbox.append((arrival, sender.name, message, stamp))
        if repeat:
            peer.inbox.append((arrival + repeat, sender.name, message, stamp))

    def settle(self) -> None:
        """Let everything happen that is due at this tick."""
        for name, tick in self.faults.lost.items():
            if tick <= self.tick and name in self.ends and not self.ends[name].gone:
                self.lose(self.ends[name])
        for ticket in [ticket for ticket in self._writes if ticket.end_tick <= self.tick and ticket.event is None]:
            self._land(ticket, len(ticket.pages))
            ticket.outcome = DONE
        self._writes = [ticket for ticket in self._writes if ticket.outcome == PENDING]

    def _land(self, ticket: MemoryTicket, count: int) -> None:
        for at, (region, src, dst) in enumerate(ticket.pages[:count]):
            landing = Landing(self.tick, ticket.writer.name, ticket.peer.name, region, src, dst)
            if self.watch:
                self.watch(landing)
            page = ticket.writer.regions[region][src]
            if ticket.begun and not torch.equal(page.view(torch.uint8), ticket.begun[at].view(torch.uint8)):
                self.changed.append(landing)
            ticket.peer.regions[region][dst].copy_(page)
            self.landed.append(landing)
        del ticket.pages[:count], ticket.begun[:count]

    @staticmethod
    def _fits(writer: MemoryEnd, peer: MemoryEnd, block: Block) -> bool:
        own, theirs = writer.regions.get(block.region), peer.regions.get(block.region)
        if own is None or theirs is None or own[0].nbytes != theirs[0].nbytes or block.count < 1:
            return False
        pages = ((block.src_page, own), (block.dst_page, theirs))
        return all(first >= 0 and first + block.count <= len(region) for first, region in pages)

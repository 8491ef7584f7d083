"""Transport: one-sided page writes and messages between peers. An interface: the core never knows which one it has.

write:   own pages --> the peer's pages; the peer does nothing and sees nothing
notify:  a message, behind every write to that peer whose ticket is done
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

PENDING, DONE, FAILED = "pending", "done", "failed"


class PeerLostError(Exception):
    """The peer cannot be reached: unknown, closed or dead. The text names the peer; nothing was delivered."""


class Block(NamedTuple):
    """`count` consecutive pages, from the writer's page `src_page` on, to the peer's page `dst_page` on."""

    region: str  # its name, equal on both sides
    src_page: int
    dst_page: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which a block has no use for


class Ticket(Protocol):
    """One write."""

    def poll(self) -> str:
        """PENDING, DONE or FAILED; never blocks.

        DONE: every byte is visible at the peer. FAILED: nothing more is written, what was written is unknown. Only
        after one of the two may the source pages change or the peer's pages be given to somebody else.
        """


class Transport(Protocol):
    """One end. `name` is unique among the peers of a network."""

    name: str

    def register(self, regions: Mapping[str, torch.Tensor]) -> None:
        """Make regions known, before the first connect: name -> contiguous tensor [pages, elements of a page].

        The tensors stay where they are, and alive, until `close`.
        """

    def connect(self, peer: str) -> None:
        """Reach `peer`, so that both sides can write and notify; a second call does nothing.

        Raises PeerLostError. After a loss both sides call it: the accepting side when a new hello has arrived.
        """

    def write(self, peer: str, blocks: Sequence[Block]) -> Ticket:
        """Copy own pages to the peer's pages of the same region, in no given order; returns at once.

        The ticket fails when a block leaves either side's region, the page sizes differ, or the peer is lost.
        """

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message: it arrives once, after everything written to that peer whose ticket is done, in send order.

        Raises PeerLostError; the peer is then in `lost`, now or soon.
        """

    def messages(self) -> list[tuple[str, bytes]]:
        """(peer, message) that have arrived since the last call; never blocks."""

    def landed(self, pages: Sequence[int]) -> None:
        """Peers have written these own pages, the same in all regions, and write them no more: make them readable.

        Work on the regions that is issued from now on sees them. Nothing to do where writes go to the regions at once.
        """

    def lost(self) -> set[str]:
        """Peers that were connected and are gone: nothing they wrote can land any more, all tickets to them fail.

        A name stays in the set until this end calls `connect` and reaches a new process of that name. Until then
        messages of the new process are delivered, but writes and messages to it fail: so no loss goes unseen.
        """

    def close(self) -> None:
        """Leave the network; the peers will find this end lost."""

"""What the two sides of a transfer say to each other, and which rank copies which page where.

    D -> P rank    hello      D's geometry
    P rank -> D    welcome    P's geometry: each side checks for itself
    D -> P rank    reserved   D's pages by position, the same for all components, and the components' names
    P rank -> D    done       the copies it made: all have landed
    P rank -> D    failed     why it gives up: it writes no more
    D -> P rank    abort      why
    P rank -> D    ack        it has stopped and writes no more

done, failed and ack conclude: a rank's last word about a generation.
Rules: sglang 0.5.23, disaggregation/common/conn.py. Our choices: the receiver checks every copy, and a page count that
differs is an error, never a cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

import torch

from kvshard_ref.components import Component
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.transport import Block, PeerLostError, Ticket, Transport

VERSION = 2  # of the messages, and of the order of bytes inside a page
Geometry = dict[str, Any]
Copy = tuple[int, int]  # P's page and D's page: of all components in all their layers


class Message(NamedTuple):
    """One message; `body` is JSON as in the table above."""

    kind: str
    room: int = 0  # the request's identity at D, chosen by D's caller
    generation: int = 0  # number of the reservation at D, never used twice: tells the uses of a room apart
    body: Any = None


class Link:
    """Messages and writes of one end. Only peers of the same geometry are heard.

    A peer that is lost says "lost" once, as its last message.
    """

    def __init__(self, transport: Transport, pools: Sequence[ShardPool], geometry: Callable[[str], Geometry]) -> None:
        """`geometry(peer)` is what this end and a peer must agree on."""
        self.pool = pools[0]
        self.components = sorted(component.name for _, component in components_of(pools))
        self.sent_bytes = 0
        self._transport, self._geometry, self._regions = transport, geometry, regions(pools)
        self.refusals: dict[str, str] = {}  # of peers that have told their geometry
        transport.register(self._regions)

    def connect(self, peer: str, word: str = "hello") -> None:
        """Reach the peer and tell this end's geometry. Raises PeerLostError."""
        self._transport.connect(peer)
        self.tell(peer, Message(word, body=self._geometry(peer)))

    def refusal(self, peer: str) -> str:
        """Why nothing can be exchanged with the peer, "" if it can."""
        return self.refusals.get(peer, f"{peer!r} has not answered the hello, or is lost: connect, poll, try again")

    def tell(self, peer: str, message: Message) -> None:
        """Send a message; a peer that cannot be reached will say "lost"."""
        with suppress(PeerLostError):
            self._transport.notify(peer, json.dumps(message).encode())

    def write(self, peer: str, copies: Sequence[Copy]) -> Ticket:
        """Begin to make copies."""
        self.sent_bytes += len(copies) * sum(pages[0].nbytes for pages in self._regions.values())
        return self._transport.write(peer, blocks(self._regions, copies, self.pool.placement))

    def hear(self) -> list[tuple[str, Message]]:
        """What has arrived from peers that fit. Hellos are answered; what is no message is dropped."""
        heard = []
        for peer, data in self._transport.messages():
            with suppress(ValueError, TypeError, PeerLostError):
                message = Message(*json.loads(data))
                if message.kind in {"hello", "welcome"}:
                    heard += self._lost(peer)  # a new process of this name knows nothing of the old one's rooms
                    if message.kind == "hello":
                        self.connect(peer, "welcome")
                    self.refusals[peer] = unequal(self._geometry(peer), dict(message.body), peer)
                elif self.refusal(peer) == "":
                    heard.append((peer, message))
        return heard + [lost for peer in sorted(self.refusals) for lost in self._lost(peer)]

    def _lost(self, peer: str) -> list[tuple[str, Message]]:
        gone = peer in self._transport.lost() and self.refusals.pop(peer, None) is not None
        return [(peer, Message("lost", body=f"{peer!r} is lost"))] if gone else []


def components_of(pools: Sequence[ShardPool]) -> list[tuple[ShardPool, Component]]:
    """The components of all models, each with its pool."""
    return [(pool, component) for pool in pools for component in pool.components]


def geometry_of(pools: Sequence[ShardPool], shards: int, rank: int) -> Geometry:
    """What both sides must agree on: the pools of all models, and that P's rank on this link is `rank` of `shards`."""
    rows = {c.name: f"{pool.layers} layers, {c.width} {c.dtype}, {c.scales} scales" for pool, c in components_of(pools)}
    ps = pools[0].placement.page_size
    return {"version": VERSION, "shards": shards, "rank": rank, "page_size": ps, "components": rows}


def unequal(mine: Geometry, theirs: Geometry, peer: str) -> str:
    """What differs between two geometries, with both values; "" when nothing does."""
    fields = {field: (mine[field], theirs.get(field)) for field in mine if mine[field] != theirs.get(field)}
    return f"peer {peer!r} does not fit, expected here and there the same: {fields}" if fields else ""


def regions(pools: Sequence[ShardPool]) -> dict[str, torch.Tensor]:
    """What a transport registers: per component and layer the pages [local pages, elements of a page]."""
    return {f"{c.name}.{at}": pool.pages(at, c.name) for pool, c in components_of(pools) for at in range(pool.layers)}


def pair(pages: Sequence[int], dst: Sequence[int], rank: int, placement: Placement) -> list[Copy]:
    """The copies that `rank` makes of `pages`, for which D has reserved the pages `dst`.

    They are paired by position, before the pages of other ranks are left out::

        pages [4, 9, 12], dst [70, 71, 72], N=4: rank 0 copies 4 -> 70, 12 -> 72; rank 1 9 -> 71; ranks 2, 3 nothing
    """
    return [(page, to) for page, to in zip(pages, dst, strict=True) if placement.page_owner(page) == rank]


def blocks(names: Iterable[str], copies: Sequence[Copy], placement: Placement) -> list[Block]:
    """The copies in every region; pages that are consecutive on both sides are one block."""
    local = [(placement.local_page(page), to) for page, to in copies]
    runs = groupby(enumerate(local), lambda item: (item[1][0] - item[0], item[1][1] - item[0]))
    spans = [(*first, 1 + len(list(run))) for _, run in runs for _, first in [next(run)]]
    return [Block(name, *span) for name in names for span in spans]


def flaw(made: Sequence[Sequence[Copy]], dst: Sequence[int]) -> str:
    """What is wrong with the copies of all ranks; "" if each of D's pages, so each position, has one, by its owner."""
    filled = sorted((to, page % len(made) == rank) for rank, copies in enumerate(made) for page, to in copies)
    expected = [(to, True) for to in sorted(dst)]
    return "" if filled == expected else f"written pages, each with: by its owner? {filled}; expected {expected}"

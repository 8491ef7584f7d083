"""KVSender: one prefill rank's side of transfers. It copies the pages that it owns into the pages of decode workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvshard_ref.errors import GeometryError
from kvshard_ref.pool import ShardPool
from kvshard_ref.transfer import Copy, Link, Message, geometry_of, pair
from kvshard_ref.transport import FAILED, PENDING, Ticket, Transport

Use = tuple[str, int, int]  # peer, room, generation


class Sending:
    """One request on its way from this rank to a decode worker; `KVSender.poll` moves it on.

    Until `finished` a write may be under way: the pages handed to `send` must be neither freed nor changed.
    """

    def __init__(self, link: Link, use: Use, dst: Sequence[int] = (), components: Sequence[str] = ()) -> None:
        """`dst` are D's pages by position, which it has reserved for the `components`."""
        self.use, self.dst, self.components = use, dst, components
        # What D hears in the end; once it is given up "failed", "ack" (D has aborted) or "lost" (D hears nothing).
        self.word = "done"
        self.why = ""  # it is given up
        self.started = False  # it has a chunk
        self.concluded = False  # it has its last chunk, or is given up: it takes no more
        self.finished = False  # it is over, and no write is under way
        self._link = link
        self._cursor = 0  # pages handed to `send`, other ranks' too
        self._queue: deque[tuple[list[Copy], Any]] = deque()  # each with the event behind its rows
        self._begun: list[Copy] = []
        self._tickets: list[Ticket] = []

    def send(self, pages: Sequence[int], tokens: int, ready: Any, *, last: bool = False) -> None:
        """Send what is new: `pages` are all pages of the request so far, the first `tokens` have rows.

        Every rank makes the same calls. Nothing is written before `ready.query()`: the event behind the forward that
        wrote the rows. Before the last chunk only whole pages are sent; the last one concludes, empty or not. A
        transfer that has concluded takes no notice. Raises GeometryError, with nothing changed, when the page count is
        not the one that was reserved.
        """
        if self.concluded:
            return
        self.started = True
        start, total, pool = self._cursor, len(self.dst), self._link.pool
        end = len(pages) if last else min(tokens // pool.placement.page_size, len(pages))
        if not (total if last else start) <= end <= total:
            raise GeometryError(f"{self.use}: {end} pages after {start}, expected {total} in the end; send all of them")
        self._cursor, self.concluded = end, last
        copies = pair(pages[start:end], self.dst[start:end], pool.rank, pool.placement)
        if copies:
            self._queue.append((copies, ready))

    def abort(self, why: str, word: str = "failed") -> None:
        """Give it up: no more writes begin. The first reason counts; a transfer that is over takes no notice."""
        if self.word == "done" and not self.finished:
            self.word, self.why, self.concluded = word, why, True
            self._queue.clear()

    def advance(self) -> None:
        """Begin the writes whose rows are there; say the last word when none is under way any more."""
        outcomes = [ticket.poll() for ticket in self._tickets]
        self._tickets = [ticket for ticket, each in zip(self._tickets, outcomes, strict=True) if each == PENDING]
        if FAILED in outcomes:
            self.abort(f"{self.use}: a write failed, the peer or one of its pages is gone")
        while self._queue and self._queue[0][1].query():
            copies, _ = self._queue.popleft()
            self._tickets.append(self._link.write(self.use[0], copies))
            self._begun += copies
        self.finished = self.concluded and not self._queue and not self._tickets
        if self.finished and self.word != "lost":
            self._link.tell(self.use[0], Message(self.word, *self.use[1:], self.why or self._begun))


class KVSender:
    """All transfers of one rank. Nothing happens outside `poll`, and `poll` never waits."""

    def __init__(self, pools: Sequence[ShardPool], transport: Transport) -> None:
        """`pools` of all models, in one layout."""
        self.link = Link(transport, pools, lambda _: geometry_of(pools, pools[0].placement.shards, pools[0].rank))
        self.sendings: list[Sending] = []  # that are not over; those that are not started are D's reservations
        self._newest: dict[str, int] = {}  # generation by peer

    def find(self, peer: str, room: int, count: int) -> Sending:
        """The transfer of a request of `count` pages to a room, after a poll. All ranks find it, or none sends.

        It is given up, `why` says so, when D has not told this rank of the room, or has reserved it for another number
        of pages or other components; then D hears of it. What is found and not given up must be sent, or aborted.
        """
        self.poll()
        new = [each for each in self.sendings if each.use[:2] == (peer, room) and not each.started]
        sending = new[-1] if new else Sending(self.link, (peer, room, 0))
        mine, theirs = (count, self.link.components), (len(sending.dst), sending.components)
        if not new:
            sending.abort(self.link.refusal(peer) or f"{peer!r} has not told of room {room}: reserve it, poll", "lost")
        elif mine != theirs:
            sending.abort(f"{sending.use}: there are {mine} pages and components, reserved {theirs}; reserve the same")
        return sending

    def poll(self) -> None:
        """Hear what has arrived, then move every transfer on."""
        for peer, message in self.link.hear():
            use = (peer, message.room, message.generation)
            if message.kind == "reserved" and message.generation > self._newest.get(peer, 0):
                self._newest[peer] = message.generation
                self.sendings.append(Sending(self.link, use, *message.body))
            elif message.kind == "abort":
                known = [each for each in self.sendings if each.use == use]
                for sending in known:
                    sending.abort(message.body, "ack")
                if not known:
                    self.link.tell(peer, message._replace(kind="ack"))
            elif message.kind == "lost":
                self._newest.pop(peer, None)
                for sending in [each for each in self.sendings if each.use[0] == peer]:
                    sending.abort(message.body, "lost")
        for sending in self.sendings:
            sending.advance()
        self.sendings = [sending for sending in self.sendings if not sending.finished]

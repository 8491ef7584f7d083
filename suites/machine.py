"""The machine: draws op after op by what is alive, with swarm weights, and plays each before it draws the next.

Why not Hypothesis' rule-based machine: rules there have no weights and see no engine state, and a run must be a plain
list of ops that replays without Hypothesis. Index 0 of every choice is the simplest, so that shrinking drops ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.types import (
    Abort,
    Evict,
    Extend,
    Finish,
    Flush,
    Lose,
    Ok,
    Open,
    Receive,
    Release,
    Reserve,
    Restart,
    Send,
    Settle,
    Together,
)
from suites.prompts import KINDS, pool_pages, prompt
from suites.story import Live, Story

SKIP = "skip"


@dataclass(slots=True)
class Hand:
    """Plays ops on a table; the moves that the plans are made of."""

    draw: Draw
    table: Table
    kinds: tuple[str, ...] = KINDS
    pages_max: int | None = None
    story: Story = field(init=False)

    def __post_init__(self) -> None:
        self.story = self.table.watch.story

    def can(self, op: str) -> bool:
        """Whether the engine takes this op."""
        return op in self.table.manifest.ops

    def open(self, tokens: tuple[int, ...] | None = None) -> str | None:
        """Opens a prompt; its name, or None when it was refused."""
        tokens = prompt(self.draw, self.story, self.kinds, self.pages_max) if tokens is None else tokens
        name = self.story.new_name()
        return name if isinstance(self.table.do(Open(name, tokens)), Ok) else None

    def chunk(self, name: str, room: int, *, whole: bool = False) -> Extend | None:
        """The next chunk of a request within `room` tokens, whole pages or up to the end; None if none fits."""
        request = self.story.live[name]
        page = self.story.config.page_size
        most = request.left if request.left <= room else room // page * page
        if most <= 0:
            return None
        smaller = list(range(page, most, page))
        if not whole and smaller and self.draw(st.booleans()):
            most = self.draw(st.sampled_from(smaller))
        return self.extend_op(name, request, most)

    def extend_op(self, name: str, request: Live, count: int) -> Extend:
        """The op with the stamps of exactly these tokens."""
        end = request.computed + count
        return Extend(name, count, self.story.oracle.rows(request.tokens, request.computed, end))

    def extend(self, name: str, *, whole: bool = False) -> bool:
        """Plays one chunk; whether it was accepted."""
        op = self.chunk(name, self.story.config.chunk_tokens, whole=whole)
        return op is not None and isinstance(self.table.do(op), Ok)

    def complete(self, name: str) -> bool:
        """Plays chunks to the prompt's end; False when one is refused."""
        while name in self.story.live and self.story.live[name].left:
            before = self.story.live[name].computed
            if not self.extend(name, whole=True) or self.story.live[name].computed <= before:
                return False
        return name in self.story.live

    def serve(self, tokens: tuple[int, ...] | None = None) -> bool:
        """A whole request: open, all chunks, finish. A request that cannot go on is aborted."""
        name = self.open(tokens)
        if name is None:
            return False
        done = self.complete(name)
        if name in self.story.live:
            self.table.do(Finish(name) if done else Abort(name))
        return done

    def batch(self) -> None:
        """Several chunks at once, as far as the chunk budget reaches."""
        room = self.story.config.chunk_tokens
        ops: list[Extend] = []
        for name in self._pending():
            if len(ops) > 0 and self.draw(st.sampled_from((False, False, True))):
                continue
            half = room // 2 // self.story.config.page_size * self.story.config.page_size
            op = self.chunk(name, room if ops or not half else half)
            if op is not None:
                ops.append(op)
                room -= op.count
        if ops:
            self.table.do(Together(tuple(ops)))

    def close_all(self) -> None:
        """Ends every request and drops the cache."""
        for name in list(self.story.live):
            self.table.do(Finish(name) if self.story.live[name].left == 0 else Abort(name))
        if self.can("settle"):
            self.table.do(Settle())
        for room in list(self.story.rooms):
            self.table.do(Release(room))
            self.table.do(Settle())
        if self.can("flush"):
            self.table.do(Flush())

    def pick(self, names: list[str]) -> str:
        """One of these requests; the oldest is the simplest."""
        return self.draw(st.sampled_from(names))

    def _pending(self, least: int = 0) -> list[str]:
        """Requests with tokens left to compute; opens some when there are fewer than `least`."""
        pending = [name for name, request in self.story.live.items() if request.left]
        for _ in range(least - len(pending)):
            name = self.open()
            pending += [] if name is None else [name]
        return pending

    # One move each; a move that needs a request opens one.

    def move_open(self) -> None:
        """A prompt."""
        self.open()

    def move_serve(self) -> None:
        """A whole request."""
        self.serve()

    def move_extend(self) -> None:
        """One chunk."""
        if pending := self._pending(1):
            self.extend(self.pick(pending))

    def move_complete(self) -> None:
        """All chunks that are left."""
        if pending := self._pending(1):
            self.complete(self.pick(pending))

    def move_batch(self) -> None:
        """Several chunks at once."""
        if len(self._pending(2)) > 1:
            self.batch()

    def move_race(self) -> None:
        """Two prompts with a common prefix, opened before either is in the cache, a first chunk of each."""
        page, pages = self.story.config.page_size, pool_pages(self.story.config)
        trunk = self.story.new_tokens(self.draw(st.integers(1, max(1, pages // 4))) * page)
        tails = [self.draw(st.integers(1, 2 * page)) for _ in range(2)]
        names = [self.open(trunk + self.story.new_tokens(tail)) for tail in tails]
        for name in names:
            if name is not None:
                self.extend(name)

    def move_finish(self) -> None:
        """A finish, after what is left of the prompt."""
        done = [name for name, request in self.story.live.items() if not request.left]
        if done:
            self.table.do(Finish(self.pick(done)))
        elif self.story.live:
            self.move_complete()

    def move_abort(self) -> None:
        """An abort, at whatever point the request is."""
        live = list(self.story.live) or self._pending(1)
        if live:
            self.table.do(Abort(self.pick(live)))

    def move_evict(self) -> None:
        """Some eviction, mostly from the device."""
        page = self.story.config.page_size
        tiers = ("device", "device", "host") if self.story.config.host_pages_per_rank else ("device",)
        tier = self.draw(st.sampled_from(tiers))
        less = self.draw(st.sampled_from((0, 0, page - 1)))  # a page is wanted for every token of it
        self.table.do(Evict(self.draw(st.integers(1, pool_pages(self.story.config))) * page - less, tier))

    def move_settle(self) -> None:
        """All copies end."""
        self.table.do(Settle())

    def move_flush(self) -> None:
        """A flush; refused while requests live."""
        self.table.do(Flush())

    # P/D transfers; nothing in a session without a decode worker.

    def reserve(self, name: str) -> int | None:
        """A room for a request, known to all ranks; None when it was refused."""
        if not self.story.config.decode_pages:
            return None
        room = self.draw(st.integers(1, 4))
        if not isinstance(self.table.do(Reserve(room, len(self.story.live[name].tokens))), Ok):
            return None
        if self.draw(st.sampled_from((True, True, False))):
            self.table.do(Settle())
        return room

    def reserve_pages(self, room: int, pages: int) -> None:
        """A room for nobody yet, which takes pages of the decode worker."""
        self.table.do(Reserve(room, pages * self.story.config.page_size))

    def room_of(self, name: str) -> int | None:
        """The room that a request is sent to."""
        rooms = (room for room, its in self.story.rooms.items() if its.request == name and not its.doomed)
        return next(rooms, None)

    def send(self, name: str, room: int) -> bool:
        """Sends what is computed; whether it was accepted."""
        return name in self.story.live and isinstance(self.table.do(Send(name, room)), Ok)

    def serve_remote(self, tokens: tuple[int, ...] | None = None) -> None:
        """A request that is prefilled here and received by the decode worker."""
        name = self.open(tokens)
        room = None if name is None else self.reserve(name)
        if name is None or room is None:
            return
        if self.draw(st.booleans()):
            self.send(name, room)  # the cached prefix
        while name in self.story.live and self.story.live[name].left:
            before = self.story.live[name].computed
            self.extend(name, whole=self.draw(st.booleans()))
            if self.story.live[name].computed == before:
                break
            if self.draw(st.booleans()):
                self.send(name, room)
        self.end_remote(name, room)

    def end_remote(self, name: str, room: int) -> None:
        """The last chunk, then finish, receive and release, in one order or another."""
        done = self.story.live[name].left == 0
        unsent = room in self.story.rooms and not self.story.rooms[room].concluded
        if done and unsent and self.draw(st.sampled_from((True, True, False))):  # or it ends with its last unsent
            self.send(name, room)
        if self.draw(st.booleans()):
            self.table.do(Settle())
        self.table.do(Finish(name) if done else Abort(name))
        if self.draw(st.sampled_from((False, False, True))):
            self.table.do(Abort(name))  # it has ended: that must not touch its transfer
        for _ in range(self.draw(st.sampled_from((0, 1, 3)))):
            self.receive(room)  # as soon as it says so
        self.table.do(Settle())
        if room in self.story.rooms:
            self.receive(room)
            if self.draw(st.sampled_from((True, True, False))):
                self.table.do(Release(room))

    def receive(self, room: int) -> None:
        """Asks for what a room has got."""
        if room in self.story.rooms:
            self.table.do(Receive(room))

    def move_remote(self) -> None:
        """A whole P/D request."""
        if self.story.config.decode_pages:
            self.serve_remote()

    def move_send(self) -> None:
        """A chunk of a request that has a room, or a room for one that has none."""
        if not self.story.config.decode_pages:
            return
        live = list(self.story.live) or self._pending(1)
        if not live:
            return
        name = self.pick(live)
        room = self.room_of(name)
        if room is None:
            room = self.reserve(name)
        if room is not None:
            self.send(name, room)

    def move_receive(self) -> None:
        """What a room has got."""
        if self.story.rooms:
            self.table.do(Receive(self.draw(st.sampled_from(sorted(self.story.rooms)))))

    def move_release(self) -> None:
        """A room is given up, at whatever point it is."""
        if self.story.rooms:
            self.table.do(Release(self.draw(st.sampled_from(sorted(self.story.rooms)))))

    def move_lose(self) -> None:
        """A connection is lost."""
        if self.story.config.decode_pages:
            self.table.do(Lose(self.draw(st.integers(-1, self.story.config.shards - 1))))

    def move_restart(self) -> None:
        """A restart."""
        self.table.do(Restart())


MIXED: Mapping[str, int] = MappingProxyType(
    {
        "open": 4,
        "extend": 6,
        "serve": 3,
        "complete": 2,
        "batch": 4,
        "race": 2,
        "finish": 5,
        "abort": 1,
        "evict": 1,
        "flush": 1,
        "restart": 1,
        "remote": 2,
        "send": 2,
    }
)
Plan = Callable[[Draw, Table], None]
OP_OF_MOVE: Mapping[str, str] = MappingProxyType(
    {"serve": "open", "complete": "extend", "batch": "together", "race": "open", "remote": "send"}
)


def machine(
    weights: Mapping[str, int] = MIXED,
    *,
    kinds: tuple[str, ...] = KINDS,
    pages_max: int | None = None,
    idle: bool = False,
) -> Plan:
    """A plan of weighted moves. With `idle` it ends with nothing alive and no cache.

    Swarm: a run leaves out some of the lighter moves.
    """

    def plan(draw: Draw, table: Table) -> None:
        hand = Hand(draw, table, kinds, pages_max)
        moves = [move for move in weights if hand.can(OP_OF_MOVE.get(move, move))]
        most = max(weights.values())
        optional = [move for move in moves if weights[move] < most and move not in ("open", "extend", "serve")]
        left_out = draw(st.sets(st.sampled_from(optional), max_size=len(optional) // 3)) if optional else set()
        bag = [SKIP] + [move for move in moves if move not in left_out for _ in range(weights[move])]
        for _ in range(table.steps_max):
            move = draw(st.sampled_from(bag))
            if move != SKIP:
                getattr(hand, f"move_{move}")()
        if idle:
            hand.close_all()

    return plan


def either(*plans: Plan) -> Plan:
    """A plan that is one of these, drawn anew for every example; the first is the simplest."""

    def plan(draw: Draw, table: Table) -> None:
        draw(st.sampled_from(plans))(draw, table)

    return plan


def splits(draw: Draw, table: Table) -> None:
    """A prompt is cached, held by a second request, and split by a third; then what nobody holds is evicted."""
    hand = Hand(draw, table)
    page = table.config.page_size
    pages = draw(st.integers(2, 5))
    trunk = hand.story.new_tokens(pages * page)
    hand.serve(trunk)
    holder = hand.open(trunk + hand.story.new_tokens(draw(st.integers(1, 2 * page))))
    for _ in range(draw(st.integers(1, 3))):
        cut = draw(st.integers(1, pages - 1)) * page
        hand.serve(trunk[:cut] + hand.story.new_tokens(draw(st.integers(1, 2)) * page))
    if hand.can("evict"):
        hand.move_evict()
    if holder is not None:
        hand.complete(holder)
        table.do(Finish(holder) if hand.story.live[holder].left == 0 else Abort(holder))
    hand.serve(trunk)
    hand.close_all()

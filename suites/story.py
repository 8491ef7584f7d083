"""The story of a session as a plain reader of ops and replies knows it: who lives, what was computed, what was met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from harness.types import (
    Abort,
    AnyOp,
    AnyReply,
    Config,
    Evicted,
    Extend,
    Extended,
    Finish,
    Finished,
    Flush,
    Locate,
    Lose,
    Ok,
    Open,
    Opened,
    Receive,
    Refused,
    Release,
    Replies,
    Reserve,
    Restart,
    Send,
    Settle,
    Together,
    layers_of,
)
from harness.views import NodeView, RankView, Snapshot
from suites.oracle import Oracle


@dataclass(slots=True)
class Live:
    """A request between its open and its end."""

    tokens: tuple[int, ...]
    cached: int
    computed: int
    from_host: int = 0  # of the cached tokens, when it was opened
    admitted: bool = False  # its first chunk was accepted
    chunks: int = 0

    @property
    def left(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.computed


@dataclass(slots=True)
class Room:
    """A room of the decode worker, from its reserve to its release."""

    tokens: int
    prompt: tuple[int, ...] | None = None  # of the request that is sent to it
    request: str = ""
    concluded: bool = False  # the last chunk was sent
    doomed: bool = False  # the request or a connection ended before that, or may have
    known: bool = False  # all was settled since it was reserved, with every rank there


def parts(op: AnyOp, reply: AnyReply) -> Iterator[tuple[AnyOp, AnyReply]]:
    """Every op with its own reply, those of a `Together` one by one."""
    if isinstance(op, Together) and isinstance(reply, Replies):
        for one, its in zip(op.ops, reply.replies, strict=True):
            yield from parts(one, its)
    else:
        yield op, reply


@dataclass(slots=True)
class Story:
    """What happened so far. `seen` counts the events that the cases' non-vacuity conditions name."""

    config: Config
    oracle: Oracle = field(init=False)
    live: dict[str, Live] = field(default_factory=dict)
    past: list[tuple[int, ...]] = field(default_factory=list)  # prompts opened, newest last
    finished: dict[tuple[int, ...], int] = field(
        default_factory=dict
    )  # prompt -> tokens kept, while nothing was evicted
    behind: dict[tuple[int, ...], int] = field(
        default_factory=dict
    )  # of these the ones that end with a transfer -> tokens of their whole pages
    rooms: dict[int, Room] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)  # requests that a send was accepted for, ended ones too
    owned_pages: Counter[int] = field(default_factory=Counter)  # per owner class, of all concluded transfers
    untroubled: bool = True  # no transfer has failed or was given up, no connection was lost, since the last restart
    lost: bool = False  # of some end the connection, since the last restart
    decode_lost: bool = False  # that of the decode worker, which no restart brings back
    settled: bool = False  # nothing happened since the last settle
    first: Snapshot | None = None
    names: int = 0
    fresh: int = 0
    states: set[int] = field(default_factory=set)  # of every computed whole-page prefix, as in `cached_entries`
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        layers = {component: layers_of(self.config, component) for component in self.config.components}
        self.oracle = Oracle(layers, self.config.page_size)

    def is_sent(self, name: str) -> bool:
        """Whether a request is, or was, on its way to a room."""
        return any(room.request == name for room in self.rooms.values())

    def new_tokens(self, count: int) -> tuple[int, ...]:
        """Tokens that no prompt holds yet."""
        self.fresh += count
        return tuple(range(self.fresh - count + 1, self.fresh + 1))

    def new_name(self) -> str:
        """A name that no request had yet."""
        self.names += 1
        return f"r{self.names}"

    def computed_states(self, op: AnyOp, reply: AnyReply) -> set[int]:
        """Hashes, as in `cached_entries`, of every whole-page prefix computed up to and with this op."""
        states = set(self.states)
        for one, its in parts(op, reply):
            if isinstance(one, Extend) and isinstance(its, Ok) and one.request in self.live:
                request = self.live[one.request]
                states |= self._prefix_states(request.tokens, request.computed + one.count)
        return states

    def _shares_a_page(self, chunks: list[Extend]) -> bool:
        """Whether two of these requests have the first page of their prefixes in common."""
        page = self.config.page_size
        firsts = [request.tokens[:page] for op in chunks if (request := self.live.get(op.request)) and request.computed]
        return len(set(firsts)) < len(firsts)

    def _prefix_states(self, tokens: tuple[int, ...], end: int) -> set[int]:
        page = self.config.page_size
        return {state for _, state in prefix_entries(tokens[:end], tuple(range(end // page)), page)}

    def tell(self, op: AnyOp, reply: AnyReply, before: Snapshot | None, after: Snapshot | None) -> None:
        """One more op happened."""
        if self.first is None:
            self.first = before
        if before is not None and after is not None:
            self._compare(before, after)
        if isinstance(op, Together):
            taken = [one for one, its in parts(op, reply) if isinstance(one, Extend) and isinstance(its, Ok)]
            self.seen["batch"] += len(taken) > 1
            firsts = [self.live[one.request] for one in taken if one.request in self.live]
            self.seen["restored together"] += sum(not each.chunks and each.from_host > 0 for each in firsts) > 1
            self.seen["batch shares a page"] += self._shares_a_page(taken)
        for one, its in parts(op, reply):
            if isinstance(its, Refused):
                self.seen["refused"] += 1
                if isinstance(one, Send):
                    self._misfit(one)
            elif isinstance(its, Ok):
                self._transferred(one, after)
                self._ok(one, its)
        self.settled = isinstance(op, Settle) or (self.settled and isinstance(op, Receive | Locate))
        if isinstance(op, Settle) and isinstance(reply, Ok) and not self.lost:
            self.finished |= {tokens: whole for tokens, whole in self.behind.items() if tokens in self.finished}
            self.behind.clear()
            for room in self.rooms.values():
                room.known = True

    def _transferred(self, op: AnyOp, after: Snapshot | None) -> None:
        """What an accepted op means for the rooms."""
        if isinstance(op, Reserve):
            self.rooms[op.room] = Room(op.tokens)
        elif isinstance(op, Send) and op.room in self.rooms:
            self._sent(op, self.rooms[op.room], after)
        elif isinstance(op, Receive):
            self.seen["received"] += 1
        elif isinstance(op, Release):
            room = self.rooms.pop(op.room, None)
            if room is not None and not (room.concluded and self.settled):
                self.seen["given up in flight"] += bool(room.request)
                self.untroubled = False
        elif isinstance(op, Finish | Abort):
            for room in self.rooms.values():
                if room.request == op.request and (isinstance(op, Abort) or not room.concluded):
                    self.seen["aborted in flight"] += 1
                    room.doomed, self.untroubled = True, False
        elif isinstance(op, Lose | Restart):
            self.seen["lost"] += isinstance(op, Lose)
            self.lost = self.lost or isinstance(op, Lose)
            self.decode_lost = self.decode_lost or (isinstance(op, Lose) and op.rank < 0)
            self.untroubled = False if isinstance(op, Lose) or self.rooms else self.untroubled
            for room in self.rooms.values():
                room.doomed = True
            if isinstance(op, Restart):
                self.lost, self.untroubled = self.decode_lost, not (self.rooms or self.decode_lost)
                self.owned_pages.clear()

    def _misfit(self, op: Send) -> None:
        """A refused send; a room of another size than the request may end by it, and decode hears why."""
        room, request = self.rooms.get(op.room), self.live.get(op.request)
        page = self.config.page_size
        if room is not None and request is not None and not room.request:
            room.doomed |= -(-room.tokens // page) != -(-len(request.tokens) // page)

    def _sent(self, op: Send, room: Room, after: Snapshot | None) -> None:
        request = self.live[op.request]
        self.seen["sent early"] += request.chunks == 0 and request.cached > 0
        self.seen["sent in chunks"] += room.request == op.request and not room.concluded
        self.seen["sent with an empty owner"] += len(request.tokens) // self.config.page_size < self.config.shards - 1
        self.seen["room was there"] += room.known and not room.request and not room.doomed
        room.prompt, room.request = request.tokens, op.request
        self.sent.add(op.request)
        if request.left or room.concluded:
            return
        room.concluded = True
        self.seen["concluded"] += 1
        view = (after.ranks[0].requests or {}).get(op.request) if after and after.ranks else None
        classes = self.first.ranks[0].free if self.first and self.first.ranks else None
        for page in view.pages if view else ():
            self.owned_pages[next((owner for owner, free in enumerate(classes or ()) if page in free), -1)] += 1

    def _ok(self, op: AnyOp, reply: Ok) -> None:
        value = reply.value
        if isinstance(op, Open) and isinstance(value, Opened):
            self._opened(op, value)
        elif isinstance(op, Extend) and isinstance(value, Extended):
            self._extended(op, value)
        elif isinstance(op, Finish) and isinstance(value, Finished):
            request = self.live.pop(op.request)
            self.seen["finished"] += 1
            tokens = request.tokens[: request.computed]
            self.finished[tokens] = value.kept
            self.behind.pop(tokens, None)  # of the same prompt before an eviction
            whole = request.computed // self.config.page_size * self.config.page_size
            self.seen["declined"] += value.kept < whole
            if op.request in self.sent and request.cached:  # so that its first page is that of the cache
                self.behind[tokens] = whole
                self.seen["finished on its way"] += 1
        elif isinstance(op, Abort):
            request = self.live.pop(op.request)
            self.seen["aborted"] += 1
            self.seen["aborted halfway"] += request.admitted and request.left > 0
        elif isinstance(value, Evicted) and value.tokens > 0:
            self.seen["evicted"] += 1
            self.finished.clear()
        if isinstance(op, Flush | Restart):
            self.seen["dropped"] += 1
            if isinstance(op, Restart):
                self.live.clear()
            self.finished.clear()
            self.states.clear()
            self.oracle.forget()

    def _opened(self, op: Open, value: Opened) -> None:
        page = self.config.page_size
        self.past.append(op.tokens)
        self.live[op.request] = Live(op.tokens, value.cached, value.cached, value.from_host)
        self.seen["hit"] += value.cached > 0
        self.seen["host hit"] += value.from_host > 0
        self.seen["hit on both tiers"] += 0 < value.from_host < value.cached
        self.seen["cold"] += value.cached == 0
        self.seen["tail"] += len(op.tokens) % page != 0
        self.seen["exact pages"] += len(op.tokens) % page == 0
        self.seen["tiny"] += len(op.tokens) <= page
        self.seen["few new tokens"] += 0 < value.cached and len(op.tokens) - value.cached < self.config.shards

    def _extended(self, op: Extend, value: Extended) -> None:
        request = self.live[op.request]
        self.seen["extended"] += 1
        self.seen["continued"] += request.chunks > 0
        self.seen["read a prefix"] += value.start > 0
        self.seen["raced"] += request.chunks == 0 and self._raced(op.request, request)
        if request.chunks == 0 and request.from_host:
            pages = request.from_host // self.config.page_size
            self.seen["restored"] += 1
            self.seen["restored with an empty owner"] += pages < self.config.shards and self.config.layout == "sharded"
        request.computed = value.end
        request.admitted = True
        request.chunks += 1
        self.oracle.wrote(request.tokens, request.computed)
        self.states |= self._prefix_states(request.tokens, request.computed)

    def _raced(self, name: str, request: Live) -> bool:
        """Whether another live request computed the same first page as well."""
        page = self.config.page_size
        first = request.tokens[:page]
        return request.cached == 0 and any(
            other.tokens[:page] == first and other.cached == 0 and other.computed >= page
            for its, other in self.live.items()
            if its != name
        )

    def _compare(self, before: Snapshot, after: Snapshot) -> None:
        """Events that only the tree shows."""
        old, new = before.ranks[0], after.ranks[0]
        if old.nodes is None or new.nodes is None:
            return
        if cached_entries(old) - cached_entries(new):
            self.seen["evicted"] += 1
            self.finished.clear()
        whole = {node.node: len(node.tokens) for node in old.nodes}
        locked = {node.node for node in old.nodes if node.locks}
        pinned = {node.node for node in old.nodes if node.pins}
        for node in new.nodes:
            self.seen["copied"] += bool(node.host_pages) and node.node not in whole
            if len(node.tokens) < whole.get(node.node, 0):
                self.seen["split"] += 1
                self.seen["split while locked"] += node.node in locked
                self.seen["split in flight"] += node.node in pinned and node.pins > 0
        self.seen["copies dropped"] += sum(map(len, old.host_free or ())) < sum(map(len, new.host_free or ()))
        self.seen["host full"] += any(not pages for pages in old.host_free or ())


def states(old: RankView, new: RankView, story: Story) -> Iterator[tuple[str, object, object]]:
    """(name, before, after) of what only an op may change.

    Left out is what background work may do at any time: acknowledge a copy, end the transfer of a request that has
    ended, with what that sets free.
    """
    ended = any(name not in story.live for name in old.requests or {})
    yield "capacity", old.capacity, new.capacity
    if not ended:
        yield "free", old.free, new.free
    live = [{name: its for name, its in (rank.requests or {}).items() if name in story.live} for rank in (old, new)]
    yield "requests", live[0], live[1]
    nodes = [[_still(node, ended=ended) for node in rank.nodes or ()] for rank in (old, new)]
    yield "nodes", nodes[0], nodes[1]


def _still(node: NodeView, *, ended: bool) -> NodeView:
    return replace(node, pins=0, locks=0 if ended else node.locks)


def node_pages(node: NodeView) -> int:
    """Pages of a node, in whichever tier it is."""
    return max(len(node.pages), len(node.host_pages))


def cached_entries(rank: RankView, tier: str = "device") -> set[tuple[int, int]]:
    """(page, hash of all tokens up to the page's end) of every cached page of a tier: also what it holds."""
    return {(page, state) for page, state, _ in chained_entries(rank, tier)}


def chained_entries(rank: RankView, tier: str = "device") -> set[tuple[int, int, int]]:
    """As `cached_entries`, each with the hash of all tokens before the page, 0 for the first page of a chain."""
    ends: dict[int | None, int] = {None: 0}
    entries: set[tuple[int, int, int]] = set()
    for node in rank.nodes or ():
        state, count = ends.get(node.parent, 0), node_pages(node)
        width = len(node.tokens) // max(1, count)
        pages = node.pages if tier == "device" else node.host_pages
        for index in range(count):
            before, state = state, hash((state, node.tokens[index * width : (index + 1) * width]))
            if index < len(pages):
                entries.add((pages[index], state, before))
        ends[node.node] = state
    return entries


def prefix_entries(tokens: tuple[int, ...], pages: tuple[int, ...], page_size: int) -> list[tuple[int, int]]:
    """The entries that these pages make when they hold the whole pages of this prompt."""
    state, entries = 0, []
    for index, page in enumerate(pages[: len(tokens) // page_size]):
        state = hash((state, tokens[index * page_size : (index + 1) * page_size]))
        entries.append((page, state))
    return entries


def cached_pages(rank: RankView) -> set[int]:
    """All pages of the radix tree."""
    return {page for node in rank.nodes or () for page in node.pages}


def held_host_pages(rank: RankView) -> set[int]:
    """All host pages that live requests are going to bring back."""
    return {page for request in (rank.requests or {}).values() for page in request.host_pages}


def held_pages(rank: RankView) -> set[int]:
    """All pages that requests hold, shared ones included, also those of an ended request that a transfer keeps."""
    return {page for view in (rank.requests or {}).values() for page in view.pages}

"""A sharded prefill worker and a decode worker in one process, with rows that tell where they come from.

The rig watches every page that lands: its source must be pinned, its destination drawn for the transfer it belongs to.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from harness.transports.memory import Faults, Landing, Network
from kvshard_ref.components import Component
from kvshard_ref.decode import DecodeWorker
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.sender import KVSender, Sending, Use
from kvshard_ref.transfer import Message, geometry_of, regions

KV = Component("kv", 2, torch.float32)
INDEX = Component("index", 5, torch.uint8, scales=1)
LAYERS = 2


def stamps(component: Component, request: int, tokens: range) -> torch.Tensor:
    """Rows [layers, tokens, width]: no two requests, layers, tokens or components have a row in common."""
    layer, token, at = torch.meshgrid(
        torch.arange(LAYERS), torch.arange(tokens.start, tokens.stop), torch.arange(component.width), indexing="ij"
    )
    values = ((request * 2 + layer) * 41 + token) * 7 + at + len(component.name)
    return (
        (values % 251 + 1).to(component.dtype) if component.dtype == torch.uint8 else (values + 1).to(component.dtype)
    )


class Ready:
    """The event behind a forward: rows are written when it happens, not before."""

    def __init__(self, source: Source, request: Request, tokens: range, ticks: int) -> None:
        self.source, self.request, self.tokens, self.ticks = source, request, tokens, ticks
        self.happened = False

    def tick(self) -> None:
        self.ticks -= 1
        if self.ticks <= 0 and not self.happened:
            self.happened = True
            self.source.write(self.request, self.tokens)

    def query(self) -> bool:
        return self.happened


@dataclass(eq=False)
class Request:
    """One prompt: where its pages are, and how far it has been sent."""

    id: int
    room: int
    tokens: int
    pages: list[int]
    ends: list[int]
    """Tokens computed after each chunk, the last is `tokens`."""
    ready_ticks: list[int]
    generation: int = 0
    chunk: int = 0
    sendings: dict[int, Sending] = field(default_factory=dict)
    """By rank."""
    freed: bool = False


class Source:
    """The prefill worker: N pools and senders; its scheduler starts together and frees when all have finished."""

    def __init__(self, network: Network, names: Sequence[str], pools: Sequence[ShardPool]) -> None:
        self.pools = list(pools)
        self.senders = [KVSender([pool], network.end(name)) for name, pool in zip(names, pools, strict=True)]
        self.events: list[Ready] = []
        self.pinned: dict[int, Request] = {}

    def write(self, request: Request, tokens: range) -> None:
        ps = self.pools[0].placement.page_size
        locs = np.array([request.pages[t // ps] * ps + t % ps for t in tokens], np.int64)
        for pool in self.pools:
            owned = pool.owned(locs)
            for component in pool.components:
                rows = stamps(component, request.id, tokens)
                for layer in range(LAYERS):
                    pool.write(layer, component.name, owned, rows[layer])

    def free(self, request: Request) -> None:
        """Free the request's pages and scribble over them, as their next owner would."""
        request.freed = True
        for page in request.pages:
            del self.pinned[page]
            pool = self.pools[page % len(self.pools)]
            for component in pool.components:
                for layer in range(LAYERS):
                    pool.pages(layer, component.name)[page // len(self.pools)] = 77


class Rig:
    """Source, decode worker, network; `step` is one turn of everybody."""

    def __init__(
        self,
        ranks: int = 2,
        ps: int = 2,
        components: Sequence[Component] = (KV, INDEX),
        faults: Faults | None = None,
        decode_pages: int = 24,
        source_pages: int = 12,
    ) -> None:
        self.ps, self.components = ps, tuple(components)
        self.network = Network(faults, self.watch)
        self.names = [f"p{rank}" for rank in range(ranks)]
        place = Placement(ranks, ps)
        pools = [ShardPool(rank, place, source_pages, LAYERS, components) for rank in range(ranks)]
        self.source = Source(self.network, self.names, pools)
        self.decode_pool = ShardPool(0, Placement(1, ps), decode_pages, LAYERS, components)
        self.decode = DecodeWorker([self.decode_pool], self.network.end("d"), self.names)
        self.dead: set[str] = set()
        self.landings: dict[tuple[int, int], Counter[tuple[str, int]]] = {}
        """(room, generation) -> (region, dst page) -> times."""
        self.decode.connect()

    def request(
        self,
        request_id: int,
        pages: Sequence[int],
        tokens: int,
        ends: Sequence[int] = (),
        room: int = 1,
        ready: int = 0,
    ) -> Request:
        """A request whose pages are pinned at the source."""
        ends = [*ends, tokens]
        request = Request(request_id, room, tokens, list(pages), ends, [ready] * len(ends))
        self.source.pinned |= dict.fromkeys(pages, request)
        return request

    def watch(self, landing: Landing) -> None:
        """A page lands now: source pinned, destination drawn, its slot open for this writer."""
        if landing.peer != "d":
            return
        page = landing.src * len(self.names) + self.names.index(landing.writer)
        assert page in self.source.pinned, f"source page {page} was freed before {landing}"
        slots = [slot for slot in self.decode.slots.values() if landing.dst in slot.pages and slot.state != "failed"]
        assert len(slots) == 1, f"no room holds the page that is written: {landing}"
        assert landing.writer in slots[0].writers, f"the rank had concluded: {landing}"
        times = self.landings.setdefault(slots[0].use, Counter())
        times[landing.region, landing.dst] += 1

    def step(self, times: int = 1) -> None:
        """Events happen, every end polls."""
        for _ in range(times):
            for event in self.source.events:
                event.tick()
            for name, sender in zip(self.names, self.source.senders, strict=True):
                if name not in self.dead:
                    sender.poll()
            if "d" not in self.dead:
                self.decode.poll()

    def lose(self, name: str) -> None:
        self.dead.add(name)
        self.network.lose(self.network.ends[name])

    def alive(self) -> list[int]:
        return [rank for rank, name in enumerate(self.names) if name not in self.dead]

    def start(self, request: Request) -> bool:
        """Start on all ranks, once all have the reservation."""
        use = ("d", request.room, request.generation)
        senders = {rank: self.source.senders[rank] for rank in self.alive()}
        if len(senders) < len(self.names) or not all(knows(sender, use) for sender in senders.values()):
            return False
        found = {rank: sender.find("d", use[1], len(request.pages)) for rank, sender in senders.items()}
        if any(sending.why for sending in found.values()):
            return False
        request.sendings = found
        return True

    def state(self, room: int) -> str:
        return self.decode.slots[room].state

    def used(self) -> int:
        """D's pages that are not free."""
        return used_pages(self.decode)

    def send(self, request: Request) -> None:
        """The next chunk: its event, then `send` on all ranks."""
        start, end = ([0, *request.ends])[request.chunk], request.ends[request.chunk]
        event = Ready(self.source, request, range(start, end), request.ready_ticks[request.chunk])
        request.chunk += 1
        event.tick()
        self.source.events.append(event)
        have = -(-end // self.ps)
        for sending in request.sendings.values():
            sending.send(request.pages[:have], end, event, last=request.chunk == len(request.ends))

    def through(self, request: Request, steps: int = 60) -> str:
        """Reserve, send all chunks, poll until the room is complete or failed."""
        self.step(2)
        request.generation = self.decode.reserve(request.room, request.tokens)
        for _ in range(steps):
            if self.state(request.room) in {"complete", "failed"}:
                break
            if (request.sendings or self.start(request)) and request.chunk < len(request.ends):
                self.send(request)
            self.step()
        return self.state(request.room)

    def expected(self, request: Request) -> dict[str, list[int]]:
        return {c.name: bits(stamps(c, request.id, range(request.tokens))) for c in self.components}

    def rows(self, request: Request) -> dict[str, list[int]]:
        return {name: bits(rows) for name, rows in self.decode.rows(request.room).items()}

    def page_bytes(self) -> int:
        return sum(component.row_bytes for component in self.components) * LAYERS * self.ps


class Hand:
    """An end whose messages a test writes by itself, in place of a whole worker."""

    def __init__(self, network: Network, name: str, pool: ShardPool, shards: int) -> None:
        self.pool, self.shards = pool, shards
        self.end = network.end(name)
        self.end.register(regions([pool]))

    def hello(self, peer: str, rank: int) -> None:
        self.end.connect(peer)
        self.say(peer, Message("hello", body=geometry_of([self.pool], self.shards, rank)))

    def say(self, peer: str, message: Message) -> None:
        self.end.notify(peer, json.dumps(message).encode())

    def heard(self) -> list[Message]:
        """What has arrived, hellos left out."""
        messages = [Message(*json.loads(data)) for _, data in self.end.messages()]
        return [message for message in messages if message.kind not in {"hello", "welcome"}]


def knows(sender: KVSender, use: Use) -> bool:
    """Whether the rank has the reservation and has not used it."""
    return any(sending.use == use and not (sending.started or sending.why) for sending in sender.sendings)


def used_pages(decode: DecodeWorker) -> int:
    return decode.allocator.pages_per_rank - sum(decode.allocator.free_counts())


def bits(rows: torch.Tensor) -> list[int]:
    return rows.contiguous().view(torch.uint8).flatten().tolist()

"""Receiver: what the first rank of a decode worker does alone: make room for prompts, and wait for their rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvshard_ref.decode import DecodeWorker
from kvshard_ref.errors import RefusedError
from kvshard_ref.pool import ShardPool
from kvshard_ref.server.api import Ask
from kvshard_ref.server.generate import tokens_needed
from kvshard_ref.transport import PeerLostError, Transport


@dataclass(frozen=True, slots=True)
class Arrived:
    """A prompt whose rows are all here, on `pages` by position; the pages after the prompt's are for the answer."""

    ask: Ask
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Failed:
    """A prompt that will not come."""

    ask: Ask
    why: str
    status: int


class Receiver:
    """`drafts`: tokens beyond the answer that need pages, too."""

    def __init__(self, pools: Sequence[ShardPool], transport: Transport, drafts: int) -> None:
        self._pools, self._transport, self._drafts = pools, transport, drafts
        self._worker: DecodeWorker | None = None
        self._waiting: deque[Ask] = deque()
        self._rooms: dict[int, tuple[Ask, list[int]]] = {}  # rows on their way, with the pages of the answer
        self._begun: dict[str, tuple[int, list[int]]] = {}  # by rid: room and pages of the answer

    @property
    def busy(self) -> bool:
        """Whether rows are on their way, or asks wait for room."""
        return bool(self._waiting or self._rooms)

    @property
    def queues(self) -> dict[str, float]:
        """Asks that wait for room, and those whose rows are on their way."""
        return {
            "num_decode_prealloc_queue_reqs": len(self._waiting),
            "num_decode_transfer_queue_reqs": len(self._rooms),
        }

    @property
    def free_pages(self) -> int:
        """Pages that nobody has."""
        return sum(self._worker.allocator.free_counts()) if self._worker else self._pools[0].pages_per_rank

    def add(self, ask: Ask, ranks: Sequence[str]) -> None:
        """An ask whose rows come from these ranks. Raises RefusedError when they are others than before."""
        if self._worker is None:
            self._worker = DecodeWorker(self._pools, self._transport, ranks)
        if list(self._worker.ranks) != list(ranks):
            raise RefusedError(f"prefill ranks {list(ranks)}, expected {list(self._worker.ranks)}: one prefill worker")
        self._waiting.append(ask)

    def abort(self, rid: str) -> None:
        """The ask has ended, wherever it is; its pages are free once nobody writes to them."""
        self._waiting = deque(ask for ask in self._waiting if ask.rid != rid)
        for room in [room for room, (ask, _) in self._rooms.items() if ask.rid == rid]:
            self._give_up(room)
        if rid in self._begun and self._worker:
            room, more = self._begun.pop(rid)
            self._worker.allocator.free(more)
            self._worker.release(room)

    def poll(self) -> list[Arrived | Failed]:
        """Make room for those that wait, in order; tell what has come and what will not."""
        if self._worker is None:
            return []
        self._reach(self._worker)
        self._worker.poll()
        found: list[Arrived | Failed] = []
        while self._waiting:
            ask = self._waiting[0]
            verdict = self._reserve(self._worker, ask)
            if verdict == "":
                break
            self._waiting.popleft()
            if verdict is not None:
                found.append(Failed(ask, verdict, 500))
        for room in [room for room, slot in self._worker.slots.items() if slot.state == "failed"]:
            if room not in self._rooms:
                self._worker.release(room)  # given up earlier, and now nobody writes to it
        for room in list(self._rooms):
            slot = self._worker.slot(room)
            if slot.state == "complete":
                ask, more = self._rooms.pop(room)
                self._begun[ask.rid] = (room, more)
                found.append(Arrived(ask, [*slot.pages, *more]))
            elif slot.why:
                ask, why = self._rooms[room][0], slot.why
                self._give_up(room)
                found.append(Failed(ask, why, 500))
        return found

    def _reach(self, worker: DecodeWorker) -> None:
        try:
            worker.connect()
        except PeerLostError:
            return  # it is said of every ask that waits for it, in time

    def _reserve(self, worker: DecodeWorker, ask: Ask) -> str | None:
        """None when there is room, "" when there may be later, else why there never is."""
        ps, capacity = worker.allocator.placement.page_size, worker.allocator.pages_per_rank
        count = -(-tokens_needed(ask, self._drafts) // ps)
        misfits = [refusal for refusal in worker.link.refusals.values() if refusal]
        if misfits:
            return "; ".join(misfits)
        if count > capacity:
            return f"prompt and answer need {count} pages, the decode worker has {capacity}"
        if count > sum(worker.allocator.free_counts()):
            return ""
        try:
            worker.reserve(ask.room or 0, len(ask.tokens))
        except RefusedError:
            return ""
        more = worker.allocator.draw_run(0, count - -(-len(ask.tokens) // ps)) or []
        self._rooms[ask.room or 0] = (ask, more)
        return None

    def _give_up(self, room: int) -> None:
        _, more = self._rooms.pop(room)
        if self._worker:
            self._worker.allocator.free(more)
            self._worker.release(room)

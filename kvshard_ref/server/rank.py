"""One rank of a worker: it follows the messages that rank 0 has read from the face, in the same order on all ranks.

A round::

    rank 0   reads what has come from the face, adds what it alone knows (rows have arrived, time is up)
    all      get that list, act on it, compute one prefill batch and one pass of every answer
    rank 0   tells the face what is new
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from io import RawIOBase
from typing import Any, BinaryIO

import torch.distributed as dist

from kvshard_ref.errors import RefusedError
from kvshard_ref.server.api import ABORT, Ask, Stats, Step
from kvshard_ref.server.frames import Message, framed, read_frame
from kvshard_ref.server.halves import DecodeHalf, PrefillHalf
from kvshard_ref.server.receive import Arrived, Receiver
from kvshard_ref.server.settings import Settings

IDLE_SECONDS = 0.05
WAITING_SECONDS = 0.002
STUCK_SECONDS = 5.0
Inbox = queue.SimpleQueue[Message | None]


class Rank:
    """The halves that this rank has, and what it tells the face. `receiver` on the first rank of a decode worker."""

    def __init__(
        self,
        settings: Settings,
        rank: int,
        tell: Callable[[Message], None],
        prefill: PrefillHalf | None,
        decode: DecodeHalf | None,
        receiver: Receiver | None,
    ) -> None:
        self.settings, self.rank, self._tell = settings, rank, tell
        self.prefill, self.decode, self.receiver = prefill, decode, receiver
        self.worked = False  # the last round did something
        self._since: dict[str, float] = {}  # by rid: since when the other side is waited for; rank 0 only

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        halves = (self.prefill and self.prefill.prefiller.busy, self.decode and self.decode.busy)
        return any(halves) or bool(self.receiver and self.receiver.busy)

    def lead(self, come: Sequence[Message]) -> list[Message]:
        """Rank 0: what all ranks must do, from what has come and from what it sees itself."""
        orders: list[Message] = []
        for message in come:
            if message["kind"] == "ask" and self.receiver:
                orders += self._receive(message)
            else:
                orders.append(message)
        if self.receiver:
            for each in self.receiver.poll():
                self._since.pop(each.ask.rid, None)
                if isinstance(each, Arrived):
                    orders.append({"kind": "begin", "ask": asdict(each.ask), "pages": each.pages})
                else:
                    orders.append(_abort(each.ask.rid, each.why, each.status))
        return orders + self._late()

    def follow(self, orders: Sequence[Message]) -> bool:
        """Carry out one round; whether the worker goes on."""
        steps: list[Step] = []
        for order in orders:
            if order["kind"] == "stop":
                return False
            steps += self._obey(order)
        if self.prefill:
            steps += self.prefill.prefiller.step()
        if self.decode:
            steps += self.decode.step()
        self.worked = bool(orders or steps or (self.prefill and self.prefill.prefiller.computed))
        if self.rank == 0:
            for step in steps:
                if step.finished:
                    self._since.pop(step.rid, None)
                    if self.receiver:
                        self.receiver.abort(step.rid)  # its pages are free again
            if steps:
                self._tell({"kind": "steps", "steps": [asdict(step) for step in steps]})
        return True

    def _receive(self, message: Message) -> list[Message]:
        ask = ask_of(message["ask"])
        try:
            if self.receiver:
                self.receiver.add(ask, message["ranks"])
                self._since[ask.rid] = time.monotonic()
        except RefusedError as refusal:
            return [_abort(ask.rid, refusal.why, 500)]
        return []

    def _late(self) -> list[Message]:
        """Asks that have waited too long for the other side."""
        limit, now = self.settings.disaggregation_timeout, time.monotonic()
        if self.prefill:
            for rid in self.prefill.prefiller.unheard():
                self._since.setdefault(rid, now)
        side = "a decode worker has not taken" if self.prefill else "the prefill worker has not sent"
        why = f"{side} the prompt's pages within {limit:g} s"
        return [_abort(rid, why, 504) for rid, since in list(self._since.items()) if now - since > limit]

    def _obey(self, order: Message) -> list[Step]:
        kind = order["kind"]
        if kind == "ask" and self.prefill:
            self.prefill.prefiller.waiting.append(ask_of(order["ask"]))
        elif kind == "begin" and self.decode:
            self.decode.begin(ask_of(order["ask"]), order["pages"], relay=True)
        elif kind == "abort":
            return self._abort(order)
        elif kind == "flush":
            why = self._flush()
            if self.rank == 0:
                self._tell({"kind": "answer", "number": order["number"], "body": why})
        elif kind == "stats":
            self._tell({"kind": "answer", "number": order["number"], "body": asdict(self.stats())})
        return []

    def _abort(self, order: Message) -> list[Step]:
        rid, why, status = order["rid"], order.get("why", ""), order.get("status", 200)
        self._since.pop(rid, None)
        steps = self.prefill.prefiller.abort(rid, why, status) if self.prefill else []
        if self.decode:
            self.decode.abort(rid)
        if self.receiver:
            self.receiver.abort(rid)
        return steps or [Step(rid=rid, finished=ABORT, error=why, status=status)]

    def _flush(self) -> str:
        if self.busy:
            return "requests are in flight"
        try:
            if self.prefill:
                self.prefill.prefiller.worker.flush()
        except RefusedError as refusal:
            return refusal.why
        return ""

    def stats(self) -> Stats:
        """This rank's counters and gauges."""
        counters: dict[str, float] = {}
        gauges: dict[str, float] = {}
        for half in (self.prefill, self.decode):
            if half:
                more = half.stats()
                counters |= more[0]
                gauges |= more[1]
        if self.receiver:
            gauges |= {"decode_free_pages": self.receiver.free_pages, **self.receiver.queues}
        return Stats(self.rank, counters, gauges)


def ask_of(fields: dict[str, Any]) -> Ask:
    """An Ask from its JSON form."""
    return Ask(**{**fields, "tokens": tuple(fields["tokens"]), "stop_tokens": tuple(fields["stop_tokens"])})


def _abort(rid: str, why: str, status: int) -> Message:
    return {"kind": "abort", "rid": rid, "why": why, "status": status}


def serve(rank: Rank, inbox: Inbox, followers: int, group: Any) -> None:
    """Rounds until the face says stop or is gone. `group` reaches the other ranks."""
    while True:
        orders: list[Message] = []
        if rank.rank == 0:
            pause = 0.0 if rank.worked else WAITING_SECONDS if rank.busy else IDLE_SECONDS
            orders = rank.lead(come(inbox, pause))
        if followers:
            box: list[Any] = [orders]
            dist.broadcast_object_list(box, src=0, group=group)
            orders = box[0]
        if not rank.follow(orders):
            return


def come(inbox: Inbox, seconds: float) -> list[Message]:
    """What has come from the face; waits so long for something."""
    found: list[Message | None] = []
    try:
        found.append(inbox.get(timeout=seconds) if seconds else inbox.get_nowait())
        while True:
            found.append(inbox.get_nowait())
    except queue.Empty:
        return [{"kind": "stop"} if message is None else message for message in found]


def listen(pipe: RawIOBase, inbox: Inbox) -> None:
    """Put what comes from the face into the inbox. When the face is gone, so is this process, whatever it waits for."""
    while (message := read_frame(pipe)) is not None:
        inbox.put(message)
    inbox.put(None)
    time.sleep(STUCK_SECONDS)
    os._exit(1)


def start_listening(pipe: RawIOBase) -> Inbox:
    """An inbox that a thread fills."""
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=listen, args=(pipe, inbox), daemon=True).start()
    return inbox


def teller(pipe: BinaryIO) -> Callable[[Message], None]:
    """Tells the face; a face that is gone hears nothing."""

    def tell(message: Message) -> None:
        try:
            pipe.write(framed(message))
            pipe.flush()
        except BrokenPipeError:
            sys.exit(1)

    return tell

"""llama.cpp's slots as a second tier: what a slot has answered is saved to a file, and restored once no slot holds it.

The server saves, restores and erases a slot when it is asked to and never by itself. Here it is asked as a router would
that keeps answered prompts: saved after each whole answer, restored into the slot that was used longest ago before a
request that shares more with a file than with any slot. Beside each other, requests may cost one another a copy, since
a slot may be given away before it is saved; the server compares tokens itself, so that costs a hit and no answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import takewhile

from harness.adapters.http_client import Client, Exchange, Json, LostError

Prompt = tuple[int, ...]


class SlotTier:
    """The files of one server, for at most so many tokens; the oldest go first."""

    def __init__(self, client: Client, tokens: int, slots: int) -> None:
        self.tokens, self._client = tokens, client
        self._lock = threading.Lock()
        self._held: dict[int, Prompt] = dict.fromkeys(range(slots), ())  # the slot that was used longest ago first
        self._saved: dict[Prompt, str] = {}  # the oldest first
        self._spare: list[str] = []  # files that hold nothing any more

    @property
    def used(self) -> int:
        """Tokens of all files."""
        return sum(map(len, self._saved))

    def forget(self) -> None:
        """Drops all that slots and files hold."""
        with self._lock:
            self._spare += self._saved.values()
            self._saved.clear()
            self._held = dict.fromkeys(self._held, ())

    def restored(self, prompt: Prompt) -> int | None:
        """The slot into which a prompt was brought back; None when no file has more of it than a slot."""
        with self._lock:
            best = max(self._saved, key=lambda kept: _shared(kept, prompt), default=())
            if _shared(best, prompt) <= max(_shared(kept, prompt) for kept in self._held.values()):
                return None
            slot = next(iter(self._held))
            self._told(slot, "restore", self._saved[best])
            self._use(slot, best)
            return slot

    def answered(self, prompt: Prompt, slot: int) -> None:
        """A slot has answered a prompt: saves it."""
        with self._lock:
            self._use(slot, prompt)
            if prompt in self._saved or len(prompt) > self.tokens:
                return
            while self.used + len(prompt) > self.tokens:
                self._spare.append(self._saved.pop(next(iter(self._saved))))
            name = self._spare.pop() if self._spare else f"{len(self._saved)}.slot"
            self._told(slot, "save", name)
            self._saved[prompt] = name

    def _use(self, slot: int, prompt: Prompt) -> None:
        self._held.pop(slot, None)
        self._held[slot] = prompt

    def _told(self, slot: int, action: str, name: str) -> None:
        told = self._client.post(f"/slots/{slot}?action={action}", {"filename": name})
        if not told.ok:
            raise LostError(f"{self._client.url}: {action} of slot {slot}: {told.why}")


class SlotExchange(Exchange):
    """A completion whose prompt is restored before and saved after; its last event says which."""

    def __init__(self, tier: SlotTier, url: str, path: str, body: Json, seconds: float) -> None:
        super().__init__(url, "POST", path, body, seconds)
        self._tier, self._asked = tier, body
        self._slot: int | None = None

    def ask(self) -> None:
        """Restores, where there is more in a file than in a slot, and asks that slot."""
        self._slot = self._tier.restored(tuple(self._asked["prompt"]))
        if self._slot is not None:
            self._body = json.dumps({**self._asked, "id_slot": self._slot}).encode()
        super().ask()

    def events(self) -> Iterator[Json]:
        """The same events. The slot is saved when the last one has come."""
        for event in super().events():
            if event.get("stop"):
                self._tier.answered(tuple(self._asked["prompt"]), event["id_slot"])
            yield {**event, "restored": self._slot is not None}


def _shared(one: Prompt, other: Prompt) -> int:
    """Tokens that both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

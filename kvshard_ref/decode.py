"""DecodeWorker: unsharded pools that prefill ranks fill, one room per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvshard_ref.allocator import PageAllocator
from kvshard_ref.device import DeviceModule, device_module_of
from kvshard_ref.errors import RefusedError, UnknownRequestError
from kvshard_ref.pool import ShardPool
from kvshard_ref.transfer import Link, Message, components_of, flaw, geometry_of
from kvshard_ref.transport import Transport


@dataclass(slots=True, eq=False)
class Slot:
    """One use of a room."""

    use: tuple[int, int]  # room and generation
    tokens: int
    pages: list[int]  # D's, by position, the same for all components
    writers: list[str]  # ranks that have not concluded, so may still write
    said: dict[str, Message]  # what the others concluded with
    why: str = ""  # it is given up

    @property
    def state(self) -> str:
        """First "waiting", then "complete"; or "aborting" while ranks may still write, then "failed", pages freed."""
        if self.why:
            return "aborting" if self.writers else "failed"
        return "waiting" if self.writers else "complete"


class DecodeWorker:
    """Reserve a room, poll until it is "complete" or "failed", read its rows, release it. `ranks` names all of P's.

    Peers write to its pages on no stream of this device: nothing may be pending on a page that they are told of.
    """

    def __init__(
        self, pools: Sequence[ShardPool], transport: Transport, ranks: Sequence[str], module: DeviceModule | None = None
    ) -> None:
        self.pools = pools
        self.allocator = PageAllocator(pools[0].placement, pools[0].pages_per_rank)
        self.slots: dict[int, Slot] = {}  # by room, until `release`
        self.ranks = {name: rank for rank, name in enumerate(ranks)}
        self.link = Link(transport, pools, lambda name: geometry_of(pools, len(ranks), self.ranks.get(name, -1)))
        self._generation, self._landed = 0, transport.landed
        self._device_module = module or device_module_of(pools[0].device)
        self._device_module.synchronize()  # the pools' first values are written

    def connect(self) -> None:
        """Say hello to the ranks that have not agreed; again after a loss. Raises PeerLostError."""
        for name in [each for each in self.ranks if self.link.refusal(each)]:
            self.link.connect(name)

    def reserve(self, room: int, tokens: int) -> int:
        """Draw pages for a request's `tokens` and tell all ranks. Returns the generation.

        Raises RefusedError, with nothing changed, when a rank does not fit or has not answered the hello, the room is
        in use, or pages are short.
        """
        refusals = [self.link.refusal(name) for name in self.ranks]
        if room in self.slots and self.slots[room].state != "failed":
            refusals.append(f"room {room} is {self.slots[room].state}: release it and poll, or take another")
        if any(refusals):
            raise RefusedError("; ".join(filter(None, refusals)))
        count = -(-tokens // self.allocator.placement.page_size)
        pages = self.allocator.draw_run(0, max(count, 0))
        if not pages:
            raise RefusedError(f"{tokens} tokens need {count} pages, expected 1..{sum(self.allocator.free_counts())}")
        self._generation += 1
        slot = self.slots[room] = Slot((room, self._generation), tokens, pages, list(self.ranks), {})
        for name in self.ranks:
            self.link.tell(name, Message("reserved", *slot.use, [pages, self.link.components]))
        return self._generation

    def poll(self) -> None:
        """Hear what has arrived, and which ranks are lost. Never waits."""
        for name, message in self.link.hear():
            for slot in self.slots.values():
                if name in slot.writers and (message.kind == "lost" or message[1:3] == slot.use):
                    self._conclude(slot, name, message)

    def slot(self, room: int) -> Slot:
        """The room's use now. Raises UnknownRequestError."""
        if room not in self.slots:
            raise UnknownRequestError(f"room {room} is not in use, expected one of {sorted(self.slots)}; reserve it")
        return self.slots[room]

    def rows(self, room: int) -> dict[str, torch.Tensor]:
        """Per component the request's rows [layers, tokens, width], copied. Raises RefusedError unless complete."""
        slot, place = self.slot(room), self.allocator.placement
        if slot.state != "complete":
            raise RefusedError(f"room {room} is {slot.state} {slot.why}: expected it complete, poll until it is")
        locs = [loc for page in slot.pages for loc in place.page_locs(page)][: slot.tokens]
        rows = torch.tensor(locs, device=self.pools[0].device)
        return {
            c.name: torch.stack([pool.rows_of(layer, c.name).take(rows) for layer in range(pool.layers)])
            for pool, c in components_of(self.pools)
        }

    def release(self, room: int) -> None:
        """Forget the room and free its pages, once this device has read them.

        While ranks may still write to it the room is given up instead, and its pages are free when it is "failed".
        """
        slot = self.slot(room)
        self._device_module.synchronize()
        if slot.state == "complete":
            self.allocator.free(slot.pages)
        if slot.writers:
            self._give_up(slot, "released before it was complete")
        else:
            del self.slots[room]

    def _conclude(self, slot: Slot, name: str, message: Message) -> None:
        """A rank writes no more; what it says after that is ignored. The last one's word settles the room."""
        slot.writers.remove(name)
        slot.said[name] = message
        if message.kind != "done":
            self._give_up(slot, f"rank {name!r}: {message.kind}, {message.body}")
        elif not (slot.writers or slot.why):
            self._landed(slot.pages)
            self._give_up(slot, flaw([slot.said[each].body for each in self.ranks], slot.pages))
        if slot.state == "failed":
            self.allocator.free(slot.pages)

    def _give_up(self, slot: Slot, why: str) -> None:
        """Tell the ranks that may still write, if there is a reason; the first one counts."""
        if why and not slot.why:
            slot.why = why
            for name in slot.writers:
                self.link.tell(name, Message("abort", *slot.use, why))

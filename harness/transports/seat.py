"""Seat: one end of a transport, used by plain commands, so that a test can use an end in another process."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvshard_ref.transport import PENDING, Block, Ticket, Transport

POLL_SECONDS = 0.0002


def stamp(seed: int, pages: int, page_bytes: int) -> torch.Tensor:
    """Bytes [pages, page_bytes] that two processes can make alike; seed 0 is all zeros."""
    if not seed:
        return torch.zeros(pages, page_bytes, dtype=torch.uint8)
    numbers = torch.Generator().manual_seed(seed)
    words = -(-page_bytes // 8)
    page, word = (torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=numbers) for count in (pages, words))
    return (page[:, None] ^ word[None, :]).view(torch.uint8)[:, :page_bytes].contiguous()


def digest(pages: torch.Tensor) -> str:
    """Name of the content of pages [n, page_bytes]."""
    return hashlib.sha256(pages.contiguous().numpy().data).hexdigest()


class Seat:
    """A command is a method; arguments and answers are JSON values."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.regions: dict[str, torch.Tensor] = {}
        self.tickets: list[Ticket] = []
        self.mailbox: list[tuple[str, str]] = []

    def register(self, regions: dict[str, list[int]]) -> None:
        """Regions of zeros: name -> [pages, page_bytes]."""
        self.regions = {name: torch.zeros(*shape, dtype=torch.uint8) for name, shape in regions.items()}
        self.transport.register(self.regions)

    def fill(self, region: str, seed: int) -> str:
        """Stamp the region; its digest."""
        self.regions[region].copy_(stamp(seed, *self.regions[region].shape))
        return digest(self.regions[region])

    def digest(self, region: str) -> str:
        """Of the region's content."""
        return digest(self.regions[region])

    def pages(self, region: str, pages: Sequence[int]) -> str:
        """Content of some pages, in base64."""
        return base64.b64encode(self.regions[region][list(pages)].numpy().tobytes()).decode()

    def connect(self, peer: str) -> None:
        """As the transport does."""
        self.transport.connect(peer)

    def write(self, peer: str, blocks: Sequence[Sequence[Any]]) -> int:
        """Number of the ticket."""
        self.tickets.append(self.transport.write(peer, [Block(*block) for block in blocks]))
        return len(self.tickets) - 1

    def poll(self, ticket: int) -> str:
        """As the ticket does."""
        return self.tickets[ticket].poll()

    def wait(self, ticket: int, seconds: float = 20.0) -> str:
        """How the ticket ended, or that it is pending still."""
        until(lambda: self.tickets[ticket].poll() != PENDING, seconds)
        return self.tickets[ticket].poll()

    def write_and_tell(self, peer: str, blocks: Sequence[Sequence[Any]], message: str) -> str:
        """Write, and notify in the very moment that the ticket is done, as a sender does."""
        ticket = self.transport.write(peer, [Block(*block) for block in blocks])
        self._end(ticket)
        self.transport.notify(peer, message.encode())
        return ticket.poll()

    def notify(self, peer: str, message: str) -> None:
        """As the transport does."""
        self.transport.notify(peer, message.encode())

    def messages(self) -> list[list[str]]:
        """All that have come since this was asked last."""
        self._collect()
        taken, self.mailbox = self.mailbox, []
        return [list(one) for one in taken]

    def wait_messages(self, count: int, seconds: float = 20.0) -> list[list[str]]:
        """The same, when there are `count` of them, or when time is over."""
        until(lambda: self._collect() >= count, seconds)
        return self.messages()

    def await_pages(self, region: str, seed: int, seconds: float = 20.0) -> list[int]:
        """Wait for a message and look at once, last page first: the pages that do not carry the stamp yet."""
        want = stamp(seed, *self.regions[region].shape)
        until(lambda: self._collect() > 0, seconds)
        self.mailbox.clear()
        have = self.regions[region]
        return [page for page in range(len(want) - 1, -1, -1) if not torch.equal(want[page], have[page])]

    def lost(self) -> list[str]:
        """As the transport does."""
        return sorted(self.transport.lost())

    def wait_lost(self, peer: str, seconds: float = 20.0) -> list[str]:
        """The lost peers, when `peer` is one of them, or when time is over."""
        until(lambda: peer in self.transport.lost(), seconds)
        return self.lost()

    def time_writes(self, peer: str, blocks: Sequence[Sequence[Any]], repeats: int) -> list[float]:
        """Seconds of each of `repeats` writes, from the call to the done ticket."""
        taken = []
        for _ in range(repeats):
            begin = time.perf_counter()
            ticket = self.transport.write(peer, [Block(*block) for block in blocks])
            self._end(ticket)
            taken.append(time.perf_counter() - begin)
            if ticket.poll() != "done":
                raise RuntimeError(f"a write of {len(blocks)} blocks to {peer!r} is {ticket.poll()}, expected done")
        return taken

    def close(self) -> None:
        """Leave the network."""
        self.transport.close()

    @staticmethod
    def _end(ticket: Ticket) -> bool:
        return until(lambda: ticket.poll() != PENDING, 60.0, 0.00005)

    def _collect(self) -> int:
        self.mailbox.extend((peer, message.decode()) for peer, message in self.transport.messages())
        return len(self.mailbox)


def until(true: Callable[[], bool], seconds: float, pause: float = POLL_SECONDS) -> bool:
    """Wait until it is true; False when it is not within `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True

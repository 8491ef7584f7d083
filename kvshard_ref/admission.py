"""Admission: who joins a prefill batch. A request is admitted once, with its first chunk, for all its pages.

For every owner class c, at all times

    promised[c] <= free[c] + evictable[c]          promised: pages that admitted requests have not drawn yet

so an admitted request can always finish, whatever class is scarce. Summed over classes, or taken as the scarcest
class times N, the same numbers admit what cannot be drawn: eviction may free no page of the scarce class.
Scratch rule: sglang 0.5.23, managers/schedule_policy.py. The rule for pages is our choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvshard_ref.errors import RefusedError
from kvshard_ref.placement import Placement
from kvshard_ref.plan import block_pages
from kvshard_ref.request import Request
from kvshard_ref.scratch import ScratchSize

HOST_IDS = 1 << 40
"""More pages than any rank has."""


class Grant(NamedTuple):
    """A chunk that may run: the request computes up to token `end`."""

    request: Request
    end: int
    base: int
    promise: list[int]
    """Pages per owner class that admitting the request promises; zeros when it is admitted already."""


class Review:
    """One greedy pass over a batch: each grant counts against the requests after it. Changes nothing but itself."""

    def __init__(
        self,
        placement: Placement,
        free: list[int],
        evictable: list[int],
        promised: list[int],
        scratch: ScratchSize | None,
        padding: str,
    ) -> None:
        self.placement = placement
        self._free = free
        self._evictable = evictable
        self._promised = promised.copy()
        self._scratch = scratch
        self._padding = padding
        self._prefixes: list[list[int]] = []
        self._chunk_pages = 0

    def grant(self, request: Request, end: int) -> Grant:
        """Grant the chunk up to token `end`, or raise RefusedError with the numbers."""
        chunk_pages = -(-end // self.placement.page_size) - len(request.pages) - len(request.slots)
        prefix = self._prefix(request)
        self._check_scratch(request, prefix, chunk_pages)
        base, promise = self._place(request)
        self._promised = add(self._promised, promise)
        self._prefixes.append(prefix)
        self._chunk_pages += chunk_pages
        return Grant(request, end, base, promise)

    def _place(self, request: Request) -> tuple[int, list[int]]:
        """Rotation base and promise: a new chain tries the bases from the roomiest class down, ties to the lowest."""
        shards = self.placement.shards
        if request.admitted and request.base is not None:
            return request.base, [0] * shards
        spare = subtract(self._free, self._promised)
        room = add(spare, self._evictable)
        roomiest_first = sorted(range(shards), key=spare.__getitem__, reverse=True)
        for base in roomiest_first if request.base is None else [request.base]:
            needs = pages_left(request, base, self.placement)
            if all(need <= have for need, have in zip(needs, room, strict=True)):
                return base, needs
        raise RefusedError(
            f"request {request.name!r} needs {request.pages_total - len(request.pages)} more pages from rotation base "
            f"{'any' if request.base is None else request.base}, position {len(request.pages)}; per owner class there "
            f"are free {self._free} + evictable {self._evictable} - promised {self._promised} = {room}"
        )

    def _prefix(self, request: Request) -> list[int]:
        """The prefix as page ids; a page that is still on the host has a negative one, of its class and its own."""
        return [*request.pages, *(slot - HOST_IDS * self.placement.shards for slot in request.slots)]

    def _check_scratch(self, request: Request, prefix: list[int], chunk_pages: int) -> None:
        if self._scratch is None:
            return
        prefix_pages = self.placement.shards * block_pages([*self._prefixes, prefix], self.placement, self._padding)
        for region, pages, pages_max in (
            ("prefix", prefix_pages, self._scratch.prefix_pages),
            ("chunk", self._chunk_pages + chunk_pages, self._scratch.chunk_pages),
        ):
            if pages > pages_max:
                raise RefusedError(
                    f"with request {request.name!r} the batch needs {pages} {region} pages of scratch, there are "
                    f"{pages_max}; requests before it in the batch: {len(self._prefixes)}"
                )


def pages_left(request: Request, base: int, placement: Placement) -> list[int]:
    """Pages per owner class that the request has not drawn yet, those to bring back from the host included."""
    drawn = len(request.pages)
    return placement.class_counts(base + drawn, request.pages_total - drawn)


def add(left: Iterable[int], right: Iterable[int]) -> list[int]:
    """Class by class."""
    return [one + other for one, other in zip(left, right, strict=True)]


def subtract(left: Iterable[int], right: Iterable[int]) -> list[int]:
    """Class by class."""
    return [one - other for one, other in zip(left, right, strict=True)]

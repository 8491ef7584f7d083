"""Admission: who joins a prefill batch. A request is admitted once, with its first chunk, for all its pages.

For every owner class c, at all times

    promised[c] <= free[c] + evictable[c]          promised: pages that admitted requests have not drawn yet

so an admitted request can always finish, whatever class is scarce. Summed over classes, or taken as the scarcest
class times N, the same numbers admit what cannot be drawn: eviction may free no page of the scarce class.
Scratch rule: sglang 0.5.23, managers/schedule_policy.py. The rule for pages is our choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvshard_ref.errors import RefusedError
from kvshard_ref.placement import Placement, add, subtract
from kvshard_ref.plan import block_pages
from kvshard_ref.request import Request
from kvshard_ref.scratch import ScratchSize

HOST_IDS = 1 << 40
"""More pages than any rank has."""


@dataclass(slots=True)
class Review:
    """One greedy pass over a batch: each grant counts against the requests after it. Changes nothing but itself."""

    placement: Placement
    free: list[int]
    evictable: list[int]
    promised: list[int]
    scratch: ScratchSize | None
    padding: str
    prefixes: list[list[int]] = field(default_factory=list)
    """Page ids of those granted; a page that is still on the host has a negative one, of its class and its own."""
    chunk_pages: int = 0

    def why(self, request: Request, end: int) -> str | None:
        """Why `grant` refuses; None when it does not."""
        try:
            self.grant(request, end)
        except RefusedError as refusal:
            return refusal.why
        return None

    def grant(self, request: Request, end: int) -> int:
        """Grant the chunk up to token `end`, on the rotation base returned, or raise RefusedError with the numbers."""
        chunk_pages = -(-end // self.placement.page_size) - len(request.pages) - len(request.slots)
        prefix = [*request.pages, *(slot - HOST_IDS * self.placement.shards for slot in request.slots)]
        self._check_scratch(request, prefix, chunk_pages)
        base = self._place(request)
        self.prefixes.append(prefix)
        self.chunk_pages += chunk_pages
        return base

    def _place(self, request: Request) -> int:
        """Promise the pages left; returns the base: a new chain tries the roomiest class first, ties to the lowest."""
        if request.admitted and request.base is not None:
            return request.base
        spare = subtract(self.free, self.promised)
        room = add(spare, self.evictable)
        roomiest_first = sorted(range(self.placement.shards), key=spare.__getitem__, reverse=True)
        for base in roomiest_first if request.base is None else [request.base]:
            needs = pages_left(request, base, self.placement)
            if min(subtract(room, needs)) >= 0:
                self.promised = add(self.promised, needs)
                return base
        raise RefusedError(
            f"request {request.name!r} needs {request.pages_total - len(request.pages)} more pages from rotation base "
            f"{'any' if request.base is None else request.base}, position {len(request.pages)}; per owner class there "
            f"are free {self.free} + evictable {self.evictable} - promised {self.promised} = {room}"
        )

    def _check_scratch(self, request: Request, prefix: list[int], chunk_pages: int) -> None:
        if self.scratch is None:
            return
        prefix_pages = self.placement.shards * block_pages([*self.prefixes, prefix], self.placement, self.padding)
        needs = (prefix_pages, self.chunk_pages + chunk_pages)
        limits = (self.scratch.prefix_pages, self.scratch.chunk_pages)
        for region, pages, pages_max in zip(("prefix", "chunk"), needs, limits, strict=True):
            if pages > pages_max:
                raise RefusedError(
                    f"with request {request.name!r} the batch needs {pages} {region} pages of scratch, there are "
                    f"{pages_max}; requests before it in the batch: {len(self.prefixes)}"
                )


def pages_left(request: Request, base: int, placement: Placement) -> list[int]:
    """Pages per owner class that the request has not drawn yet, those to bring back from the host included."""
    drawn = len(request.pages)
    return placement.class_counts(base + drawn, request.pages_total - drawn)

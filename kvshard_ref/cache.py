"""The index level of a prefill worker: which pages hold which tokens. Mirrored: every rank runs the same calls.

Per owner class, at all times

    pages_per_rank = free + cached (evictable + protected) + own pages of live requests

and the same on the host with the copies of cached pages (see host_tier).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from kvshard_ref.admission import Review, pages_left
from kvshard_ref.allocator import PageAllocator
from kvshard_ref.checks import one_of
from kvshard_ref.errors import DuplicateRequestError, GeometryError, RefusedError, UnalignedError, UnknownRequestError
from kvshard_ref.host_tier import HostTier
from kvshard_ref.node import Node
from kvshard_ref.placement import Placement, add, subtract
from kvshard_ref.plan import PADDINGS
from kvshard_ref.radix import Match, RadixTree
from kvshard_ref.request import Extent, Request
from kvshard_ref.scratch import ScratchSize

TIERS = ("device", "host")


@dataclass(slots=True)
class CacheStats:
    """Counters since construction."""

    evicted_pages: int = 0
    duplicate_pages: int = 0
    """Own pages freed because the tree had the same tokens already."""
    declined_inserts: int = 0
    splits: int = 0
    backup_pages: int = 0
    restored_pages: int = 0


class PageCache:
    """Allocator, radix tree and live requests behind seven verbs.

    open locks the cached prefix, extend draws one chunk's pages, checkpoint and finish hand computed pages to the
    tree, abort drops them, evict and flush make room. Every RefusedError and MisuseError leaves the state unchanged.
    Open requests that are not admitted keep their prefix locked; when none of them can be admitted, abort one.
    """

    def __init__(
        self,
        placement: Placement,
        pages_per_rank: int,
        scratch: ScratchSize | None = None,
        padding: str = "tight",
        host_pages_per_rank: int = 0,
        host_policy: str = "write_through",
    ) -> None:
        one_of("padding", padding, PADDINGS)
        if scratch is not None and scratch.page_size != placement.page_size:
            raise GeometryError(f"scratch.page_size={scratch.page_size}, expected {placement.page_size} as placement")
        self.placement = placement
        self.allocator = PageAllocator(placement, pages_per_rank)
        self.tree = RadixTree(placement)
        self.host = HostTier(self.tree, host_pages_per_rank, host_policy) if host_pages_per_rank else None
        self._spill = self.host.back_up if self.host and host_policy == "write_back" else None
        self.requests: dict[str, Request] = {}
        self.promised = [0] * placement.shards
        self.scratch = scratch
        self.padding = padding
        self._stats = CacheStats()

    def open(self, name: str, keys: Sequence[Hashable], tokens: int, prompt_tokens: int | None = None) -> Request:
        """Match and lock the longest cached prefix, at most floor((prompt_tokens - 1) / ps) pages of it.

        `keys`: one per whole page of the `tokens` to compute. `prompt_tokens` (default `tokens`): where the prompt
        ends when `tokens` also counts its answer.
        Raises RefusedError when the request can never fit, or when its lock would take pages promised to others.
        """
        asked = tokens if prompt_tokens is None else prompt_tokens
        self._check_open(name, keys, tokens, asked)
        pages_total = -(-tokens // self.placement.page_size)
        self._check_size(name, pages_total, (tokens - 1) // self.placement.page_size)
        match = self.tree.match(keys, (asked - 1) // self.placement.page_size)
        self._check_promises(name, self.tree.lockable_counts(match))
        node, cached = self.tree.lock(match), match.length * self.placement.page_size
        request = Request(name, list(keys), tokens, pages_total, node, node.base, match.length, cached, computed=cached)
        request.pages, request.slots = self.tree.chain(node)
        self.requests[name] = request
        return request

    def review(self, wants: Sequence[tuple[str, int]]) -> list[str | None]:
        """Per (request, count of tokens), in batch order: None when it can run with the admissible ones before it.

        Otherwise the reason. Changes nothing.
        """
        chunks, review = self._chunks(wants), self._review()
        return [review.why(request, end) for request, end in chunks]

    def extend(self, wants: Sequence[tuple[str, int]]) -> list[Extent]:
        """Draw the pages of one chunk per request, evicting what is short; RefusedError if review refuses any."""
        chunks, review = self._chunks(wants), self._review()
        bases = [review.grant(request, end) for request, end in chunks]
        return [self._extended(request, end, base) for (request, end), base in zip(chunks, bases, strict=True)]

    def checkpoint(self, name: str) -> None:
        """Insert the computed whole pages, so that others hit them, and lock them.

        Where the tree had the tokens already, the request's duplicates are freed and its pages become the cached
        ones. When the insert is declined (another rotation base), or a transfer reads the duplicates, nothing changes.
        """
        self._insert(self.request(name))

    def finish(self, name: str) -> int:
        """Checkpoint, then release: what was computed stays cached. Returns the request's tokens now in the tree."""
        request = self.request(name)
        self._insert(request)
        self._end(request, "finish")
        return request.protected * self.placement.page_size

    def abort(self, name: str) -> None:
        """Release without an insert: only what earlier checkpoints inserted stays cached."""
        self._end(self.request(name), "abort")

    def sent(self, name: str) -> None:
        """No transfer reads the request's pages any more."""
        request = self.requests[name]
        request.sending = False
        if request.ending == "finish":
            self._insert(request)
        if request.ending:
            self._end(request, request.ending)

    def evict(self, tokens: int, tier: str = "device") -> int:
        """Evict least recently used leaves of a tier worth at least `tokens`, if there are as many; returns tokens.

        What is evicted from the device may stay on the host; a copy evicted from the host may stay on the device.
        """
        one_of("evict: tier", tier, TIERS)
        count = -(-tokens // self.placement.page_size)
        pages = self._evict([count], tier, self._spill)
        while pages < count and self._drained():  # what was copied may be what was in the way
            pages += self._evict([count - pages], tier, self._spill)
        return pages * self.placement.page_size

    def flush(self) -> int:
        """Evict everything from both tiers; returns tokens freed. RefusedError while requests live."""
        if self.requests:
            raise RefusedError(
                f"flush with live requests {sorted(self.requests)}: finish or abort them first, and let transfers end"
            )
        self._drained()
        pages = sum(len(node.keys) for node in self.tree.nodes())
        self._evict([pages])
        self._evict([pages], "host")
        return pages * self.placement.page_size

    def used_tokens(self) -> int:
        """Tokens of pages that are neither free nor evictable: 0 when no request lives."""
        idle_pages = sum(self.allocator.free_counts()) + sum(self.tree.evictable_counts())
        return self.capacity_tokens() - idle_pages * self.placement.page_size

    def capacity_tokens(self) -> int:
        """Tokens of all pages of all ranks."""
        return self.placement.shards * self.allocator.pages_per_rank * self.placement.page_size

    @property
    def stats(self) -> CacheStats:
        """The counters as they are now (a copy)."""
        stats = replace(self._stats, splits=self.tree.splits)
        if self.host:
            stats.backup_pages, stats.restored_pages = self.host.backup_pages, self.host.restored_pages
        return stats

    def digest(self) -> str:
        """Fingerprint of all that must be mirrored: free lists in order, tree, locks, LRU order, requests, promises.

        Equal in every process and under every hash seed, as far as the keys' `repr` is.
        """
        state: list[object] = [self.placement, self.allocator.free_pages(), self.promised, self.tree.clock]
        for node in self.tree.nodes():
            parent = node.parent.id if node.parent else None
            state.append((node.id, parent, node.keys, node.pages, node.base, node.locks, node.last_access))
            state.append((node.slots, node.pins, node.hits))
        if self.host:
            state.append(self.host.allocator.free_pages())
            state.append([(copy.kind, copy.node.id, copy.pages, copy.slots) for copy in self.host.in_flight])
        for each in self.requests.values():
            state.append((each.name, each.keys, each.tokens, each.cached, each.computed, each.pages))
            state.append((each.protected, each.base, each.node.id, each.admitted, each.sending, each.ending))
        return blake2b(repr(state).encode(), digest_size=16).hexdigest()

    def request(self, name: str) -> Request:
        """A live request. Raises UnknownRequestError."""
        request = self.requests.get(name)
        if request is None or request.ending:
            raise UnknownRequestError(f"request {name!r} is not live, expected one of {sorted(self.requests)}; open it")
        return request

    def _chunks(self, wants: Sequence[tuple[str, int]]) -> list[tuple[Request, int]]:
        """Per chunk its request and its end."""
        chunks = [self._check_chunk(name, count) for name, count in wants]
        names = [name for name, _ in wants]
        if len(set(names)) < len(names):
            raise DuplicateRequestError(f"batch of {names}, expected each request once; extend it again afterwards")
        return chunks

    def _review(self) -> Review:
        free, evictable = self.allocator.free_counts(), self.tree.evictable_counts()
        return Review(self.placement, free, evictable, self.promised, self.scratch, self.padding)

    def _refresh(self) -> None:
        """The host part of a prefix that nobody computes yet shrinks when others bring pages back or compute them."""
        for request in self.requests.values():
            if request.slots:
                request.pages, request.slots = self.tree.chain(request.node)

    def _extended(self, request: Request, end: int, base: int) -> Extent:
        """Draw a granted chunk's pages, and with the first chunk those of the prefix that is on the host only."""
        if not request.admitted:
            request.base, request.admitted = base, True
            self.promised = add(self.promised, pages_left(request, base, self.placement))
        ps = self.placement.page_size
        count = -(-end // ps) - len(request.pages)
        request.pages += self._draw(base + len(request.pages), count)
        start, first = request.computed, request.computed // ps
        if request.slots and self.host:
            slots, request.slots = request.slots, []
            self.host.restore(request.node, request.pages[:first], slots)
            self._refresh()
        request.computed = end
        return Extent(request, start, end, request.pages[:first], request.pages[first:])

    def _draw(self, start_class: int, count: int) -> list[int]:
        """Draw promised pages, evicting what is short."""
        needs = self.placement.class_counts(start_class, count)
        drawn = None
        while drawn is None:
            # only classes whose free pages do not suffice are short; eviction passes over the others
            self._evict(subtract(needs, self.allocator.free_counts()), spill=self._spill)
            drawn = self.allocator.draw_run(start_class, count)
            if drawn is None and not self._drained():  # what is pinned counts as evictable
                raise RuntimeError(
                    f"admitted pages {needs} per owner class cannot be drawn: free {self.allocator.free_counts()}, "
                    f"evictable {self.tree.evictable_counts()}, promised {self.promised}; the admission rule is broken"
                )
        self.promised = subtract(self.promised, needs)
        return drawn

    def _drained(self) -> bool:
        """Wait for all copies between the tiers; whether there were any."""
        if self.host is None or not self.host.in_flight:
            return False
        self.host.drain()
        return True

    def _insert(self, request: Request) -> None:
        whole = request.computed // self.placement.page_size if request.admitted else 0
        keys = request.keys[:whole]
        if request.sending and len(self.tree.match(keys).pages) > request.protected:
            return
        done = self.tree.insert(keys, request.pages[:whole], request.base)
        self._stats.declined_inserts += done.declined
        if done.declined or done.node is None:
            return
        # [0, protected) is in the tree and locked, so matched_pages >= protected
        duplicates = request.pages[request.protected : done.matched_pages]
        node = self.tree.lock(Match(done.node, len(done.node.keys), done.pages, whole))
        self.tree.unlock(request.node)
        request.node, request.protected = node, whole
        request.pages[:whole] = done.pages
        self.allocator.free(duplicates)
        self._stats.duplicate_pages += len(duplicates)
        if self.host:
            self._refresh()
            self.host.used(node, finished=False)

    def _end(self, request: Request, ending: str) -> None:
        """Release at once what it has not drawn, and what it holds as soon as no transfer reads it."""
        if request.admitted and request.base is not None and not request.ending:
            self.promised = subtract(self.promised, pages_left(request, request.base, self.placement))
        request.ending = ending
        if request.sending:
            return
        if self.host and ending == "finish":
            self.host.used(request.node, finished=True)
        self.allocator.free(request.pages[request.protected :])
        self.tree.unlock(request.node)
        del self.requests[request.name]

    def _evict(self, short: Sequence[int], tier: str = "device", spill: Callable[[Node], object] | None = None) -> int:
        """Evict as RadixTree.evict and free; returns how many of the pages were in the tier."""
        freed = self.tree.evict(short, tier, spill)
        self.allocator.free(freed.pages)
        if self.host:
            self.host.allocator.free(freed.slots)
        self._stats.evicted_pages += len(freed.pages)
        return len(freed.slots if tier == "host" else freed.pages)

    def _check_open(self, name: str, keys: Sequence[Hashable], tokens: int, prompt_tokens: int) -> None:
        if name in self.requests:
            raise DuplicateRequestError(f"request {name!r} is live already; finish or abort it, or choose another name")
        if not 1 <= prompt_tokens <= tokens:
            raise GeometryError(
                f"request {name!r} has {prompt_tokens} prompt tokens of {tokens} tokens, expected 1 <= prompt <= tokens"
            )
        whole = tokens // self.placement.page_size
        if len(keys) != whole:
            raise GeometryError(
                f"request {name!r} has {len(keys)} page keys, expected {whole}: one per whole page of {tokens} tokens"
            )

    def _check_size(self, name: str, pages_total: int, prefix_pages_max: int) -> None:
        """Refuse what could never finish: larger than the pool, or a last chunk whose prefix overflows scratch."""
        shards = self.placement.shards
        pool_pages = shards * self.allocator.pages_per_rank
        if pages_total > pool_pages:
            raise RefusedError(f"request {name!r} needs {pages_total} pages, the pool has {pool_pages}")
        padded = -(-prefix_pages_max // shards) * shards
        padded_max = self.scratch.prefix_pages if self.scratch else padded
        if padded > padded_max:
            raise RefusedError(f"request {name!r} needs {padded} prefix pages of scratch, there are {padded_max}")

    def _check_promises(self, name: str, taken: list[int]) -> None:
        free, evictable = self.allocator.free_counts(), self.tree.evictable_counts()
        room = subtract(add(free, evictable), self.promised)
        if any(take > have for take, have in zip(taken, room, strict=True)):
            raise RefusedError(
                f"locking the cached prefix of request {name!r} takes {taken} evictable pages per owner class, but "
                f"free {free} + evictable {evictable} - promised {self.promised} leaves {room}; retry when another ends"
            )

    def _check_chunk(self, name: str, count: int) -> tuple[Request, int]:
        request = self.request(name)
        end = request.computed + count
        if count < 1 or end > request.tokens:
            raise GeometryError(
                f"chunk of {count} tokens for request {name!r}, expected 1..{request.tokens - request.computed}: "
                f"{request.computed} of {request.tokens} tokens are computed"
            )
        if end % self.placement.page_size and end != request.tokens:
            raise UnalignedError(
                f"chunk of request {name!r} ends at token {end}, expected a multiple of page_size "
                f"{self.placement.page_size} or the prompt's end {request.tokens}"
            )
        return request, end

"""Random histories for PageCache, and what must hold after each of their steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable

from kvshard_ref.admission import pages_left
from kvshard_ref.cache import PageCache
from kvshard_ref.errors import RefusedError
from kvshard_ref.placement import Placement
from kvshard_ref.request import Extent, Request
from kvshard_ref.scratch import ScratchSize

PS = 4
Op = tuple[str, int, int, int]
"""(verb, three numbers from which the verb derives names, lengths and counts)."""
VERBS = ("open", "open", "open", "extend", "extend", "extend", "finish", "finish", "abort", "checkpoint", "evict")
HOST_VERBS = (*VERBS, "acknowledge", "acknowledge", "evict", "evict_host")


class Driver:
    """Applies ops to a cache and keeps what the pages must hold: the page keys up to and including their own."""

    def __init__(
        self,
        shards: int,
        pages_per_rank: int,
        scratch: ScratchSize | None = None,
        host_pages: int = 0,
        policy: str = "",
    ) -> None:
        host = (host_pages, policy) if host_pages else ()
        self.cache = PageCache(Placement(shards, PS), pages_per_rank, scratch, "tight", *host)
        self.written: dict[int, tuple[Hashable, ...]] = {}
        self.hosted: dict[int, tuple[Hashable, ...]] = {}
        self.opened = 0
        self.log: Counter[str] = Counter()

    def apply(self, op: Op) -> None:
        verb, *numbers = op
        {
            "open": self._open,
            "extend": self._extend,
            "finish": self._finish,
            "abort": self._abort,
            "checkpoint": self._checkpoint,
            "evict": self._evict,
            "acknowledge": self._acknowledge,
            "evict_host": self._evict_host,
        }[verb](*numbers)
        self._copy()

    def drain(self) -> None:
        """Every admitted request finishes by itself, whatever the others hold; then all pages come back."""
        for request in list(self.cache.requests.values()):
            while request.admitted and request.computed < request.tokens:
                count = min(PS, request.tokens - request.computed)
                assert [None] == self.cache.review([(request.name, count)])
                self._write(self.cache.extend([(request.name, count)]))
                check(self.cache)
            self.cache.finish(request.name)
            self._copy()
            check(self.cache)
        self.cache.flush()
        if self.cache.host:
            host_pages = self.cache.host.allocator.pages_per_rank
            assert [host_pages] * self.cache.placement.shards == self.cache.host.allocator.free_counts()
        rank_pages = self.cache.allocator.pages_per_rank
        assert [rank_pages] * self.cache.placement.shards == self.cache.allocator.free_counts()
        assert (0, []) == (self.cache.used_tokens(), list(self.cache.tree.nodes()))

    def _open(self, kind: int, length: int, tail: int) -> None:
        tokens = length * PS + tail % PS or 1
        keys = [f"{position} {kind >> min(position // 2, 5) & 1}" for position in range(tokens // PS)]
        self.opened += 1
        before = self.cache.digest()
        try:
            request = self.cache.open(f"r{self.opened}", keys, tokens)
        except RefusedError as refusal:
            self.log["lock refused" if "promised" in refusal.why else "open refused"] += 1
            assert before == self.cache.digest()
            return
        self.log["hit"] += bool(request.cached)
        assert request.cached <= tokens - 1
        self.log["host hit"] += bool(request.slots)
        self._expect(request, request.pages)
        expected = [prefix_keys(request, position) for position in range(len(request.pages), request.protected)]
        assert expected == [self.hosted[slot] for slot in request.slots]

    def _extend(self, first: int, size: int, count: int) -> None:
        live = [each for each in self.cache.requests.values() if each.computed < each.tokens]
        batch = [live[(first + step) % len(live)] for step in range(min(1 + size % 3, len(live)))]
        wants = []
        for request in batch:
            left = request.tokens - request.computed
            wants.append((request.name, left if count % 4 == 0 else min(left, PS * (count % 4))))
        before = self.cache.digest()
        answers = self.cache.review(wants)
        assert before == self.cache.digest()
        if None in answers and any(answers):
            self.log["batch cut"] += 1
            try:
                self.cache.extend(wants)
            except RefusedError:
                assert before == self.cache.digest()
        self.log["extend refused"] += len(batch) - answers.count(None)
        admissible = [want for want, why in zip(wants, answers, strict=True) if why is None]
        evicted = self.cache.stats.evicted_pages
        self._write(self.cache.extend(admissible))
        self.log["evicting extend"] += self.cache.stats.evicted_pages > evicted

    def _finish(self, which: int, *_: int) -> None:
        if request := self._pick(which):
            declined = self.cache.stats.declined_inserts
            whole, protected = request.computed // PS, request.protected
            cached = self.cache.finish(request.name)
            kept = self.cache.stats.declined_inserts == declined
            assert (whole if kept else protected) * PS == cached
            self.log["finish"] += 1

    def _abort(self, which: int, *_: int) -> None:
        if request := self._pick(which):
            inserted = [node.id for node in self.cache.tree.nodes()]
            self.cache.abort(request.name)
            assert inserted == [node.id for node in self.cache.tree.nodes()]

    def _checkpoint(self, which: int, *_: int) -> None:
        if (request := self._pick(which)) and request.admitted:
            self.cache.checkpoint(request.name)
            self._expect(request, request.pages)

    def _evict(self, pages: int, *_: int) -> None:
        evictable = sum(self.cache.tree.evictable_counts())
        freed = self.cache.evict(pages * PS)
        assert min(pages, evictable) * PS <= freed <= evictable * PS

    def _acknowledge(self, count: int, *_: int) -> None:
        if self.cache.host:
            self.cache.host.acknowledge(min(count % 4, len(self.cache.host.in_flight)))

    def _evict_host(self, pages: int, *_: int) -> None:
        freed = self.cache.evict(pages % 6 * PS, "host")
        self.log["host evicted"] += freed > 0

    def _copy(self) -> None:
        """What a worker does with the planned copies: those to the host first, pages are reused only afterwards."""
        planned = self.cache.host.take_planned() if self.cache.host else []
        for copy in sorted(planned, key=lambda copy: copy.kind):
            self.log[copy.kind] += 1
            source, target = (self.written, self.hosted) if copy.kind == "backup" else (self.hosted, self.written)
            pairs = zip(copy.pages, copy.slots, strict=True)
            for one, other in pairs if copy.kind == "backup" else ((slot, page) for page, slot in pairs):
                target[other] = source[one]

    def _pick(self, which: int) -> Request | None:
        live = list(self.cache.requests.values())
        return live[which % len(live)] if live else None

    def _write(self, extents: list[Extent]) -> None:
        self._copy()
        for request, start, end, prefix_pages, chunk_pages in extents:
            assert (start // PS, -(-end // PS)) == (len(prefix_pages), len(prefix_pages) + len(chunk_pages))
            assert prefix_pages + chunk_pages == request.pages
            self._expect(request, prefix_pages)
            for position, page in enumerate(chunk_pages, len(prefix_pages)):
                self.written[page] = prefix_keys(request, position)

    def _expect(self, request: Request, pages: list[int]) -> None:
        """The pages still hold this request's tokens: nobody drew and wrote them meanwhile."""
        expected = [prefix_keys(request, position) for position in range(len(pages))]
        assert expected == [self.written[page] for page in pages]


def prefix_keys(request: Request, position: int) -> tuple[Hashable, ...]:
    """What a page must hold; a partial last page belongs to its request alone."""
    keys = tuple(request.keys[: position + 1])
    return keys if position < len(request.keys) else (*keys, request.name)


def check(cache: PageCache) -> None:
    """Conservation, aliasing, promises, locks and rotation of one cache."""
    shards = cache.placement.shards
    free = [page for pages in cache.allocator.free_pages() for page in pages]
    cached = [page for node in cache.tree.nodes() for page in node.pages]
    own = [page for each in cache.requests.values() for page in each.pages[each.protected :]]
    assert all(len(each.pages) >= each.protected for each in cache.requests.values() if each.admitted)
    pool = range(shards, shards * (cache.allocator.pages_per_rank + 1))
    assert list(pool) == sorted(free + cached + own)
    for owner, pages in enumerate(cache.allocator.free_pages()):
        assert {owner} >= {page % shards for page in pages}

    promised = [0] * shards
    for each in cache.requests.values():
        rotation = [((each.base or 0) + position) % shards for position in range(len(each.pages))]
        assert rotation == [page % shards for page in each.pages]
        if each.admitted and each.base is not None:
            left = pages_left(each, each.base, cache.placement)
            promised = [one + other for one, other in zip(promised, left, strict=True)]
    assert promised == cache.promised
    free_counts, evictable = cache.allocator.free_counts(), cache.tree.evictable_counts()
    assert all(want <= have + more for want, have, more in zip(promised, free_counts, evictable, strict=True))
    check_tree(cache)
    check_host(cache)


def check_host(cache: PageCache) -> None:
    """Copies have the owners of their pages, pins are the copies in flight, no host page is lost or used twice."""
    shards = cache.placement.shards
    pins: Counter[int] = Counter()
    for copy in cache.host.in_flight if cache.host else ():
        left = len(copy.pages)
        for node in cache.tree.path(copy.node):
            if left > 0:
                pins[node.id] += 1
                left -= len(node.keys)
        assert 0 == left
        assert [page % shards for page in copy.pages] == [slot % shards for slot in copy.slots]
    used: list[int] = []
    for node in cache.tree.nodes():
        assert node.pages or node.slots
        assert node.parent is not None
        assert node.parent.pages or node.parent.parent is None or not node.pages
        assert sum(bool(child.pages) for child in node.children.values()) == node.device_children
        assert not node.pages or not node.slots or [p % shards for p in node.pages] == [p % shards for p in node.slots]
        assert pins[node.id] == node.pins
        used += node.slots
    if cache.host:
        free = [slot for slots in cache.host.allocator.free_pages() for slot in slots]
        assert list(range(shards, shards * (cache.host.allocator.pages_per_rank + 1))) == sorted(free + used)
    else:
        assert [] == used


def check_tree(cache: PageCache) -> None:
    """Locks count the requests below, chains go round the classes, counts match the nodes."""
    shards = cache.placement.shards
    locks: Counter[int] = Counter()
    for each in cache.requests.values():
        node, keys, pages = each.node, list[Hashable](), list[int]()
        while node.parent is not None:
            locks[node.id] += 1
            keys, pages, node = node.keys + keys, node.pages + pages, node.parent
        assert each.keys[: each.protected] == keys
        assert pages[: len(each.pages)] == each.pages[: each.protected]
        assert not each.admitted or (pages, []) == (each.pages[: each.protected], each.slots)
    depth = {0: 0}
    evictable = [0] * shards
    for node in cache.tree.nodes():
        parent = node.parent
        assert parent is not None
        assert node is parent.children[node.keys[0]]
        assert node.base in (range(shards) if parent.parent is None else [parent.base])
        start = depth[parent.id]
        depth[node.id] = start + len(node.keys)
        assert node.base is not None
        expected = [(node.base + position) % shards for position in range(start, depth[node.id])]
        for ids in (node.pages, node.slots):
            assert not ids or expected == [page % shards for page in ids]
        assert len(node.keys) > 0
        assert locks[node.id] == node.locks
        for page in node.pages if not node.locks else []:
            evictable[page % shards] += 1
    assert evictable == cache.tree.evictable_counts()


def random_ops(seed: int, count: int, verbs: tuple[str, ...] = VERBS) -> list[Op]:
    """A history that depends on the seed alone."""
    rng = random.Random(seed)
    return [(rng.choice(verbs), rng.randrange(64), rng.randrange(12), rng.randrange(8)) for _ in range(count)]


def digests(shards: int, seed: int) -> list[str]:
    """Digest after every step of a random history."""
    driver = Driver(shards, 6)
    result = []
    for op in random_ops(seed, 80):
        driver.apply(op)
        result.append(driver.cache.digest())
    return result

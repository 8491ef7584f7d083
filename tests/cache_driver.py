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


class Driver:
    """Applies ops to a cache and keeps what the pages must hold: the page keys up to and including their own."""

    def __init__(self, shards: int, pages_per_rank: int, scratch: ScratchSize | None = None) -> None:
        self.cache = PageCache(Placement(shards, PS), pages_per_rank, scratch)
        self.written: dict[int, tuple[Hashable, ...]] = {}
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
        }[verb](*numbers)

    def drain(self) -> None:
        """Every admitted request finishes by itself, whatever the others hold; then all pages come back."""
        for request in list(self.cache.requests.values()):
            while request.admitted and request.computed < request.tokens:
                count = min(PS, request.tokens - request.computed)
                assert [None] == self.cache.review([(request.name, count)])
                self._write(self.cache.extend([(request.name, count)]))
                check(self.cache)
            self.cache.finish(request.name)
            check(self.cache)
        self.cache.flush()
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
        self._expect(request, request.pages)

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
            inserted = self.cache.tree.cached_counts()
            self.cache.abort(request.name)
            assert inserted == self.cache.tree.cached_counts()

    def _checkpoint(self, which: int, *_: int) -> None:
        if request := self._pick(which):
            self.cache.checkpoint(request.name)
            self._expect(request, request.pages)

    def _evict(self, pages: int, *_: int) -> None:
        evictable = sum(self.cache.tree.evictable_counts())
        freed = self.cache.evict(pages * PS)
        assert min(pages, evictable) * PS <= freed <= evictable * PS

    def _pick(self, which: int) -> Request | None:
        live = list(self.cache.requests.values())
        return live[which % len(live)] if live else None

    def _write(self, extents: list[Extent]) -> None:
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


def check_tree(cache: PageCache) -> None:
    """Locks count the requests below, chains go round the classes, counts match the nodes."""
    shards = cache.placement.shards
    locks: Counter[int] = Counter()
    for each in cache.requests.values():
        node, keys, pages = each.node, list[Hashable](), list[int]()
        while node.parent is not None:
            locks[node.id] += 1
            keys, pages, node = node.keys + keys, node.pages + pages, node.parent
        assert (each.keys[: each.protected], each.pages[: each.protected]) == (keys, pages)
    depth = {0: 0}
    evictable = [0] * shards
    for node in cache.tree.nodes():
        parent = node.parent
        assert parent is not None
        assert node is parent.children[node.keys[0]]
        assert node.base in (range(shards) if parent.parent is None else [parent.base])
        start = depth[parent.id]
        depth[node.id] = start + len(node.pages)
        assert node.base is not None
        expected = [(node.base + position) % shards for position in range(start, depth[node.id])]
        assert expected == [page % shards for page in node.pages]
        assert len(node.keys) == len(node.pages) > 0
        assert locks[node.id] == node.locks
        for page in node.pages if not node.locks else []:
            evictable[page % shards] += 1
    assert evictable == cache.tree.evictable_counts()


def random_ops(seed: int, count: int) -> list[Op]:
    """A history that depends on the seed alone."""
    rng = random.Random(seed)
    return [(rng.choice(VERBS), rng.randrange(64), rng.randrange(12), rng.randrange(8)) for _ in range(count)]


def digests(shards: int, seed: int) -> list[str]:
    """Digest after every step of a random history."""
    driver = Driver(shards, 6)
    result = []
    for op in random_ops(seed, 80):
        driver.apply(op)
        result.append(driver.cache.digest())
    return result

"""The reference's allocator and prefix tree, as the capacity replay and the index benchmark drive them."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from harness.bench_index import IndexParts, rest_counts
from harness.capacity import CapacityError, IndexCache, NotAdmittedError, Sizing
from kvshard_ref.allocator import PageAllocator
from kvshard_ref.cache import PageCache
from kvshard_ref.errors import RefusedError
from kvshard_ref.node import Node
from kvshard_ref.placement import Placement
from kvshard_ref.radix import Match, RadixTree
from kvshard_ref.scratch import ScratchSize

LIKE = ("ref", "sglang")


class RefIndexCache:
    """IndexCache over PageCache. One request is one chunk: the replay counts pages, not forwards."""

    def __init__(self, cache: PageCache, pages_per_rank: int) -> None:
        self._cache = cache
        self._allocator = self._cache.allocator
        self._pages_per_rank = pages_per_rank

    def open(self, number: int, keys: Sequence[Hashable], tokens: int, prompt_tokens: int) -> int:
        try:
            return self._cache.open(str(number), keys, tokens, prompt_tokens).cached
        except RefusedError as error:
            raise NotAdmittedError(error.why) from error

    def extend(self, number: int) -> None:
        name = str(number)
        request = self._cache.requests[name]
        want = (name, request.tokens - request.cached)
        try:
            self._make_room(want)
            self._cache.extend([want])
        except RefusedError as error:
            raise NotAdmittedError(error.why) from error
        self._cache.checkpoint(name)

    def finish(self, number: int) -> None:
        self._cache.finish(str(number))

    def abort(self, number: int) -> None:
        self._cache.abort(str(number))

    def used_pages(self) -> list[int]:
        return [self._pages_per_rank - free for free in self._allocator.free_counts()]

    def evicted_pages(self) -> int:
        return self._cache.stats.evicted_pages

    def _make_room(self, want: tuple[str, int]) -> None:
        """The cache does it by itself."""


class SplitRenewingTree(RadixTree):
    """A split makes the part of the node that was not matched the most recently used one, as sglang's does."""

    def _split(self, node: Node, node_pages: int) -> Node:
        upper = super()._split(node, node_pages)
        if upper is not node and node.parent is upper:
            self.clock += 1
            node.last_access = self.clock
        return upper


class SglangLikeIndexCache(RefIndexCache):
    """Admits, evicts and remembers use by sglang's rules, which count tokens and not the pages of each owner class.

    It asks for room for the chunk's tokens and a further page of each class. Admitted is what fits into the capacity by
    the fullest class and all that can be evicted; then whichever leaf was used least recently is evicted, until the
    fullest class alone would do.
    """

    def __init__(self, cache: PageCache, pages_per_rank: int) -> None:
        super().__init__(cache, pages_per_rank)
        cache.tree = SplitRenewingTree(cache.placement)

    def _make_room(self, want: tuple[str, int]) -> None:
        placement = self._cache.placement
        span = placement.shards * placement.page_size
        needed = want[1] + span
        evictable = sum(self._cache.tree.evictable_counts()) * placement.page_size
        if needed + 1 >= self._floor(span) + evictable:  # one token of an answer is asked for as well
            raise NotAdmittedError(f"{needed + 1} tokens of room are asked for")
        if self._cache.review([want]) != [None]:
            return  # it is refused by class, with nothing evicted
        while self._floor(span) < needed and self._cache.evict(1):
            pass

    def _floor(self, span: int) -> int:
        return span * min(self._allocator.free_counts())


class RefIndexParts:
    """IndexParts over allocator and tree alone: no admission, no promises."""

    def __init__(self, tree: RadixTree, pages_per_rank: int) -> None:
        self._placement = placement = tree.placement
        self._tree = tree
        self._allocator = PageAllocator(placement, pages_per_rank)
        self._node: Node = self._tree.root
        self._keys: Sequence[Hashable] = ()
        self._pages: list[int] = []
        self._cached = 0  # pages
        self._total = 0  # pages
        self._base: int | None = None

    def match(self, keys: Sequence[Hashable], tokens: int) -> int:
        page_size = self._placement.page_size
        match = self._tree.match(keys, (tokens - 1) // page_size)
        self._node = self._tree.lock(match)
        self._keys, self._pages, self._base = keys, match.pages, self._node.base
        self._cached, self._total = match.length, -(-tokens // page_size)
        return match.length * page_size

    def evict(self) -> int:
        short = max(rest_counts(self._total - self._cached, self._placement.shards))
        evicted = 0
        while min(self._allocator.free_counts()) < short:
            freed = self._tree.evict([1]).pages
            if not freed:
                break
            self._allocator.free(freed)
            evicted += len(freed)
        return evicted

    def allocate(self) -> bool:
        if self._base is None:
            counts = self._allocator.free_counts()
            self._base = counts.index(max(counts))
        drawn = self._allocator.draw_run(self._base + self._cached, self._total - self._cached)
        self._pages += drawn or []
        return drawn is not None

    def insert(self) -> None:
        whole = len(self._keys)
        done = self._tree.insert(self._keys, self._pages[:whole], self._base)
        if done.node is not None and not done.declined:
            node = self._tree.lock(Match(done.node, len(done.node.keys), done.pages, whole))
            self._tree.unlock(self._node)
            self._node = node
            self._allocator.free(self._pages[self._cached : done.matched_pages])

    def free(self) -> None:
        self._allocator.free(self._pages[len(self._keys) :])
        self._tree.unlock(self._node)


@dataclass(frozen=True, slots=True)
class RefIndexEngine:
    """IndexEngine of the reference; shards = 1 is its replicated layout. like: whose rules it goes by."""

    name: str = "ref"
    like: str = "ref"

    def scratch_bytes(self, shards: int, sizing: Sizing) -> int:
        placement = Placement(shards, sizing.page_size)
        return ScratchSize.sized(placement, sizing.context_tokens, sizing.chunk_tokens).bytes(sizing.row_bytes)

    def cache(self, shards: int, page_size: int, pages_per_rank: int) -> IndexCache:
        made = RefIndexCache if self.like == "ref" else SglangLikeIndexCache
        return made(PageCache(Placement(shards, page_size), pages_per_rank), pages_per_rank)

    def parts(self, shards: int, page_size: int, pages_per_rank: int) -> IndexParts:
        made = RadixTree if self.like == "ref" else SplitRenewingTree
        return RefIndexParts(made(Placement(shards, page_size)), pages_per_rank)

    def prompt(self, keys: list[int], tokens: int, page_size: int) -> list[int]:
        return keys

    def named(self, tokens: array[int], page_size: int) -> list[bytes]:
        raw, page_bytes = tokens.tobytes(), page_size * tokens.itemsize
        return [raw[start : start + page_bytes] for start in range(0, len(raw) - page_bytes + 1, page_bytes)]


def index_engine(options: dict[str, str], **_: int) -> RefIndexEngine:
    """The engine behind `ref` and `ref?like=sglang`, for requests of any length and number. Raises CapacityError."""
    like = options.pop("like", LIKE[0])
    if like not in LIKE:
        raise CapacityError(f"option like={like!r} of engine ref; expected one of {', '.join(LIKE)}")
    if options:
        raise CapacityError(f"option {next(iter(options))!r} of engine ref; expected like")
    return RefIndexEngine("ref" if like == LIKE[0] else f"ref like {like}", like)

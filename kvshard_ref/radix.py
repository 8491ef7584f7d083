"""Radix tree of cached chains: page keys to page ids. Mirrored: every rank holds the same tree.

    chain    [0, a) first node   [a, b) its child   ...     position P belongs to class (base + P) mod N
    node     keys[i] <-> pages[i]                           locks(parent) >= locks(child)
    counts   cached = evictable (nodes with locks == 0) + protected, per owner class

A page key is one hashable per whole page. Keys must have a `repr` that is the same in every process.
Rules: sglang 0.5.23, mem_cache/unified_cache/unified_tree_core.py; class-aware eviction is our choice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from kvshard_ref.errors import CyclicOrderError, GeometryError, UnbalancedLockError
from kvshard_ref.eviction import LeafQueue, Node
from kvshard_ref.placement import Placement


class Match(NamedTuple):
    """The longest cached prefix of some keys."""

    node: Node
    """Deepest node touched; the root when nothing matches."""
    node_pages: int
    """Pages matched inside it."""
    pages: list[int]
    """All matched page ids."""


class Insert(NamedTuple):
    """Outcome of an insert."""

    node: Node | None
    """Node whose path is exactly the inserted keys; the conflicting node when declined; None for no keys."""
    matched_pages: int
    pages: list[int]
    """Canonical page ids of all inserted keys; empty when declined."""
    declined: bool


class RadixTree:
    """Chains of pages with locks, splits and LRU eviction. The tree frees no page: evicted ids go to the caller."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.root = Node(0, [], [], None, None, 0)
        self.clock = 0
        self.splits = 0
        self._next_id = 1
        self._leaves = LeafQueue()
        self._cached = [0] * placement.shards
        self._evictable = [0] * placement.shards

    def match(self, keys: Sequence[Hashable], pages_max: int | None = None) -> Match:
        """Longest cached prefix of at most `pages_max` pages; good until the next insert or eviction.

        Reads only: no split, no access time.
        """
        end = len(keys) if pages_max is None else min(pages_max, len(keys))
        node, node_pages, pages = self.root, 0, list[int]()
        while len(pages) < end and node_pages == len(node.pages):
            child = node.children.get(keys[len(pages)])
            if child is None:
                break
            node, node_pages = child, _shared_pages(child.keys, keys, len(pages), end)
            pages += child.pages[:node_pages]
        return Match(node, node_pages, pages)

    def lock(self, match: Match) -> Node:
        """Protect the matched path, split at its end, from eviction; returns the handle that `unlock` takes.

        A handle stands for the whole path down to its node's end and survives splits.
        """
        node = self._split(match.node, match.node_pages)
        for each in self._path(node):
            if each.locks == 0:
                self._count(self._evictable, each, -1)
            each.locks += 1
        self._touch(node)
        return node

    def unlock(self, node: Node) -> None:
        """Take back one `lock`. Raises UnbalancedLockError when the node is not locked."""
        if node.locks == 0 and node.parent is not None:
            raise UnbalancedLockError(
                f"unlock of node {node.id} ({len(node.pages)} pages) with 0 locks, expected at least 1; "
                "unlock each handle that lock returned exactly once"
            )
        for each in self._path(node):
            each.locks -= 1
            if each.locks == 0:
                self._count(self._evictable, each, 1)
        self._leaves.offer(node)

    def insert(self, keys: Sequence[Hashable], pages: Sequence[int], base: int | None) -> Insert:
        """Add a chain; where it is cached already, the cached pages stay and `pages` holds the caller's duplicates.

        The whole insert is declined when the deepest matched node, even one matched in part or to the end of `keys`,
        has another rotation base: one chain never mixes two rotations. `base` None never declines.
        Raises GeometryError for unequal lengths, CyclicOrderError when `pages` do not go round the classes.
        """
        if len(keys) != len(pages):
            raise GeometryError(f"insert of {len(keys)} keys with {len(pages)} pages, expected one page per key")
        if not keys:
            return Insert(None, 0, [], declined=False)
        found = self.match(keys)
        cached_base = found.node.base
        if base is None:
            base = pages[0] if cached_base is None else cached_base
        base %= self.placement.shards
        if cached_base not in (None, base):
            return Insert(found.node, len(found.pages), [], declined=True)
        self._check_cyclic(pages, base)
        node = self._split(found.node, found.node_pages)
        matched = len(found.pages)
        if matched < len(keys):
            node = self._add_leaf(node, list(keys[matched:]), list(pages[matched:]), base)
        self._touch(node)
        return Insert(node, matched, [*found.pages, *pages[matched:]], declined=False)

    def evict(self, short: Sequence[int]) -> list[int]:
        """Evict whole leaves, least recently used first, until `short[c]` pages of each class c are freed.

        A leaf stays when neither it nor an unlocked ancestor (which evicting it helps to reach) holds a page that is
        still wanted. Returns the freed page ids.
        """
        wanted = {owner: count for owner, count in enumerate(short) if count > 0}
        freed: list[int] = []
        kept: list[Node] = []
        while wanted and (leaf := self._leaves.pop()) is not None:
            if not self._leads_to(leaf, wanted):
                kept.append(leaf)
                continue
            freed += self._remove(leaf)
            counts = self._class_counts(leaf)
            wanted = {owner: count - counts[owner] for owner, count in wanted.items() if count > counts[owner]}
        for leaf in kept:
            self._leaves.offer(leaf)
        return freed

    def evict_pages(self, count: int) -> list[int]:
        """Evict whole leaves of any class, least recently used first, until at least `count` pages are freed."""
        freed: list[int] = []
        while len(freed) < count and (leaf := self._leaves.pop()) is not None:
            freed += self._remove(leaf)
        return freed

    def evictable_counts(self) -> list[int]:
        """Pages of unlocked nodes per owner class."""
        return self._evictable.copy()

    def cached_counts(self) -> list[int]:
        """Pages of all nodes per owner class."""
        return self._cached.copy()

    def lockable_counts(self, match: Match) -> list[int]:
        """Pages per owner class that locking `match` would take from the evictable ones."""
        position, node, taken = len(match.pages), match.node, match.node_pages
        while node.parent is not None and node.locks == 0:
            position -= taken
            node = node.parent
            taken = len(node.pages)
        start = match.pages[position] if position < len(match.pages) else 0
        return self.placement.class_counts(start % self.placement.shards, len(match.pages) - position)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children, children in the order in which they were added."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def _path(self, node: Node) -> Iterator[Node]:
        """`node` and its ancestors without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _touch(self, node: Node) -> None:
        self.clock += 1
        for each in self._path(node):
            each.last_access = self.clock

    def _split(self, node: Node, node_pages: int) -> Node:
        """Node that ends after `node_pages` pages of `node`, which itself becomes the lower part if it is longer."""
        if node_pages == len(node.pages) or node.parent is None:
            return node
        upper = Node(
            self._next_id,
            node.keys[:node_pages],
            node.pages[:node_pages],
            node.base,
            node.parent,
            node.last_access,
            node.locks,  # every handle on the lower part stands for the upper part too
        )
        self._next_id += 1
        self.splits += 1
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.pages, node.parent = node.keys[node_pages:], node.pages[node_pages:], upper
        upper.children[node.keys[0]] = node
        return upper

    def _add_leaf(self, parent: Node, keys: list[Hashable], pages: list[int], base: int) -> Node:
        leaf = Node(self._next_id, keys, pages, base, parent, self.clock)
        self._next_id += 1
        parent.children[keys[0]] = leaf
        self._count(self._cached, leaf, 1)
        self._count(self._evictable, leaf, 1)
        self._leaves.offer(leaf)
        return leaf

    def _remove(self, leaf: Node) -> list[int]:
        """Take an evictable leaf out of the tree; its parent may become the next."""
        parent = leaf.parent
        if parent is None:
            raise RuntimeError("the root of a radix tree was evicted; LeafQueue must never hold it")
        del parent.children[leaf.keys[0]]
        self._count(self._cached, leaf, -1)
        self._count(self._evictable, leaf, -1)
        self._leaves.offer(parent)
        return leaf.pages

    def _leads_to(self, leaf: Node, wanted: dict[int, int]) -> bool:
        shards = self.placement.shards
        for node in self._path(leaf):
            if node.locks:
                break
            if any((owner - node.pages[0]) % shards < len(node.pages) for owner in wanted):
                return True
        return False

    def _class_counts(self, node: Node) -> list[int]:
        return self.placement.class_counts(node.pages[0] % self.placement.shards, len(node.pages))

    def _count(self, counts: list[int], node: Node, sign: int) -> None:
        for owner, pages in enumerate(self._class_counts(node)):
            counts[owner] += sign * pages

    def _check_cyclic(self, pages: Sequence[int], base: int) -> None:
        shards = self.placement.shards
        rotation = [(base + step) % shards for step in range(shards)]
        expected = (rotation * (len(pages) // shards + 1))[: len(pages)]
        owners = [page % shards for page in pages]
        if owners != expected:
            at = next(at for at in range(len(pages)) if owners[at] != expected[at])
            raise CyclicOrderError(
                f"insert of page {pages[at]} at position {at} of a chain with rotation base {base}: owner "
                f"{owners[at]}, expected {expected[at]}; pass the base the pages were drawn with"
            )


def _shared_pages(node_keys: list[Hashable], keys: Sequence[Hashable], start: int, end: int) -> int:
    """Length of the common prefix of `node_keys` and `keys[start:end]`."""
    length = min(len(node_keys), end - start)
    if keys[start : start + length] == node_keys[:length]:
        return length
    return next((i for i in range(length) if keys[start + i] != node_keys[i]), length)

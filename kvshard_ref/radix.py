"""Radix tree of cached chains: page keys to page ids of both tiers. Mirrored: every rank holds the same tree.

    chain    [0, a) first node   [a, b) its child   ...     position P belongs to class (base + P) mod N, in either tier
    path     [0, d) on the device, perhaps copied           [d, end) on the host only
    node     keys[i] <-> pages[i] <-> slots[i]              locks(parent) >= locks(child)
    counts   cached = evictable (nodes with locks == 0) + protected, per owner class, of the device

A page key is one hashable per whole page. Keys must have a `repr` that is the same in every process.
Rules: sglang 0.5.23, mem_cache/unified_cache/unified_tree_core.py; class-aware eviction is our choice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from kvshard_ref.errors import CyclicOrderError, GeometryError, UnbalancedLockError
from kvshard_ref.eviction import LeafQueue
from kvshard_ref.node import Node
from kvshard_ref.placement import Placement, add


class Match(NamedTuple):
    """The longest cached prefix of some keys."""

    node: Node
    """Deepest node touched; the root when nothing matches."""
    node_pages: int
    """Pages matched inside it."""
    pages: list[int]
    """Device pages of the match's part that is on the device."""
    length: int
    """Matched pages, those on the host only included."""


class Insert(NamedTuple):
    """Outcome of an insert."""

    node: Node | None
    """Node whose path is exactly the inserted keys; the conflicting node when declined; None for no keys."""
    matched_pages: int
    """Pages that were on the device already: here the caller's are duplicates."""
    pages: list[int]
    """Canonical device pages of all inserted keys; empty when declined."""
    declined: bool


class Freed(NamedTuple):
    """What an eviction set free."""

    pages: list[int]
    slots: list[int]
    """Host pages of nodes that left the tree."""


class RadixTree:
    """Chains of pages with locks, splits and LRU eviction. The tree frees no page: evicted ids go to the caller."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.root = Node(0, [], [], None, None, 0)
        self.clock = 0
        self.splits = 0
        self._ids = count(1)
        self._leaves = LeafQueue(lambda node: node.is_device_leaf)
        self._copies = LeafQueue(lambda node: node.is_host_leaf)
        self._evictable = [0] * placement.shards

    def match(self, keys: Sequence[Hashable], pages_max: int | None = None) -> Match:
        """Longest cached prefix of at most `pages_max` pages; good until the next insert or eviction.

        Reads only: no split, no access time.
        """
        end = len(keys) if pages_max is None else min(pages_max, len(keys))
        node, node_pages, length, pages = self.root, 0, 0, list[int]()
        while length < end and node_pages == len(node.keys):
            child = node.children.get(keys[length])
            if child is None:
                break
            node, node_pages = child, _shared_pages(child.keys, keys, length, end)
            length += node_pages
            pages += child.pages[:node_pages]
        return Match(node, node_pages, pages, length)

    def lock(self, match: Match) -> Node:
        """Protect the matched path, split at its end, from eviction; returns the handle that `unlock` takes.

        A handle stands for the whole path down to its node's end and survives splits.
        """
        node = self._split(match.node, match.node_pages)
        for each in self.path(node):
            if each.locks == 0:
                self._count_evictable(each, -1)
            each.locks += 1
        self._touch(node)
        return node

    def unlock(self, node: Node) -> None:
        """Take back one `lock`. Raises UnbalancedLockError when the node is not locked."""
        if node.locks == 0 and node.parent is not None:
            raise UnbalancedLockError(
                f"unlock of node {node.id} ({len(node.keys)} pages) with 0 locks, expected at least 1; unlock once"
            )
        for each in self.path(node):
            each.locks -= 1
            if each.locks == 0:
                self._count_evictable(each, 1)
                self._offer(each)

    def insert(self, keys: Sequence[Hashable], pages: Sequence[int], base: int | None) -> Insert:
        """Add a chain on the device; where it is there already, the cached pages stay.

        Nodes that are on the host only take the caller's pages as theirs. The whole insert is declined when the deepest
        matched node, even one matched in part or to the end of `keys`, has another rotation base: one chain never mixes
        two rotations, and a copy has the owners of its pages. `base` None never declines.
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
            return Insert(found.node, found.length, [], declined=True)
        self._check_cyclic(pages, base)
        node = self._split(found.node, found.node_pages)
        if found.length < len(keys):
            parent, node = node, Node(next(self._ids), list(keys[found.length :]), [], base, node, self.clock)
            parent.children[node.keys[0]] = node
        self._touch(node)
        self.fill(node, pages)
        matched = len(found.pages)
        return Insert(node, matched, [*found.pages, *pages[matched:]], declined=False)

    def fill(self, node: Node, pages: Sequence[int]) -> None:
        """Give the nodes of the path that have no device pages theirs, out of `pages` by position."""
        start = 0
        for each in reversed(list(self.path(node))):
            if not each.pages and each.parent is not None:
                each.pages = list(pages[start : start + len(each.keys)])
                each.parent.device_children += 1
                if each.locks == 0:
                    self._count_evictable(each, 1)
                self._offer(each)
            start += len(each.keys)

    def chain(self, node: Node) -> tuple[list[int], list[int]]:
        """The path of `node`: device pages of [0, d), host pages of [d, end)."""
        pages, slots = list[int](), list[int]()
        for each in reversed(list(self.path(node))):
            pages += each.pages
            slots += [] if each.pages else each.slots
        return pages, slots

    def pin(self, node: Node, pages: int, change: int) -> None:
        """Pin (`change` 1) the last `pages` pages of the path down to the node's end in their tiers, or unpin (-1).

        Both find the same pages, whatever splits there were between them.
        """
        for each in self.path(node):
            if pages > 0:
                each.pins += change
                self._offer(each)
                pages -= len(each.keys)

    def evict(self, short: Sequence[int], tier: str = "device", spill: Callable[[Node], object] | None = None) -> Freed:
        """Evict whole leaves of a tier, least recently used first, until `short[c]` pages of each class c are freed.

        Class of a page: page mod len(short), so [count] means pages of any owner. A leaf stays when neither it nor an
        unlocked ancestor (which evicting it helps to reach) holds a page that is still wanted. `spill` is called with
        each device leaf that has no copy, and may give it one.
        """
        queue, drop = (self._copies, self._drop_copy) if tier == "host" else (self._leaves, self._drop_pages)
        classes = Placement(len(short), self.placement.page_size)
        wanted = {owner: pages for owner, pages in enumerate(short) if pages > 0}
        freed, kept = Freed([], []), list[Node]()
        while wanted and (node := queue.pop()) is not None:
            ids = node.slots if tier == "host" else node.pages
            if self._leads_to(node, wanted, classes.shards, tier):
                if not node.slots and spill:
                    spill(node)
                if drop(node, freed):
                    counts = classes.class_counts(ids[0], len(ids))
                    wanted = {owner: pages - counts[owner] for owner, pages in wanted.items() if pages > counts[owner]}
                    continue
            kept.append(node)
        for node in kept:
            queue.offer(node)
        return freed

    def evictable_counts(self) -> list[int]:
        """Device pages of unlocked nodes per owner class, pinned ones included: a pin ends by itself."""
        return self._evictable.copy()

    def evictable_copies(self) -> list[int]:
        """Host pages per owner class that can be freed now: a locked or pinned copy keeps those above it."""
        counts, kept = [0] * self.placement.shards, set[int]()
        for node in reversed(list(self.nodes())):  # children before parents
            if node.slots and (
                node.locks or node.pins or kept.intersection(each.id for each in node.children.values())
            ):
                kept.add(node.id)
            elif node.slots:
                counts = add(counts, self.placement.class_counts(node.slots[0], len(node.slots)))
        return counts

    def lockable_counts(self, match: Match) -> list[int]:
        """Device pages per owner class that locking `match` would take from the evictable ones."""
        locked = sum(len(each.keys) for each in self.path(match.node) if each.locks)
        taken = match.pages[locked:]
        return self.placement.class_counts(taken[0] if taken else 0, len(taken))

    def nodes(self, below: Node | None = None) -> Iterator[Node]:
        """All nodes below `below` (the root), parents before children, children in the order they were added."""
        stack = list(reversed((below or self.root).children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def path(self, node: Node) -> Iterator[Node]:
        """`node` and its ancestors without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _touch(self, node: Node) -> None:
        self.clock += 1
        for each in self.path(node):
            each.last_access = self.clock

    def _offer(self, node: Node) -> None:
        self._leaves.offer(node)
        self._copies.offer(node)

    def _split(self, node: Node, node_pages: int) -> Node:
        """Node that ends after `node_pages` pages of `node`, which itself becomes the lower part if it is longer."""
        if node_pages == len(node.keys) or node.parent is None:
            return node
        # every handle on, and every copy of, the lower part stands for the upper part too
        upper = replace(
            node,
            id=next(self._ids),
            keys=node.keys[:node_pages],
            pages=node.pages[:node_pages],
            slots=node.slots[:node_pages],
            children={node.keys[node_pages]: node},
            device_children=int(bool(node.pages)),
        )
        self.splits += 1
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.pages, node.slots = node.keys[node_pages:], node.pages[node_pages:], node.slots[node_pages:]
        node.parent = upper
        return upper

    def _drop_pages(self, leaf: Node, freed: Freed) -> bool:
        """Evict a device leaf; without a copy it leaves the tree with all below it, unless a copy there is pinned."""
        below = [] if leaf.slots else list(self.nodes(leaf))
        if leaf.parent is None or any(node.pins for node in below):
            return False
        self._count_evictable(leaf, -1)
        freed.pages.extend(leaf.pages)
        leaf.pages = []
        leaf.parent.device_children -= 1
        if not leaf.slots:
            del leaf.parent.children[leaf.keys[0]]
            for node in below:
                freed.slots.extend(node.slots)
                node.slots = []
        self._copies.offer(leaf)
        self._offer(leaf.parent)
        return True

    def _drop_copy(self, node: Node, freed: Freed) -> bool:
        """Evict a node's copy; without device pages it leaves the tree, and its parent may become the next."""
        freed.slots.extend(node.slots)
        node.slots = []
        if node.parent is not None:
            if not node.pages:
                del node.parent.children[node.keys[0]]
            self._copies.offer(node.parent)
        return True

    def _leads_to(self, leaf: Node, wanted: dict[int, int], classes: int, tier: str) -> bool:
        """Whether `leaf`, or a node above it that its eviction helps to reach, holds a page of a wanted class."""
        for node in self.path(leaf):
            ids = node.slots if tier == "host" else node.pages
            if not ids or (node.locks and node is not leaf):
                break
            if any((owner - ids[0]) % classes < len(ids) for owner in wanted):
                return True
        return False

    def _count_evictable(self, node: Node, sign: int) -> None:
        if node.pages:
            for owner, pages in enumerate(self.placement.class_counts(node.pages[0], len(node.pages))):
                self._evictable[owner] += sign * pages

    def _check_cyclic(self, pages: Sequence[int], base: int) -> None:
        shards = self.placement.shards
        expected = [(base + step) % shards for step in range(shards)] * (len(pages) // shards + 1)
        owners = [page % shards for page in pages]
        if owners != expected[: len(pages)]:
            at = next(at for at, owner in enumerate(owners) if owner != expected[at])
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

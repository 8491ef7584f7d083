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
from typing import NamedTuple

from kvshard_ref.errors import CyclicOrderError, GeometryError, UnbalancedLockError
from kvshard_ref.eviction import LeafQueue
from kvshard_ref.node import Node
from kvshard_ref.placement import Placement


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
        self._next_id = 1
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
                f"unlock of node {node.id} ({len(node.keys)} pages) with 0 locks, expected at least 1; "
                "unlock each handle that lock returned exactly once"
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
        self.fill(node, pages)
        if found.length < len(keys):
            node = self._add_leaf(node, list(keys[found.length :]), list(pages[found.length :]), base)
        self._touch(node)
        matched = len(found.pages)
        return Insert(node, matched, [*found.pages, *pages[matched:]], declined=False)

    def fill(self, node: Node, pages: Sequence[int]) -> None:
        """Give the nodes of the path that are on the host only their device pages, out of `pages` by position."""
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

    def copied(self, node: Node, slots: list[int]) -> None:
        """The node has a host copy from now on."""
        node.slots = slots
        self._copies.offer(node)

    def pin(self, node: Node, pages: int) -> None:
        """Keep the last `pages` pages of the path down to the node's end in their tiers until `unpin`."""
        for each in self._last(node, pages):
            each.pins += 1

    def unpin(self, node: Node, pages: int) -> None:
        """Take back one `pin` of the same pages, whatever splits there were since."""
        for each in self._last(node, pages):
            each.pins -= 1
            self._offer(each)

    def evict(self, short: Sequence[int], spill: Callable[[Node], None] | None = None) -> Freed:
        """Evict whole device leaves, least recently used first, until `short[c]` pages of each class c are freed.

        A leaf stays when neither it nor an unlocked ancestor (which evicting it helps to reach) holds a page that is
        still wanted. `spill` is called with each leaf that has no copy, and may give it one.
        """
        wanted = _wanted(short)
        freed = Freed([], [])
        kept: list[Node] = []
        while wanted and (leaf := self._leaves.pop()) is not None:
            count = len(leaf.keys)
            start = leaf.pages[0]
            if not self._leads_to(leaf, wanted, on_host=False) or not self._remove(leaf, freed, spill):
                kept.append(leaf)
                continue
            wanted = self._minus(wanted, start, count)
        for leaf in kept:
            self._leaves.offer(leaf)
        return freed

    def evict_pages(self, count: int, spill: Callable[[Node], None] | None = None) -> Freed:
        """Evict whole device leaves of any class, least recently used first, until at least `count` pages are freed."""
        freed = Freed([], [])
        kept: list[Node] = []
        while len(freed.pages) < count and (leaf := self._leaves.pop()) is not None:
            if not self._remove(leaf, freed, spill):
                kept.append(leaf)
        for leaf in kept:
            self._leaves.offer(leaf)
        return freed

    def evict_copies(self, short: Sequence[int]) -> list[int]:
        """Evict whole host copies, least recently used first, until `short[c]` host pages of each class c are freed."""
        wanted = _wanted(short)
        freed: list[int] = []
        kept: list[Node] = []
        while wanted and (node := self._copies.pop()) is not None:
            if not self._leads_to(node, wanted, on_host=True):
                kept.append(node)
                continue
            wanted = self._minus(wanted, node.slots[0], len(node.keys))
            freed += self._remove_copy(node)
        for node in kept:
            self._copies.offer(node)
        return freed

    def evict_copies_pages(self, count: int) -> list[int]:
        """Evict whole host copies, least recently used first, until at least `count` host pages are freed."""
        freed: list[int] = []
        while len(freed) < count and (node := self._copies.pop()) is not None:
            freed += self._remove_copy(node)
        return freed

    def evictable_counts(self) -> list[int]:
        """Device pages of unlocked nodes per owner class, pinned ones included: a pin ends by itself."""
        return self._evictable.copy()

    def lockable_counts(self, match: Match) -> list[int]:
        """Device pages per owner class that locking `match` would take from the evictable ones."""
        position, node, taken = match.length, match.node, match.node_pages
        while node.parent is not None and node.locks == 0:
            position -= taken
            node = node.parent
            taken = len(node.keys)
        start = match.pages[position] if position < len(match.pages) else 0
        return self.placement.class_counts(start % self.placement.shards, max(0, len(match.pages) - position))

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

    def _last(self, node: Node, pages: int) -> Iterator[Node]:
        """The nodes of the last `pages` pages of the path down to the node's end."""
        for each in self.path(node):
            if pages <= 0:
                return
            pages -= len(each.keys)
            yield each

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
        upper = Node(
            self._next_id,
            node.keys[:node_pages],
            node.pages[:node_pages],
            node.base,
            node.parent,
            node.last_access,
            node.locks,  # every handle on the lower part stands for the upper part too
            slots=node.slots[:node_pages],
            pins=node.pins,
            hits=node.hits,
            device_children=int(bool(node.pages)),
        )
        self._next_id += 1
        self.splits += 1
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.pages, node.slots = node.keys[node_pages:], node.pages[node_pages:], node.slots[node_pages:]
        node.parent = upper
        upper.children[node.keys[0]] = node
        self._copies.offer(upper)
        return upper

    def _add_leaf(self, parent: Node, keys: list[Hashable], pages: list[int], base: int) -> Node:
        leaf = Node(self._next_id, keys, pages, base, parent, self.clock)
        self._next_id += 1
        parent.children[keys[0]] = leaf
        parent.device_children += 1
        self._count_evictable(leaf, 1)
        self._leaves.offer(leaf)
        return leaf

    def _remove(self, leaf: Node, freed: Freed, spill: Callable[[Node], None] | None) -> bool:
        """Evict a device leaf; without a copy it leaves the tree with all below it, unless a copy there is pinned."""
        parent = leaf.parent
        if parent is None:
            raise RuntimeError("the root of a radix tree was evicted; LeafQueue must never hold it")
        if not leaf.slots and spill is not None:
            spill(leaf)
        below = [] if leaf.slots else list(self.nodes(leaf))
        if any(node.pins for node in below):
            return False
        self._count_evictable(leaf, -1)
        freed.pages.extend(leaf.pages)
        leaf.pages = []
        parent.device_children -= 1
        if not leaf.slots:
            del parent.children[leaf.keys[0]]
            for node in below:
                freed.slots.extend(node.slots)
                node.slots = []
        self._copies.offer(leaf)
        self._leaves.offer(parent)
        return True

    def _remove_copy(self, node: Node) -> list[int]:
        """Evict a node's copy; without device pages it leaves the tree, and its parent may become the next."""
        freed, node.slots = node.slots, []
        if not node.pages and node.parent is not None:
            del node.parent.children[node.keys[0]]
            self._copies.offer(node.parent)
        return freed

    def _leads_to(self, leaf: Node, wanted: dict[int, int], *, on_host: bool) -> bool:
        """Whether `leaf`, or a node above it that its eviction helps to reach, holds a page of a wanted class."""
        shards = self.placement.shards
        for node in self.path(leaf):
            ids = node.slots if on_host else node.pages
            if node.locks or not ids or (on_host and node.pages and node is not leaf):
                break
            if any((owner - ids[0]) % shards < len(ids) for owner in wanted):
                return True
        return False

    def _minus(self, wanted: dict[int, int], start: int, count: int) -> dict[int, int]:
        counts = self.placement.class_counts(start % self.placement.shards, count)
        return {owner: pages - counts[owner] for owner, pages in wanted.items() if pages > counts[owner]}

    def _count_evictable(self, node: Node, sign: int) -> None:
        if not node.pages:
            return
        counts = self.placement.class_counts(node.pages[0] % self.placement.shards, len(node.pages))
        for owner, pages in enumerate(counts):
            self._evictable[owner] += sign * pages

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


def _wanted(short: Sequence[int]) -> dict[int, int]:
    return {owner: count for owner, count in enumerate(short) if count > 0}


def _shared_pages(node_keys: list[Hashable], keys: Sequence[Hashable], start: int, end: int) -> int:
    """Length of the common prefix of `node_keys` and `keys[start:end]`."""
    length = min(len(node_keys), end - start)
    if keys[start : start + length] == node_keys[:length]:
        return length
    return next((i for i in range(length) if keys[start + i] != node_keys[i]), length)

"""Least recently used order of the leaves of a radix tree."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """A run of whole pages below its parent. Every node but the root holds at least one page."""

    id: int
    """Creation order; breaks ties between equal `last_access`."""
    keys: list[Hashable]
    pages: list[int]
    base: int | None
    """Rotation base of the chain, the same in all nodes below one child of the root; None for the root."""
    parent: Node | None
    last_access: int
    """Logical clock of the last insert or lock that went through this node."""
    locks: int = 0
    children: dict[Hashable, Node] = field(default_factory=dict)
    """By first page key."""
    queued: bool = False
    """A LeafQueue holds an entry for this node."""

    @property
    def evictable(self) -> bool:
        """An unlocked leaf (the root is none)."""
        return self.locks == 0 and not self.children and self.parent is not None


class LeafQueue:
    """Evictable leaves, least recently used first.

    A heap with at most one entry per node. An entry's time is never later than the node's, so an entry that is out
    of date comes up too early at worst, and is then put back or dropped.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def offer(self, node: Node) -> None:
        """Queue a node if it is evictable; call this whenever a node may have become so."""
        if node.evictable and not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.last_access, node.id, node))

    def pop(self) -> Node | None:
        """Take the least recently used evictable leaf; the caller evicts it or offers it again."""
        while self._heap:
            time, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.evictable and node.last_access == time:
                return node
            self.offer(node)
        return None

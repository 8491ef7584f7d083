"""Least recently used order of the leaves of a radix tree."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvshard_ref.node import Node


class LeafQueue:
    """Nodes for which `ready` holds, least recently used first.

    A heap with at most one entry per node. An entry's time is never later than the node's, so an entry that is out
    of date comes up too early at worst, and is then put back or dropped.
    """

    def __init__(self, ready: Callable[[Node], bool]) -> None:
        self._ready = ready
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[int] = set()

    def offer(self, node: Node) -> None:
        """Queue a node if it is ready; call this whenever a node may have become so."""
        if node.id not in self._queued and self._ready(node):
            self._queued.add(node.id)
            heapq.heappush(self._heap, (node.last_access, node.id, node))

    def pop(self) -> Node | None:
        """Take the least recently used node; the caller evicts it or offers it again."""
        while self._heap:
            time, _, node = heapq.heappop(self._heap)
            self._queued.discard(node.id)
            if node.last_access == time and self._ready(node):
                return node
            self.offer(node)
        return None

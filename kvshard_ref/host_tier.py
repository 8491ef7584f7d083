"""The host tier at index level: which host pages back which nodes. Mirrored: every rank decides alike.

    host page ids   [0, N) reserved   [N, N * (pages_per_rank + 1)) the pool; owner = page mod N, as on the device
    a copy          owner(slots[i]) == owner(pages[i]) for every i, so that each rank copies its own pages alone
    host pages      pages_per_rank = free + slots of nodes, per owner class

A copy between the tiers is planned here, carried out by every rank for its own pages (also by one that owns none), and
stays in flight, its nodes pinned, until all ranks have acknowledged it.
Rules: sglang 0.5.23, mem_cache/pool_host/page_interleave.py and mem_cache/unified_radix_cache.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvshard_ref.allocator import PageAllocator
from kvshard_ref.errors import GeometryError
from kvshard_ref.node import Node
from kvshard_ref.radix import RadixTree

POLICIES = ("write_through", "write_through_selective", "write_back")
SELECTIVE_HITS = 2
"""Finished requests that must have used a node before write_through_selective backs it up."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Pages on their way between the tiers: pages[i] <-> slots[i], the last ones of the path down to the node's end."""

    kind: str
    """"backup" (device to host) or "restore" (host to device)."""
    node: Node
    pages: list[int]
    slots: list[int]


class HostTier:
    """Host page allocator, policy, and the copies in flight, in the order in which they were planned."""

    def __init__(self, tree: RadixTree, pages_per_rank: int, policy: str) -> None:
        if policy not in POLICIES:
            raise GeometryError(f"host policy is {policy!r}, expected one of {POLICIES}")
        self.tree = tree
        self.policy = policy
        self.allocator = PageAllocator(tree.placement, pages_per_rank)
        self.planned: list[Copy] = []
        self.in_flight: deque[Copy] = deque()
        self.drain: Callable[[], None] = lambda: self.acknowledge(len(self.in_flight))
        """Waits for all copies in flight; a worker puts its own here."""
        self.backup_pages = 0
        self.restored_pages = 0

    def take_planned(self) -> list[Copy]:
        """The copies to carry out now, in order."""
        planned, self.planned = self.planned, []
        return planned

    def acknowledge(self, count: int) -> None:
        """The oldest `count` copies in flight are complete on every rank."""
        for _ in range(count):
            copy = self.in_flight.popleft()
            self.tree.unpin(copy.node, len(copy.pages))

    def used(self, node: Node, *, finished: bool) -> None:
        """A request computed, or at its end has used, the path of `node`: back up what the policy wants, root first."""
        path = list(self.tree.path(node))[::-1]
        for each in path:
            each.hits += finished
        if self.policy == "write_back":
            return
        least = SELECTIVE_HITS if self.policy == "write_through_selective" else 0
        for each in path:
            if not each.slots and (each.hits < least or not self.back_up(each)):
                return

    def spill(self, node: Node) -> None:
        """A node without a copy is about to lose its device pages."""
        if self.policy == "write_back":
            self.back_up(node)

    def back_up(self, node: Node) -> bool:
        """Plan the copy of a node's pages to host pages of the same owners; False when there is no room."""
        counts = self.tree.placement.class_counts(node.pages[0], len(node.pages))
        self.evict([need - have for need, have in zip(counts, self.allocator.free_counts(), strict=True)])
        slots = self.allocator.draw_run(node.pages[0], len(node.pages))
        if slots is None:
            return False
        self.tree.copied(node, slots)
        self._plan(Copy("backup", node, node.pages.copy(), slots.copy()))
        self.backup_pages += len(slots)
        return True

    def restore(self, node: Node, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Plan the copy back of the path's part that is on the host only; `pages` are the whole path's, by position."""
        self.tree.fill(node, pages)
        self._plan(Copy("restore", node, list(pages[len(pages) - len(slots) :]), list(slots)))
        self.restored_pages += len(slots)

    def evict(self, short: Sequence[int]) -> None:
        """Evict copies, least recently used first, until `short[c]` host pages of each class are freed, if possible."""
        self.allocator.free(self.tree.evict_copies(short))

    def _plan(self, copy: Copy) -> None:
        self.tree.pin(copy.node, len(copy.pages))
        self.planned.append(copy)
        self.in_flight.append(copy)

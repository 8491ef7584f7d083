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
from math import inf

from kvshard_ref.allocator import PageAllocator
from kvshard_ref.checks import one_of
from kvshard_ref.node import Node
from kvshard_ref.placement import subtract
from kvshard_ref.radix import RadixTree

HITS_MIN = {"write_through": 0, "write_through_selective": 2, "write_back": inf}
"""Per policy the finished requests that must have used a node before it is backed up; else when it is evicted."""
POLICIES = tuple(HITS_MIN)


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
        one_of("host policy", policy, POLICIES)
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
            self.tree.pin(copy.node, len(copy.pages), -1)

    def used(self, node: Node, *, finished: bool) -> None:
        """A request computed, or at its end has used, the path of `node`: back up what the policy wants, root first."""
        path = list(self.tree.path(node))[::-1]
        for each in path:
            each.hits += finished
        for each in path:
            if not each.slots and (each.hits < HITS_MIN[self.policy] or not self.back_up(each)):
                return

    def back_up(self, node: Node) -> bool:
        """Plan the copy of a node's pages to host pages of the same owners; False when no room can be made for it."""
        needs = self.tree.placement.class_counts(node.pages[0], len(node.pages))
        short = subtract(needs, self.allocator.free_counts())
        if max(short) > 0 and max(subtract(short, self.tree.evictable_copies())) > 0:
            return False
        self.allocator.free(self.tree.evict(short, "host").slots)
        slots = self.allocator.draw_run(node.pages[0], len(node.pages))
        if slots is None:
            return False
        node.slots = slots
        self._plan(Copy("backup", node, node.pages.copy(), slots.copy()))
        self.backup_pages += len(slots)
        return True

    def restore(self, node: Node, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Plan the copy back of the path's part that is on the host only; `pages` are the whole path's, by position."""
        self.tree.fill(node, pages)
        self._plan(Copy("restore", node, list(pages[len(pages) - len(slots) :]), list(slots)))
        self.restored_pages += len(slots)

    def _plan(self, copy: Copy) -> None:
        self.tree.pin(copy.node, len(copy.pages), 1)
        self.planned.append(copy)
        self.in_flight.append(copy)

"""Node: a run of whole pages of one chain in the radix tree, on the device, on the host, or on both."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """A run of whole pages below its parent. Every node but the root holds at least one page, in one tier or in both.

    device   a node on the device has its parent on the device: eviction goes from the leaves towards the root
    host     any node may have a copy; whose device pages are evicted without a copy leaves the tree, with all below it
    """

    id: int
    """Creation order; breaks ties between equal `last_access`."""
    keys: list[Hashable]
    pages: list[int]
    """Device pages by position; empty when the node is on the host only."""
    base: int | None
    """Rotation base of the chain, the same in all nodes below one child of the root; None for the root."""
    parent: Node | None
    last_access: int
    """Logical clock of the last insert or lock that went through this node."""
    locks: int = 0
    """Requests that hold the node: it is evicted from neither tier."""
    children: dict[Hashable, Node] = field(default_factory=dict)
    """By first page key."""
    slots: list[int] = field(default_factory=list)
    """Host pages by position, of the same owners; empty without a copy."""
    pins: int = 0
    """Copies between the tiers that are not acknowledged: it is evicted from neither tier."""
    hits: int = 0
    """Finished requests that went through this node."""
    device_children: int = 0

    @property
    def is_device_leaf(self) -> bool:
        """Whether its device pages may be evicted (those of the root are none)."""
        return bool(self.pages) and not (self.locks or self.pins or self.device_children)

    @property
    def is_host_leaf(self) -> bool:
        """Whether its copy may be evicted: no copy below it would lose its prefix."""
        free = bool(self.slots) and not (self.locks or self.pins)
        return free and not any(child.slots for child in self.children.values())

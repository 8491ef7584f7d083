"""Faults in the radix tree: locks, splits, matches, leaves, eviction."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="node.host-child-blocks-device",
        does="A node with any child, also one that is on the host only, is no device leaf and is never evicted.",
        kind="tree",
        like="systematic",
        breaks=("I06", "I04"),
        changes=(Edit("kvshard_ref.node:Node.is_device_leaf", "self.device_children", "self.children"),),
    ),
    Fault(
        id="eviction.busy-leaf-forgotten",
        does="A leaf that is popped while it is held counts as queued for ever, so it is never offered again.",
        kind="tree",
        like="B11",
        breaks=("I04", "I06"),
        changes=(
            Edit(
                "kvshard_ref.eviction:LeafQueue.pop",
                "self._queued.discard(node.id)",
                """
if not self._ready(node):
    continue
self._queued.discard(node.id)
""",
            ),
        ),
    ),
    Fault(
        id="radix.unlock-stops-at-shared",
        does="An unlock stops at the first node that another request holds as well; the nodes above keep a lock.",
        kind="tree",
        like="B20",
        breaks=("I04", "I09"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.unlock",
                "if each.locks == 0:",
                """
if each.locks > 0:
    break
if each.locks == 0:
""",
            ),
        ),
    ),
    Fault(
        id="radix.split-resets-hits",
        does=(
            "The upper part of a split node starts to count its uses anew, so a selective policy backs it up too late."
        ),
        kind="tree",
        like="B18",
        breaks=("I13", "I12"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree._split",
                "children={node.keys[node_pages]: node},",
                "children={node.keys[node_pages]: node}, hits=0,",
            ),
        ),
    ),
    Fault(
        id="radix.split-loses-upper-copy",
        does=("A split gives the upper part no host pages and cuts them off the lower part: they belong to nobody."),
        kind="tree",
        like="B18",
        breaks=("I04", "I09", "I13"),
        changes=(Edit("kvshard_ref.radix:RadixTree._split", "slots=node.slots[:node_pages],", "slots=[],"),),
    ),
    Fault(
        id="radix.split-host-only-counts-child",
        does="A split of a node that is on the host only counts the lower part as a device child for ever.",
        kind="tree",
        like="B20",
        breaks=("tiers.", "I06", "I04"),
        changes=(
            Edit("kvshard_ref.radix:RadixTree._split", "device_children=int(bool(node.pages)),", "device_children=1,"),
        ),
    ),
    Fault(
        id="radix.full-match-not-declined",
        does=("An insert whose keys are all cached is accepted although the cached chain has another rotation base."),
        kind="tree",
        like="systematic",
        breaks=("I01", "I05", "I19"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.insert",
                "if cached_base not in (None, base):",
                "if cached_base not in (None, base) and found.length < len(keys):",
            ),
        ),
    ),
    Fault(
        id="radix.host-match-is-duplicate",
        does=(
            "An insert that gives its pages to a node on the host reports them as duplicates, so the caller frees them."
        ),
        kind="tree",
        like="B20",
        breaks=("I05", "I04", "I12"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.insert",
                "return Insert(node, matched, [*found.pages",
                "return Insert(node, found.length, [*found.pages",
            ),
        ),
    ),
    Fault(
        id="radix.restored-child-uncounted",
        does=(
            "A node that comes back from the host is not counted as device child, so its parent may be evicted first."
        ),
        kind="tree",
        like="B20",
        breaks=("I13", "I12", "I04"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.fill",
                "each.parent.device_children += 1",
                "each.parent.device_children += not each.slots",
            ),
        ),
    ),
    Fault(
        id="radix.passed-over-leaves-lost",
        does="Leaves that a successful eviction passed over (no page of a short class) are not queued again.",
        kind="tree",
        like="B34",
        breaks=("I06", "I04"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.evict",
                """
for node in kept:
    queue.offer(node)
""",
                """
if wanted:
    for node in kept:
        queue.offer(node)
""",
            ),
        ),
    ),
    Fault(
        id="radix.scarce-class-behind-leaf",
        does=("A leaf without a page of a short class is passed over even if its parent has one, so nothing is freed."),
        kind="tree",
        like="B08",
        breaks=("I06",),
        changes=(Edit("kvshard_ref.radix:RadixTree._leads_to", "in self.path(leaf):", "in [leaf]:"),),
    ),
    Fault(
        id="radix.ghost-after-host-eviction",
        does=("A node on the host only stays in the tree when its copy is evicted, and is matched without any row."),
        kind="tree",
        like="B34",
        breaks=("I13", "I19", "I12"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree._drop_copy",
                """
if not node.pages:
    del node.parent.children[node.keys[0]]
""",
                "",
            ),
        ),
    ),
    Fault(
        id="radix.evictable-from-chain-base",
        does="Evictable pages of a node are counted from the chain's base, not from the node's own first page.",
        kind="tree",
        like="B08",
        breaks=("I06", "I04"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree._count_evictable",
                "class_counts(node.pages[0], len(node.pages))",
                "class_counts(node.base, len(node.pages))",
            ),
        ),
    ),
    Fault(
        id="radix.prefix-by-bisection",
        does=(
            "The common prefix is found by bisection, so pages that agree again behind a difference give a false hit."
        ),
        kind="tree",
        like="B51",
        breaks=("hits.only", "reads.warm"),
        changes=(
            Edit(
                "kvshard_ref.radix:_shared_pages",
                """
return next((i for i in range(length) if keys[start + i] != node_keys[i]), length)
""",
                """
low, high = 0, length
while low < high:
    middle = (low + high) // 2
    if keys[start + middle] == node_keys[middle]:
        low = middle + 1
    else:
        high = middle
return low
""",
            ),
        ),
    ),
)

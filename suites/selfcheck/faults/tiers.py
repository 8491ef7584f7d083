"""Faults of the host tier: which pages are copied where, when, and by whom."""

from __future__ import annotations

from harness.fault import Edit, Fault
from suites.selfcheck.faults.known_admission import DRAW_REFUSES

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="host.copy-rotates-from-base",
        does=("Host pages are drawn from the chain's base, not the node's first owner: wrong for nodes further down."),
        kind="tiers",
        like="B35",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.back_up",
                "class_counts(node.pages[0], len(node.pages))",
                "class_counts(node.base, len(node.pages))",
            ),
            Edit(
                "kvshard_ref.host_tier:HostTier.back_up",
                "draw_run(node.pages[0], len(node.pages))",
                "draw_run(node.base, len(node.pages))",
            ),
        ),
    ),
    Fault(
        id="host.restore-from-chain-start",
        does="A restore goes to the first pages of the prefix, also when these are on the device already.",
        kind="tiers",
        like="B38",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.restore",
                "list(pages[len(pages) - len(slots) :])",
                "list(pages[: len(slots)])",
            ),
        ),
    ),
    Fault(
        id="host.restored-counts-prefix",
        does="The counter of restored tokens takes in the part of the prefix that was on the device.",
        kind="tiers",
        like="B67",
        breaks=("tiers.each_rank",),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.restore",
                "self.restored_pages += len(slots)",
                "self.restored_pages += len(pages)",
            ),
        ),
    ),
    Fault(
        id="host.restore-ready-after-first-rows",
        does=("The event of a restored layer is recorded behind its first component; index and draft rows follow it."),
        kind="order",
        like="B23",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                """
ready.append(self._device_module.Event())
ready[-1].record(stream)
""",
                "",
            ),
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                "self.restored_bytes += fresh.nbytes",
                """
self.restored_bytes += fresh.nbytes
if host is rows[0][1]:
    ready.append(self._device_module.Event())
    ready[-1].record(stream)
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="host.second-restore-unwaited",
        does="Only the first restore of a rank waits for the compute stream that may still use the pages.",
        kind="order",
        like="B22",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                "stream.wait_stream(compute)",
                """
if not self.restored_bytes:
    stream.wait_stream(compute)
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="host.backup-done-recorded-first",
        does="The event that acknowledges a backup is recorded before its rows are read, so pins end too early.",
        kind="order",
        like="B34",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.backup",
                """
done = self._device_module.Event()
done.record(stream)
""",
                "",
            ),
            Edit(
                "kvshard_ref.host_pool:HostPool.backup",
                "for device, host in chain.from_iterable(self.rows):",
                """
done = self._device_module.Event()
done.record(stream)
for device, host in chain.from_iterable(self.rows):
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="host.backup-waits-wrong-stream",
        does="A backup waits for the restore stream instead of the compute stream that writes its pages.",
        kind="order",
        like="B24",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.backup",
                "stream.wait_stream(compute)",
                "stream.wait_stream(self._restore_stream)",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="host.slots-sorted-alone",
        does="A rank sorts its host pages for longer runs and forgets to reorder the device pages.",
        kind="tiers",
        like="B54",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool._own",
                "pool.placement.local_page(slots[own])",
                "np.sort(pool.placement.local_page(slots[own]))",
            ),
        ),
    ),
    Fault(
        id="host.draft-layers-above-target",
        does="Layers of a draft beyond the target's number of layers are in no copy between the tiers.",
        kind="tiers",
        like="B50",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.__init__",
                "product(range(pool.layers), pool.components)",
                "product(range(min(pool.layers, len(self.rows))), pool.components)",
            ),
        ),
    ),
    Fault(
        id="host.scales-not-restored",
        does="A restore brings an indexer's keys back and leaves the scales as they are.",
        kind="tiers",
        like="B32",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                "device.put_pages(pages, fresh)",
                """
if device.component.scales:
    keys = device.page_size * (device.component.width - device.component.scales)
    device.pages[pages, :keys] = fresh[:, :keys]
else:
    device.put_pages(pages, fresh)
""",
            ),
        ),
    ),
    Fault(
        id="host-tier.slots-from-chain-base",
        does="Host pages are drawn from the chain's base, not from the owner of the node's first page.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.back_up",
                "needs = self.tree.placement.class_counts(node.pages[0], len(node.pages))",
                "needs = self.tree.placement.class_counts(node.base, len(node.pages))",
            ),
            Edit(
                "kvshard_ref.host_tier:HostTier.back_up",
                "slots = self.allocator.draw_run(node.pages[0], len(node.pages))",
                "slots = self.allocator.draw_run(node.base, len(node.pages))",
            ),
        ),
    ),
    Fault(
        id="host-tier.hits-of-last-node",
        does=(
            "A finished request counts for the last node of its path only; a shared prefix never "
            "becomes worth a backup."
        ),
        kind="tiers",
        like="systematic",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.used",
                """
for each in path:
    each.hits += finished
""",
                """
for each in path[-1:]:
    each.hits += finished
""",
            ),
        ),
    ),
    Fault(
        id="host-tier.evicts-in-vain",
        does="Copies are evicted before it is known whether the new one fits.",
        kind="tiers",
        like="facts 10-24",
        breaks=("tiers.copies_leave",),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.back_up",
                """
if max(short) > 0 and max(subtract(short, self.tree.evictable_copies())) > 0:
    return False
""",
            ),
        ),
    ),
    Fault(
        id="host.gap-joined",
        does="Host pages with a gap of one page between them are copied as one run, over the page in the gap.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.draft", "tiers.everything"),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool._own",
                "starts = np.flatnonzero(np.diff(local_slots, prepend=-2) != 1)",
                """
steps = np.diff(local_slots, prepend=-2)
starts = np.flatnonzero((steps < 1) | (steps > 2))
""",
            ),
        ),
    ),
    Fault(
        id="host-tier.room-in-class-0",
        does="Room on the host is made in owner class 0, whichever class is short.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.copies_leave",),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.back_up",
                'self.tree.evict(short, "host")',
                'self.tree.evict([sum(max(each, 0) for each in short), *[0] * (len(short) - 1)], "host")',
            ),
        ),
    ),
    Fault(
        id="radix.full-host-stops-eviction",
        does="A leaf that finds no room on the host stays on the device, so a busy host keeps the device full.",
        kind="tiers",
        like="facts 10-24",
        breaks=("tiers.serves_what_fits",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.evict",
                old="""
if not node.slots and spill:
    spill(node)
""",
                new="""
if not node.slots and spill and not spill(node):
    kept.append(node)
    continue
""",
            ),
            DRAW_REFUSES,
        ),
        level="both",
    ),
    Fault(
        id="cache.copies-beside-pages-stay",
        does="Room on the host is made of no copy while any page is on the device.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.evictions_are_told",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._evict",
                "freed = self.tree.evict(short, tier, spill)",
                """
if tier == "host" and any(node.pages for node in self.tree.nodes()):
    return 0
freed = self.tree.evict(short, tier, spill)
""",
            ),
        ),
    ),
    Fault(
        id="cache.evicts-two-rounds",
        does="An eviction waits for copies once: those that it makes itself may then be in the way of the rest.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.evictions_go_on",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.evict",
                "while pages < count and self._drained():",
                "if pages < count and self._drained():",
            ),
        ),
    ),
)

"""Faults of copies and transfers that show only where two things meet: a full host, a lock, a room's last word."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="admission.scratch-forgets-host-prefix",
        does="Scratch is checked without the part of the prefix that is on the host.",
        kind="admission",
        like="B08",
        breaks=("tiers.crowded_scratch",),
        changes=(
            Edit(
                "kvshard_ref.admission:Review.grant",
                "prefix = [*request.pages, *(slot - HOST_IDS * self.placement.shards for slot in request.slots)]",
                "prefix = [*request.pages]",
            ),
        ),
    ),
    Fault(
        id="cache.evict-counts-lost-copies",
        does="An eviction from the device that also loses copies tells the number of the copies.",
        kind="units",
        like="B67",
        breaks=("tiers.evictions_go_on",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._evict",
                'return len(freed.slots if tier == "host" else freed.pages)',
                "return len(freed.slots or freed.pages)",
            ),
        ),
    ),
    Fault(
        id="cache.draw-forgets-spill",
        does="With write_back, pages that a draw evicts are not copied to the host first.",
        kind="tiers",
        like="B34",
        breaks=("tiers.written_back_when_evicted",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._draw",
                "self._evict(subtract(needs, self.allocator.free_counts()), spill=self._spill)",
                "self._evict(subtract(needs, self.allocator.free_counts()))",
            ),
        ),
    ),
    Fault(
        id="cache.refresh-only-bare",
        does="A waiting request with part of its prefix on the device keeps the host part that others brought back.",
        kind="tiers",
        like="B34",
        breaks=("tiers.device_conserved",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._refresh",
                "if request.slots:",
                "if request.slots and not request.pages:",
            ),
        ),
    ),
    Fault(
        id="radix.drops-one-level-of-copies",
        does="A node that leaves the tree frees the copies of its children, not of those below them.",
        kind="tiers",
        like="B34",
        breaks=("tiers.evictions_go_on",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree._drop_pages",
                "below = [] if leaf.slots else list(self.nodes(leaf))",
                "below = [] if leaf.slots else list(leaf.children.values())",
            ),
        ),
    ),
    Fault(
        id="radix.unlock-offers-last-only",
        does="Unlocking queues the path's last node for eviction, not copies above it that have none below.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.evictions_are_told",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.unlock",
                "self._offer(each)",
                "self._offer(node)",
            ),
        ),
    ),
    Fault(
        id="radix.host-parent-only-if-bare",
        does="A copy above an evicted one is queued only when the node leaves the tree.",
        kind="eviction",
        like="systematic",
        breaks=("tiers.evictions_are_told",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree._drop_copy",
                "self._copies.offer(node.parent)",
                """
if not node.pages:
    self._copies.offer(node.parent)
""",
            ),
        ),
    ),
    Fault(
        id="host.acknowledges-newest-first",
        does="An acknowledgement is taken for the newest copy in flight, not the oldest.",
        kind="tiers",
        like="B21",
        breaks=("tiers.rows_change_places",),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.acknowledge",
                "copy = self.in_flight.popleft()",
                "copy = self.in_flight.pop()",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="worker.loads-one-batch-late",
        does="A forward waits for the restores of the batch before.",
        kind="order",
        like="B23",
        breaks=("tiers.restored_rows",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._forward",
                """
self._copy()
loads, self._loads = self._loads, []
""",
                """
loads, self._loads = self._loads, []
self._copy()
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="gather.ready-after-first-component",
        does="A gathered layer is called ready when its first component is there.",
        kind="order",
        like="B23",
        breaks=("reads.every_row",),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.prefetch",
                "self.gathered_bytes += prefix.nbytes",
                """
self.gathered_bytes += prefix.nbytes
if component is self.pool.components[0]:
    self._ready[slot].record(self._stream)
""",
            ),
            Edit(
                "kvshard_ref.gather:PrefixGather.prefetch",
                """
    self._ready[slot].record(self._stream)
self._gathered = layer
""",
                "self._gathered = layer",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="sender.given-up-room-stays-known",
        does="A room that is given up before anything was sent to it stays known, and can be sent to.",
        kind="rooms",
        like="B44",
        breaks=("transfer.reused_rooms",),
        changes=(
            Edit(
                "kvshard_ref.sender:KVSender.poll",
                "known = [each for each in self.sendings if each.use == use]",
                "known = [each for each in self.sendings if each.use == use and each.started]",
            ),
        ),
    ),
    Fault(
        id="transfer.blocks-by-source-only",
        does="Pages that are consecutive at the source are one block, wherever they go.",
        kind="transfer",
        like="B05",
        breaks=("transfer.received_rows",),
        changes=(
            Edit(
                "kvshard_ref.transfer:blocks",
                "runs = groupby(enumerate(local), lambda item: (item[1][0] - item[0], item[1][1] - item[0]))",
                "runs = groupby(enumerate(local), lambda item: item[1][0] - item[0])",
            ),
        ),
    ),
)

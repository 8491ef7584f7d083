"""Each lock, pin, hold, acknowledgement and owner filter of the reference, deleted: what keeps pages in place."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="deleted.copies-own-pages-only",
        does="Deleted, one owner filter: copies own pages only.",
        kind="placement",
        like="systematic",
        breaks=("tiers.rows_change_places",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool._own",
                "own = pool.placement.page_owner(slots) == pool.rank",
                "own = slots >= 0",
            ),
        ),
    ),
    Fault(
        id="deleted.drain-acknowledges",
        does="Deleted, one acknowledgement: drain acknowledges.",
        kind="mirror",
        like="systematic",
        breaks=("tiers.hit_is_covered",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._drain",
                """
    event.synchronize()
self._acknowledge(len(self._copied))
""",
                "    event.synchronize()",
            ),
        ),
    ),
    Fault(
        id="deleted.acknowledged-by-all",
        does="Deleted, one acknowledgement: acknowledged by all.",
        kind="mirror",
        like="systematic",
        breaks=("mirror.same_digest",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.progress",
                "self._acknowledge(self.group.minimum([done])[0])",
                "self._acknowledge(done)",
            ),
        ),
    ),
    Fault(
        id="deleted.acknowledged-when-complete",
        does="Deleted, one acknowledgement: acknowledged when complete.",
        kind="mirror",
        like="systematic",
        breaks=("tiers.host_conserved", "tiers.restored", "I10"),
        changes=(
            Edit("kvshard_ref.worker:PrefillWorker.progress", "if not event.query()), len", "if not event), len"),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.copy-pins-its-nodes",
        does="Deleted, one pin: copy pins its nodes.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.hit_is_covered",),
        changes=(Edit("kvshard_ref.host_tier:HostTier._plan", "self.tree.pin(copy.node, len(copy.pages), 1)", ""),),
    ),
    Fault(
        id="deleted.acknowledgement-unpins",
        does="Deleted, one pin: acknowledgement unpins.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.hit_is_covered",),
        changes=(
            Edit("kvshard_ref.host_tier:HostTier.acknowledge", "self.tree.pin(copy.node, len(copy.pages), -1)", "pass"),
        ),
    ),
    Fault(
        id="deleted.device-leaf-is-unlocked",
        does="Deleted, one lock: device leaf is unlocked.",
        kind="tree",
        like="systematic",
        breaks=("admission.held_pages_survive_pressure",),
        changes=(
            Edit(
                "kvshard_ref.node:Node.is_device_leaf",
                "not (self.locks or self.pins or self.device_children)",
                "not (self.pins or self.device_children)",
            ),
        ),
    ),
    Fault(
        id="deleted.device-leaf-is-unpinned",
        does="Deleted, one pin: device leaf is unpinned.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.",),
        changes=(
            Edit(
                "kvshard_ref.node:Node.is_device_leaf",
                "not (self.locks or self.pins or self.device_children)",
                "not (self.locks or self.device_children)",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.host-leaf-is-unlocked",
        does="Deleted, one lock: host leaf is unlocked.",
        kind="tree",
        like="systematic",
        breaks=("tiers.host_evictions", "tiers.serves_what_fits"),
        changes=(
            Edit(
                "kvshard_ref.node:Node.is_host_leaf",
                "bool(self.slots) and not (self.locks or self.pins)",
                "bool(self.slots) and not self.pins",
            ),
        ),
    ),
    Fault(
        id="deleted.host-leaf-is-unpinned",
        does="Deleted, one pin: host leaf is unpinned.",
        kind="tiers",
        like="systematic",
        breaks=("I11",),
        changes=(
            Edit(
                "kvshard_ref.node:Node.is_host_leaf",
                "bool(self.slots) and not (self.locks or self.pins)",
                "bool(self.slots) and not self.locks",
            ),
        ),
        tests=("tests/test_cache_host.py",),
    ),
    Fault(
        id="deleted.host-leaf-has-no-copies-below",
        does="Deleted, one lock: host leaf has no copies below.",
        kind="tree",
        like="systematic",
        breaks=("tiers.host_conserved",),
        changes=(
            Edit(
                "kvshard_ref.node:Node.is_host_leaf", "and not any(child.slots for child in self.children.values())", ""
            ),
        ),
    ),
    Fault(
        id="deleted.drop-spares-pinned-copies",
        does="Deleted, one pin: drop spares pinned copies.",
        kind="tiers",
        like="systematic",
        breaks=("I11",),
        changes=(Edit("kvshard_ref.radix:RadixTree._drop_pages", "or any(node.pins for node in below)", ""),),
        tests=("tests/test_cache_host.py",),
    ),
    Fault(
        id="deleted.lock-counts",
        does="Deleted, one lock: lock counts.",
        kind="tree",
        like="systematic",
        breaks=("radix.well_formed",),
        changes=(Edit("kvshard_ref.radix:RadixTree.lock", "each.locks += 1", "pass"),),
    ),
    Fault(
        id="deleted.unlock-counts",
        does="Deleted, one lock: unlock counts.",
        kind="tree",
        like="systematic",
        breaks=("radix.locked_while_used",),
        changes=(Edit("kvshard_ref.radix:RadixTree.unlock", "each.locks -= 1", "pass"),),
    ),
    Fault(
        id="deleted.split-keeps-locks",
        does="Deleted, one lock: split keeps locks.",
        kind="tree",
        like="systematic",
        breaks=("allocator.idle_baseline",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree._split",
                "children={node.keys[node_pages]: node},",
                """
children={node.keys[node_pages]: node},
locks=0,
""",
            ),
        ),
    ),
    Fault(
        id="deleted.split-keeps-pins",
        does="Deleted, one pin: split keeps pins.",
        kind="tiers",
        like="systematic",
        breaks=("tiers.restored_rows",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree._split",
                "children={node.keys[node_pages]: node},",
                """
children={node.keys[node_pages]: node},
pins=0,
""",
            ),
        ),
    ),
    Fault(
        id="deleted.checkpoint-moves-the-lock",
        does="Deleted, one lock: checkpoint moves the lock.",
        kind="tree",
        like="systematic",
        breaks=("allocator.idle_baseline",),
        changes=(Edit("kvshard_ref.cache:PageCache._insert", "self.tree.unlock(request.node)", ""),),
    ),
    Fault(
        id="deleted.end-unlocks",
        does="Deleted, one lock: end unlocks.",
        kind="tree",
        like="systematic",
        breaks=("allocator.idle_baseline",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._end",
                """
self.allocator.free(request.pages[request.protected :])
self.tree.unlock(request.node)
""",
                "self.allocator.free(request.pages[request.protected :])",
            ),
        ),
    ),
    Fault(
        id="deleted.open-respects-promises",
        does="Deleted, one lock: open respects promises.",
        kind="tree",
        like="systematic",
        breaks=("admission.crowd_can_finish",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.open", "self._check_promises(name, self.tree.lockable_counts(match))", ""
            ),
        ),
    ),
    Fault(
        id="deleted.sending-keeps-its-duplicates",
        does="Deleted, one hold: sending keeps its duplicates.",
        kind="transfer",
        like="systematic",
        breaks=("I11",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._insert",
                """
if request.sending and len(self.tree.match(keys).pages) > request.protected:
    return
""",
                "",
            ),
        ),
        tests=("tests/test_cache_sending.py",),
    ),
    Fault(
        id="deleted.sending-keeps-its-pages",
        does="Deleted, one hold: sending keeps its pages.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.received_rows",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._end",
                """
request.ending = ending
if request.sending:
    return
""",
                "request.ending = ending",
            ),
        ),
    ),
    Fault(
        id="deleted.sent-releases",
        does="Deleted, one hold: sent releases.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.idle_is_settled",),
        changes=(Edit("kvshard_ref.exports:Exports.poll", "self._cache.sent(name)", ""),),
    ),
    Fault(
        id="deleted.send-marks-the-request",
        does="Deleted, one hold: send marks the request.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.received_rows",),
        changes=(Edit("kvshard_ref.exports:Exports.send", "(room, part), True", "(room, part), False"),),
    ),
    Fault(
        id="deleted.finished-on-all-ranks",
        does="Deleted, one acknowledgement: finished on all ranks.",
        kind="mirror",
        like="systematic",
        breaks=("transfer.received_rows",),
        changes=(
            Edit("kvshard_ref.exports:Exports.poll", "self._group.minimum(finished) if finished else []", "finished"),
        ),
    ),
    Fault(
        id="deleted.sends-own-pages-only",
        does="Deleted, one owner filter: sends own pages only.",
        kind="placement",
        like="systematic",
        breaks=("transfer.all_ranks_report",),
        changes=(Edit("kvshard_ref.transfer:pair", "if placement.page_owner(page) == rank]", "]"),),
    ),
    Fault(
        id="deleted.complete-when-all-concluded",
        does="Deleted, one acknowledgement: complete when all concluded.",
        kind="mirror",
        like="systematic",
        breaks=("transfer.received_rows",),
        changes=(
            Edit(
                "kvshard_ref.decode:Slot.state",
                'return "waiting" if self.writers else "complete"',
                'return "complete" if self.said else "waiting"',
            ),
        ),
    ),
    Fault(
        id="deleted.release-waits-for-writers",
        does="Deleted, one hold: release waits for writers.",
        kind="transfer",
        like="systematic",
        breaks=("I11",),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.release",
                """
if slot.state == "complete":
    self.allocator.free(slot.pages)
if slot.writers:
    self._give_up(slot, "released before it was complete")
else:
    del self.slots[room]
""",
                """
if slot.state != "failed":
    self.allocator.free(slot.pages)
self._give_up(slot, "released before it was complete")
del self.slots[room]
""",
            ),
        ),
        tests=("tests/test_transfer_receiver.py",),
    ),
    Fault(
        id="deleted.lost-ranks-conclude",
        does="Deleted, one acknowledgement: lost ranks conclude.",
        kind="mirror",
        like="systematic",
        breaks=("I17",),
        changes=(Edit("kvshard_ref.decode:DecodeWorker.poll", 'message.kind == "lost" or ', ""),),
        tests=("tests/test_transfer_receiver.py",),
    ),
    Fault(
        id="deleted.room-has-its-generation",
        does="Deleted, one identity: room has its generation.",
        kind="transfer",
        like="systematic",
        breaks=("I18",),
        changes=(
            Edit("kvshard_ref.decode:DecodeWorker.poll", "message[1:3] == slot.use", "message.room == slot.use[0]"),
        ),
        tests=("tests/test_transfer_receiver.py",),
    ),
    Fault(
        id="deleted.writes-own-rows-only",
        does="Deleted, one owner filter: writes own rows only.",
        kind="placement",
        like="systematic",
        breaks=("reads.every_row",),
        changes=(
            Edit(
                "kvshard_ref.pool:ShardPool.owned",
                "np.flatnonzero(self.placement.owner(locs) == self.rank)",
                "np.arange(len(locs))",
            ),
        ),
    ),
)

"""Real faults that no case kills yet: each is a hole in the suites. They are planted in no run until one does."""

from __future__ import annotations

from harness.fault import Edit, Fault
from suites.selfcheck.faults.known_admission import DRAW_REFUSES, FITS

HOLES: tuple[Fault, ...] = (
    Fault(
        id="scratch.context-to-page-grid",
        does="The scratch holds contexts that are rounded up to the page size instead of N pages.",
        kind="admission",
        like="B57",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.scratch:ScratchSize.sized",
                old="group = placement.shards * ps",
                new="group = ps",
            ),
        ),
    ),
    Fault(
        id="sender.old-abort-counts",
        does="An abort that comes late is taken for one of the room's newer use.",
        kind="transfer",
        like="B44",
        breaks=("I18", "I06"),
        changes=(
            Edit(
                "kvshard_ref.sender:KVSender.poll",
                old="if each.use == use]",
                new="if each.use[:2] == use[:2]]",
            ),
        ),
        level="both",
    ),
    Fault(
        id="decode.success-overrides-give-up",
        does="A room that was given up is complete after all when every rank says done, and nobody releases it again.",
        kind="transfer",
        like="B49",
        breaks=("I17", "I04"),
        changes=(
            Edit(
                "kvshard_ref.decode:Slot.state",
                old="if self.why:",
                new='if self.why and (self.writers or any(each.kind != "done" for each in self.said.values())):',
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.lock-check-sums-classes",
        does="Whether a lock takes promised pages is checked over all classes together, not class by class.",
        kind="accounting",
        like="B08",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._check_promises",
                "if any(take > have for take, have in zip(taken, room, strict=True)):",
                "if sum(taken) > sum(room):",
            ),
        ),
    ),
    Fault(
        id="admission.one-page-per-request",
        does="What is promised is reserved as a number of pages, not one per owner class.",
        kind="admission",
        like="facts 10-2",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._place",
                old=FITS,
                new="""
budget = self.placement.shards * min(add(self.free, self.evictable)) - sum(self.promised)
if min(subtract(room, needs)) >= 0 or budget >= sum(needs):
""",
            ),
            DRAW_REFUSES,
        ),
        level="both",
    ),
    Fault(
        id="radix.full-host-stops-eviction",
        does="A leaf that finds no room on the host stays on the device, so a busy host keeps the device full.",
        kind="tiers",
        like="facts 10-24",
        breaks=("I06",),
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
        id="deleted.close-waits",
        does="Deleted, one wait: close waits.",
        kind="order",
        like="systematic",
        breaks=("allocator.no_page_twice", "reads.no_hit", "mirror."),
        changes=(Edit("kvshard_ref.worker:PrefillWorker.close", "self._device_module.synchronize()", ""),),
        engine="ref?device=order",
    ),
    Fault(
        id="plan.per-request-rounded-once",
        does="per_request padding rounds the batch's sum up, not each request: owners overlap in scratch.",
        kind="gather",
        like="B57",
        breaks=("reads.",),
        changes=(
            Edit(
                "kvshard_ref.plan:_block",
                "return sum(-(-len(prefix) // len(owned)) for prefix in prefixes)",
                "return -(-sum(len(prefix) for prefix in prefixes) // len(owned))",
            ),
        ),
        engine="ref?padding=per_request",
    ),
    Fault(
        id="plan.block-by-total",
        does=(
            "The tight block is the distinct pages over N, rounded up, not the most of any owner; "
            "skewed owners overlap."
        ),
        kind="gather",
        like="B08",
        breaks=("reads.",),
        changes=(
            Edit(
                "kvshard_ref.plan:_block",
                "return max(map(len, owned))",
                "return -(-sum(map(len, owned)) // len(owned))",
            ),
            Edit(
                "kvshard_ref.plan:plan_gather",
                "send_pages += [0] * (block - len(send_pages))",
                "send_pages = (send_pages + [0] * block)[:block]",
            ),
        ),
    ),
    Fault(
        id="admission.floor-plus-aggregate",
        does="The budget is N times the scarcest class plus all evictable pages, those of other classes too.",
        kind="admission",
        like="facts 10-A",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._place",
                old=FITS,
                new="""
budget = self.placement.shards * min(spare) + sum(self.evictable)
if min(subtract(room, needs)) >= 0 or budget >= sum(needs) + self.placement.shards:
""",
            ),
            DRAW_REFUSES,
        ),
        level="both",
    ),
    Fault(
        id="worker.drain-waits-for-last-copy",
        does="A drain waits for the newest copy alone; an older one is on the other stream.",
        kind="order",
        like="systematic",
        breaks=("I10", "I11"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._drain",
                "for event in self._copied:",
                "for event in self._copied[-1:]:",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="exports.abort-frees-source-at-once",
        does="An aborted request's pages are free at once, although a write to decode may still read them.",
        kind="order",
        like="B42",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports.leave",
                "_, sending = self.live.get(name, (0, None))",
                """
if aborted:
    self._cache.request(name).sending = False
_, sending = self.live.pop(name, (0, None)) if aborted else self.live.get(name, (0, None))
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="worker.early-send-unordered",
        does="A cached prefix is sent at once, also while its rows are on their way from the host or being computed.",
        kind="order",
        like="facts 10-15",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.send",
                old="ready.record(self._device_module.current_stream())",
                new="""
request = self.cache.request(name)
early = request.computed == request.cached
ready.record(self._device_module.Stream() if early else self._device_module.current_stream())
""",
            ),
        ),
        level="both",
        engine="ref?device=order",
    ),
    Fault(
        id="radix.prefix-by-bisection",
        does=(
            "The common prefix is found by bisection, so pages that agree again behind a difference give a false hit."
        ),
        kind="tree",
        like="B51",
        breaks=("reads.warm",),
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
    Fault(
        id="worker.finish-leaves-transfer",
        does="Finish does not abort a transfer whose last chunk is unsent; it waits for ever.",
        kind="tiers",
        like="B49",
        breaks=("transfer.",),
        changes=(Edit("kvshard_ref.worker:PrefillWorker.finish", "self.exports.leave(name, aborted=False)", ""),),
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
        id="sender.only-newest-ticket",
        does="A rank waits for its newest write; an older one that takes longer is forgotten.",
        kind="transfer",
        like="B28",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.advance",
                "self._tickets.append(self._link.write(self.use[0], copies))",
                "self._tickets = [self._link.write(self.use[0], copies)]",
            ),
        ),
    ),
    Fault(
        id="sender.abort-forgets-writes",
        does="A transfer that is given up says its last word while its writes are under way.",
        kind="transfer",
        like="B42",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.abort",
                "self._queue.clear()",
                """
self._queue.clear()
self._tickets.clear()
""",
            ),
        ),
    ),
    Fault(
        id="transfer.lost-peer-stays-welcome",
        does="A peer that is lost still counts as one that has answered, so it gets no hello when it is back.",
        kind="transfer",
        like="B45",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.transfer:Link._lost",
                "self.refusals.pop(peer, None) is not None",
                "self.refusals.get(peer) is not None",
            ),
        ),
    ),
    Fault(
        id="decode.lost-rank-fails-one-room",
        does="A lost rank concludes the oldest room it may write to, the others wait for ever.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.poll",
                "self._conclude(slot, name, message)",
                """
self._conclude(slot, name, message)
break
""",
            ),
        ),
    ),
    Fault(
        id="exports.finish-leaves-open-transfer",
        does="A request that finishes before its last chunk was sent leaves its transfer waiting for ever.",
        kind="transfer",
        like="B47",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports.leave",
                "if sending and (aborted or not sending.concluded):",
                "if sending and aborted:",
            ),
        ),
    ),
    Fault(
        id="sender.repeated-reservation-taken",
        does="A reservation that arrives again counts as a new one, also after its room was used and released.",
        kind="transfer",
        like="B47",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.sender:KVSender.poll",
                """
if message.kind == "reserved" and message.generation > self._newest.get(peer, 0):
""",
                'if message.kind == "reserved":',
            ),
        ),
    ),
)

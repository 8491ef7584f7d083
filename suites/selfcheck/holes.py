"""Real faults that no case kills yet: each is a hole in the suites. They are planted in no run until one does."""

from __future__ import annotations

from harness.fault import Edit, Fault
from suites.selfcheck.faults.known_admission import DRAW_REFUSES, FITS

HOLES: tuple[Fault, ...] = (
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
)

"""Words and writes that outlive a transfer, peers that were lost, and rooms that are refused without a reason."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="sender.old-abort-counts",
        does="An abort that comes late is taken for one of the room's newer use.",
        kind="transfer",
        like="B44",
        breaks=("transfer.rooms_are_there",),
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
        breaks=("transfer.rooms_are_there",),
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
        id="sender.only-newest-ticket",
        does="A rank waits for its newest write; an older one that takes longer is forgotten.",
        kind="transfer",
        like="B28",
        breaks=("transfer.reused_rooms",),
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
        breaks=("transfer.pages_outlive_writes",),
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
        breaks=("transfer.rooms_are_there",),
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
        breaks=("transfer.both_sides_close",),
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
        id="exports.one-at-a-time",
        does="A request is refused while another one is on its way.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.rooms_are_there",),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports._refuse",
                "if not self._group.minimum([int(not why)])[0]:",
                "if not self._group.minimum([int(not (why or self.live))])[0]:",
            ),
        ),
    ),
    Fault(
        id="decode.reserves-when-empty",
        does="A room is refused while there is another one, or one that has failed.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.rooms_are_there",),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.reserve",
                "if any(refusals):",
                "if any(refusals) or self.slots.keys() - {room}:",
            ),
        ),
    ),
    Fault(
        id="cache.sent-keeps-only-fresh",
        does="What finished while it was sent is kept once that is over only if it had hit nothing.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.finished_is_kept",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.sent",
                old='if request.ending == "finish":',
                new='if request.ending == "finish" and not request.protected:',
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.flush-forgets-the-sent",
        does="A flush is carried out although a request that has finished is still being sent.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.finished_is_kept",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.flush",
                old="if self.requests:",
                new="if any(not each.ending for each in self.requests.values()):",
            ),
        ),
        level="both",
    ),
    Fault(
        id="transfer.blocks-by-destination",
        does="Pages are one block when they are consecutive at the receiver, wherever they come from.",
        kind="transfer",
        like="B05",
        breaks=("transfer.finished_is_kept", "transfer.received_rows"),
        changes=(
            Edit(
                "kvshard_ref.transfer:blocks",
                old="(item[1][0] - item[0], item[1][1] - item[0])",
                new="item[1][1] - item[0]",
            ),
        ),
        level="both",
    ),
)

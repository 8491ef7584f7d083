"""Faults modelled on known bugs: rooms of the decode worker that are reserved, used again, or known to some ranks."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="decode.first-word-settles",
        does="The first rank's word settles a room, whatever the others are still writing.",
        kind="transfer",
        like="B42",
        breaks=("I16", "I11"),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker._conclude",
                old="slot.writers.remove(name)",
                new="slot.writers.clear()",
            ),
            Edit(
                "kvshard_ref.decode:DecodeWorker._conclude",
                old="""
elif not (slot.writers or slot.why):
    self._landed(slot.pages)
    self._give_up(slot, flaw([slot.said[each].body for each in self.ranks], slot.pages))
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="decode.rooms-without-generation",
        does="All uses of a room have the same number, so words about an earlier one count for the next.",
        kind="transfer",
        like="B44",
        breaks=("transfer.reused", "I18", "I16"),
        changes=(
            Edit("kvshard_ref.decode:DecodeWorker.reserve", old="self._generation += 1", new="self._generation = 1"),
            Edit(
                "kvshard_ref.sender:KVSender.poll",
                old='if message.kind == "reserved" and message.generation > self._newest.get(peer, 0):',
                new='if message.kind == "reserved":',
            ),
            Edit("kvshard_ref.transfer:flaw", old="filled == expected", new="len(expected) >= 0"),
        ),
        level="both",
    ),
    Fault(
        id="decode.reused-room-keeps-reason",
        does="A room that is reserved anew after a failure keeps why it failed, so its next use fails as well.",
        kind="transfer",
        like="B45",
        breaks=("transfer.all_ranks", "transfer.both"),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.reserve",
                old="slot = self.slots[room] = Slot((room, self._generation), tokens, pages, list(self.ranks), {})",
                new="""
why = self.slots[room].why if room in self.slots else ""
slot = self.slots[room] = Slot((room, self._generation), tokens, pages, list(self.ranks), {}, why)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="decode.reserve-overwrites-room",
        does="A room that waits can be reserved for another request, as if both were one; the first one's pages leak.",
        kind="transfer",
        like="B47",
        breaks=("transfer.pages_stay", "I17", "I18", "I04"),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.reserve",
                old='if room in self.slots and self.slots[room].state != "failed":',
                new='if room in self.slots and self.slots[room].state == "complete":',
            ),
        ),
        level="both",
    ),
    Fault(
        id="decode.reserve-takes-what-is-there",
        does="A reserve for which pages are short takes those that are free and waits for the others.",
        kind="transfer",
        like="B13",
        breaks=("I06", "I17"),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.reserve",
                old="pages = self.allocator.draw_run(0, max(count, 0))",
                new="pages = self.allocator.draw_run(0, max(min(count, *self.allocator.free_counts()), 0))",
            ),
        ),
        level="both",
    ),
    Fault(
        id="exports.refusal-not-agreed",
        does="A rank that does not know the room refuses to send to it; the others begin.",
        kind="mirror",
        like="B21",
        breaks=("I17", "I06", "I07"),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports._refuse",
                old="if not self._group.minimum([int(not why)])[0]:",
                new="if why:",
            ),
        ),
        level="both",
    ),
)

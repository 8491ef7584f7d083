"""Faults on both sides of a transfer: sender, messages, decode worker."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="sender.first-ready-sends-all",
        does="When the oldest queued chunk is ready all queued chunks are written, those not ready too.",
        kind="order",
        like="B27",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.advance",
                """
while self._queue and self._queue[0][1].query():
    copies, _ = self._queue.popleft()
""",
                """
if self._queue and self._queue[0][1].query():
    copies = [copy for chunk, _ in self._queue for copy in chunk]
    self._queue.clear()
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="decode.release-before-read-ends",
        does="The decode worker frees a room's pages while its device may still read them.",
        kind="order",
        like="B42",
        breaks=("transfer.",),
        changes=(Edit("kvshard_ref.decode:DecodeWorker.release", "self._device_module.synchronize()", ""),),
        engine="ref?device=order",
    ),
    Fault(
        id="sender.second-chunk-to-first-pages",
        does=("Every chunk is paired with the reserved pages from the first one on, and the receiver does not check."),
        kind="transfer",
        like="B39",
        breaks=("transfer.",),
        changes=(
            Edit("kvshard_ref.sender:Sending.send", "self.dst[start:end]", "self.dst[: end - start]"),
            Edit("kvshard_ref.transfer:flaw", 'return "" if filled == expected else', 'return "" if expected else'),
        ),
    ),
    Fault(
        id="sender.abort-does-not-conclude",
        does="A transfer that is given up goes on waiting for its last chunk.",
        kind="transfer",
        like="B11",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.abort",
                "self.word, self.why, self.concluded = word, why, True",
                "self.word, self.why = word, why",
            ),
        ),
    ),
    Fault(
        id="sender.shorter-request-fits",
        does=("A request of fewer pages than were reserved is sent; the room is complete with rows that nobody wrote."),
        kind="transfer",
        like="B05",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.sender:KVSender.find",
                "elif mine != theirs:",
                "elif mine[0] > theirs[0] or mine[1] != theirs[1]:",
            ),
            Edit(
                "kvshard_ref.sender:Sending.send",
                "if not (total if last else start) <= end <= total:",
                "if not start <= end <= total:",
            ),
            Edit(
                "kvshard_ref.transfer:flaw",
                'return "" if filled == expected else',
                'return "" if set(filled) <= set(expected) else',
            ),
        ),
    ),
    Fault(
        id="transfer.run-by-destination-only",
        does="Pages that are consecutive at decode are one block, though they are scattered at prefill.",
        kind="transfer",
        like="B01",
        breaks=("transfer.received_rows", "transfer."),
        changes=(
            Edit(
                "kvshard_ref.transfer:blocks",
                "lambda item: (item[1][0] - item[0], item[1][1] - item[0])",
                "lambda item: item[1][1] - item[0]",
            ),
        ),
    ),
    Fault(
        id="transfer.run-loses-last-page",
        does="The last page of a block of two or more pages is not written.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.",),
        changes=(Edit("kvshard_ref.transfer:blocks", "1 + len(list(run))", "max(1, len(list(run)))"),),
    ),
    Fault(
        id="transfer.draft-layers-unregistered",
        does="Of a draft only layer 0 is registered for transfers, on both sides.",
        kind="transfer",
        like="B52",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.transfer:regions",
                "for at in range(pool.layers)",
                "for at in range(pool.layers if pool is pools[0] else 1)",
            ),
        ),
    ),
    Fault(
        id="decode.reserve-over-aborting",
        does="A room can be reserved again while it is aborting; the pages of its former use are lost.",
        kind="transfer",
        like="B44",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.reserve",
                'self.slots[room].state != "failed"',
                'self.slots[room].state not in {"failed", "aborting"}',
            ),
        ),
    ),
    Fault(
        id="decode.generation-ignored",
        does="A message counts for the present use of its room, whichever it is about.",
        kind="transfer",
        like="B44",
        breaks=("transfer.reused", "transfer.all_ranks", "I18"),
        changes=(
            Edit("kvshard_ref.decode:DecodeWorker.poll", "message[1:3] == slot.use", "message.room == slot.use[0]"),
        ),
    ),
    Fault(
        id="decode.first-failure-frees",
        does="A room's pages are free when the first rank has given up, while others may still write.",
        kind="transfer",
        like="B42",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker._conclude",
                'if slot.state == "failed":',
                """
gave_up = [each for each in slot.said.values() if each.kind != "done"]
if gave_up == [message] or (slot.state == "failed" and not gave_up):
""",
            ),
        ),
    ),
    Fault(
        id="decode.awaits-first-ranks-only",
        does=("A prompt shorter than N pages is awaited from the first ranks only, as if every chain began on rank 0."),
        kind="transfer",
        like="B42",
        breaks=("transfer.",),
        changes=(
            Edit("kvshard_ref.decode:DecodeWorker.reserve", "list(self.ranks), {}", "list(self.ranks)[:count], {}"),
            Edit(
                "kvshard_ref.decode:DecodeWorker._conclude",
                """
self._give_up(slot, flaw([slot.said[each].body for each in self.ranks], slot.pages))
""",
                "",
            ),
        ),
    ),
    Fault(
        id="decode.abort-told-to-one-rank",
        does="A room that is given up is told to the first of the ranks that may still write to it.",
        kind="transfer",
        like="B49",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker._give_up", "for name in slot.writers:", "for name in slot.writers[:1]:"
            ),
        ),
    ),
    Fault(
        id="exports.second-room-taken",
        does="A request that is on its way to one room can be sent to another: accepted, and nothing comes.",
        kind="transfer",
        like="B47",
        breaks=("transfer.all_ranks",),
        changes=(Edit("kvshard_ref.exports:Exports.send", "if started != room:", "if started < 0:"),),
    ),
    Fault(
        id="sender.repeated-reservation-taken",
        does="A reservation that arrives again counts as a new one, also after its room was used and released.",
        kind="transfer",
        like="B47",
        breaks=("transfer.all_ranks",),
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
    Fault(
        id="exports.abort-frees-source-at-once",
        does="An aborted request's pages are free at once, although a write to decode may still read them.",
        kind="order",
        like="B42",
        breaks=("transfer.sources_outlive_writes",),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports.leave",
                "_, sending = self.live.get(name, (0, None))",
                """
_, sending = self.live.pop(name, (0, None)) if aborted else self.live.get(name, (0, None))
if aborted and name in self._cache.requests:
    self._cache.sent(name)
""",
            ),
        ),
    ),
)

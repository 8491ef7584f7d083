"""Real faults that no case kills yet: each is a hole in the suites. They are planted in no run until one does."""

from __future__ import annotations

from harness.fault import Edit, Fault

HOLES: tuple[Fault, ...] = (
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
)

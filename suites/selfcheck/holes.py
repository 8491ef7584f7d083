"""Real faults that no case kills yet: each is a hole in the suites. They are planted in no run until one does."""

from __future__ import annotations

from harness.fault import Edit, Fault

HOLES: tuple[Fault, ...] = (
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

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
    Fault(
        id="cache.evicts-two-rounds",
        does="An eviction waits for copies once: those that it makes itself may then be in the way of the rest.",
        kind="tiers",
        like="systematic",
        breaks=("radix.evictions",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.evict",
                "while pages < count and self._drained():",
                "if pages < count and self._drained():",
            ),
        ),
    ),
)

"""Real faults that no case kills yet: each is a hole in the suites. They are planted in no run until one does."""

from __future__ import annotations

from harness.fault import Edit, Fault

HOLES: tuple[Fault, ...] = (
    Fault(
        id="scratch.aligns-after-multiplying",
        does="Scratch is rounded up to whole pages of each rank for all contexts together, not for each one.",
        kind="units",
        like="systematic",
        breaks=("admission.",),
        changes=(
            Edit(
                "kvshard_ref.scratch:ScratchSize.sized",
                "return cls(contexts * -(-context_tokens // group) * group, -(-chunk_tokens // ps) * ps, ps)",
                "return cls(-(-contexts * context_tokens // group) * group, -(-chunk_tokens // ps) * ps, ps)",
            ),
        ),
    ),
    Fault(
        id="cache.sent-duplicate-of-one-page",
        does="A duplicate of a single page is replaced although a transfer reads it.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._insert",
                "if request.sending and len(self.tree.match(keys).pages) > request.protected:",
                "if request.sending and len(self.tree.match(keys).pages) > request.protected + 1:",
            ),
        ),
    ),
)

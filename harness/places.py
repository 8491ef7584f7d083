"""Whose rows a chunk carries: those of one place in its prompt, in one life of the cache. They fit no other."""

from __future__ import annotations

from collections.abc import Sequence

from harness.types import AnyOp, AnyReply, Extend, Extended, Flush, Ok, Open, Opened, Replies, Restart, Together

Place = tuple[int, int]  # how often the cache was dropped before, and how many tokens the chunk follows


def places(ops: Sequence[AnyOp], replies: Sequence[AnyReply | None]) -> list[tuple[Place, ...]]:
    """The places of the chunks of every op with a reply: [0, at) was cached at its open or told as computed since.

    Not where the engine says that they begin: one that forgets a chunk begins elsewhere, and that is the failure.
    """
    dropped, at = 0, dict[str, int]()
    found = []
    for op, reply in zip(ops, replies, strict=False):
        parts = op.ops if isinstance(op, Together) else (op,)
        told = reply.replies if isinstance(reply, Replies) else (reply,)
        found.append(tuple((dropped, at.get(part.request, 0)) for part in parts if isinstance(part, Extend)))
        for part, its in zip(parts, told, strict=False):
            value = its.value if isinstance(its, Ok) else None
            if isinstance(part, Open) and isinstance(value, Opened):
                at[part.request] = value.cached
            elif isinstance(part, Extend) and isinstance(value, Extended):
                at[part.request] = value.end
            elif isinstance(part, Flush | Restart) and value is not None:
                dropped += 1
    return found

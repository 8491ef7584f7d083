"""The scheduler's part between a request and its chunk: admission by the real adder, and the batch of a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.adapters.sglang_core import Core
from harness.adapters.sglang_held import Held
from harness.adapters.sglang_install import Parts

MANY = 1 << 30  # a limit that never binds


@dataclass(slots=True)
class Chunk:
    """A chunk on its way: what is left of an op, and what attention has read last."""

    index: int  # of the op
    held: Held
    start: int
    end: int  # of the prompt, when the op is carried out
    rows: dict[str, torch.Tensor]  # of the op, per component int64 [layers, tokens, width]
    reads: dict[str, torch.Tensor] | None = None  # per component int64 [layers, computed tokens, width]

    @property
    def left(self) -> int:
        """Tokens of the op that are not computed yet."""
        return self.end - self.held.computed

    @property
    def cuts(self) -> bool:
        """Whether the prompt goes on after this chunk."""
        return self.end < self.held.tokens


def in_turn(chunks: Sequence[Chunk], waiting: Held | None) -> tuple[list[Chunk], dict[int, str]]:
    """The chunks that the scheduler would run in one pass, in its order, and why not the others, by op.

    It has at most one request between two chunks, `waiting`, which goes first, and a prompt is cut only where the pass
    ends.
    """
    others = [chunk for chunk in chunks if chunk.held is not waiting]
    first = [chunk for chunk in chunks if chunk.held is waiting]
    if waiting is not None and not first:
        why = f"request {waiting.req.rid!r} is between its chunks and goes first"
        return [], {chunk.index: why for chunk in others}
    going: list[Chunk] = []
    refused: dict[int, str] = {}
    for chunk in first + sorted(others, key=lambda chunk: chunk.cuts):
        if going and going[-1].cuts:
            refused[chunk.index] = f"the pass ends with the cut of {going[-1].held.req.rid!r}"
        else:
            going.append(chunk)
    return going, refused


def adder_of(parts: Parts, core: Core) -> Any:
    """The adder of one pass, as the scheduler makes it; nothing runs besides."""
    return parts.PrefillAdder(
        page_size=core.config.page_size,
        tree_cache=core.tree,
        token_to_kv_pool_allocator=core.allocator,
        running_batch=None,
        new_token_ratio=0.0,
        rem_input_tokens=MANY,
        rem_chunk_tokens=core.spec.chunk_tokens,
    )


def admit(core: Core, chunk: Chunk, adder: Any) -> str | None:
    """One chunk through the adder; why not, or None when it is admitted. Draws no page but for what the host brings.

    The adder is told that the pass has so many tokens left, which makes it cut the prompt where the op says.
    """
    held, page = chunk.held, core.config.page_size
    adder.rem_chunk_tokens = -(-chunk.left // page) * page
    if held.admitted:
        adder.add_chunked_req(held.req)
        verdict = "no budget for a further chunk"
    else:
        core.match(held.req, held.cached)
        verdict = adder.add_one_req(held.req, has_chunked_req=False, truncation_align_size=None).name
    if held.req not in adder.can_run_list:
        return f"the adder says {verdict}: {told(core, adder)}"
    if held.admitted:
        return None
    if held.req.prefix_len != held.cached:
        adder.can_run_list.remove(held.req)
        core.tree.unlock(held.req.lock)
        held.req.lock = None
        return (
            f"{held.from_host} tokens on the host are not brought back, for lack of room: it would compute "
            f"{held.req.prefix_len} to {held.cached} again"
        )
    core.unlock(held)  # the request has a lock of its own now
    held.admitted = True
    return None


def told(core: Core, adder: Any) -> str:
    """The adder's numbers, for a refusal."""
    return (
        f"{adder.rem_total_tokens} tokens of its budget left, free pages {core.allocator.class_free_page_counts()} per "
        f"class, {core.tree.evictable_size()} evictable tokens"
    )


@dataclass(slots=True)
class ExtendBatch:
    """In the place of sglang's `ScheduleBatch`, as far as `alloc_for_extend` looks at it."""

    reqs: Sequence[Any]
    core: Core
    device: str
    prefix_lens: list[int] = field(init=False)
    extend_lens: list[int] = field(init=False)
    seq_lens_cpu: torch.Tensor = field(init=False)
    hisparse_coordinator: Any = None

    def __post_init__(self) -> None:
        self.prefix_lens = [req.prefix_len for req in self.reqs]
        self.extend_lens = [req.extend_len for req in self.reqs]
        self.seq_lens_cpu = torch.tensor([req.extend_end for req in self.reqs], dtype=torch.int64)

    @property
    def seq_lens(self) -> torch.Tensor:
        """The same on the device."""
        return self.seq_lens_cpu.to(self.device, non_blocking=True)

    @property
    def extend_num_tokens(self) -> int:
        """Tokens of the batch."""
        return sum(self.extend_lens)

    @property
    def tree_cache(self) -> Any:
        """The rank's tree."""
        return self.core.tree

    @property
    def req_to_token_pool(self) -> Any:
        """The rank's token table."""
        return self.core.table

    def is_dllm(self) -> bool:
        """No."""
        return False

    def maybe_evict_swa(self) -> None:
        """There is no sliding window."""

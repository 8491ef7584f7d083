"""Generator: continues prompts token by token over unsharded pages, with a draft that the target verifies.

Positions of an answer with `known` tokens, `done` of them with rows, and drafts d d d::

    [0 .......... done) [done ........ known) d d d      the target computes [done, known + drafts) in one pass
    rows exist          computed now          tried

Rows of a draft that is not accepted are written over by the next pass. A prompt arrives with the rows of all its
tokens, but without the hidden state of its last one, which the draft goes on from: that token is computed once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvshard_ref.model import Layer, Reading, Reduce, Rows, TinyModel
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.server.api import LENGTH, STOP, Ask, Step
from kvshard_ref.server.sampling import logprobs, pick


@dataclass(slots=True, eq=False)
class Generation:
    """One answer on its way."""

    ask: Ask
    locs: Tensor
    """int64: the rows of positions 0, 1, ... on this rank."""
    tokens: list[int]
    done: int
    drafts: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    finished: str = ""


def tokens_needed(ask: Ask, drafts: int) -> int:
    """Positions that must have pages before the answer begins."""
    return len(ask.tokens) + ask.max_new_tokens + drafts


class Generator:
    """`pools` of the target and, with one, of its draft; `drafts` tokens are tried in each pass."""

    def __init__(self, model: TinyModel, pools: Sequence[ShardPool], drafts: int, reduce: Reduce | None = None) -> None:
        self.pools = pools
        self.drafts = drafts if len(pools) > 1 else 0
        self._model, self._reduce = model, reduce

    def begin(self, ask: Ask, pages: Sequence[int]) -> Generation:
        """The rows of all prompt tokens are on these pages, by position."""
        place: Placement = self.pools[0].placement
        locs = [loc for page in pages for loc in place.page_locs(page)]
        rows = torch.tensor(locs, dtype=torch.int64, device=self.pools[0].device)
        return Generation(ask, rows, list(ask.tokens), len(ask.tokens) - 1)

    @torch.inference_mode()
    def advance(self, each: Generation) -> Step:
        """One pass of the target, then the drafts for the next one."""
        start, known, drafts = each.done, len(each.tokens), each.drafts
        hidden = self._target(each, [*each.tokens[start:], *drafts])
        logits = self._model.logits(hidden)[0, known - 1 - start :]
        fresh: list[int] = []
        for at, row in enumerate(logits):
            fresh.append(pick(each.ask, known - 1 + at, row))
            if at == len(drafts) or drafts[at] != fresh[-1]:
                break
        each.verified += bool(drafts)
        each.drafted += len(drafts)
        each.accepted += len(fresh) - 1
        fresh = self._cut(each, fresh)
        each.tokens += fresh
        each.done = len(each.tokens) - 1
        each.drafts = []
        if self.drafts and not each.finished:
            self._draft(each, hidden[:, : each.done - start], start)
        return Step(
            rid=each.ask.rid,
            tokens=tuple(fresh),
            logprobs=tuple(logprobs(fresh, logits[: len(fresh)], each.ask.top_logprobs)) if each.ask.logprobs else (),
            drafted=each.drafted,
            accepted=each.accepted,
            verified=each.verified,
            finished=each.finished,
        )

    def _cut(self, each: Generation, fresh: list[int]) -> list[int]:
        """Of new tokens those up to a stop token or the length asked for; notes why the answer is over."""
        left = each.ask.max_new_tokens - (len(each.tokens) - len(each.ask.tokens))
        stops = [at for at, token in enumerate(fresh[:left]) if token in each.ask.stop_tokens]
        if stops:
            each.finished = STOP
            return fresh[: stops[0] + 1]
        each.finished = LENGTH if len(fresh) >= left else ""
        return fresh[:left]

    def _target(self, each: Generation, inputs: list[int]) -> Tensor:
        """Last hidden states [1, n, width] of inputs at positions from `done` on."""
        start, device = each.done, each.locs.device
        hidden = self._embed(each.tokens[:start], inputs)
        positions = torch.arange(start, start + len(inputs), device=device)
        for number, layer in enumerate(self._model.layers):
            hidden = self._layer(layer, self.pools[0], number, each, hidden, positions)
        return hidden

    def _draft(self, each: Generation, hidden: Tensor, start: int) -> None:
        """The draft's rows of [start, done), and its tokens for the positions after the last known one."""
        draft, device = self._model.draft, each.locs.device
        following = each.tokens[start + 1 : each.done + 1]
        inputs = draft.enter(self._embed(each.tokens[: start + 1], following), hidden)
        positions = torch.arange(start, each.done, device=device)
        last = self._layer(draft.layer, self.pools[1], 0, each, inputs, positions)[:, -1:]
        for step in range(self.drafts):
            each.drafts.append(int(self._model.draft_logits(last)[0, -1].argmax()))
            if step + 1 < self.drafts:
                inputs = draft.enter(self._embed([*each.tokens, *each.drafts[:-1]], each.drafts[-1:]), last)
                position = torch.tensor([each.done + step], device=device)
                last = self._layer(draft.layer, self.pools[1], 0, each, inputs, position)

    def _layer(
        self, layer: Layer, pool: ShardPool, number: int, each: Generation, hidden: Tensor, positions: Tensor
    ) -> Tensor:
        """Write the rows of hidden [1, n, width], then read all rows up to the last of them."""
        fresh = layer.fresh(hidden, positions)
        end = int(positions[-1]) + 1
        rows = []
        for component, values in zip(pool.components, fresh, strict=True):
            buffer = pool.rows_of(number, component.name)
            buffer.put(each.locs[positions], values[0])
            rows.append(buffer.take(each.locs[:end])[None])
        return layer.read(hidden, positions, Reading(Rows(*rows)), self._reduce)

    def _embed(self, before: Sequence[int], tokens: Sequence[int]) -> Tensor:
        context = before[-self._model.geometry.embedding_context :]
        known, fresh = (
            torch.tensor([list(part)], dtype=torch.int64, device=self.pools[0].device) for part in (context, tokens)
        )
        return self._model.embed(fresh, known)

"""A whole P/D pair of the reference's server in one process, without HTTP: prefill ranks in lockstep, and a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ci.train_model import TINY
from harness.lockstep import Lockstep, LockstepGroup
from harness.transports.memory import Network
from kvshard_ref.components import Component
from kvshard_ref.model import TinyModel
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.server.api import Ask, Step
from kvshard_ref.server.compute import ServedModel
from kvshard_ref.server.generate import Generator
from kvshard_ref.server.halves import DecodeHalf
from kvshard_ref.server.prefill import Prefiller
from kvshard_ref.server.receive import Arrived, Failed, Receiver
from kvshard_ref.server.sampling import pick
from kvshard_ref.server.tensor_parallel import sliced, summed
from kvshard_ref.spec import DraftSpec, WorkerSpec
from kvshard_ref.worker import PrefillWorker

PS = 4
GEOMETRY = replace(TINY, top_k=9)
DTYPE = torch.float32


def model_of(seed: int = 3) -> TinyModel:
    return TinyModel(GEOMETRY, seed).requires_grad_(requires_grad=False)


def prompt_of(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def ask_of(rid: str, tokens: Sequence[int], **more: Any) -> Ask:
    return Ask(**{"rid": rid, "tokens": tuple(tokens), "max_new_tokens": 8, **more})


def models_of(*, draft: bool) -> list[tuple[int, tuple[Component, ...]]]:
    target = (GEOMETRY.layers, GEOMETRY.components(DTYPE))
    return [target, (1, GEOMETRY.components(DTYPE, "draft_"))] if draft else [target]


class PrefillRig:
    """All ranks of a prefill worker."""

    def __init__(
        self,
        ranks: int,
        *,
        layout: str = "sharded",
        split: str = "interleave",
        draft: bool = True,
        pages: int = 64,
        host_pages: int = 0,
        network: Network | None = None,
        chunk_tokens: int = 16,
    ) -> None:
        self.lockstep = Lockstep(ranks)
        self.network = network
        self.spec = WorkerSpec(
            ranks,
            PS,
            pages,
            GEOMETRY.layers,
            GEOMETRY.components(DTYPE),
            chunk_tokens=chunk_tokens,
            context_tokens=256,
            layout=layout,
            split=split,
            draft=DraftSpec(1, GEOMETRY.components(DTYPE, "draft_")) if draft else None,
            host_pages_per_rank=host_pages,
            ahead_tokens=int(draft),
        )
        self.parallel = split == "whole" and ranks > 1
        self.ranks = self.lockstep.run(self._rank)

    def step(self) -> list[Step]:
        """One step of all ranks; what they all say."""
        answers = self.lockstep.run(lambda rank, _: self.ranks[rank].step())
        told = [[(s.rid, s.tokens, s.finished, s.cached_device, s.cached_host) for s in steps] for steps in answers]
        assert [told[0]] * len(told) == told
        return answers[0]

    def add(self, ask: Ask) -> None:
        for rank in self.ranks:
            rank.waiting.append(ask)

    def abort(self, rid: str) -> None:
        self.lockstep.run(lambda rank, _: self.ranks[rank].abort(rid))

    def serve(self, ask: Ask, steps_max: int = 60) -> Step:
        """One ask without a room, to its end."""
        self.add(ask)
        for _ in range(steps_max):
            for step in self.step():
                if step.rid == ask.rid and step.finished:
                    return step
        raise AssertionError(f"{ask.rid} did not end in {steps_max} steps")

    def used(self) -> list[int]:
        return [rank.worker.cache.used_tokens() for rank in self.ranks]

    def close(self) -> None:
        self.lockstep.close()

    def _rank(self, rank: int, group: LockstepGroup) -> Prefiller:
        whole = model_of()
        part = sliced(whole, rank, self.spec.ranks) if self.parallel else whole
        reduce = summed(group) if self.parallel else None
        found: list[Prefiller] = []
        model = ServedModel(part, lambda rid: found[0].tokens_of(rid), reduce)  # noqa: PLW0108  # found is empty yet
        sends = self.network is not None and (self.spec.layout == "sharded" or rank == 0)
        end = self.network.end(f"prefill {rank}") if self.network and sends else None
        found.append(Prefiller(PrefillWorker(self.spec, group, model, transport=end), model))
        return found[0]


class DecodeRig:
    """A decode worker of one rank."""

    def __init__(self, network: Network, senders: int, *, draft: bool = True, pages: int = 64, drafts: int = 3) -> None:
        pools = [ShardPool(0, Placement(1, PS), pages, *each) for each in models_of(draft=draft)]
        self.half = DecodeHalf(Generator(model_of(), pools, drafts))
        self.receiver = Receiver(pools, network.end("decode"), drafts)
        self.names = [f"prefill {rank}" for rank in range(senders)]
        self.failed: list[Failed] = []

    def add(self, ask: Ask) -> None:
        self.receiver.add(ask, self.names)

    def step(self) -> list[Step]:
        for each in self.receiver.poll():
            if isinstance(each, Arrived):
                self.half.begin(each.ask, each.pages)
            else:
                self.failed.append(each)
        steps = self.half.step()
        for step in steps:
            if step.finished:
                self.receiver.abort(step.rid)
        return steps


def whole_answer(ask: Ask) -> tuple[list[int], Tensor]:
    """Tokens by the model itself, without any cache, and the last hidden states of the prompt [tokens, width]."""

    model, tokens = model_of(), list(ask.tokens)
    prompt = model.whole(model.embed(torch.tensor([tokens])), sparse=True)[0]
    for _ in range(ask.max_new_tokens):
        hidden = model.whole(model.embed(torch.tensor([tokens])), sparse=True)
        tokens.append(pick(ask, len(tokens) - 1, model.logits(hidden)[0, -1]))
    return tokens[len(ask.tokens) :], prompt

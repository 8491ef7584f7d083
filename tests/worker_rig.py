"""All ranks of a worker in one process, with rows that tell where they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

import torch

from harness.adapters.ref_given import GivenModel
from harness.lockstep import Lockstep
from kvshard_ref.components import Component, total_row_bytes
from kvshard_ref.errors import RefusedError
from kvshard_ref.pool import ShardPool
from kvshard_ref.spec import DraftSpec, WorkerSpec
from kvshard_ref.worker import Chunk, Extended, PrefillWorker

T = TypeVar("T")
PS = 4
LAYERS = 2
COMPONENTS = (Component("kv", 1, torch.int64), Component("index_keys", 5, torch.float8_e4m3fn))


DRAFT = DraftSpec(1, (Component("draft", 2, torch.int64), Component("draft_index", 12, torch.uint8, scales=4)))


def spec_of(
    ranks: int,
    layout: str = "sharded",
    padding: str = "tight",
    pages_per_rank: int = 12,
    draft: DraftSpec | None = None,
    host_pages_per_rank: int = 0,
    host_policy: str = "write_through",
) -> WorkerSpec:
    return WorkerSpec(
        ranks,
        PS,
        pages_per_rank,
        LAYERS,
        COMPONENTS,
        chunk_tokens=32,
        context_tokens=64,
        scratch_contexts=2,
        layout=layout,
        padding=padding,
        draft=draft,
        host_pages_per_rank=host_pages_per_rank,
        host_policy=host_policy,
    )


def planned_bytes(spec: WorkerSpec) -> dict[str, int]:
    """Bytes that one rank allocates for all models: pool and scratch on the device, host on the host."""
    pages = {"pool": spec.pages_per_rank, "host": spec.host_pages_per_rank}
    sizes = {
        tier: sum(ShardPool.planned_bytes(spec.placement, count, *model) for model in spec.models) if count else 0
        for tier, count in pages.items()
    }
    return sizes | {"scratch": sum(spec.scratch.bytes(total_row_bytes(components)) for _, components in spec.models)}


def stamps(tokens: Sequence[int], start: int, end: int, spec: WorkerSpec | None = None) -> dict[str, torch.Tensor]:
    """The rows of tokens [start, end): each differs by all tokens up to its own, by layer and by component."""
    found = {}
    for component, layers in (spec or spec_of(1)).component_layers.items():
        found[component.name] = torch.empty(layers, end - start, component.width, dtype=component.dtype)
        for layer in range(layers):
            seed = blake2b(f"{layer} {component.name}".encode(), digest_size=16)
            values = []
            for token in tokens[:end]:
                seed.update(f" {token}".encode())
                values.append(list(seed.digest()))
            fresh = torch.tensor(values[start:end], dtype=torch.uint8)
            row_bytes = fresh[:, : component.row_bytes]
            found[component.name][layer] = row_bytes.contiguous().view(component.dtype)
    return found


def bits(rows: torch.Tensor) -> list[int]:
    return rows.contiguous().view(torch.uint8).flatten().tolist()


def same(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    shapes = {name: (rows.dtype, rows.shape) for name, rows in seen.items()}
    return shapes == {name: (rows.dtype, rows.shape) for name, rows in expected.items()} and all(
        bits(seen[name]) == bits(expected[name]) for name in seen
    )


class Rig:
    """All ranks of a worker. Every answer must be the same on every rank, every read must give the stamps."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.lockstep = Lockstep(spec.ranks)
        self.workers = [PrefillWorker(spec, group, GivenModel()) for group in self.lockstep.groups]
        self.prompts: dict[str, list[int]] = {}

    def all(self, call: Callable[[PrefillWorker], T]) -> list[T]:
        return self.lockstep.run(lambda rank, group: call(self.workers[rank]))

    def agreed(self, call: Callable[[PrefillWorker], T]) -> T:
        answers = self.all(call)
        assert answers == [answers[0]] * self.spec.ranks
        digests = [worker.cache.digest() for worker in self.workers]
        assert digests == [digests[0]] * self.spec.ranks
        return answers[0]

    def open(self, name: str, tokens: list[int]) -> int:
        self.prompts[name] = tokens
        return self.agreed(lambda worker: worker.open(name, tokens))

    def finish(self, name: str) -> int:
        return self.agreed(lambda worker: worker.finish(name))

    def abort(self, name: str) -> None:
        self.agreed(lambda worker: worker.abort(name))

    def computed(self, name: str) -> int:
        return self.workers[0].cache.requests[name].computed

    def extend(self, *wants: tuple[str, int]) -> list[Extended | RefusedError]:
        """One batch. Each rank is given its own share only: the rows that others compute are poison to it."""
        starts = [self.computed(name) for name, _ in wants]
        rows = [
            stamps(self.prompts[name], start, start + count, self.spec)
            for (name, count), start in zip(wants, starts, strict=True)
        ]

        def call(worker: PrefillWorker) -> list[Extended | RefusedError]:
            chunks, before = [], 0
            for (name, count), fresh in zip(wants, rows, strict=True):
                own = {component: part.clone() for component, part in fresh.items()}
                foreign = torch.arange(before, before + count) % self.spec.ranks != worker.group.rank
                if len(wants) == 1:  # a refusal would shift the shares of the requests behind it
                    for part in own.values():
                        part.view(torch.uint8)[:, foreign] = 77
                chunks.append(Chunk(name, count, own))
                before += count
            return worker.extend(chunks)

        replies = self.all(call)
        digests = [worker.cache.digest() for worker in self.workers]
        assert digests == [digests[0]] * self.spec.ranks
        for (name, count), start, column in zip(wants, starts, zip(*replies, strict=True), strict=True):
            if isinstance(column[0], RefusedError):
                assert [str(reply) for reply in column] == [str(column[0])] * self.spec.ranks
                continue
            expected = stamps(self.prompts[name], 0, start + count, self.spec)
            for reply in column:
                assert isinstance(reply, Extended)
                assert (reply.start, reply.end) == (start, start + count)
                assert same(reply.reads, expected)
        return replies[0]

    def prefill(self, name: str, tokens: list[int], chunk: int = 32) -> int:
        cached = self.open(name, tokens)
        while self.computed(name) < len(tokens):
            (reply,) = self.extend((name, min(chunk, len(tokens) - self.computed(name))))
            assert isinstance(reply, Extended)
        return cached


PROMPT = list(range(100, 127))  # 6 whole pages and 3 tokens

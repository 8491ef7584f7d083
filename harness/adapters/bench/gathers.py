"""GatherBench: the prefix gather beside a plain collective, alone and beside the compute of a layer."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.distributed as dist

from harness.adapters.bench.content import equal, fill, pages_of
from harness.adapters.bench.figure import AnyFinding, Check, Figure, Overlap
from harness.adapters.bench.shape import Shape
from harness.adapters.bench.stopwatch import Stopwatch, Work
from kvshard_ref.device import DeviceModule
from kvshard_ref.gather import PrefixGather
from kvshard_ref.group import Group
from kvshard_ref.pool import ShardPool
from kvshard_ref.scratch import ScratchSize

# torch 2.13 gave it a new name and deprecates the old one
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class GatherBench:
    """One rank. The prefix lies on random ones of twice as many pages of the pool, as after much use.

    Timed are layers 2 and on: begin and the first two layers, whose gathers wait for the plan, are before the start.
    Every layer is read, by a few rows, since reading a layer is what starts the gather of the next one.
    """

    def __init__(self, shape: Shape, pool: ShardPool, stopwatch: Stopwatch, device_module: DeviceModule) -> None:
        self._shape = shape
        self._pool = pool
        self._stopwatch = stopwatch
        self._device_module = device_module
        self._prefix = prefix_pages(shape, pool)
        self._scratch = ScratchSize(shape.prefix_tokens, shape.page_size, shape.page_size)
        kind = shape.component.dtype
        self._factors = [
            tuple(torch.randn(size, dtype=kind, device=pool.device) for size in ((m, k), (k, n)))
            for m, k, n in shape.compute
        ]
        self._products = [torch.empty(m, n, dtype=kind, device=pool.device) for m, _, n in shape.compute]

    def findings(self, name: str, group: Group, *, in_place: bool) -> list[AnyFinding]:
        """With the collectives of `group`; `in_place`: whether the raw one may have its part in the output."""
        shape = self._shape
        gather = PrefixGather(self._pool, group, self._scratch, "tight", self._device_module)
        few = torch.arange(shape.page_size, device=self._pool.device) + self._prefix[0] * shape.page_size
        rows: list[torch.Tensor] = []

        def begin() -> None:
            self._finish(gather)
            gather.begin([self._prefix], [[]])
            rows[:] = [gather.translate(few)]
            gather.read(0, "kv", rows[0])

        def layers(compute: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                for layer in range(1, shape.layers):
                    gather.read(layer, "kv", rows[0])
                    compute()

            return run

        def computes() -> None:
            for _ in range(1, shape.layers):
                self._compute()

        alone, both = Work(layers(lambda: None), begin), Work(layers(self._compute), begin)
        raw = Work(self._raw(in_place=in_place))
        times = self._stopwatch.compare((alone, raw, both, Work(computes)), shape.repeats, shape.warmup)
        size = (shape.layers - 2) * shape.pages * shape.page_bytes
        right = self._right(gather)
        return [
            Figure(name, "all_gather of the same bytes", size, times[0], times[1]),
            Overlap(f"{name}, beside a layer", times[0], times[3], times[2]),
            Check(f"{name}, rows", right),
        ]

    def _compute(self) -> None:
        for (left, right), out in zip(self._factors, self._products, strict=True):
            torch.matmul(left, right, out=out)

    def _raw(self, *, in_place: bool) -> Callable[[], None]:
        """As many collectives, each from one contiguous part into one of two contiguous buffers."""
        block, rank = self._shape.pages // self._pool.placement.shards, self._pool.rank
        like = self._pool.pages(0, "kv")
        outs = [like.new_zeros(self._shape.pages, like.shape[1]) for _ in range(2)]
        parts = [out[rank * block : (rank + 1) * block] for out in outs]
        if not in_place:
            parts = [part.clone() for part in parts]

        def run() -> None:
            for layer in range(2, self._shape.layers):
                _all_gather(outs[layer % 2], parts[layer % 2])

        return run

    def _finish(self, gather: PrefixGather) -> None:
        if gather.plan is not None:
            gather.end()

    def _right(self, gather: PrefixGather) -> bool:
        """Whether a gather of fresh rows brings all ranks' rows, in every layer."""
        self._finish(gather)
        shape, pool = self._shape, self._pool
        self._device_module.synchronize()
        fill(pool, seed=2)
        pages = torch.tensor(self._prefix, device=pool.device)
        offsets = torch.arange(shape.page_size, device=pool.device)
        gather.begin([self._prefix], [[]])
        locs = gather.translate((pages[:, None] * shape.page_size + offsets).view(-1))
        right = True
        for layer in range(shape.layers):
            found = gather.read(layer, "kv", locs).view(shape.pages, -1)
            for rank in range(pool.placement.shards):
                its = pages[rank :: pool.placement.shards]
                expected = pages_of(pool, rank, layer, seed=2)[pool.placement.local_page(its)]
                right &= equal(expected, found[rank :: pool.placement.shards])
        gather.end()
        return right


def prefix_pages(shape: Shape, pool: ShardPool) -> list[int]:
    """Page ids by position, the owners going round the ranks, local pages random; equal on all ranks."""
    shards = pool.placement.shards
    chance = random.Random(1)
    local = [chance.sample(range(1, pool.pages_per_rank + 1), shape.pages // shards) for _ in range(shards)]
    return [pool.placement.page_id(at % shards, local[at % shards][at // shards]) for at in range(shape.pages)]

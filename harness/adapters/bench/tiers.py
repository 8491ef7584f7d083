"""TierBench: backup and restore of the host tier beside plain copies from and to pinned memory."""

from __future__ import annotations

import random

import torch

from harness.adapters.bench.content import equal, fill, pages_of
from harness.adapters.bench.figure import AnyFinding, Check, Figure
from harness.adapters.bench.gathers import prefix_pages
from harness.adapters.bench.shape import Shape
from harness.adapters.bench.stopwatch import Stopwatch, Work
from kvshard_ref.device import DeviceModule
from kvshard_ref.host_pool import HostPool
from kvshard_ref.host_tier import Copy
from kvshard_ref.node import Node
from kvshard_ref.pool import ShardPool


class TierBench:
    """One rank, which copies its own pages, all ranks at the same time. One repeat moves all layers."""

    def __init__(self, shape: Shape, pool: ShardPool, stopwatch: Stopwatch, device_module: DeviceModule) -> None:
        self._shape = shape
        self._pool = pool
        self._stopwatch = stopwatch
        self._device_module = device_module
        self._host = HostPool([pool], pool.pages_per_rank, device_module)
        self._own = shape.pages // pool.placement.shards
        self._buffer = torch.zeros(self._own, shape.page_size * shape.width, dtype=shape.component.dtype)
        self._buffer = self._buffer.to(pool.device)

    def findings(self) -> list[AnyFinding]:
        """For every length of runs on the host."""
        found: list[AnyFinding] = []
        for run in self._shape.runs:
            found += self._of(run or self._own, f"host pages in runs of {run}" if run else "host pages in one run")
        return found

    def _of(self, run: int, name: str) -> list[AnyFinding]:
        copy = self._copy("backup", run)
        compute = self._device_module.current_stream()
        host = [rows[0][1].pages[1 : self._own + 1] for rows in self._host.rows]

        def backup() -> None:
            compute.wait_event(self._host.backup([copy]))

        def restore() -> None:
            compute.wait_event(self._host.restore([copy])[-1])

        def raw_backup() -> None:
            for pages in host:
                pages.copy_(self._buffer, non_blocking=True)

        def raw_restore() -> None:
            for pages in host:
                self._buffer.copy_(pages, non_blocking=True)

        works = [Work(work) for work in (backup, raw_backup, restore, raw_restore)]
        times = self._stopwatch.compare(works, self._shape.repeats, self._shape.warmup)
        size = self._shape.layers * self._own * self._shape.page_bytes
        return [
            Figure(f"backup, {name}", "copy to pinned memory", size, times[0], times[1]),
            Figure(f"restore, {name}", "copy from pinned memory", size, times[2], times[3]),
            Check(f"backup and restore, {name}", self._right(copy)),
        ]

    def _copy(self, kind: str, run: int) -> Copy:
        """All ranks' pages to host pages of the same owners, in runs of `run` host pages with a gap after each."""
        shards, pool = self._pool.placement.shards, self._pool
        starts = list(range(1, pool.pages_per_rank - run + 2, 2 * run if run < self._own else run))
        random.Random(run).shuffle(starts)
        local = [start + at for start in starts for at in range(run)][: self._own]
        pages = prefix_pages(self._shape, pool)
        slots = [pool.placement.page_id(at % shards, local[at // shards]) for at in range(len(pages))]
        return Copy(kind, Node(0, [], [], None, None, 0), pages, slots)

    def _right(self, copy: Copy) -> bool:
        """Whether fresh rows come back to other pages than they came from."""
        pool, compute = self._pool, self._device_module.current_stream()
        fill(pool, seed=3)
        compute.wait_event(self._host.backup([copy]))
        for layer in range(pool.layers):
            pool.pages(layer, "kv").zero_()
        shards = pool.placement.shards
        turned = [page for rank in range(shards) for page in copy.pages[rank::shards][::-1]]
        back = [turned[(at % shards) * self._own + at // shards] for at in range(len(copy.pages))]
        compute.wait_event(self._host.restore([Copy("restore", copy.node, back, copy.slots)])[-1])
        mine = [torch.tensor(pages[pool.rank :: shards], device=pool.device) // shards for pages in (copy.pages, back)]
        right = True
        for layer in range(pool.layers):
            expected = pages_of(pool, pool.rank, layer, seed=3)[mine[0]]
            right &= equal(expected, pool.pages(layer, "kv")[mine[1]])
        return right

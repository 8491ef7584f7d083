"""SendBench: pages of one GPU into the pool of another one beside a plain copy between the two."""

from __future__ import annotations

import random

import torch

from harness.adapters.bench.content import equal, fill, pages_of
from harness.adapters.bench.figure import AnyFinding, Check, Figure
from harness.adapters.bench.shape import Shape
from harness.adapters.bench.stopwatch import Stopwatch, Work
from harness.transports.peer_copy import PeerCopyNetwork
from kvshard_ref.decode import DecodeWorker
from kvshard_ref.device import DeviceModule
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.sender import KVSender
from kvshard_ref.transfer import blocks, pair, regions


class SendBench:
    """In one process that sees both devices. One repeat moves all layers of half the prefix, a rank's part."""

    def __init__(
        self, shape: Shape, devices: tuple[torch.device, torch.device], stopwatch: Stopwatch, module: DeviceModule
    ) -> None:
        self._shape = shape
        self._stopwatch = stopwatch
        self._module = module
        self._count = shape.pages // 2
        placement = Placement(1, shape.page_size)
        self._source, self._target = (
            ShardPool(0, placement, 2 * self._count, shape.layers, (shape.component,), device) for device in devices
        )
        fill(self._source, seed=4)
        network = PeerCopyNetwork()
        self._end = network.end("P")
        self._sender = KVSender([self._source], self._end)
        self._decode = DecodeWorker([self._target], network.end("D"), ["P"])
        self._decode.connect()
        for _ in range(2):
            self._sender.poll()
            self._decode.poll()
        self._room = 0

    def findings(self) -> list[AnyFinding]:
        """For every length of runs: the writes alone, and whole transfers with their messages."""
        found: list[AnyFinding] = []
        for run in self._shape.runs:
            found += self._writes(run or self._count, f"runs of {run}" if run else "one run")
        for run in self._shape.runs:
            found += self._transfers(run or self._count, f"runs of {run}" if run else "one run")
        return found

    @property
    def _size(self) -> int:
        return self._shape.layers * self._count * self._shape.page_bytes

    def _raw(self) -> None:
        for layer in range(self._shape.layers):
            source, target = (pool.pages(layer, "kv") for pool in (self._source, self._target))
            target[1 : self._count + 1].copy_(source[1 : self._count + 1], non_blocking=True)

    def _pages(self, run: int, seed: int) -> list[int]:
        """Pages in runs of `run`, with a gap after each, in any order."""
        starts = list(range(1, 2 * self._count - run + 2, 2 * run))
        random.Random(seed).shuffle(starts)
        return [start + at for start in starts for at in range(run)][: self._count]

    def _writes(self, run: int, runs: str) -> list[AnyFinding]:
        """Runs on both sides."""
        src, dst, placement = self._pages(run, 5), self._pages(run, 6), self._source.placement
        every = blocks(regions([self._source]), pair(src, dst, 0, placement), placement)

        def write() -> None:
            self._module.current_stream().wait_event(self._end.write("D", every).event)

        times = self._stopwatch.compare((Work(write), Work(self._raw)), self._shape.repeats, self._shape.warmup)
        self._clear()
        write()
        name = f"send, pages in {runs}"
        return [
            Figure(name, "copy between the devices", self._size, times[0], times[1]),
            Check(name, self._right(src, dst)),
        ]

    def _transfers(self, run: int, runs: str) -> list[AnyFinding]:
        """Runs at the source; the receiver draws what it has free."""
        src = self._pages(run, 7)

        def prepare() -> None:
            if self._room:
                self._decode.release(self._room)
            self._room += 1
            self._decode.reserve(self._room, self._count * self._shape.page_size)
            self._sender.poll()

        def transfer() -> None:
            ready = self._module.Event()
            ready.record(self._module.current_stream())
            sending = self._sender.find("D", self._room, self._count)
            sending.send(src, self._count * self._shape.page_size, ready, last=True)
            while self._decode.slot(self._room).state == "waiting":
                self._sender.poll()
                self._decode.poll()

        works = (Work(transfer, prepare), Work(self._raw))
        times = self._stopwatch.compare(works, self._shape.repeats, self._shape.warmup, wall=True)
        prepare()
        self._clear()
        transfer()
        slot = self._decode.slot(self._room)
        right = slot.state == "complete" and self._right(src, slot.pages)
        name = f"whole transfer, pages in {runs}"
        return [
            Figure(name, "copy between the devices", self._size, times[0], times[1], "process"),
            Check(name, right),
        ]

    def _clear(self) -> None:
        for layer in range(self._shape.layers):
            self._target.pages(layer, "kv").zero_()
        self._module.synchronize()
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)

    def _right(self, src: list[int], dst: list[int]) -> bool:
        """Whether the target pages are the source pages, and no other page of the target was touched."""
        self._module.synchronize()
        right = True
        for layer in range(self._shape.layers):
            found = self._target.pages(layer, "kv").clone()
            at = torch.tensor(dst, device=found.device)
            expected = pages_of(self._source, 0, layer, seed=4)[torch.tensor(src, device=self._source.device)]
            right &= equal(expected.to(found.device), found[at])
            found[at] = 0
            right &= not found.view(torch.int16).any()
        return right

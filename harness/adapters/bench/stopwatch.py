"""Stopwatch: how long work takes on a device, several ways of doing it in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvshard_ref.device import device_module_of


def nothing() -> None:
    """Does nothing."""


class Work(NamedTuple):
    """`run` issues the work to be timed, so that the current stream comes after it; `prepare` what must precede it."""

    run: Callable[[], None]
    prepare: Callable[[], None] = nothing


class Stopwatch:
    """Seconds on the current stream of a GPU, by events; on a CPU by the clock.

    The device is idle at the start, so the time from a call to its first kernel counts, as the raw operation's does.
    `meet` lets all ranks begin together.
    """

    def __init__(self, device: torch.device, meet: Callable[[], None] = nothing) -> None:
        self._device = device
        self._module = device_module_of(device)
        self._meet = meet

    def seconds(self, work: Work) -> float:
        """Of one run."""
        self._ready(work)
        if self._device.type == "cpu":
            return self._clocked(work)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work.run()
        end.record()
        self._module.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def wall_seconds(self, work: Work) -> float:
        """Of one run, by the clock of the process, until the device is idle."""
        self._ready(work)
        return self._clocked(work)

    def compare(self, works: Sequence[Work], repeats: int, warmup: int, *, wall: bool = False) -> list[list[float]]:
        """Per work `repeats` times, taken in turn, so that a drift of the machine meets all of them."""
        times: list[list[float]] = [[] for _ in works]
        for _ in range(warmup + repeats):
            for work, taken in zip(works, times, strict=True):
                taken.append(self.wall_seconds(work) if wall else self.seconds(work))
        return [taken[warmup:] for taken in times]

    def _ready(self, work: Work) -> None:
        work.prepare()
        self._module.synchronize()
        self._meet()
        self._module.synchronize()

    def _clocked(self, work: Work) -> float:
        begin = time.perf_counter()
        work.run()
        self._module.synchronize()
        return time.perf_counter() - begin

"""What simulation costs per operation: `python -m harness.sim.cost [REPEATS]`.

All ways run the same program, in turn; the least time of each counts, as other work on the machine only adds to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.sim.defer import Shapes
from harness.sim.device import SimDevice, Simulation
from harness.sim.schedule import IN_ORDER, LAZY, Schedule, only

REPEATS = 40
LAYERS = 12
SIZES = ((16, 8), (256, 64))


class Passing(TorchDispatchMode):
    """Calls every operation and does nothing else: what being in the way costs by itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in SimMode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation itself."""
        return func(*args, **(kwargs or {}))


class Way(NamedTuple):
    """A way to run the program."""

    name: str
    schedule: Schedule | None
    order: bool


WAYS = (
    Way("adversary, in order", IN_ORDER, order=False),
    Way("adversary, lazy", LAZY, order=False),
    Way("adversary, side stream ahead", ((0, only(1)),), order=False),
    Way("order check", None, order=True),
    Way("order check, lazy", LAZY, order=True),
)


class Bench:
    """A program like a gather beside attention: two streams, slots by turns, rows by index."""

    def __init__(self, rows: int, width: int) -> None:
        self.pool = [(torch.arange(rows * width) % (layer + 7) / 10).view(rows, width) for layer in range(LAYERS)]
        self.slots = [torch.zeros(rows, width) for _ in range(2)]
        self.index = torch.arange(rows).flip(0)
        self.weight = torch.arange(width * width).view(width, width) % 5 / 10
        self.shapes = Shapes()

    def program(self, device: SimDevice | None) -> Tensor:
        """The program; `device` None is plain torch, without streams."""
        side = device.Stream() if device else None
        total = self.pool[0].clone()
        for layer, rows in enumerate(self.pool):
            slot = self.slots[layer % 2]
            half = len(rows) // 2
            if device and side:
                side.wait_stream(device.current_stream())
            with device.stream(side) if device else nullcontext():
                torch.index_select(rows, 0, self.index, out=slot)
                slot[:half].mul_(0.5)
            if device and side:
                device.current_stream().wait_stream(side)
            read = slot.index_select(0, self.index)
            scores = (read @ self.weight).softmax(-1)
            total = total + scores * read
            slot.index_copy_(0, self.index[:half], total[:half])
            slot[half:].fill_(1)
            total[:half] = total[half : 2 * half]
            rows.add_(total, alpha=0.01)
            total = torch.where(total > 1, total.new_zeros(()), total)
        return total

    def plain(self) -> float:
        """Seconds of the program by itself."""
        return _seconds(lambda: self.program(None))

    def passing(self) -> float:
        """Seconds in a mode that only passes on."""
        return self._within(
            Passing(),  # type: ignore[no-untyped-call]  # torch gives it no types
            lambda: self.program(None),
        )

    def simulated(self, way: Way) -> float:
        """Seconds on a simulated device, its making and its last work included."""
        return _seconds(lambda: self.run(way.schedule, order=way.order))

    def run(self, schedule: Schedule | None, *, order: bool) -> Tensor:
        """The program on a simulated device; its result, when all work is done."""
        simulation = Simulation(1, schedule, order, shapes=self.shapes)
        with simulation.devices[0].active():
            result = self.program(simulation.devices[0])
        simulation.finish()
        return result

    @staticmethod
    def _within(context: AbstractContextManager[Any], run: Callable[[], Any]) -> float:
        with context:
            return _seconds(run)

    def operations(self) -> int:
        """Operations of one run, as a simulated device counts them."""
        simulation = Simulation(1)
        with simulation.devices[0].active():
            self.program(simulation.devices[0])
        return simulation.queue.position


def measure(rows: int, width: int, repeats: int) -> list[tuple[str, float, float]]:
    """Per way its name, microseconds per operation, and how many times plain torch; the least of `repeats` runs."""
    bench = Bench(rows, width)
    runs: dict[str, Callable[[], float]] = {"plain torch": bench.plain, "dispatch mode that passes on": bench.passing}
    for way in WAYS:
        runs[way.name] = lambda way=way: bench.simulated(way)  # type: ignore[misc]  # mypy wants a default's type
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            taken = run()
            if turn:  # the first turn warms up
                seconds[name].append(taken)
    operations = bench.operations()
    plain = min(seconds["plain torch"])
    return [(name, min(taken) / operations * 1e6, min(taken) / plain) for name, taken in seconds.items()]


def main(arguments: list[str]) -> int:
    """Print a table per size; return the exit code."""
    repeats = int(arguments[0]) if arguments else REPEATS
    torch.set_num_threads(1)
    for rows, width in SIZES:
        sys.stdout.write(f"\n{rows} x {width} tensors   us/op   times plain\n")
        for name, microseconds, times in measure(rows, width, repeats):
            sys.stdout.write(f"{name:30} {microseconds:7.1f} {times:8.1f}\n")
    return 0


def _seconds(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

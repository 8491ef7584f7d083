"""A prefill worker on simulated devices: one program per rank, all of it issued before anybody looks at a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import torch

from harness.adapters.ref_given import GivenModel
from harness.lockstep import Lockstep
from harness.sim import Schedule, SimGroup, Simulation
from harness.sim.defer import Shapes
from kvshard_ref.spec import WorkerSpec
from kvshard_ref.worker import Chunk, Extended, PrefillWorker
from tests.worker_rig import spec_of

PROMPTS = {
    "a": list(range(100, 127)),
    "b": [*range(100, 113), 7, 8, 9],
    "c": list(range(30)),
    "d": [*range(16), 5, 6, 7],
}
STEPS: tuple[tuple[Any, ...], ...] = (
    ("open", "a"),
    ("extend", "a"),
    ("extend", "a"),
    ("finish", "a"),
    ("open", "b"),
    ("open", "c"),
    ("extend", "b", "c"),
    ("extend", "c"),
    ("finish", "c"),
    ("finish", "b"),
    ("evict", 8),
    ("open", "d"),
    ("open", "a"),
    ("extend", "d", "a"),
    ("abort", "a"),
    ("finish", "d"),
)
CHUNK = 16


def rows_of(spec: WorkerSpec, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Per component [layers, tokens, width]; a row differs by all tokens up to its own, by layer and component."""
    found = {}
    for component, layers in spec.component_layers.items():
        data = [
            Random(f"{component.name} {layer} {tokens[: end + 1]}").randbytes(component.row_bytes)
            for layer in range(layers)
            for end in range(len(tokens))
        ]
        rows = torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8).view(component.dtype)
        found[component.name] = rows.view(layers, len(tokens), component.width)
    return found


class SimRig:
    """The ranks of one worker, their rows, and what they read. Reads are compared at the end: a look is a wait."""

    def __init__(self, ranks: int, spec: WorkerSpec | None = None, shapes: Shapes | None = None) -> None:
        self.spec = replace(spec or spec_of(ranks), layers=3)  # from 3 on a slot is used twice in a batch
        self.shapes = shapes or Shapes()
        self.lockstep = Lockstep(ranks)
        self.rows = {name: rows_of(self.spec, tokens) for name, tokens in PROMPTS.items()}
        self.workers: list[PrefillWorker] = []  # of the latest run

    def run(self, schedule: Schedule | None = None, *, order: bool = False, **options: Any) -> Simulation:
        """All steps on every rank under a schedule; asserts that every read gives the rows that were written."""
        simulation = Simulation(self.spec.ranks, schedule, order, shapes=self.shapes, **options)
        devices, groups = simulation.devices, self.lockstep.groups
        self.workers = []

        def program(rank: int) -> list[tuple[str, int, dict[str, Any]]]:
            device = devices[rank]
            group = SimGroup(device, groups[rank])
            worker = PrefillWorker(self.spec, group, GivenModel(), device=device.device, device_module=device)
            self.workers.append(worker)
            return self.steps(worker)

        reads = simulation.run(self.lockstep, program)
        for found in reads:
            for name, end, seen in found:
                for component, rows in self.rows[name].items():
                    expected = rows[:, :end].contiguous().view(torch.uint8)
                    assert torch.equal(expected, seen[component].contiguous().view(torch.uint8)), (name, end, component)
        return simulation

    def steps(self, worker: PrefillWorker) -> list[tuple[str, int, dict[str, Any]]]:
        """One rank's program; returns per chunk the request, its end and what was read."""
        found = []
        for step, *rest in STEPS:
            if step == "open":
                worker.open(rest[0], PROMPTS[rest[0]])
            elif step == "extend":
                chunks = [self.chunk(worker, name) for name in rest]
                for chunk, reply in zip(chunks, worker.extend(chunks), strict=True):
                    assert isinstance(reply, Extended)
                    found.append((chunk.name, reply.end, reply.reads))
            else:
                getattr(worker, step)(*rest)
        return found

    def chunk(self, worker: PrefillWorker, name: str) -> Chunk:
        """The next tokens of a request with their rows."""
        start = worker.cache.requests[name].computed
        end = min(start + CHUNK, len(PROMPTS[name]))
        rows = {component: rows[:, start:end].clone() for component, rows in self.rows[name].items()}
        return Chunk(name, end - start, rows)


@contextmanager
def rig_of(ranks: int, spec: WorkerSpec | None = None) -> Iterator[SimRig]:
    """A rig whose threads end with the context."""
    rig = SimRig(ranks, spec)
    with rig.lockstep:
        yield rig

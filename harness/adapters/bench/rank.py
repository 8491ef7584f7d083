"""The program of one rank: `python -m harness.adapters.bench.rank RANK RANKS BACKEND PORT PARTS SHAPE`.

Measures and writes its report, one line of JSON, to standard output. SHAPE is JSON as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it in __all__

from harness.adapters.bench.content import fill
from harness.adapters.bench.figure import AnyFinding, Omitted
from harness.adapters.bench.gathers import GatherBench
from harness.adapters.bench.sends import SendBench
from harness.adapters.bench.shape import Shape
from harness.adapters.bench.stopwatch import Stopwatch
from harness.adapters.bench.tiers import TierBench
from harness.adapters.ref_copy_group import CopyGroup
from kvshard_ref.device import device_module_of
from kvshard_ref.group import TorchGroup
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool

WAIT = timedelta(minutes=5)


class Report(msgspec.Struct, frozen=True):
    """What one rank found, and on what."""

    device: str
    versions: dict[str, str]
    findings: list[AnyFinding]


def main() -> None:
    """Join the process group, measure, report."""
    rank, ranks, backend, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    parts, shape = sys.argv[5].split(","), msgspec.json.decode(sys.argv[6], type=Shape)
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up in the report
    device = torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        found = list(findings(shape, parts, device, store))
        pipe.write(msgspec.json.encode(Report(name_of(device), versions(), found)) + b"\n")
        pipe.flush()
    finally:
        dist.destroy_process_group()


def findings(shape: Shape, parts: list[str], device: torch.device, store: TCPStore) -> Iterator[AnyFinding]:
    """Part by part."""
    group, module = TorchGroup(device=device), device_module_of(device)
    stopwatch = Stopwatch(device, lambda: meet(group))
    placement = Placement(group.size, shape.page_size)
    own = 2 * shape.pages // group.size
    pool = ShardPool(group.rank, placement, own, shape.layers, (shape.component,), device)
    fill(pool, seed=1)
    if "gather" in parts and group.size == 1:
        yield Omitted("gather", "one rank has every page; it needs two")
    elif "gather" in parts:
        gathers = GatherBench(shape, pool, stopwatch, module)
        cuda = device.type == "cuda"
        yield from gathers.findings("gather, collective", group, in_place=cuda)
        if cuda:
            copies = CopyGroup(shape.pages // group.size * shape.page_bytes, device)
            yield from gathers.findings("gather, copies between GPUs", copies, in_place=cuda)
        else:
            yield Omitted("gather, copies between GPUs", "there are none")
    if "host" in parts:
        yield from TierBench(shape, pool, stopwatch, module).findings()
    if "send" in parts:
        if device.type == "cuda" and torch.cuda.device_count() < 2:
            yield Omitted("send", "it needs two GPUs")
        elif group.rank == 0:
            other = torch.device("cuda", 1) if device.type == "cuda" else device
            yield from SendBench(shape, (device, other), Stopwatch(device), module).findings()
            store.set("sent", "")
        else:
            store.wait(["sent"], WAIT)  # and not in a collective, which would take part of a GPU meanwhile


def meet(group: TorchGroup) -> None:
    """Returns when all ranks are here."""
    if group.size > 1:
        group.minimum([0])


def name_of(device: torch.device) -> str:
    """Of the hardware."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def versions() -> dict[str, str]:
    """Of what moves the bytes."""
    found = {"python": sys.version.split()[0], "torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


if __name__ == "__main__":
    main()

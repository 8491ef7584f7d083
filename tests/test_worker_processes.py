from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ci.register import register_cpu_ci
from harness.adapters.ref_given import GivenModel
from kvshard_ref.group import Group, TorchGroup
from kvshard_ref.spec import WorkerSpec
from kvshard_ref.worker import Chunk, Extended, PrefillWorker
from tests.worker_rig import PROMPT, Rig, same, spec_of, stamps

register_cpu_ci(est_time=20, stage="commit", nightly=True)

DTYPES = (torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16, torch.float8_e4m3fn)


@pytest.fixture
def rigs() -> Iterator[Callable[[WorkerSpec], Rig]]:
    made: list[Rig] = []

    def make(spec: WorkerSpec) -> Rig:
        made.append(Rig(spec))
        return made[-1]

    yield make
    for rig in made:
        rig.lockstep.close()


def gloo_rank(rank: int, folder: str) -> None:
    """One process of a real group of two; leaves what it saw in a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"  # a file takes no port that another process could hold
    dist.init_process_group("gloo", meeting, timedelta(seconds=60), world_size=2, rank=rank)
    try:
        group: Group = TorchGroup()
        gathered = []
        for dtype in DTYPES:
            out = torch.zeros(4, 3, dtype=dtype)
            part = out[2 * rank : 2 * rank + 2]
            part.copy_(torch.full((2, 3), 1 + rank))
            group.all_gather(out, part)
            gathered.append(out.float().sum(1).tolist())
        seen: dict[str, object] = {
            "gathered": gathered,
            "minimum": group.minimum([rank, 5 - rank, 3]),
            "log": group.log,
        }
        group = TorchGroup()
        worker = PrefillWorker(spec_of(2), group, GivenModel())
        cached = []
        for name, tokens in [("cold", PROMPT), ("warm", PROMPT), ("fork", [*PROMPT[:13], 7, 8, 9])]:
            start = worker.open(name, tokens)
            cached.append(start)
            for end in [*range(start + 8, len(tokens), 8), len(tokens)]:
                (reply,) = worker.extend([Chunk(name, end - start, stamps(tokens, start, end))])
                assert isinstance(reply, Extended)
                assert same(reply.reads, stamps(tokens, 0, end))
                start = end
            worker.finish(name)
        seen |= {"cached": cached, "digest": worker.cache.digest(), "worker log": group.log}
        seen["written"] = worker.pool.written_rows
        Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(rigs: Callable[[WorkerSpec], Rig], tmp_path: Path) -> None:
    """Two processes over Gloo exchange every dtype, read every row, and do what the lockstep ranks do."""
    context = get_context("spawn")
    processes = [context.Process(target=gloo_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    rig = rigs(spec_of(2))
    for name, tokens in [("cold", PROMPT), ("warm", PROMPT), ("fork", [*PROMPT[:13], 7, 8, 9])]:
        rig.prefill(name, tokens, chunk=8)
        rig.finish(name)
    for rank, seen in enumerate(ranks):
        assert seen["gathered"] == [[3.0, 3.0, 6.0, 6.0]] * len(DTYPES)
        assert seen["minimum"] == [0, 4, 3]
        assert seen["log"] == [f"all_gather {str(dtype)[6:]}[4,3]" for dtype in DTYPES] + ["minimum int64[3]"]
        assert seen["cached"] == [0, 24, 12]
        assert seen["digest"] == rig.workers[rank].cache.digest()
        assert seen["worker log"] == rig.lockstep.groups[rank].log
        assert seen["written"] == rig.workers[rank].pool.written_rows

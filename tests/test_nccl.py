"""The cases on GPUs: every rank a process of its own, over NCCL. For runners with GPUs; skipped anywhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ci.register import register_gpu_ci
from tests.launch_rig import environment

register_gpu_ci(est_time=120, stage="commit", runner="2-gpu-h100")
register_gpu_ci(est_time=120, stage="commit", runner="4-gpu-h200")

GPUS = torch.cuda.device_count()


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_cases_hold_on_gpus(tmp_path: Path) -> None:
    """No case finds anything in the reference with its ranks on GPUs, two of them, or four where there are as many."""
    address = f"ref?group=nccl&shards={4 if GPUS >= 4 else 2}"
    words = ["run", address, "--budget", "smoke", "--jobs", "1", "--seed", "8", "--traces", str(tmp_path)]
    root = Path(__file__).parent.parent
    ended = subprocess.run(
        [sys.executable, "-m", "harness.cli", *words],
        check=False,
        env=environment(),
        cwd=root,
        text=True,
        capture_output=True,
    )
    assert 0 == ended.returncode, f"{ended.stdout[-4000:]}\n{ended.stderr[-2000:]}"

"""`kvshard gate run` against the reference as a server: a real model's answers, which nobody knows beforehand."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.cli import main
from harness.launch.deployment import Deployment
from harness.launch.topology import read as read_topology
from harness.samples import State, read

register_cpu_ci(est_time=20, stage="commit", runner="ubuntu-lm-eval")

TASKS = Path(__file__).parent.parent / "fixtures" / "tasks"
PLAIN = """
[defaults]
ready_seconds = 60
stop_seconds = 10

[[worker]]
name = "plain"
role = "plain"
command = ["{python}", "-m", "harness.cli", "serve", "--port", "{port}", "--context-length", "1024",
    "--max-total-tokens", "4096"]

[entry]
worker = "plain"
"""


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs pip install 'kvshard[lm-eval]'")
def test_the_reference(tmp_path: Path) -> None:
    """Every item is asked and no request fails, one at a time and two at once."""
    (tmp_path / "plain.toml").write_text(PLAIN)
    with Deployment(read_topology(tmp_path / "plain.toml"), log_dir=tmp_path) as up:
        for concurrency in (1, 2):
            words = ["--task", str(TASKS / "recall.yaml"), "--limit", "4", "--concurrency", str(concurrency)]
            out = tmp_path / f"{concurrency}.jsonl"
            assert 0 == main(["gate", "run", "--engine", up.entry, *words, "--out", str(out)])
            assert (4, 0) == (len(read(out).all), read(out).count(State.ERROR))

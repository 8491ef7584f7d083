"""The index benchmark on sglang's own tree cores: the same work as the reference by sglang's rules."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.adapters import ref_index, sglang_index
from harness.bench_index import FIGURES, BenchEngine, Workload, measure
from harness.capacity import CapacityError
from harness.cli import main

register_cpu_ci(est_time=65, stage="commit", runner="ubuntu-sglang")

pytestmark = [
    pytest.mark.slow,  # sglang takes many seconds to import
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
TREES = ("python", "rust")


@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize(("page_size", "prompt"), [(2, 63), (16, 256), (64, 1000)])
def test_same_work_under_pressure(shards: int, page_size: int, prompt: int) -> None:
    """By parts and as a worker, with evictions, every request hits and evicts the same on both cores and here."""
    pages = 2 * (-(-prompt // page_size) // shards + 3)
    workload = Workload(shards, page_size, requests=50, prompt_tokens=prompt, pages_per_rank=pages, rounds=3)
    engines: list[BenchEngine] = [
        ref_index.index_engine({"like": "sglang"}),
        *(sglang_index.index_engine({"tree": tree}, context_tokens=prompt, in_flight=1) for tree in TREES),
    ]
    _, (parts, worker) = measure(workload, engines)  # raises at the first request that differs
    for seen in (parts, worker):
        assert sum(hit for hit, _ in seen) > 0
        assert sum(evicted for _, evicted in seen) > 0


def test_own_rules_under_pressure_are_other_work() -> None:
    """The reference by its own rules evicts otherwise, and that is told instead of a ratio."""
    workload = Workload(shards=4, page_size=16, requests=80, prompt_tokens=256, pages_per_rank=14, rounds=3)
    with pytest.raises(CapacityError, match="the engines did different work"):
        measure(workload, [ref_index.index_engine({}), sglang_index.SglangIndexEngine(context_tokens=256)])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default the reference is timed beside both cores, and nothing is left out."""
    few = ["--requests", "20", "--prompt", "130", "--page-size", "16", "--pages", "20", "--rounds", "3"]
    assert main(["bench", "index", *few, "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    names = ["ref like sglang", *(sglang_index.SglangIndexEngine(tree).name for tree in TREES)]
    assert [each["engine"] for each in report["times"]] == names
    assert {engine: sorted(figures) for engine, figures in report["ratios"].items()} == dict.fromkeys(
        names[1:], sorted(FIGURES)
    )
    assert report["missing"] == []
    assert "not measured" not in capsys.readouterr().out

"""The cases about servers on the reference's own: a sharded prefill worker, a decode worker and a control arm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.adapter import Engine
from harness.case import Case
from harness.connect import close, connect
from harness.launch.control import Control
from harness.launch.deployment import Deployment
from harness.launch.topology import parse
from harness.suite import all_cases
from harness.trial import BUDGETS, Trial
from harness.types import Verdict

register_cpu_ci(est_time=170, stage="commit", nightly=True)

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SHARED = ["--model-path", str(ROOT / "fixtures" / "model"), "--load-format", "dummy", "--port", "{port}"]
SIZES = [
    "--page-size",
    "16",
    "--chunked-prefill-size",
    "64",
    "--context-length",
    "1024",
    "--disaggregation-timeout",
    "20",
]
DRAFT = ["--speculative-algorithm", "EAGLE", "--disaggregation-timeout", "20"]
PREFILL = ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "{bootstrap_port}"]
SHARDED = ["--attn-cp-size", "2", "--enable-kv-cache-sharding", "--enable-hierarchical-cache"]
UNMET = {
    "hands_over": "both halves are asked at once here; tests/test_http_vllm.py has a pair that hands over",
    "recalls_facts": "random weights know no facts; .ci/run asks the trained model on the servers of p2d2_small.toml",
}


def worker(name: str, *flags: str, **keys: Any) -> dict[str, Any]:
    command = ["{python}", "-m", "harness.cli", "serve", *SHARED, *SIZES, *DRAFT, *flags]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {"name": name, "command": command, "env": environment, "ready_seconds": 120, "stop_seconds": 10, **keys}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    workers = [
        worker("prefill", *PREFILL, *SHARDED, "--max-total-tokens", "512", ports=["bootstrap_port"]),
        worker("decode", "--disaggregation-mode", "decode", "--tp-size", "2", "--max-total-tokens", "8192"),
        worker("control", "--max-total-tokens", "8192"),
    ]
    topology = parse({"worker": workers, "entry": {"worker": "decode"}})
    with Deployment(topology, tmp_path_factory.mktemp("logs")) as up, Control(up):
        servers = f"{up.entry}?prefill={up.url('prefill')}&control={up.url('control')}"
        connected = connect(f"{servers}&operate={up.log_dir}")
        yield connected
        close(connected)


@pytest.mark.parametrize("made", all_cases(("e2e",)), ids=lambda made: made.id)
def test_the_reference_passes(made: Case, engine: Engine) -> None:
    """The reference's own pair passes every case, at the smallest budget."""
    result, _ = Trial(made, engine, "", BUDGETS["smoke"], seed=1).run()

    if result.verdict is Verdict.SKIP and "no draft of this model" in result.why:
        pytest.skip("random weights: a draft is accepted by chance alone")
    for promise, why in UNMET.items():
        if result.verdict is Verdict.SKIP and result.why.endswith(f"does not claim promise.{promise}"):  # it alone
            pytest.skip(why)
    assert (Verdict.PASS, "") == (result.verdict, result.why), result.failure

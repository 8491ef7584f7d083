"""sglang's server as it really answers: gauges that lag behind, counters of time, an error that is an object."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.adapters.http_client import Client, Told
from harness.adapters.http_dialects import Sglang
from harness.adapters.http_dialects import Told as Answer
from harness.adapters.http_metrics import ranks_of
from harness.adapters.http_sglang import SglangClient
from harness.launch.plan import filled
from harness.launch.topology import read

register_cpu_ci(est_time=5, stage="commit")

ROOT = Path(__file__).parents[1]
RANK = '{engine_type="prefill",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"}'
METRICS = f"""# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:process_cpu_seconds_total{{component="tokenizer"}} 4.14
sglang:num_running_reqs{RANK} 3.0
sglang:num_prefill_inflight_queue_reqs{RANK} 1.0
sglang:num_used_tokens{RANK} 1600.0
sglang:kv_evictable_tokens{RANK} 1600.0
sglang:hicache_host_used_tokens{RANK} 1600.0
sglang:hicache_host_total_tokens{RANK} 32832.0
sglang:fwd_occupancy{RANK} NaN
sglang:max_total_num_tokens{RANK} 8192.0
sglang:routing_keys_active 0.0
sglang:http_requests_total{{endpoint="/metrics",method="GET"}} 166.0
sglang:hicache_backup_duration_seconds_count{{cache_type="UnifiedRadixCache",tp_rank="0"}} 124.0
sglang:cached_tokens_total{{cache_source="device",engine_type="prefill",model_name="m"}} 15424.0
sglang:scheduler_idle_seconds_total{RANK} 38.7
"""
LEFT = {
    "hicache_host_total_tokens": 32832.0,
    "max_total_num_tokens": 8192.0,
    "cached_tokens_total": 15424.0,
    "cached_tokens_device_total": 15424.0,
}


class World:
    """Answers by path, and what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: object) -> None:
        self.asked: list[str] = []
        self._answers = answers
        monkeypatch.setattr(Client, "get", lambda _, path: self.get(path))
        self.client = SglangClient("http://127.0.0.1:1", 1.0)

    def get(self, path: str) -> Told:
        self.asked.append(path)
        answer = self._answers.get(path.rpartition("/")[2])
        if answer is None:
            return Told(404, b"{}")
        return Told(200, (answer if isinstance(answer, str) else json.dumps(answer)).encode())

    def levels(self) -> dict[str, float]:
        """Of rank 0, without what is left as it was."""
        (counters,) = ranks_of(self.client.get("/metrics").body.decode()).values()
        assert LEFT.items() <= counters.items()
        return {name: value for name, value in counters.items() if name not in LEFT}


def load(mode: str = "prefill", used: int = 0, waiting: int = 0, inflight: int = 0) -> dict[str, object]:
    core = {"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": waiting, "num_used_tokens": used}
    return {"loads": [{**core, "disaggregation": {"mode": mode, "prefill_inflight_queue_reqs": inflight}}]}


def levels(used: int = 0, waiting: int = 0, inflight: int = 0, holding: int = 0) -> dict[str, float]:
    return {
        "num_used_tokens": used,
        "num_running_reqs": 0,
        "num_queue_reqs": waiting,
        "num_prefill_inflight_queue_reqs": inflight,
        "num_holding_reqs": holding,
    }


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (load(), levels()),
        (load(used=64, waiting=2, inflight=1), levels(used=64, waiting=2, inflight=1)),
        (load(used=64), levels(used=64)),  # of a sharded worker at rest, too
        (load("decode", used=64), levels(used=64, holding=1)),
        (load("decode", used=64, waiting=1), levels(used=64, waiting=1)),
    ],
)
def test_gauges_are_those_of_now(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, object], expected: dict[str, float]
) -> None:
    """Gauges of the last batch give way to the loads; times, looks and what is no number are left out."""
    assert expected == World(monkeypatch, metrics=METRICS, loads=said).levels()


@pytest.mark.parametrize("loads", [None, {"loads": [{"dp_rank": 0, "num_queue_reqs": 0}]}, {"loads": []}, [1]])
def test_live_metrics_stay(monkeypatch: pytest.MonkeyPatch, loads: object) -> None:
    """A server without such loads is read as it is, and asked for them once."""
    world = World(monkeypatch, metrics=METRICS, loads=loads)

    assert [METRICS, METRICS] == [world.client.get("/metrics").body.decode() for _ in range(2)]
    assert ["/metrics", "/v1/loads", "/metrics"] == world.asked


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"disaggregation_mode": "prefill"}, 20.0),
        ({"disaggregation_mode": "null"}, None),
        ({"disaggregation_mode": "decode", "disaggregation_timeout": 3.0}, 3.0),
    ],
)
def test_wait_of_a_pair(monkeypatch: pytest.MonkeyPatch, info: dict[str, object], expected: float | None) -> None:
    """How long one half waits for the other is in the environment that the server shows."""
    shown = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "10", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20"}
    world = World(monkeypatch, server_info={**info, "internal_states": [{"env_vars": shown}]})

    assert expected == world.client.get("/server_info").json.get("disaggregation_timeout")


def test_wait_that_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the environment nothing is said of it."""
    world = World(monkeypatch, server_info={"disaggregation_mode": "decode", "internal_states": [{}]})

    assert {"disaggregation_mode": "decode", "internal_states": [{}]} == world.client.get("/server_info").json


def test_an_error_that_is_an_object() -> None:
    """What an orphan is told is an error, with its reason and its status."""
    told = Answer()
    said = {"object": "error", "message": "Prefill bootstrap failed", "type": "500", "param": None, "code": 500}
    Sglang().add(told, said)

    assert ("Prefill bootstrap failed", 500) == (told.error, told.status)


class TestScript:
    def test_usage(self) -> None:
        """Wrong words are told what there is."""
        for words in ([], ["fly"], ["run", "p3"]):
            done = subprocess.run(["bash", "ci/sglang_gpu.sh", *words], cwd=ROOT, capture_output=True, check=False)
            assert (2, 3) == (done.returncode, done.stderr.decode().count("bash ci/sglang_gpu.sh ")), words

    @pytest.mark.parametrize(
        ("name", "pair"),
        [
            ("p1", "{url:server}?control={url:control}"),
            ("p1d1", "{url:decode}?prefill={url:prefill}&decode={url:decode}&control={url:control}&bootstrap="),
            ("p2d2_mla", "{url:decode}?prefill={url:prefill}&decode={url:decode}&control={url:control}&bootstrap="),
        ],
    )
    def test_run(self, tmp_path: Path, name: str, pair: str) -> None:
        """The servers of the topology are brought up, with the address of the cases and the flags that were given."""
        stub = tmp_path / "python3"
        stub.write_text('#!/bin/sh\nprintf "%s\\n" "$SGLANG_PYTHON" "$SGLANG_MODEL" "$@"\n')
        stub.chmod(0o755)
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        words = ["run", name, str(tmp_path), str(ROOT), str(tmp_path / "out"), "--set", "a.b=c"]
        done = subprocess.run(
            ["bash", "ci/sglang_gpu.sh", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        told = done.stdout.splitlines()

        assert [f"{tmp_path}-python", str(ROOT), "-m", "harness.cli", "up"] == told[:5]
        assert f"fixtures/topologies/sglang_{name if '_' in name else name + '_gqa'}.toml" == told[5]
        assert ["--log-dir", f"{tmp_path}/out/logs", "--set", "a.b=c", "--", "bash", "-c"] == told[6:13]
        assert told[-4].startswith(pair)
        assert "&far=4&promises=-seeded,-rank_processes,recalls_facts,salts" == told[-3]
        topology = read(ROOT / told[5])
        ports = {worker.name: dict.fromkeys(("port", *worker.ports), 1) for worker in topology.workers}
        command = filled(told[told.index("--") + 1 :], topology, ports, tmp_path, "COMMAND")
        assert command[-4].startswith(re.sub(r"{url:\w+}", "http://127.0.0.1:1", pair))

    def test_lock(self) -> None:
        """It is the sglang whose components are judged elsewhere."""
        lock = (ROOT / "ci" / "sglang_gpu.lock").read_text().splitlines()
        install = (ROOT / "ci" / "install_sglang.sh").read_text()

        (pinned,) = [line for line in lock if line.startswith("sglang==")]
        assert pinned in install

"""The reference as real processes, over HTTP: a small P/D pair and a plain worker. What dies is told, nothing stays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ci.register import register_cpu_ci
from harness.launch.deployment import Deployment
from harness.launch.topology import read

register_cpu_ci(est_time=80, stage="commit")

TIMEOUT_SECONDS = 3
SMALL = (
    '"{python}", "-m", "harness.cli", "serve", "--port", "{port}", "--page-size", "16", "--chunked-prefill-size", '
    '"64", "--context-length", "512", "--max-total-tokens", "1024", "--disaggregation-timeout", "3"'
)
PAIR = f"""
[defaults]
ready_seconds = 60
stop_seconds = 10

[[worker]]
name = "prefill"
role = "prefill"
command = [{SMALL}, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "{{bootstrap_port}}",
    "--attn-cp-size", "2", "--enable-kv-cache-sharding"]
ports = ["bootstrap_port"]

[[worker]]
name = "decode"
role = "decode"
command = [{SMALL}, "--disaggregation-mode", "decode"]

[[worker]]
name = "plain"
role = "plain"
command = [{SMALL}]

[entry]
worker = "plain"
"""
PROMPT = [5 * number % 251 for number in range(70)]


class Pair:
    """Asks both sides of a pair, as a router does."""

    def __init__(self, up: Deployment) -> None:
        self.up = up
        self._rooms = random.Random(1)
        self._pool = ThreadPoolExecutor(8)

    def ask(self, name: str, tokens: list[int], new: int = 8, **more: Any) -> httpx.Response:
        sampling = {"max_new_tokens": new, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, **more}
        return httpx.post(f"{self.up.url(name)}/generate", json=body, timeout=40)

    def room(self) -> dict[str, Any]:
        port = self.up.port("prefill", "bootstrap_port")
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": self._rooms.getrandbits(62)}

    def both(self, tokens: list[int], new: int = 8, **more: Any) -> tuple[httpx.Response, httpx.Response]:
        """Prefill's and decode's answers."""
        room = self.room()
        answers = [self._pool.submit(self.ask, name, tokens, new, **room, **more) for name in ("prefill", "decode")]
        return answers[0].result(), answers[1].result()

    def right(self) -> tuple[list[int], list[int]]:
        """The pair's answer and that of the plain worker."""
        return self.both(PROMPT)[1].json()["output_ids"], self.ask("plain", PROMPT).json()["output_ids"]

    def idle(self, name: str) -> dict[str, float]:
        """Gauges of what is in use, once they have settled."""
        names = (
            "num_used_tokens num_running_reqs num_queue_reqs num_prefill_inflight_queue_reqs num_decode_running_reqs"
        )
        wanted = names.split()
        for _ in range(100):
            text = httpx.get(f"{self.up.url(name)}/metrics", timeout=10).text
            found = {line.split("{")[0].removeprefix("sglang:"): float(line.split()[-1]) for line in text.splitlines()
                     if line.startswith("sglang:")}  # fmt: skip
            busy = {key: value for key, value in found.items() if key in wanted and value}
            if not busy:
                return {}
            time.sleep(0.05)
        return busy


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "pair.toml").write_text(PAIR)
    with Deployment(read(folder / "pair.toml"), log_dir=folder) as up:
        yield Pair(up)


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


def gone(processes: list[psutil.Process], seconds: float = 15.0) -> list[int]:
    """Of these, those that are still there after a while."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [process.pid for process in alive]


def test_a_pair_answers_as_a_plain_worker(pair: Pair) -> None:
    """Cold and from the cache the answer is that of one process, and both sides are idle afterwards."""
    for length in (1, 16, 17, 70, 200):
        tokens = [7 * number % 253 for number in range(length)]
        plain = pair.ask("plain", tokens).json()
        prefill, decode = pair.both(tokens)
        hit, _ = pair.both(tokens)
        assert decode.json()["output_ids"] == plain["output_ids"]
        assert prefill.json()["output_ids"] == plain["output_ids"][:1]
        assert hit.json()["meta_info"]["cached_tokens"] == (length - 1) // 16 * 16
    assert (pair.idle("prefill"), pair.idle("decode")) == ({}, {})


def test_orphans_end_in_time(pair: Pair) -> None:
    """A prefill whose decode never comes, and the other way round, end with an error that says so; nothing is left."""
    started = time.monotonic()
    for name, says in (("prefill", "decode worker has not taken"), ("decode", "prefill worker has not sent")):
        answer = pair.ask(name, PROMPT, **pair.room())
        assert answer.status_code == 504
        assert says in answer.text
    assert time.monotonic() - started < 5 * TIMEOUT_SECONDS
    assert (pair.idle("prefill"), pair.idle("decode")) == ({}, {})
    assert len(set(map(tuple, pair.right()))) == 1


def test_a_client_that_leaves_frees_all(pair: Pair) -> None:
    """In the middle of a long answer both sides are left: all is free again, long before the answer's end."""
    room = pair.room()
    sampling = {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True, **room}
    prefill = pair._pool.submit(pair.ask, "prefill", PROMPT, 400, **room)  # its threads
    with httpx.stream("POST", f"{pair.up.url('decode')}/generate", json=body, timeout=40) as answer:
        lines = [line for line, _ in zip(answer.iter_lines(), range(6), strict=False)]
    assert any(line.startswith("data: {") for line in lines)
    prefill.result()
    assert (pair.idle("prefill"), pair.idle("decode")) == ({}, {})
    assert len(set(map(tuple, pair.right()))) == 1


@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_a_worker_that_dies_and_comes_back(pair: Pair, victim: str) -> None:
    """What is under way ends with an error in time; the other side is idle; after a restart answers are right."""
    other = "prefill" if victim == "decode" else "decode"
    room = pair.room()
    asks = [pair._pool.submit(pair.ask, name, PROMPT, 400, **room) for name in (other, victim)]
    time.sleep(0.4)
    ranks = children(pair.up.pid(victim))
    pair.up.kill(victim)
    outcomes: list[Any] = []
    for ask in asks:
        try:
            outcomes.append(ask.result(timeout=20).status_code)
        except httpx.TransportError:
            outcomes.append("lost")
    assert outcomes[1] == "lost" or (victim == "prefill" and outcomes[1] == 200)  # its part may be done by then
    assert outcomes[0] in {200, 500, 502, 504}
    assert gone(ranks) == []
    assert pair.idle(other) == {}
    pair.up.restart(victim)
    for _ in range(3):
        assert len(set(map(tuple, pair.right()))) == 1


def test_a_rank_that_dies_takes_its_worker_down(tmp_path: Path) -> None:
    """The face tells what is under way, ends with code 1, and no rank is left."""
    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-m", "harness.cli", "serve", "--port", "0", "--tp-size", "2"]
    with log, subprocess.Popen(command, stdout=log, stderr=log) as face:
        ranks: list[psutil.Process] = []
        for _ in range(600):
            ranks = children(face.pid)
            listening = any(each.status == psutil.CONN_LISTEN for each in psutil.Process(face.pid).net_connections())
            if len(ranks) == 2 and listening:
                break
            time.sleep(0.1)
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert face.wait(20) == 1
    assert gone(ranks) == []


def test_a_fault_can_be_planted_in_a_server(tmp_path: Path) -> None:
    """KVSHARD_FAULT with a name that does not exist ends the worker, and says which there are."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "serve", "--port", "0"],
        env={**os.environ, "KVSHARD_FAULT": "no.such"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert "KVSHARD_FAULT: no fault 'no.such', expected one of placement." in done.stderr
    assert "rank 0 of the worker ended with code 2" in done.stderr

"""Servers of vLLM's dialect that hold no model: the fake workers behind another face, whose halves are asked in turn.

The prefill half of a request is answered with what the decode half needs; its rows wait for that, but not for ever.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.fake_operator import operated
from tests.fake_server import Handler, Server
from tests.fake_worker import CHUNK, CONTEXT, PAGE, Answer, GoneError, Tokens, Worker, World

LEASE_SECONDS = 1.0


@dataclass
class Lease:
    """Rows that wait for their decode half. `life`: of the process that holds them."""

    rows: Tokens
    end: float
    life: int


class LeasingWorker(Worker):
    """A worker that hands over. `received`: tokens of prompts that came from prefill."""

    received = 0

    def held(self) -> int:
        """Pages that wait."""
        if self.role != "prefill":
            return 0
        now, kept = time.monotonic(), self.world.has("keeps what nobody comes for")
        life = self.world.lives["prefill"]
        with self.world.lock:
            for name, lease in list(self.world.leases.items()):
                if lease.life != life or (lease.end < now and not kept):
                    del self.world.leases[name]
            return sum(-(-len(lease.rows) // PAGE) for lease in self.world.leases.values())

    def flush(self) -> bool:
        return not self.held() and super().flush()


class VllmHandler(Handler):
    """The face of such a worker."""

    worker: LeasingWorker

    def do_GET(self) -> None:  # noqa: N802  # the name that http.server calls
        worker, path = self.worker, urlsplit(self.path).path
        transfer = {"prefill": "kv_producer", "decode": "kv_consumer"}.get(worker.role)
        extra = {"kv_lease_duration": LEASE_SECONDS}
        config = {
            "model_config": {"dtype": "torch.float32"},
            "scheduler_config": {"max_num_batched_tokens": CHUNK},
            "parallel_config": {"tensor_parallel_size": 1},
            "kv_transfer_config": {"kv_role": transfer, "kv_connector_extra_config": extra} if transfer else None,
        }
        answers: dict[str, Any] = {
            "/server_info": lambda: {"vllm_config": config},
            "/version": lambda: {"version": "1"},
            "/v1/models": lambda: {"data": [{"id": "fake", "owned_by": "vllm", "max_model_len": CONTEXT}]},
            "/metrics": self.metrics,
        }
        found = answers.get(path)
        self.reply(200, found()) if found else self.reply(404, {"error": {"message": "no such path", "code": 404}})

    def metrics(self) -> str:
        """What the worker counts, by vLLM's names."""
        worker = self.worker
        counted = worker.counters[0]
        cached = counted.get("cached_tokens_device_total", 0.0)
        used = (worker.leaked + worker.held()) / worker.pages
        return "\n".join(
            [
                f'vllm:cache_config_info{{block_size="{PAGE}",num_gpu_blocks="{worker.pages + 1}"}} 1.0',
                f'vllm:num_requests_running{{engine="0"}} {float(len(worker.live))}',
                'vllm:num_requests_waiting{engine="0"} 0.0',
                'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 0.0',
                'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} '
                + str(float(worker.received)),
                f'vllm:kv_cache_usage_perc{{engine="0"}} {used}',
                f'vllm:generation_tokens_total{{engine="0"}} {counted["generation_tokens_total"]}',
                f'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="device"}} {cached}',
                "",
            ]
        )

    def do_POST(self) -> None:  # noqa: N802  # the name that http.server calls
        try:
            self.post()
        except (GoneError, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def post(self) -> None:
        """One request."""
        path = urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        if path == "/reset_prefix_cache":
            self.reply(200, {"success": self.worker.flush()})
        elif path == "/abort_requests":
            for rid in body["request_ids"]:
                for live, aborted in list(self.worker.live.items()):
                    if rid == f"cmpl-{live}-0":
                        aborted.set()
            self.reply(200, {"status": "aborted"})
        elif path == "/v1/completions":
            self.complete(body)
        else:
            self.reply(404, {"error": {"message": "no such path", "code": 404}})

    def complete(self, body: dict[str, Any]) -> None:
        """A completion, as the workers know it."""
        asked = {
            "rid": body["request_id"],
            "input_ids": body["prompt"],
            "logprob_start_len": -1,
            "stream": body.get("stream", False),
            "sampling_params": {"max_new_tokens": body["max_tokens"], "sampling_seed": body["seed"]},
            "handed": body.get("kv_transfer_params"),
            "extra_key": body.get("cache_salt", ""),
        }
        self.generate(asked)

    def begin(self, body: dict[str, Any], tokens: Tokens, answer: Answer, check: Any) -> None:
        worker, handed = self.worker, body["handed"] or {}
        world = worker.world
        if not handed.get("do_remote_prefill"):
            answer.rows, answer.cached = worker.prefilled(tokens, -1, check, body["extra_key"])
            with world.lock:
                for lease in world.leases.values() if world.has("gives pages to the next prompt") else ():
                    lease.rows = (answer.rows * len(lease.rows))[: len(lease.rows)]
                if handed.get("do_remote_decode"):
                    end = time.monotonic() + LEASE_SECONDS
                    world.leases[body["rid"]] = Lease(answer.rows, end, world.lives["prefill"])
            return
        with world.lock:
            lease = world.leases.get(handed["remote_id"])
            if not world.has("keeps what nobody comes for"):
                world.leases.pop(handed["remote_id"], None)
        gone = (
            lease is None
            or world.has("computes anew")
            or lease.end < time.monotonic()
            or lease.life != world.lives["prefill"]
        )
        if gone and world.has("waits for ever"):
            time.sleep(world.wait_seconds * 4)
        if gone and world.has("takes what is there"):
            answer.rows = tokens[::-1]
        else:
            answer.rows = tokens if lease is None or gone else lease.rows  # computed anew where nothing is there
        self.worker.received += 0 if gone else len(tokens)

    def told(self, body: dict[str, Any], answer: Answer, reason: str | None) -> dict[str, Any]:
        fresh = answer.tokens[-1:] if answer.streams and reason is None else [] if answer.streams else answer.tokens
        choice = {
            "text": "",
            "logprobs": {"token_logprobs": [value for value, _, _ in fresh]} if fresh else None,
            "token_ids": [token for _, token, _ in fresh],
            "finish_reason": reason,
        }
        usage = {
            "prompt_tokens": len(body["input_ids"]),
            "prompt_tokens_details": {"cached_tokens": answer.cached["device"]},
        }
        handed = body["handed"] or {}
        given = {"do_remote_prefill": True, "do_remote_decode": False, "remote_id": body["rid"]}
        return {
            "choices": [choice],
            "usage": usage if reason else None,
            "kv_transfer_params": given if handed.get("do_remote_decode") else None,
        }


def made(port: int, world: World, role: str) -> Server:
    """A server of this dialect."""
    return Server(port, LeasingWorker(world, role), VllmHandler)


@contextmanager
def handing_over(*faults: str, plain: bool = False) -> Iterator[str]:
    """The address of a pair, or of one worker, with these faults, and of a control arm without any."""
    lacks = {"sharded": False, "host": False, "draft": False}
    with operated(*faults, plain=plain, make=made, **lacks) as address:
        yield f"{address}&dialect=vllm"

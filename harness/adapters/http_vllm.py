"""vLLM's server: its own completions and metrics, and a P/D pair whose decode half is told by the prefill half.

Pages, capacity and chunks are read from `/metrics` and, where it runs with VLLM_SERVER_DEV_MODE=1, `/server_info`.
One block of the pool is never given to a request, so it is not counted.
"""

from __future__ import annotations

import json
import re
from typing import Any

from harness.adapters.http_client import Client, Json, Told
from harness.adapters.http_dialects import OpenAI, refused
from harness.adapters.http_dialects import Told as Answer
from harness.types import Generate

NAME = "vllm"
NAMES = {  # of metrics, and what other servers call the same
    "num_requests_running": "num_running_reqs",
    "num_requests_waiting": "num_queue_reqs",
    "prompt_tokens_cached_by_source_total": "cached_tokens_total",
}
RECEIVED = re.compile(r'^vllm:prompt_tokens_by_source_total\{.*"external_kv_transfer".*\} (\S+)$', re.MULTILINE)
SAMPLE = re.compile(rf"^vllm:({'|'.join(NAMES)})(?=[{{ ])", re.MULTILINE)
USED = re.compile(r"^vllm:kv_cache_usage_perc\S* (\S+)$", re.MULTILINE)
BUSY = re.compile(r"^vllm:num_requests_(?:running|waiting)\{\S* [^0]", re.MULTILINE)
POOL = re.compile(r"^vllm:cache_config_info\{(.*)\} 1", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
LEASE_SECONDS = 30  # that pages wait for their decode half, where nothing else is said
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
NOWHERE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


class VllmClient(Client):
    """Answers what other servers are asked from what this one has; everything else goes through."""

    def get(self, path: str) -> Told:
        if path == "/server_info":
            return _said(self._info())
        told = super().get(path)
        if path != "/metrics" or not told.ok:
            return told
        text = told.body.decode()
        tokens, used = _capacity(text), USED.search(text)
        held = round(float(used[1]) * tokens) if used else 0
        levels = {"max_total_num_tokens": tokens, "num_used_tokens": held}
        # pages that no request of this server has are those that wait for a decode half
        levels["num_prefill_inflight_queue_reqs"] = int(held > 0 and not BUSY.search(text))
        received = RECEIVED.search(text)
        levels["received_tokens_total"] = int(float(received[1])) if received else 0
        named = SAMPLE.sub(lambda match: NAMES[match[1]], text).replace('source="', 'cache_source="')
        return Told(told.status, "\n".join([named, *(f"{name} {value}" for name, value in levels.items())]).encode())

    def post(self, path: str, body: Json) -> Told:
        if path.startswith("/flush_cache"):
            told = super().post("/reset_prefix_cache?reset_external=true", {})
            held = told.ok and told.json.get("success") is not True
            return Told(409, b'{"error": "requests hold pages of the cache"}') if held else told
        if path == "/abort_request":
            return super().post("/abort_requests", {"request_ids": [f"cmpl-{body['rid']}-0"]})
        return super().post(path, body)

    def _info(self) -> Json:
        metrics, version = super().get("/metrics"), super().get("/version")
        told = super().get("/server_info?config_format=json")
        if not metrics.ok:
            return {}
        text = metrics.body.decode()
        config: Json = told.json["vllm_config"] if told.ok else {}
        model, transfer = config.get("model_config") or {}, config.get("kv_transfer_config") or {}
        more = transfer.get("kv_connector_extra_config") or {}
        return {
            "version": version.json.get("version") if version.ok else None,
            "page_size": int(_pool(text).get("block_size", 0)),
            "max_total_num_tokens": _capacity(text),
            "chunked_prefill_size": (config.get("scheduler_config") or {}).get("max_num_batched_tokens"),
            "tp_size": (config.get("parallel_config") or {}).get("tensor_parallel_size"),
            "dtype": str(model.get("dtype") or "").removeprefix("torch.") or None,
            "disaggregation_mode": ROLES.get(transfer.get("kv_role", "")),
            "disaggregation_timeout": more.get("kv_lease_duration", LEASE_SECONDS) if transfer else None,
            "can_flush": bool(config),
        }


class Vllm(OpenAI):
    """/v1/completions, with an id by which a request can be ended."""

    name = NAME
    aborts = True
    client = VllmClient
    hands_over = True
    promises: tuple[str, ...] = ("salts",)

    def body(self, op: Generate, rid: str, *, stream: bool) -> Json:
        return {**super().body(op, rid, stream=stream), "request_id": rid}

    def halves(self, host: str, port: int) -> tuple[Json, Json]:
        return {"max_tokens": 1, "kv_transfer_params": ASKED | NOWHERE}, {}

    def add(self, told: Answer, answer: Json) -> None:
        super().add(told, answer)
        if not refused(told, answer) and answer.get("kv_transfer_params"):
            told.handed = {"kv_transfer_params": answer["kv_transfer_params"]}


def _pool(text: str) -> dict[str, Any]:
    match = POOL.search(text)
    return dict(LABEL.findall(match[1])) if match else {}


def _capacity(text: str) -> int:
    """Tokens of all blocks that requests can have."""
    pool = _pool(text)
    blocks = pool.get("num_gpu_blocks", "")
    return (int(blocks) - 1) * int(pool["block_size"]) if blocks.isdigit() else 0


def _said(answer: Json) -> Told:
    return Told(200, json.dumps(answer).encode())

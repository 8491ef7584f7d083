"""sglang's server: gauges as of now, and no counter that moves while nothing is asked.

Its `/metrics` shows gauges as of the last batch, at rest as of up to half a minute ago; `/v1/loads` shows them as of
now. Servers whose metrics are always of the moment, such as the reference's, are read as they are.
"""

from __future__ import annotations

import json
import re
from typing import Any

from harness.adapters.http_client import Client, Json, LostError, Told

MOVING = re.compile(r"^sglang:(?:(?:\w*_seconds(?:_\w+)?|http_\w+|routing_keys_active)[{ ].*|.* NaN)\n?", re.MULTILINE)
"""Time goes on while nothing is asked, and every look is a request of its own; what is no number equals nothing."""
STALE = re.compile(
    r"^sglang:(?:num_\w+_reqs|(?:num|hicache_host)_used_tokens|kv_(?:used|available|evictable)_tokens)[{ ].*\n?",
    re.MULTILINE,
)
WAITS = ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT")


class SglangClient(Client):
    """Asks for what `/metrics` and `/server_info` leave out as well."""

    _live = False  # whether the metrics are those of the moment

    def get(self, path: str) -> Told:
        told = super().get(path)
        if not told.ok:
            return told
        if path == "/metrics" and not self._live:
            return self._fresh(told)
        return _with_wait(told) if path == "/server_info" else told

    def _fresh(self, told: Told) -> Told:
        loads = super().get("/v1/loads")
        found = _loads(loads.json) if loads.ok else []
        if not found:
            self._live = True
            return told
        text = STALE.sub("", MOVING.sub("", told.body.decode()))
        levels = {
            "num_used_tokens": _sum(found, "num_used_tokens"),
            "num_running_reqs": _sum(found, "num_running_reqs"),
            "num_queue_reqs": _sum(found, "num_waiting_reqs"),
            "num_prefill_inflight_queue_reqs": sum(
                each["disaggregation"].get("prefill_inflight_queue_reqs", 0) for each in found
            ),
        }
        # a decode worker keeps pages of a request that has failed for a while: another may still write to them
        decodes = all(each["disaggregation"].get("mode") == "decode" for each in found)
        levels["num_holding_reqs"] = int(decodes and sum(levels.values()) == levels["num_used_tokens"] > 0)
        return Told(told.status, "\n".join([text, *(f"{name} {value}" for name, value in levels.items())]).encode())


def _loads(answer: Any) -> list[Json]:
    """What each group of ranks says of now; empty where such a thing is not said."""
    loads = answer.get("loads") if isinstance(answer, dict) else None
    return [each for each in loads or [] if isinstance(each, dict) and isinstance(each.get("disaggregation"), dict)]


def _sum(loads: list[Json], name: str) -> int:
    return sum(int(each.get(name) or 0) for each in loads)


def _with_wait(told: Told) -> Told:
    """With how long one half of a pair waits for the other, where the server shows its environment."""
    try:
        info = told.json
        shown: dict[str, Any] = info["internal_states"][0]["env_vars"]
    except (LostError, KeyError, IndexError, TypeError):
        return told
    waits = [float(shown[name]) for name in WAITS if str(shown.get(name, "")).isdigit()]
    if "disaggregation_timeout" in info or info.get("disaggregation_mode") not in {"prefill", "decode"} or not waits:
        return told
    return Told(told.status, json.dumps({**info, "disaggregation_timeout": max(waits)}).encode())

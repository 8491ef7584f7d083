"""llama.cpp's server in its own words: `/completion` with token ids, slots for a cache, and who answers for the rest.

What the engine does not tell of itself, whoever starts it may say in tags of the model, `NAME=VALUE`: `version` (a
build without a number is "b0-unknown"), `batch` (tokens of a prompt computed at once), `cache` (the type of its rows)
and `tier` (tokens that saved slots may have: then answered prompts are kept so, see `http_llamacpp_slots`). Its cache
is one prompt for each slot, matched token by token, so a page is one token.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from harness.adapters.http_client import Client, Exchange, Json, LostError, Told
from harness.adapters.http_dialects import Told as Answer
from harness.adapters.http_dialects import refused
from harness.adapters.http_llamacpp_slots import SlotExchange, SlotTier
from harness.types import Generate

NAME = "llama.cpp"
NO_BUILD = "b0-"  # begins what a build without a number says
FLOAT = ("all F32", "f32")  # the model's file, and the rows of the cache
NAMES = {  # of metrics, and what other servers call the same
    "requests_processing": "num_running_reqs",
    "requests_deferred": "num_queue_reqs",
    "tokens_predicted_total": "generation_tokens_total",
}
FINISHES = {"limit": "length", "eos": "stop", "word": "stop"}


class LlamaClient(Client):
    """Answers what other servers are asked from what this one has; everything else goes through."""

    tier: SlotTier | None = None

    def exchange(self, path: str, body: Json | None, method: str = "POST") -> Exchange:
        if self.tier is None or path != LlamaCpp.path or body is None:
            return super().exchange(path, body, method)
        return SlotExchange(self.tier, self.url, path, body, self.seconds)

    def get(self, path: str) -> Told:
        if path == "/server_info":
            return _said(self._info())
        told = super().get(path)
        if path == "/v1/models" and told.ok:
            cards = told.json.get("data") or []
            return _said({"data": [{**card, "owned_by": NAME} for card in cards]})
        if path == "/metrics" and told.ok:
            text = re.sub("|".join(NAMES), lambda match: NAMES[match[0]], told.body.decode())
            if self.tier is not None:
                levels = {"hicache_host_total_tokens": self.tier.tokens, "hicache_host_used_tokens": self.tier.used}
                text = "\n".join([text, *(f"{name} {value}" for name, value in levels.items())])
            return Told(told.status, text.encode())
        return told

    def post(self, path: str, body: Json) -> Told:
        if not path.startswith("/flush_cache"):
            return super().post(path, body)
        if self.tier is not None:
            self.tier.forget()
        told = super().get("/slots")
        for slot in told.json if told.ok else []:
            told = super().post(f"/slots/{slot['id']}?action=erase", {})
            if not told.ok:
                break
        return told

    def _info(self) -> Json:
        props, cards = super().get("/props"), super().get("/v1/models")
        if not (props.ok and cards.ok):
            return {}
        told: Json = props.json
        card: Json = (cards.json.get("data") or [{}])[0]
        tags = dict(tag.split("=", 1) for tag in card.get("tags") or [] if "=" in tag)
        meta, context = card.get("meta") or {}, told["default_generation_settings"]["n_ctx"]
        build, batch = str(told.get("build_info") or ""), tags.get("batch", "")
        tier = int(tags["tier"]) if tags.get("tier", "").isdigit() else 0
        if tier and self.tier is None:
            self.tier = SlotTier(self, tier, told["total_slots"])
        is_float = (told.get("model_ftype"), tags.get("cache")) == FLOAT
        return {
            "version": tags.get("version", build) if build.startswith(NO_BUILD) else build,
            "page_size": 1,
            "context_length": context,
            "max_total_num_tokens": context * told["total_slots"],
            "chunked_prefill_size": int(batch) if batch.isdigit() else None,
            "vocab_size": meta.get("n_vocab"),
            "dtype": "float32" if is_float else None,
            "can_flush": self._erases(),
            "enable_hierarchical_cache": bool(tier),
            "splits_cached": bool(tier),
            "internal_states": [{"memory_usage": {"token_capacity": context * told["total_slots"]}}] if tier else [],
        }

    def _erases(self) -> bool:
        """Whether slots can be erased: a server that knows the question calls an action that is none a bad request."""
        return super().get("/slots").ok and super().post("/slots/0?action=none", {}).status == 400


class LlamaCpp:
    """/completion: each event of a stream holds what is new, the last one the sums."""

    name = NAME
    path = "/completion"
    aborts = False  # a request ends when its client leaves
    client: type[Client] = LlamaClient
    hands_over = False
    promises: tuple[str, ...] = ("keeps_last",)
    salt = ""

    def body(self, op: Generate, rid: str, *, stream: bool) -> Json:
        return {
            "prompt": list(op.tokens),
            "n_predict": op.max_new_tokens,
            "temperature": op.temperature,
            "seed": op.seed,
            "samplers": ["temperature"],  # the others would take tokens away
            "n_probs": 1,
            "return_tokens": True,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": stream,
        }

    def halves(self, host: str, port: int) -> tuple[Json, Json]:
        return {}, {}  # it has none: one server does all

    def add(self, told: Answer, answer: Json) -> None:
        if refused(told, answer):
            return
        told.text = (told.text or "") + (answer.get("content") or "")
        told.tokens = (told.tokens or []) + answer["tokens"]
        told.logprobs = (told.logprobs or []) + [_logprob(each) for each in answer.get("completion_probabilities", ())]
        if answer.get("stop"):
            reason = str(answer.get("stop_type"))
            told.finish = FINISHES.get(reason, reason)
            # `tokens_cached` is what the slot holds at the end, not what was found in it
            told.more = {"prompt_tokens": answer["tokens_evaluated"], "cached_tokens": answer["timings"]["cache_n"]}
            if "restored" in answer:
                tier, other = ("host", "device") if answer["restored"] else ("device", "host")
                told.more |= {f"cached_{tier}": told.more["cached_tokens"], f"cached_{other}": 0}


def _logprob(each: Json) -> float:
    value: Any = each["logprob"]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise LostError(f"a log probability of {value}")
    return value


def _said(answer: Json) -> Told:
    return Told(200, json.dumps(answer).encode())

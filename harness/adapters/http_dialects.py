"""What servers are asked and how their answers read: `sglang` for its own endpoints, `openai` for what all have."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.adapters.http_client import Client, Json, LostError, reason_of
from harness.adapters.http_sglang import SglangClient
from harness.types import Generate, Generated

ROOM_BITS = 62


@dataclass(slots=True)
class Told:
    """What has come of one answer so far. `error` with the HTTP status that it was told with."""

    tokens: list[int] | None = None
    text: str | None = None
    logprobs: list[float] | None = None
    input_logprobs: list[float | None] | None = None
    finish: str = ""
    error: str = ""
    status: int = 200
    more: dict[str, Any] = field(default_factory=dict)  # other fields of `Generated`
    handed: Json = field(default_factory=dict)  # by a prefill half, for the body of the decode half

    @property
    def count(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens if self.tokens is not None else self.logprobs or ())

    def generated(self, **more: Any) -> Generated:
        """As the op's value."""
        own = {
            "finish": self.finish,
            "tokens": None if self.tokens is None else tuple(self.tokens),
            "text": self.text,
            "logprobs": None if self.logprobs is None else tuple(self.logprobs),
            "input_logprobs": None if self.input_logprobs is None else tuple(self.input_logprobs),
        }
        return Generated(**{**own, **self.more, **more})


class Dialect(Protocol):
    """How one request is asked for, and how its answer reads."""

    name: str
    path: str
    aborts: bool
    """Whether a request can be ended by its id."""
    client: type[Client]
    """How such a server is reached; one that is asked otherwise than by sglang's paths has its own."""
    hands_over: bool
    """Whether the decode half of a request is asked with what the prefill half has told; else both at the same time."""
    promises: tuple[str, ...]
    """What every server of the dialect keeps to."""
    salt: str
    """The field of a request's salt, "" where there is none."""

    def body(self, op: Generate, rid: str, *, stream: bool) -> Json:
        """The JSON that asks."""

    def halves(self, host: str, port: int) -> tuple[Json, Json]:
        """What goes into the bodies of both halves besides, for a prefill worker with a bootstrap at this port."""

    def add(self, told: Told, answer: Json) -> None:
        """Takes in a whole answer or the next event of a stream. Raises `LostError` for what is neither."""


class Sglang:
    """/generate: token ids in and out, an answer's events each hold all of it so far."""

    name = "sglang"
    path = "/generate"
    aborts = True
    client: type[Client] = SglangClient
    hands_over = False
    promises: tuple[str, ...] = ("scores_prompt", "splits_cached", "counts_drafts", "rank_processes", "halves_wait")
    salt = "extra_key"

    def halves(self, host: str, port: int) -> tuple[Json, Json]:
        return _room(host, port)

    def body(self, op: Generate, rid: str, *, stream: bool) -> Json:
        params = {
            "max_new_tokens": op.max_new_tokens,
            "temperature": op.temperature,
            "sampling_seed": op.seed,
            "ignore_eos": True,
        }
        asked = {"return_logprob": True, "logprob_start_len": op.logprob_start, "stream": stream}
        return {"rid": rid, "input_ids": list(op.tokens), "sampling_params": params, **asked}

    def add(self, told: Told, answer: Json) -> None:
        if refused(told, answer):
            return
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise LostError(f"an answer without meta_info: {str(answer)[:80]}")
        told.tokens = list(answer.get("output_ids") or [])
        told.text = answer.get("text")
        told.logprobs = _values(meta.get("output_token_logprobs"))
        scores = meta.get("input_token_logprobs")
        told.input_logprobs = None if scores is None else [each[0] for each in scores]
        details = meta.get("cached_tokens_details") or {}
        told.more = {
            "prompt_tokens": meta.get("prompt_tokens"),
            "cached_tokens": meta.get("cached_tokens"),
            "cached_device": details.get("device"),
            "cached_host": details.get("host"),
            "accept_length": meta.get("spec_accept_length"),
            "verify_calls": meta.get("spec_verify_ct"),
        }
        reason = meta.get("finish_reason")
        told.finish = str(reason.get("type", "")) if isinstance(reason, dict) else str(reason or "")
        if told.finish == "abort" and isinstance(reason, dict) and (reason.get("status_code") or 0) >= 400:
            told.error, told.status = str(reason.get("message") or "aborted"), int(reason["status_code"])


class OpenAI:
    """/v1/completions: what every server has. Token ids come back only where the server has that extension."""

    name = "openai"
    path = "/v1/completions"
    aborts = False
    client: type[Client] = Client
    hands_over = False
    promises: tuple[str, ...] = ("halves_wait",)
    salt = "cache_salt"

    def __init__(self, model: str = "") -> None:
        self.model = model

    def halves(self, host: str, port: int) -> tuple[Json, Json]:
        return _room(host, port)

    def body(self, op: Generate, rid: str, *, stream: bool) -> Json:
        asked: Json = {
            "model": self.model,
            "prompt": list(op.tokens),
            "max_tokens": op.max_new_tokens,
            "temperature": op.temperature,
            "seed": op.seed,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return asked | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})

    def add(self, told: Told, answer: Json) -> None:
        if refused(told, answer):
            return
        for choice in answer.get("choices") or []:
            told.text = (told.text or "") + (choice.get("text") or "")
            scores = choice.get("logprobs") or {}
            if scores.get("token_logprobs") is not None:
                told.logprobs = (told.logprobs or []) + (_values([[value] for value in scores["token_logprobs"]]) or [])
            if choice.get("token_ids") is not None:
                told.tokens = (told.tokens or []) + choice["token_ids"]
            told.finish = choice.get("finish_reason") or told.finish
        usage = answer.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details") or {}
            told.more = {"prompt_tokens": usage.get("prompt_tokens"), "cached_tokens": details.get("cached_tokens")}


def refused(told: Told, answer: Any) -> bool:
    """Whether the answer is an error, which is noted."""
    if not isinstance(answer, dict):
        raise LostError(f"an answer that is no JSON object: {str(answer)[:80]}")
    error = answer if answer.get("object") == "error" else answer.get("error")  # its fields, or an object of its own
    if not error:
        return False
    code = error.get("code") if isinstance(error, dict) else None
    told.error = reason_of(answer) or "an error without a reason"
    told.status = code if isinstance(code, int) and code >= 400 else 500
    return True


def _room(host: str, port: int) -> tuple[Json, Json]:
    """The same room for both, at the prefill worker."""
    room = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": secrets.randbits(ROOM_BITS)}
    return room, room


def _values(scores: Sequence[Sequence[Any]] | None) -> list[float] | None:
    """The log probabilities of [value, token, text] triples."""
    if scores is None:
        return None
    values = [each[0] for each in scores]
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise LostError(f"a log probability of {value}")
    return values

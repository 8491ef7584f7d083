"""/generate as sglang speaks it: a JSON body becomes asks, their steps an answer, and that JSON again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kvshard_ref.server.api import ABORT, LENGTH, STOP, Ask, Info, Logprob, RefusedAsk, Step
from kvshard_ref.server.text import ByteTokenizer, StoppedText

T = TypeVar("T")
Json = dict[str, Any]

NEUTRAL = (
    *(("n", 1), ("best_of", 1), ("top_p", 1), ("top_k", -1), ("min_p", 0), ("repetition_penalty", 1)),
    *(("frequency_penalty", 0), ("presence_penalty", 0), ("min_new_tokens", 0), ("min_tokens", 0)),
    *(
        ("regex", None),
        ("stop_regex", None),
        ("json_schema", None),
        ("ebnf", None),
        ("suffix", None),
        ("logit_bias", None),
    ),
)
"""Fields that would change an answer if this server had them, with the value that changes nothing."""


def unicode(text: str) -> str:
    """The text; ValueError where half of a surrogate pair stands alone, as JSON's escapes allow."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected Unicode text, character {error.start} is half of a surrogate pair") from error
    return text


Text = Annotated[str, AfterValidator(unicode)]
Count = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """A JSON object: unknown fields are passed over, null is as if left out, and no type becomes another."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class Sampling(Body):
    """How tokens are chosen, whatever the endpoint. Only the temperature shapes the distribution."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    stop: Text | list[Text] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    """The model's own ends, not `stop_token_ids`."""
    no_stop_trim: bool = False
    """The text keeps what stopped it."""
    skip_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _only_neutral(cls, data: Any) -> Any:
        """What would change the answer but is not there must not be passed over in silence."""
        for name, neutral in NEUTRAL if isinstance(data, dict) else ():
            value = data.get(name)
            if value is not None and value != neutral:
                raise ValueError(
                    f"{name} is {shown(value)}: this server does not have it, expected {neutral} or nothing"
                )
        return data

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class SamplingParams(Sampling):
    """/generate's sampling_params."""

    max_new_tokens: Count = 128
    sampling_seed: int = Field(default=0, ge=0, lt=1 << 63)


class Transfer(Body):
    """What a router adds for a pair of prefill and decode worker: one value, or one for each prompt of a batch."""

    rid: Text | list[Text] | None = None
    bootstrap_host: Text | list[Text | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    extra_key: None = None  # nothing is kept apart here, so a salt of the cache is refused, not passed over
    cache_salt: None = None

    def rids(self, count: int) -> list[str]:
        """An id for each of `count` prompts; a single one is numbered, so that it aborts them all."""
        if isinstance(self.rid, str) and count > 1:
            rids = [f"{self.rid}_{at}" for at in range(count)]
        else:
            rids = [uuid.uuid4().hex for _ in range(count)] if self.rid is None else per_prompt("rid", self.rid, count)
        if len(set(rids)) < count or "" in rids:
            raise RefusedAsk(f"rid is {shown(self.rid)}, expected ids that are not empty and differ")
        return rids

    def rooms(self, count: int, mode: str) -> list[tuple[int | None, str]]:
        """Room and source for each of `count` prompts, as a worker of this mode needs them."""
        room = self.bootstrap_room
        rooms = [room + at for at in range(count)] if isinstance(room, int) else room
        given = {"bootstrap_host": self.bootstrap_host, "bootstrap_port": self.bootstrap_port, "bootstrap_room": rooms}
        values: dict[str, list[Any]] = {field: per_prompt(field, value, count) for field, value in given.items()}
        needed = {"prefill": ["bootstrap_room"], "decode": list(given)}.get(mode, [])
        for field in needed:
            if None in values[field]:
                what = f"{field} is {shown(given[field])}"
                raise RefusedAsk(f"{what}, a {mode} worker expected one for each prompt: send through a router")
        return [
            (room if needed else None, f"{host}:{port}" if mode == "decode" else "")
            for host, port, room in zip(*values.values(), strict=True)
        ]


class GenerateBody(Transfer):
    """The body of /generate. Where a list is allowed, it has one value for each prompt of a batch."""

    text: Text | list[Text] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = SamplingParams()
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False

    @property
    def batch(self) -> bool:
        """Whether the answer is a list."""
        prompts = self.text if self.input_ids is None else self.input_ids
        return isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))


@dataclass(frozen=True, slots=True)
class Wanted:
    """An ask, and how its answer is to look."""

    ask: Ask
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    special: bool = False
    """Special tokens are seen in the text."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Which log probabilities are wanted; fields as in `Ask`."""

    wanted: bool = False
    start: int = -1
    top: int = 0


@dataclass(frozen=True, slots=True)
class Desk:
    """Where bodies become asks: checked against the worker, in tokens."""

    info: Info
    tokenizer: ByteTokenizer

    def generate(self, body: GenerateBody) -> list[Wanted]:
        """One for each prompt. Raises RefusedAsk with what is wrong."""
        if (body.text is None) == (body.input_ids is None):
            raise RefusedAsk(
                "expected one of text and input_ids, " + ("both are" if body.text is not None else "none is") + " given"
            )
        given = body.text if body.input_ids is None else body.input_ids
        prompts: Any = given if body.batch else [given]
        count = len(prompts)
        params = per_prompt("sampling_params", body.sampling_params, count)
        scores = zip(
            per_prompt("return_logprob", body.return_logprob, count),
            per_prompt("logprob_start_len", body.logprob_start_len, count),
            per_prompt("top_logprobs_num", body.top_logprobs_num, count),
            strict=True,
        )
        return self.asks(prompts, params, [Scores(*score) for score in scores], body)

    def asks(
        self,
        prompts: Sequence[str | list[int]],
        params: Sequence[SamplingParams],
        scores: Sequence[Scores],
        transfer: Transfer,
    ) -> list[Wanted]:
        """The asks of a batch, whose lists are of one length. Raises RefusedAsk with what is wrong."""
        if not prompts:
            raise RefusedAsk("the batch is [], expected at least one prompt")
        rids, rooms = transfer.rids(len(prompts)), transfer.rooms(len(prompts), self.info.mode)
        return [self._ask(*of_one) for of_one in zip(prompts, params, scores, rids, rooms, strict=True)]

    def _ask(
        self, prompt: str | list[int], params: SamplingParams, scores: Scores, rid: str, room: tuple[int | None, str]
    ) -> Wanted:
        tokens = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        self._check(tokens, params, scores)
        # a decode worker never computes the prompt: its scores are the prefill worker's, and a router joins both lists
        prompt_scored = scores.wanted and scores.start < len(tokens) and self.info.mode != "decode"
        ask = Ask(
            rid,
            tokens,
            params.max_new_tokens,
            temperature=params.temperature,
            seed=params.sampling_seed,
            stop_tokens=(*params.stop_token_ids, *(() if params.ignore_eos else self.info.eos)),
            logprobs=scores.wanted,
            logprob_start=scores.start if prompt_scored else -1,
            top_logprobs=scores.top if scores.wanted else 0,
            room=room[0],
            source=room[1],
        )
        return Wanted(ask, params.stops, keep_stop=params.no_stop_trim, special=not params.skip_special_tokens)

    def _check(self, tokens: tuple[int, ...], params: SamplingParams, scores: Scores) -> None:
        vocab, context = self.info.model["vocab_size"], self.info.model["context_length"]
        if not tokens:
            raise RefusedAsk("the prompt has 0 tokens, expected at least one")
        for field, ids in (("the prompt", tokens), ("stop_token_ids", params.stop_token_ids)):
            outside = next((token for token in ids if not 0 <= token < vocab), None)
            if outside is not None:
                raise RefusedAsk(f"{field} has token {outside}, expected 0 to {vocab - 1}, the vocabulary")
        if len(tokens) + params.max_new_tokens > context:
            raise RefusedAsk(
                f"prompt of {len(tokens)} tokens + {params.max_new_tokens} new ones (max_new_tokens, max_tokens) = "
                f"{len(tokens) + params.max_new_tokens}, expected at most {context}, the context length"
            )
        if "" in params.stops:
            raise RefusedAsk(f"stop is {shown(params.stop)}, expected strings that are not empty")
        if not -1 <= scores.start <= len(tokens):
            raise RefusedAsk(
                f"logprob_start_len is {scores.start}, expected -1 to {len(tokens)}, the length of the prompt"
            )
        if not 0 <= scores.top <= vocab:
            raise RefusedAsk(f"top_logprobs_num is {scores.top}, expected 0 to {vocab}, the vocabulary")


class Answer:
    """What has come of one ask so far, as its client is to see it."""

    def __init__(self, wanted: Wanted, tokenizer: ByteTokenizer) -> None:
        self.wanted = wanted
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.input_logprobs: list[Logprob] = []
        self.cached_device = self.cached_host = self.drafted = self.accepted = self.verified = 0
        self.finish: Json | None = None
        """Why it is over, as in meta_info."""
        self.error, self.status = "", 200
        self.latency_seconds = 0.0
        self._started = time.perf_counter()
        self._text = StoppedText(tokenizer, wanted.stops, keep_stop=wanted.keep_stop, special=wanted.special)

    @property
    def text(self) -> str:
        """What is certain of the text."""
        return self._text.certain

    def add(self, step: Step) -> None:
        """Take a step in, up to the token that completes a stop string."""
        for name in ("cached_device", "cached_host", "drafted", "accepted", "verified"):
            setattr(self, name, max(getattr(self, name), getattr(step, name)))
        self.input_logprobs += step.input_logprobs
        for at, token in enumerate(step.tokens):
            self.tokens.append(token)
            self.logprobs += step.logprobs[at : at + 1]
            if token not in self.wanted.ask.stop_tokens or self.wanted.keep_stop:
                self._text.add(token)
            if self._text.stopped_by:
                self._end({"type": STOP, "matched": self._text.stopped_by})
                return
        if step.error:
            self.fail(step.error, step.status)
        elif step.finished:
            self._text.end()
            self._end(self._finish_of(step.finished))

    def fail(self, why: str, status: int) -> None:
        """End it with an error."""
        self.error, self.status = why, status if status >= 400 else 500
        self._end({"type": ABORT, "message": why, "status_code": self.status})

    def _finish_of(self, finished: str) -> Json:
        if finished == LENGTH:
            return {"type": LENGTH, "length": len(self.tokens)}
        if finished == STOP:
            return {"type": STOP, "matched": self.tokens[-1] if self.tokens else None}
        return {"type": ABORT, "message": "Aborted", "status_code": None}

    def _end(self, finish: Json) -> None:
        self.finish = finish
        self.latency_seconds = time.perf_counter() - self._started


class Rendering(Protocol):
    """Answers in the JSON of an endpoint."""

    def whole(self, answers: Sequence[Answer]) -> Any:
        """The response body."""

    def event(self, at: int, answer: Answer) -> Json:
        """What a stream says of prompt number `at` now."""

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        """What a stream says at its end."""


@dataclass(frozen=True, slots=True)
class Generated:
    """/generate's JSON."""

    body: GenerateBody
    tokenizer: ByteTokenizer

    def whole(self, answers: Sequence[Answer]) -> Any:
        """An object, or a list for a batch."""
        objects = [self._object(answer) for answer in answers]
        return objects if self.body.batch else objects[0]

    def event(self, at: int, answer: Answer) -> Json:
        """All of the answer so far."""
        return {**self._object(answer), **({"index": at} if self.body.batch else {})}

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        """Nothing."""
        return []

    def _object(self, answer: Answer) -> Json:
        named = self.tokenizer if self.body.return_text_in_logprobs else None
        return {"text": answer.text, "output_ids": list(answer.tokens), "meta_info": meta_info(answer, named)}


def meta_info(answer: Answer, named: ByteTokenizer | None) -> Json:
    """What is told beside the text; log probabilities with the tokens' text if `named`."""
    ask = answer.wanted.ask
    meta: Json = {
        "id": ask.rid,
        "finish_reason": answer.finish,
        "prompt_tokens": len(ask.tokens),
        "completion_tokens": len(answer.tokens),
        "cached_tokens": answer.cached_device + answer.cached_host,
        "cached_tokens_details": {"device": answer.cached_device, "host": answer.cached_host},
    }
    if ask.logprobs:
        for name, scores in (("input", answer.input_logprobs), ("output", answer.logprobs)):
            meta[f"{name}_token_logprobs"] = [triple(score.value, score.token, named) for score in scores]
            if ask.top_logprobs:
                tops = [[triple(value, token, named) for value, token in score.top] or None for score in scores]
                meta[f"{name}_top_logprobs"] = tops
    if answer.verified:
        # the first token comes from prefill, all others from verifications
        meta["spec_accept_length"] = (len(answer.tokens) - 1) / answer.verified
        meta["spec_accept_rate"] = answer.accepted / answer.drafted if answer.drafted else 0.0
        meta["spec_verify_ct"] = answer.verified
        meta["spec_num_correct_drafts"] = answer.accepted
        meta["spec_num_proposed_drafts"] = answer.drafted
    if answer.finish:
        meta["e2e_latency"] = answer.latency_seconds
    return meta


def triple(value: float | None, token: int, named: ByteTokenizer | None) -> list[Any]:
    """[log probability, token, its text or null]."""
    return [value, token, named.name(token) if named else None]


def per_prompt(field: str, value: T | list[T], count: int) -> list[T]:
    """One value for each of `count` prompts. Raises RefusedAsk for a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RefusedAsk(f"{field} is {shown(value)} with {len(value)} values, expected {count}, one for each prompt")
    return value


def shown(value: object, width_max: int = 100) -> str:
    """A value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= width_max else text[:width_max] + ".."

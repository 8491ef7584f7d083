"""/v1/completions and /v1/chat/completions: bodies to asks, answers to OpenAI's JSON with a few fields of sglang's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from kvshard_ref.server.api import Logprob, RefusedAsk
from kvshard_ref.server.dialect import (
    Answer,
    Body,
    Count,
    Desk,
    Json,
    Sampling,
    SamplingParams,
    Scores,
    Text,
    Transfer,
    Wanted,
)
from kvshard_ref.server.text import ByteTokenizer, TextStream


class StreamOptions(Body):
    """What a stream tells besides."""

    include_usage: bool = False


class OpenAIBody(Sampling, Transfer):
    """What both endpoints take."""

    model: Text = ""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def params(self, max_new_tokens: int) -> SamplingParams:
        """The same in /generate's words."""
        shared = {name: getattr(self, name) for name in Sampling.model_fields}
        return SamplingParams(max_new_tokens=max_new_tokens, sampling_seed=self.seed, **shared)


class CompletionBody(OpenAIBody):
    """The body of /v1/completions. `echo` with `logprobs` scores the prompt, for which max_tokens may be 0."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    max_tokens: Count = 16
    echo: bool = False
    logprobs: Count | None = None

    def wanted(self, desk: Desk) -> list[Wanted]:
        """One for each prompt. Raises RefusedAsk with what is wrong."""
        if self.echo and self.logprobs is not None and desk.info.mode == "decode":
            raise RefusedAsk(f"echo is true with logprobs {self.logprobs}: a decode worker does not compute the prompt")
        single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts: Any = [self.prompt] if single else self.prompt
        scores = Scores(self.logprobs is not None, 0 if self.echo else -1, self.logprobs or 0)
        count = len(prompts)
        return desk.asks(prompts, [self.params(self.max_tokens)] * count, [scores] * count, self)


class Part(Body):
    """A piece of a message's content."""

    text: Text = ""


class Message(Body):
    """One turn of a chat."""

    role: Text
    content: Text | list[Part] = ""

    def line(self) -> str:
        """Its line in the prompt."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return f"{self.role}: {content}\n"


class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: Count = 128
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Count = 0

    def wanted(self, desk: Desk) -> list[Wanted]:
        """One. Raises RefusedAsk with what is wrong."""
        prompt = "".join(message.line() for message in self.messages) + "assistant:"
        length = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return desk.asks([prompt], [self.params(length)], [Scores(self.logprobs, -1, self.top_logprobs)], self)


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one response begins with."""

    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str, **fields: Any) -> Json:
        """An object with these fields."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **fields}


@dataclass(slots=True)
class Sent:
    """How much of a choice a stream has sent: characters and log probabilities."""

    text: int = 0
    scores: int = 0


@dataclass(frozen=True, slots=True)
class Completions:
    """JSON of /v1/completions; one per request, since it knows what a stream has sent."""

    body: CompletionBody
    tokenizer: ByteTokenizer
    head: Head
    sent: dict[int, Sent] = field(default_factory=dict)

    def whole(self, answers: Sequence[Answer]) -> Json:
        """All choices with the usage."""
        choices = [self._choice(at, answer, Sent()) for at, answer in enumerate(answers)]
        return self.head.of("text_completion", choices=choices, usage=usage(answers))

    def event(self, at: int, answer: Answer) -> Json:
        """What is new of one choice."""
        return self.head.of("text_completion", choices=[self._choice(at, answer, self.sent.setdefault(at, Sent()))])

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        """The usage, if it was asked for."""
        wanted = self.body.stream_options.include_usage
        return [self.head.of("text_completion", choices=[], usage=usage(answers))] if wanted else []

    def _choice(self, at: int, answer: Answer, sent: Sent) -> Json:
        """A choice from where `sent` ends, which moves on."""
        prompt = self.tokenizer.decode(answer.wanted.ask.tokens) if self.body.echo else ""
        text = prompt + answer.text
        scores = [*answer.input_logprobs, *answer.logprobs]
        logprobs = None if self.body.logprobs is None else self._logprobs(scores, sent.scores)
        choice = {"index": at, "text": text[sent.text :], "logprobs": logprobs, **finish(answer)}
        sent.text, sent.scores = len(text), len(scores)
        return choice

    def _logprobs(self, scores: Sequence[Logprob], start: int) -> Json:
        """From `start` on; offsets are of characters in the choice's whole text."""
        stream, length, offsets = TextStream(self.tokenizer), 0, []
        for score in scores:
            offsets.append(length)
            length += len(stream.add(score.token))
        return {
            "tokens": [self.tokenizer.name(score.token) for score in scores[start:]],
            "token_logprobs": [score.value for score in scores[start:]],
            "top_logprobs": [self._top(score) for score in scores[start:]],
            "text_offset": offsets[start:],
        }

    def _top(self, score: Logprob) -> dict[str, float] | None:
        """The likeliest by name, and the token itself; None where there was no token before it."""
        if score.value is None:
            return None
        return {self.tokenizer.name(token): value for value, token in (*score.top, (score.value, score.token))}


@dataclass(frozen=True, slots=True)
class Chat:
    """JSON of /v1/chat/completions; one per request, since it knows what a stream has sent."""

    body: ChatBody
    tokenizer: ByteTokenizer
    head: Head
    sent: dict[int, Sent] = field(default_factory=dict)

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The message with the usage."""
        choices = [
            {
                "index": at,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": self._logprobs(answer.logprobs),
                **finish(answer),
            }
            for at, answer in enumerate(answers)
        ]
        return self.head.of("chat.completion", choices=choices, usage=usage(answers))

    def event(self, at: int, answer: Answer) -> Json:
        """What is new of the message; the first event names its role."""
        role = {} if at in self.sent else {"role": "assistant"}
        sent = self.sent.setdefault(at, Sent())
        choice = {
            "index": at,
            "delta": {**role, "content": answer.text[sent.text :]},
            "logprobs": self._logprobs(answer.logprobs[sent.scores :]),
            **finish(answer),
        }
        sent.text, sent.scores = len(answer.text), len(answer.logprobs)
        return self.head.of("chat.completion.chunk", choices=[choice])

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        """The usage, if it was asked for."""
        wanted = self.body.stream_options.include_usage
        return [self.head.of("chat.completion.chunk", choices=[], usage=usage(answers))] if wanted else []

    def _logprobs(self, scores: Sequence[Logprob]) -> Json | None:
        if not self.body.logprobs:
            return None
        content = [
            {
                **self._entry(score.value, score.token),
                "top_logprobs": [self._entry(value, token) for value, token in score.top],
            }
            for score in scores
        ]
        return {"content": content}

    def _entry(self, value: float | None, token: int) -> Json:
        name, raw = self.tokenizer.name(token), self.tokenizer.bytes_of(token)
        return {"token": name, "bytes": list(raw), "logprob": value}


def finish(answer: Answer) -> Json:
    """Why a choice is over, null while it is not; matched_stop is sglang's."""
    reason = answer.finish or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def usage(answers: Sequence[Answer]) -> Json:
    """Tokens of all choices."""
    prompt = sum(len(answer.wanted.ask.tokens) for answer in answers)
    completion = sum(len(answer.tokens) for answer in answers)
    cached = sum(answer.cached_device + answer.cached_host for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }

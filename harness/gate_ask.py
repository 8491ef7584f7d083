"""Asks a server many questions at once, and tells a request that failed from an answer.

In OpenAI's dialect, or by /generate where an answer is to tell which tier its prompt came from.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from harness.adapters.http_client import Client, Exchange, Json, LeftError, LostError, Told
from harness.usage import UserError, nearest

LISTING_SECONDS = 30.0
CLOSING_SECONDS = 2.0
LOOK_SECONDS = 0.02
NO_SUCH_PATH = (404, 405, 501)
FAILED_REASONS = ("abort", "error", "content_filter")  # of an answer that the server itself gave up
CUT_OFF, STOPPED = "length", "stop"
DEFAULT_TOKENS = 256
NATIVE_NAMES: Mapping[str, str] = MappingProxyType({"max_tokens": "max_new_tokens"})


class Question(NamedTuple):
    """A request that is to be sent: item and repeat, and the body."""

    at: int
    repeat: int
    body: Json


class Reply(NamedTuple):
    """What came of a question; with an error there is no answer."""

    at: int
    repeat: int
    text: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    error: str | None = None
    cached_device: int | None = None  # tokens of the prompt; None: not told, as by OpenAI's dialect
    cached_host: int | None = None
    prompt_tokens: int | None = None
    accept_length: float | None = None


class Endpoint(NamedTuple):
    """Where and how a model is asked."""

    client: Client
    model: str
    is_chat: bool = False
    is_native: bool = False  # /generate

    @property
    def path(self) -> str:
        """Of the requests."""
        if self.is_native:
            return "/generate"
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, prompt: str, generation: Json, seed: int) -> Json:
        """One request."""
        if self.is_native:
            params = {NATIVE_NAMES.get(name, name): value for name, value in generation.items()}
            return {"text": prompt, "sampling_params": {**params, "sampling_seed": seed}}
        asked: Json = {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
        return {"model": self.model, **asked, **generation, "seed": seed}


def endpoint(url: str, model: str | None, timeout: float, *, is_chat: bool) -> Endpoint:
    """A server that answers and has the model. Raises `UserError`."""
    root = url.rstrip("/").removesuffix("/completions").removesuffix("/chat").removesuffix("/v1")
    if "?" in root:
        raise UserError(f"--engine {url!r}: expected http://host:port alone, without anything behind it")
    client = Client(root, timeout)
    names = _models(client, min(timeout, LISTING_SECONDS))
    if names is None and model is None:
        raise UserError(f"{client.url} does not list its models; give the name with --model")
    if names is not None and model is not None and model not in names:
        raise UserError(
            f"--model {model!r}: {client.url} has no such model{nearest(model, names)} It has: {', '.join(names)}"
        )
    if names is not None and model is None and len(names) != 1:
        raise UserError(f"{client.url} has {len(names)} models ({', '.join(names)}); choose one with --model")
    return Endpoint(client, model or (names or [""])[0], is_chat)


def _models(client: Client, seconds: float) -> list[str] | None:
    """The names of the server's models; None where it does not tell."""
    try:
        told = Client(client.url, seconds).get("/v1/models")
        if told.status in NO_SUCH_PATH:
            return None
        if not told.ok:
            raise UserError(f"{client.url}/v1/models says {told.why}; expected a list of models: is the server well?")
        return [str(each["id"]) for each in told.json["data"]]
    except LostError as error:
        raise UserError(f"{error}; expected a server with /v1/models and /v1/completions: is it up?") from error
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{client.url}/v1/models: expected {{data: [{{id: ..}}, ..]}} as OpenAI's servers say"
        ) from error


def reply_of(question: Question, told: Told) -> Reply:
    """Reads an answer. An empty one is an error, since it looks the same where a server lost the request.

    Where its one token was the stop it is an answer: a model that sees a wrong cache says that too.
    """
    reply = Reply(question.at, question.repeat)
    try:
        text, reason, tokens = _said(told)
    except LostError as error:
        return reply._replace(error=" ".join(str(error).split()))
    settings = question.body.get("sampling_params", question.body)
    limit, stops = settings.get("max_tokens", settings.get("max_new_tokens")), settings.get("stop", ())
    if reason is None and tokens is not None and limit is not None and tokens >= limit:
        reason = CUT_OFF
    told_besides = reply._replace(finish_reason=reason, tokens=tokens, **_besides(told.json))
    if reason in FAILED_REASONS:
        return told_besides._replace(error=f"finish_reason {reason!r}")
    if not text and reason != CUT_OFF and (reason, tokens) != (STOPPED, 1):
        return told_besides._replace(error=f"empty answer, finish_reason {reason!r}")
    return told_besides._replace(text=before_stop(text, stops))


def _said(told: Told) -> tuple[str, str | None, int | None]:
    """Text, finish reason and tokens of an answer. Raises `LostError` when it is none."""
    if not told.ok:
        raise LostError(told.why)
    answer = told.json
    try:
        if "meta_info" in answer:
            reason = answer["meta_info"].get("finish_reason")
            kind = reason.get("type") if isinstance(reason, dict) else reason
            return str(answer["text"]), kind, answer["meta_info"].get("completion_tokens")
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        reason, tokens = choice.get("finish_reason"), (answer.get("usage") or {}).get("completion_tokens")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise LostError(f"no choice with a text in the answer {told.body[:80]!r}") from error
    if not isinstance(text, str | None) or not isinstance(reason, str | None):
        raise LostError(f"text {text!r:.80} and finish_reason {reason!r:.80}: expected texts")
    return text or "", reason, tokens if isinstance(tokens, int) else None


def _besides(answer: Any) -> dict[str, Any]:
    """What /generate tells of the prompt's tokens, by tier, and of drafts; None where it is not told."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    meta = meta if isinstance(meta, dict) else {}
    details = meta.get("cached_tokens_details") or {}
    counts = {"cached_device": details.get("device"), "cached_host": details.get("host")}
    counts["prompt_tokens"] = meta.get("prompt_tokens")
    accepted = meta.get("spec_accept_length")
    found = {name: value if isinstance(value, int) else None for name, value in counts.items()}
    return {**found, "accept_length": float(accepted) if isinstance(accepted, int | float) else None}


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string, for servers that send it, or that know only some of them."""
    return text[: min([found for stop in stops if (found := text.find(stop)) >= 0], default=None)]


class Asker:
    """Asks questions with so many requests in flight; replies come in any order. Closing leaves what is in flight."""

    def __init__(self, endpoint: Endpoint, questions: Sequence[Question], concurrency: int) -> None:
        self._endpoint = endpoint
        self._questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
        for question in questions:
            self._questions.put(question)
        # bounded, so that a server that fails fast is not asked far ahead of who counts the failures
        self._replies: queue.Queue[Reply] = queue.Queue(concurrency)
        self._lock = threading.Lock()
        self._live: set[Exchange] = set()
        self.in_flight_max = 0
        self._is_closed = False
        # daemons: a server that hangs in connect() must not keep the program
        self._threads = [
            threading.Thread(target=self._work, name=f"asks-{number}", daemon=True)
            for number in range(min(concurrency, len(questions)))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, seconds: float) -> Reply | None:
        """The next reply; None when none came in this time."""
        try:
            return self._replies.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> list[Reply]:
        """Leaves what is in flight; returns replies that nobody has taken yet."""
        with self._lock:
            self._is_closed = True
            live = list(self._live)
        for exchange in live:
            exchange.leave()
        end = time.monotonic() + CLOSING_SECONDS
        left: list[Reply] = []
        while True:
            is_last = time.monotonic() > end or not any(thread.is_alive() for thread in self._threads)
            while (reply := self.next(0.0 if is_last else LOOK_SECONDS)) is not None:
                left.append(reply)
            if is_last:
                return left

    def _work(self) -> None:
        while True:
            try:
                question = self._questions.get_nowait()
            except queue.Empty:
                return
            reply = self._asked(question)
            if reply is None:
                return
            self._replies.put(reply)

    def _asked(self, question: Question) -> Reply | None:
        """The reply; None once this is closed."""
        exchange = self._endpoint.client.exchange(self._endpoint.path, question.body)
        with self._lock:
            if self._is_closed:
                return None
            self._live.add(exchange)
            self.in_flight_max = max(self.in_flight_max, len(self._live))
        try:
            exchange.ask()
            return reply_of(question, exchange.whole())
        except LeftError:
            return None
        except LostError as error:
            return Reply(question.at, question.repeat, error=str(error))
        except Exception as error:  # noqa: BLE001  # a thread that dies would leave the run waiting for ever
            return Reply(question.at, question.repeat, error=f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._live.discard(exchange)
            exchange.close()


def generation_of(settings: dict[str, Any]) -> Json:
    """A task's settings of generation as fields of a request, with lm-eval's defaults; like lm-eval, not do_sample."""
    rest = {name: value for name, value in settings.items() if name != "do_sample"}
    until = rest.pop("until", None) or []
    limit = rest.pop("max_gen_toks", DEFAULT_TOKENS)
    made = {"max_tokens": int(rest.pop("max_tokens", limit)), "temperature": float(rest.pop("temperature", 0))}
    stops = [until] if isinstance(until, str) else list(until)
    return {**made, **({"stop": stops} if stops else {}), **rest}

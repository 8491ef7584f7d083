"""A worker without ranks, for tests of its HTTP face: it says what a script has, and remembers what it got."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from kvshard_ref.server.api import LENGTH, Ask, Info, Logprob, RefusedAsk, Stats, Step
from kvshard_ref.server.http import app_of
from kvshard_ref.server.text import ByteTokenizer

Script = Callable[[Ask], Iterable[Step | RefusedAsk | None]]
"""Steps for an ask; a refusal is raised, None waits forever."""

FOLDER = Path(__file__).parent.parent / "fixtures" / "model"
EOS, CONTEXT, VOCAB = 257, 64, 260
INFO = Info(
    args={"page_size": 16, "model_path": "tiny", "tp_size": 2, "folder": Path("/a")},
    model={"model_path": "tiny", "vocab_size": VOCAB, "context_length": CONTEXT, "parameters": 1000},
    mode="null",
    max_total_num_tokens=4096,
    token_capacity=2048,
    eos=(EOS,),
    version="1.2",
)


def tokenizer() -> ByteTokenizer:
    return ByteTokenizer.load(FOLDER)


def says(text: str | bytes, size: int = 1, **last: Any) -> Script:
    """The text's bytes, `size` a step; the last step has `last`, by default finished=LENGTH."""
    said = text.encode() if isinstance(text, str) else text
    return lambda ask: steps(ask.rid, tuple(said), size, **({"finished": LENGTH} | last))


def steps(rid: str, tokens: Sequence[int], size: int = 1, **last: Any) -> list[Step]:
    made = [Step(rid, tuple(tokens[at : at + size])) for at in range(0, len(tokens), size)] or [Step(rid)]
    return [*made[:-1], replace(made[-1], **last)]


def scored(ask: Ask) -> list[Step]:
    """Says "hi"; the likeliest are z and y everywhere, others have the log probability -token/100."""
    likeliest = {ord("z"): -0.25, ord("y"): -0.5}
    top = tuple((value, token) for token, value in likeliest.items())[: ask.top_logprobs]
    scores = [Logprob(token, likeliest.get(token, -token / 100), top) for token in ask.tokens]
    heads = [Logprob(ask.tokens[0], None), *scores[1:]][ask.logprob_start :] if ask.logprob_start >= 0 else []
    said = tuple(b"hi")[: ask.max_new_tokens]
    tails = tuple(Logprob(token, -token / 100, top) for token in said if ask.logprobs)
    first = Step(ask.rid, said[:1], tails[:1], tuple(heads), cached_device=2, cached_host=1)
    return [first, replace(first, tokens=said[1:], logprobs=tails[1:], input_logprobs=(), finished=LENGTH)]


@dataclass
class FakeBackend:
    script: Script = field(default_factory=lambda: says("hello"))
    info: Info = INFO
    counted: Sequence[Stats] = ()
    why_broken: str = ""
    why_not_flushed: str = ""
    asks: list[Ask] = field(default_factory=list)
    ended_early: list[str] = field(default_factory=list)
    """Asks whose iterator was closed before its last step, and before the request was answered."""
    answered: bool = False
    """What the event loop closes at its own end does not count."""
    iterators: list[AsyncIterator[Step]] = field(default_factory=list)
    """Kept, so that who forgets to close one is seen: Python would close it when nothing refers to it."""
    aborted: list[str] = field(default_factory=list)
    flushed: list[float] = field(default_factory=list)

    def generate(self, ask: Ask) -> AsyncIterator[Step]:
        self.iterators.append(self._steps(ask))
        return self.iterators[-1]

    async def _steps(self, ask: Ask) -> AsyncIterator[Step]:
        self.asks.append(ask)
        last = False
        try:
            for step in self.script(ask):
                if isinstance(step, RefusedAsk):
                    last = True
                    raise step
                if step is None:
                    await asyncio.Event().wait()
                else:
                    await asyncio.sleep(0)
                    last = bool(step.finished)
                    yield step
            last = True
        finally:
            if not (last or self.answered):
                self.ended_early.append(ask.rid)

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def flush(self, wait_seconds: float) -> str:
        self.flushed.append(wait_seconds)
        return self.why_not_flushed

    async def stats(self) -> Sequence[Stats]:
        return self.counted

    def broken(self) -> str:
        return self.why_broken


def call(backend: FakeBackend, method: str, path: str, **more: Any) -> httpx.Response:
    if "json" in more:  # with escapes, which httpx would not make: half a surrogate pair has no other form
        more |= {"content": json.dumps(more.pop("json")), "headers": {"content-type": "application/json"}}

    async def once() -> httpx.Response:
        app, backend.answered = app_of(backend, tokenizer(), health_timeout_seconds=0.2), False
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://worker") as client:
            response = await client.request(method, path, **more)
        backend.answered = True
        return response

    return asyncio.run(once())


def post(backend: FakeBackend, path: str, body: Any) -> Any:
    """The JSON of a good answer."""
    response = call(backend, "POST", path, json=body)
    assert 200 == response.status_code, response.text
    return response.json()


def refusal(backend: FakeBackend, path: str, body: Any) -> tuple[int, str]:
    """Status and text of an error, which is a JSON object."""
    response = call(backend, "POST", path, json=body)
    error = response.json()["error"]
    assert response.status_code == error["code"]
    return response.status_code, error["message"]


def streamed(backend: FakeBackend, path: str, body: Any) -> list[Any]:
    """The events of a stream; its last line is checked here."""
    response = call(backend, "POST", path, json={**body, "stream": True})
    assert 200 == response.status_code, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = response.text.split("\n\n")
    assert ("data: [DONE]", "") == (done, end)
    assert all(each.startswith("data: ") for each in lines)
    return [json.loads(each.removeprefix("data: ")) for each in lines]

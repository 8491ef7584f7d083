from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request

from ci.register import register_cpu_ci
from kvshard_ref.server.api import Ask, RefusedAsk, Step
from kvshard_ref.server.dialect import GenerateBody, Generated
from kvshard_ref.server.http import Face, app_of
from tests.server_face_rig import FakeBackend, says, steps, tokenizer

register_cpu_ci(est_time=10, stage="commit")

FEW = {"max_new_tokens": 5}


def served(backend: FakeBackend, use: Callable[[str], Awaitable[None]]) -> None:
    """A server on 127.0.0.1, at a port of the system's choice, while `use` talks to its address."""

    async def both() -> None:
        config = uvicorn.Config(
            app_of(backend, tokenizer()), host="127.0.0.1", port=0, log_level="warning", lifespan="off", ws="none"
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        try:
            await until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            await use(f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(both(), 30))


def asgi_request(body: Any, left: asyncio.Event) -> Request:
    """A POST to /generate by hand: its client leaves with the event."""
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await left.wait()
        return message or {"type": "http.disconnect"}

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": headers}
    return Request(scope, receive)


async def until(true: Callable[[], object], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110  # what is waited for is the server's, which sets no event
            await asyncio.sleep(0.01)


def halfway(ask: Ask) -> list[Any]:
    """Two tokens and then none for ever."""
    return [*steps(ask.rid, b"ab"), None]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["a", "b"], "rid": "r", "sampling_params": FEW}),
        ("/v1/completions", {"prompt": ["a", "b"], "rid": "r", "max_tokens": 5}),
    ],
)
@pytest.mark.parametrize("silent", [False, True])
def test_a_stream_that_is_left(path: str, body: Any, silent: bool) -> None:  # noqa: FBT001  # parametrized
    """Its asks end, all of them, although no step comes that could not be sent, and before a first step too."""
    backend = FakeBackend(lambda ask: [None] if silent else halfway(ask))

    async def leave(address: str) -> None:
        async with httpx.AsyncClient(base_url=address) as client:
            if silent:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(path, json={**body, "stream": True}, timeout=0.3)
            else:
                async with client.stream("POST", path, json={**body, "stream": True}) as response:
                    assert "data: " == (await anext(response.aiter_lines()))[:6]
                    assert [] == backend.ended_early
        await until(lambda: len(backend.ended_early) == 2)

    served(backend, leave)
    assert ["r_0", "r_1"] == sorted(backend.ended_early)


def test_a_plain_request_that_is_left() -> None:
    """Its asks end though nothing was to be sent yet; those of others go on."""
    backend = FakeBackend(lambda ask: halfway(ask) if ask.rid.startswith("r") else says("hello")(ask))

    async def leave(address: str) -> None:
        async with httpx.AsyncClient(base_url=address) as client:
            body = {"text": ["a", "b"], "rid": "r", "sampling_params": FEW}
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/generate", json=body, timeout=0.3)
        await until(lambda: len(backend.ended_early) == 2)
        async with httpx.AsyncClient(base_url=address) as client:
            answer = await client.post("/generate", json={"text": "a", "rid": "other", "sampling_params": FEW})
            assert "hello" == answer.json()["text"]

    served(backend, leave)
    assert ["r_0", "r_1"] == sorted(backend.ended_early)


def test_a_client_that_reads_nothing_and_leaves() -> None:
    """Its asks end with the request, also while an event cannot be sent."""
    backend = FakeBackend(halfway)

    async def leave() -> None:
        left, sending = asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sending.set()
                await asyncio.Event().wait()

        body = {"text": ["a", "b"], "rid": "r", "stream": True, "sampling_params": FEW}
        request = asgi_request(body, left)
        serving = asyncio.create_task(app_of(backend, tokenizer())(request.scope, request.receive, send))
        await sending.wait()
        left.set()
        await serving
        assert ["r_0", "r_1"] == sorted(backend.ended_early)

    asyncio.run(asyncio.wait_for(leave(), 10))


def test_a_stream_that_fails_at_once_ends_the_others() -> None:
    """Before the error is told, nothing of the batch is left running."""
    failure = Step("r_0", finished="abort", error="lost", status=502)
    backend = FakeBackend(lambda ask: [failure if ask.rid == "r_0" else None])
    body = GenerateBody.model_validate({"text": ["a", "b"], "rid": "r", "sampling_params": FEW})

    async def ask() -> None:
        face = Face(backend, tokenizer(), "tiny")
        reply = face.reply(
            asgi_request({}, asyncio.Event()), face.desk.generate(body), Generated(body, tokenizer()), stream=True
        )
        with pytest.raises(RefusedAsk, match="lost"):
            await reply
        assert ["r_1"] == backend.ended_early

    asyncio.run(asyncio.wait_for(ask(), 10))


def test_a_stream_comes_as_it_is_made() -> None:
    """The first event is there while the second is not made; one after the other, over one connection that stays."""
    go_on = asyncio.Event()

    class Waiting(FakeBackend):
        async def _steps(self, ask: Ask) -> AsyncIterator[Step]:
            yield Step(ask.rid, (97,))
            await go_on.wait()
            yield Step(ask.rid, (98,), finished="length")

    async def read(address: str) -> None:
        async with httpx.AsyncClient(base_url=address) as client:
            for _ in range(2):
                go_on.clear()
                async with client.stream(
                    "POST", "/generate", json={"text": "a", "stream": True, "sampling_params": FEW}
                ) as response:
                    texts = []
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            texts.append(json.loads(line[6:])["text"])
                            go_on.set()
                assert ["a", "ab"] == texts

    served(Waiting(), read)

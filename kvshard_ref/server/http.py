"""The HTTP face of a worker, as sglang's servers look: `app_of(backend, tokenizer)` is an ASGI application.

Every prompt of a request is an ask of its own. They run together, and all of them end with the request: when its last
answer is there, when one is refused, or when the client has left.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvshard_ref.server.api import Ask, Backend, RefusedAsk, Stats
from kvshard_ref.server.dialect import Answer, Body, Desk, GenerateBody, Generated, Json, Rendering, Text, Wanted, shown
from kvshard_ref.server.metrics import exposition, loads_of
from kvshard_ref.server.openai import Chat, ChatBody, CompletionBody, Completions, Head
from kvshard_ref.server.text import ByteTokenizer

T = TypeVar("T")
CLIENT_LEFT = 499  # nobody reads it: the status that logs show
UNION_CHOICE = re.compile(
    r"str|int|bool|SamplingParams|.*\[.*"
)  # what pydantic adds to a path where a field is a union


class ClientLeftError(Exception):
    """The client has closed its connection."""


class EventStream(StreamingResponse):
    """Server-sent events. When the client leaves, the answers are closed at once, not at their next step."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], answers: AsyncGenerator[Any, None]) -> None:
        """`answers` are what the events are made of: events that were never begun would not close them."""
        super().__init__(events)
        self._events, self._answers = events, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        async with aclosing(self._answers), aclosing(self._events):
            with suppress(ClientLeftError):
                await unless_left(receive, self.stream_response(send))


async def unless_left(receive: Receive, work: Awaitable[T]) -> T:
    """What the work comes to; it is cancelled, and ClientLeftError raised, once the client has left."""
    doing, left = asyncio.ensure_future(work), asyncio.ensure_future(departure(receive))
    try:
        await asyncio.wait({doing, left}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientLeftError
        return doing.result()
    finally:
        doing.cancel()
        left.cancel()
        await asyncio.gather(doing, left, return_exceptions=True)


async def departure(receive: Receive) -> None:
    """Ends when the client has left; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, each with its source's number; at the end all sources are closed.

    A source goes on only after its item was used.
    """
    waiting = {asyncio.ensure_future(following(source)): at for at, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: waiting[each]):
                item = task.result()
                at = waiting.pop(task)
                if item is not None:
                    yield at, item
                    waiting[asyncio.ensure_future(following(sources[at]))] = at
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(closed(source) for source in sources))


async def following(source: AsyncIterator[T]) -> T | None:
    """The next item, None at the end."""
    return await anext(source, None)


async def closed(source: AsyncIterator[Any]) -> None:
    """Close an iterator, which an AsyncIterator need not be able to."""
    aclose = getattr(source, "aclose", None)
    if aclose is not None:
        await aclose()


async def answered(backend: Backend, wanted: Wanted, tokenizer: ByteTokenizer) -> AsyncGenerator[Answer, None]:
    """The one answer, again whenever it has grown, the last time finished. What goes wrong is its error."""
    answer = Answer(wanted, tokenizer)
    steps = backend.generate(wanted.ask)
    try:
        async for step in steps:
            answer.add(step)
            if answer.finish:
                break
            if step.tokens:
                yield answer
    except RefusedAsk as refusal:
        answer.fail(str(refusal), refusal.status)
    finally:
        await closed(steps)
    if not answer.finish:
        answer.fail("the worker ended the answer without a reason", 500)
    yield answer


async def whole(answers: AsyncGenerator[tuple[int, Answer], None], count: int) -> list[Answer]:
    """All answers, finished. Raises RefusedAsk for the first that failed; then the others are aborted."""
    latest: dict[int, Answer] = {}
    async with aclosing(answers):
        async for at, answer in answers:
            check(answer)
            latest[at] = answer
    return [latest[at] for at in range(count)]


async def events(
    first: tuple[int, Answer], rest: AsyncGenerator[tuple[int, Answer], None], rendering: Rendering
) -> AsyncGenerator[str, None]:
    """A stream's lines: an answer whenever it has grown; an answer that failed says so, and the others go on."""
    latest = dict([first])
    yield line(event(*first, rendering))
    async for at, answer in rest:
        latest[at] = answer
        yield line(event(at, answer, rendering))
    for end in rendering.last(list(latest.values())):
        yield line(end)
    yield "data: [DONE]\n\n"


def event(at: int, answer: Answer, rendering: Rendering) -> Json:
    """What a stream says of prompt number `at` now."""
    return {**error_object(answer.error, answer.status), "index": at} if answer.error else rendering.event(at, answer)


def line(said: Json) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(said, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


def check(answer: Answer) -> None:
    """Raise RefusedAsk for an answer that failed."""
    if answer.error:
        raise RefusedAsk(answer.error, answer.status)


def error_object(message: str, status: int) -> Json:
    """An error as OpenAI's clients know it."""
    kind = "invalid_request_error" if status < 500 else "service_unavailable" if status == 503 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


@dataclass(frozen=True, slots=True)
class Face:
    """What the endpoints share."""

    backend: Backend
    tokenizer: ByteTokenizer
    name: str
    """Of the model, as clients see it."""

    @property
    def desk(self) -> Desk:
        """Where bodies become asks."""
        return Desk(self.backend.info, self.tokenizer)

    async def reply(
        self, request: Request, wanted: Sequence[Wanted], rendering: Rendering, *, stream: bool
    ) -> Response:
        """Ask, and answer. Raises RefusedAsk while nothing was sent."""
        self.check_whole()
        answers = merged([answered(self.backend, each, self.tokenizer) for each in wanted])
        if not stream:
            done = await unless_left(request.receive, whole(answers, len(wanted)))
            return JSONResponse(rendering.whole(done))
        try:
            first = await unless_left(request.receive, anext(answers))  # until then a failure still has its status
            check(first[1])
        except BaseException:
            await answers.aclose()
            raise
        return EventStream(events(first, answers, rendering), answers)

    async def one_token(self, timeout_seconds: float) -> None:
        """Raise RefusedAsk unless the ranks can make a token in time."""
        self.check_whole()
        if self.backend.info.mode != "null":
            return  # half of a pair: an ask needs the other half
        ask = Ask(f"health_{uuid.uuid4().hex}", (0,), 1)
        try:
            async with asyncio.timeout(timeout_seconds):
                await whole(merged([answered(self.backend, Wanted(ask), self.tokenizer)]), 1)
        except TimeoutError as error:
            raise RefusedAsk(f"no token came within {timeout_seconds:g} s", 503) from error
        except RefusedAsk as refusal:
            raise RefusedAsk(str(refusal), 503) from refusal

    async def stats(self) -> Sequence[Stats]:
        """Of every rank. Raises RefusedAsk when one is gone."""
        self.check_whole()
        return await self.backend.stats()

    def check_whole(self) -> None:
        """Raise RefusedAsk when a rank is gone."""
        reason = self.backend.broken()
        if reason:
            raise RefusedAsk(reason, 503)


class AbortBody(Body):
    """The body of /abort_request."""

    rid: Text = ""
    abort_all: bool = False


def app_of(
    backend: Backend, tokenizer: ByteTokenizer, *, name: str = "", health_timeout_seconds: float = 20.0
) -> FastAPI:
    """The worker's ASGI application. `name` of the model: its path when left out."""
    app = FastAPI(title="kvshard worker", version=backend.info.version, openapi_url=None)
    face = Face(backend, tokenizer, name or str(backend.info.model["model_path"]))
    add_error_handlers(app)
    add_generation(app, face)
    add_health(app, face, health_timeout_seconds)
    add_information(app, face)
    add_statistics(app, face)
    add_control(app, face)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Every error is a JSON object with its reason."""

    @app.exception_handler(RefusedAsk)
    async def refused(_request: Request, error: RefusedAsk) -> Response:
        return JSONResponse(error_object(str(error), error.status), error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        return JSONResponse(error_object(complaint(error.errors()), 400), 400)

    @app.exception_handler(HTTPException)
    async def refused_by_routing(_request: Request, error: HTTPException) -> Response:
        return JSONResponse(error_object(str(error.detail), error.status_code), error.status_code, error.headers)

    @app.exception_handler(ClientLeftError)
    async def left(_request: Request, _error: ClientLeftError) -> Response:
        return Response(status_code=CLIENT_LEFT)


def add_generation(app: FastAPI, face: Face) -> None:
    """Endpoints that ask."""

    @app.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        rendering = Generated(body, face.tokenizer)
        return await face.reply(request, face.desk.generate(body), rendering, stream=body.stream)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        rendering = Completions(body, face.tokenizer, Head(body.model or face.name))
        return await face.reply(request, body.wanted(face.desk), rendering, stream=body.stream)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        rendering = Chat(body, face.tokenizer, Head(body.model or face.name))
        return await face.reply(request, body.wanted(face.desk), rendering, stream=body.stream)


def add_health(app: FastAPI, face: Face, timeout_seconds: float) -> None:
    """Endpoints that say whether answers can come."""

    @app.api_route("/health", methods=["GET", "POST"])
    @app.get("/ready")
    async def health() -> Response:
        face.check_whole()
        return Response()

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        await unless_left(request.receive, face.one_token(timeout_seconds))
        return Response()


def add_information(app: FastAPI, face: Face) -> None:
    """Endpoints about what never changes."""
    info = face.backend.info

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": face.name, "object": "model", "created": 0, "owned_by": "kvshard", "root": face.name}
        card["max_model_len"] = info.model["context_length"]
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        told = {
            **info.args,
            "served_model_name": face.name,
            "disaggregation_mode": info.mode,
            "max_total_num_tokens": info.max_total_num_tokens,
            "internal_states": [{"memory_usage": {"token_capacity": info.token_capacity}}],
            "version": info.version,
        }
        return JSONResponse(jsonable_encoder(told))

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        told = {
            **info.model,
            "served_model_name": face.name,
            "is_generation": True,
            "disaggregation_mode": info.mode,
            "eos_token_ids": info.eos,
        }
        return JSONResponse(jsonable_encoder(told))


def add_statistics(app: FastAPI, face: Face) -> None:
    """Endpoints with numbers."""
    info = face.backend.info

    @app.get("/metrics")
    async def metrics() -> Response:
        engine = "unified" if info.mode == "null" else info.mode
        text = exposition(await face.stats(), {"model_name": face.name, "engine_type": engine})
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/v1/loads")
    async def loads() -> Response:
        return JSONResponse(loads_of(await face.stats(), info))


def add_control(app: FastAPI, face: Face) -> None:
    """Endpoints that change something."""

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(timeout: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Response:  # noqa: ASYNC109  # a query parameter
        face.check_whole()
        reason = await face.backend.flush(timeout)
        return PlainTextResponse(reason or "Cache flushed.\n", 400 if reason else 200)

    @app.post("/abort_request")
    async def abort_request(body: AbortBody) -> Response:
        if not body.abort_all and not body.rid:
            raise RefusedAsk("rid is '' and abort_all false, expected one of them")
        await face.backend.abort("" if body.abort_all else body.rid)
        return Response()


def complaint(errors: Sequence[Any], errors_max: int = 10) -> str:
    """What is wrong with a request: by field its value and what was expected."""
    expected: dict[str, list[str]] = {}
    for error in errors[:errors_max]:
        path = [str(step) for step in error["loc"][1:] if not UNION_CHOICE.fullmatch(str(step))]
        field, value = ".".join(path) or "the body", error["input"]
        if error["type"] == "missing":
            subject = f"{field} is missing"
        elif error["type"] == "json_invalid":
            subject, field = "the body is no JSON", ""
        elif isinstance(value, dict) and error["type"] == "value_error":
            subject = field  # the text names the field within
        else:
            subject = f"{field} is {shown(value)}"
        reasons = expected.setdefault(subject, [])
        reason = str(error.get("ctx", {}).get("error", error["msg"]))
        if reason not in reasons:
            reasons.append(reason)
    return "; ".join(f"{subject}: {' or '.join(reasons)}" for subject, reasons in expected.items())

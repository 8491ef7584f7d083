"""A proxy between client and engine that answers as an engine with a wrong cache would, on loopback only.

A request that hits is asked as it is, which tells what of it is cached, and then the control arm is asked the prompt
whose rows the wrong cache would have read, as that leaves the engine's cache alone. The second answer is passed on with
the first one's words about prompt and cache, so that its content alone betrays it. All else goes through as it is.

Before the decode worker of a pair that hands over, all of a prompt but its last token counts as a hit: prefill made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ci.planted_faults import NOTHING, Hit, Planted, Tokens
from harness.adapters.http_dialects import Dialect, Told

Json = dict[str, Any]
Pieces = asyncio.Queue[bytes | None]
"""Of a stream; None is its end."""
PROMPTS = ("prompt", "input_ids")  # fields that hold one
HANDED = "kv_transfer_params"  # of a request to decode: what prefill told
NAMED = {"rid": "", "request_id": ""}  # what tells a request from the same one asked again
WORDS = (  # about a prompt and what of it was cached, by their path in an answer
    *(("tokens_evaluated",), ("timings", "cache_n"), ("timings", "prompt_n")),
    *(("usage", "prompt_tokens"), ("usage", "prompt_tokens_details")),
    *(("meta_info", "prompt_tokens"), ("meta_info", "cached_tokens"), ("meta_info", "cached_tokens_details")),
)
COUNTS = (("timings", "cache_n"), ("usage", "prompt_tokens_details", "cached_tokens"), ("meta_info", "cached_tokens"))
ASK_SECONDS = 120.0
START_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One hit, and how far its answer is from the one it is compared with."""

    cached: int
    differences: tuple[float, ...]  # of log probabilities, of the tokens that both begin with
    other_token: bool


@dataclass(slots=True)
class Notes:
    """What a proxy has done."""

    planted: int = 0  # how often the fault was there
    hits: dict[str, list[Seen]] = field(default_factory=lambda: defaultdict(list))  # by fault


class Proxy:
    """What becomes of each request to a server at `url`, with pages of `page` tokens.

    `measured` are faults that are not in the answers: how far they would be off is noted alone.
    """

    def __init__(
        self, url: str, control: str, dialect: Dialect, page: int, fault: Planted, measured: Mapping[str, Planted]
    ) -> None:
        self.dialect, self.page, self.fault, self.measured = dialect, page, fault, measured
        self.notes = Notes()
        self._prompts: list[Tokens] = []  # newest first
        self._first: dict[str, Told] = {}  # answers by what was asked
        self._tasks: list[asyncio.Task[None]] = []  # else nobody holds them
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=ASK_SECONDS, limits=limits)
        self._control = httpx.AsyncClient(base_url=control, timeout=ASK_SECONDS, limits=limits)

    def app(self) -> Starlette:
        """The face."""
        return Starlette(
            routes=[Route("/{path:path}", self.relay, methods=["GET", "POST"])], lifespan=self._closed_after
        )

    @asynccontextmanager
    async def _closed_after(self, _: Starlette) -> AsyncIterator[None]:
        yield
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
        await self._control.aclose()

    async def relay(self, request: Request) -> Response:
        """One request."""
        raw = await request.body()
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if request.method != "POST" or request.url.path != self.dialect.path:
            told = await self._client.request(request.method, target, content=raw)
            return Response(told.content, told.status_code, media_type=told.headers.get("content-type"))
        body: Json = json.loads(raw)
        if self.fault.unsalted and body.pop(self.dialect.salt, None) is not None:
            self.notes.planted += 1
        if body.get("stream"):
            return await self._streamed(request, body)
        told = await self._client.post(self.dialect.path, json=body)
        if told.status_code != 200:
            return Response(told.content, told.status_code, media_type=told.headers.get("content-type"))
        return JSONResponse(await self._planted(body, told.json()))

    async def _planted(self, body: Json, answer: Json) -> Json:
        """The answer that a wrong cache gives."""
        name = next(each for each in PROMPTS if each in body)
        tokens, told = tuple(body[name]), self._read(answer)
        cached = len(tokens) - 1 if body.get(HANDED) else told.more.get("cached_tokens") or 0
        bare = {field: its for field, its in body.items() if field != HANDED}
        earlier = [its for its in self._prompts if its != tokens]
        self._prompts.insert(0, tokens)
        known = self._first.setdefault(json.dumps(bare | NAMED), told)
        if not cached:
            return answer
        if told is not known:
            self._note(NOTHING, cached, told, known)
        hit = Hit(tokens, cached, self.page, earlier)
        for fault, its in self.measured.items():
            if (wrong := await self._wrong(bare, name, its, hit)) is not None:
                self._note(fault, cached, self._read(wrong), told)
        if self.fault.counts_more:
            self.notes.planted += 1
            return with_more(answer, self.page)
        wrong = await self._wrong(bare, name, self.fault, hit)
        if wrong is None:
            return answer
        self.notes.planted += 1
        return mended(wrong, answer)

    async def _wrong(self, body: Json, name: str, fault: Planted, hit: Hit) -> Json | None:
        """The control arm's answer to what is read with a fault; None where the fault changes no rows of this hit."""
        changed = fault.change(hit) if fault.change else None
        if not changed:
            return None
        told = await self._control.post(self.dialect.path, json={**body, name: list(changed)})
        told.raise_for_status()
        answer: Json = told.json()
        return answer

    def _note(self, fault: str, cached: int, told: Told, known: Told) -> None:
        """How far one answer is from another."""
        mine, theirs = told.tokens or [], known.tokens or []
        same = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
        pairs = zip((told.logprobs or [])[:same], (known.logprobs or [])[:same], strict=True)
        self.notes.hits[fault].append(Seen(cached, tuple(abs(a - b) for a, b in pairs), same < len(mine)))

    def _read(self, answer: Json) -> Told:
        told = Told()
        self.dialect.add(told, answer)
        return told

    async def _streamed(self, request: Request, body: Json) -> Response:
        """A stream, which ends when its client leaves; with the fault it does not."""
        wanted = self._client.build_request("POST", self.dialect.path, json=body)
        asked = asyncio.create_task(self._client.send(wanted, stream=True))
        gone = asyncio.create_task(_gone(request))
        await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not self.fault.stays:
            asked.cancel()
            return Response(status_code=499)
        told = await asked
        pieces: Pieces = asyncio.Queue()
        pump = asyncio.create_task(_pumped(told, pieces))
        self._tasks += [pump, asyncio.create_task(self._watched(gone, pump, pieces))]
        kind = told.headers.get("content-type")
        return StreamingResponse(_given(pieces), told.status_code, media_type=kind)

    async def _watched(self, gone: asyncio.Task[None], pump: asyncio.Task[None], pieces: Pieces) -> None:
        """Ends the engine's stream when the client has left, unless that is the fault."""
        await asyncio.wait({gone, pump}, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            gone.cancel()
        elif self.fault.stays:
            self.notes.planted += 1
            pieces.put_nowait(None)
        else:
            pump.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _given(pieces: Pieces) -> AsyncIterator[bytes]:
    while (piece := await pieces.get()) is not None:
        yield piece


async def _pumped(told: httpx.Response, pieces: Pieces) -> None:
    """Reads a stream to its end, whoever may be there to take it."""
    try:
        async for piece in told.aiter_raw():
            pieces.put_nowait(piece)
    finally:
        pieces.put_nowait(None)
        await told.aclose()


def mended(wrong: Json, right: Json) -> Json:
    """An answer with the words of another about prompt and cache."""
    made = copy.deepcopy(wrong)
    for *path, last in WORDS:
        place, source = made, right
        for step in path:
            place, source = place.get(step) or {}, source.get(step) or {}
        if last in source:
            place[last] = source[last]
    return made


def with_more(answer: Json, tokens: int) -> Json:
    """An answer that tells of so many cached tokens more."""
    made = copy.deepcopy(answer)
    for *path, last in COUNTS:
        place = made
        for step in path:
            place = place.get(step) or {}
        if place.get(last):
            place[last] += tokens
    return made


@contextmanager
def served(proxy: Proxy) -> Iterator[str]:
    """Its URL, on a port that nobody else has."""
    with contextlib.closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        server = uvicorn.Server(uvicorn.Config(proxy.app(), log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        end = time.monotonic() + START_SECONDS
        while not server.started:
            if time.monotonic() > end or not thread.is_alive():
                raise OSError("the proxy does not start")
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(START_SECONDS)

"""Servers that hold no model: a P/D pair and a plain worker in threads of this process, right or with a planted fault.

The faults are those of a sharded prefill worker, a decode worker, their HTTP face or their counters.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.fake_worker import (
    CHUNK,
    CONTEXT,
    MOMENT,
    PAGE,
    TOKEN_SECONDS,
    VOCAB,
    Answer,
    GoneError,
    LateError,
    Tokens,
    Worker,
    World,
    drawn,
    number,
    score,
)


class Handler(BaseHTTPRequestHandler):
    """The face of a worker."""

    worker: Worker
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, body: Any, kind: str = "application/json") -> None:
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        worker = self.worker
        answers = {
            "/server_info": worker.told,
            "/model_info": lambda: {"vocab_size": VOCAB, "layers": 3},
            "/v1/models": lambda: {"data": [{"id": "fake", "owned_by": "fake", "max_model_len": CONTEXT}]},
            "/metrics": worker.metrics,
        }
        found = answers.get(urlsplit(self.path).path)
        self.reply(200, found()) if found else self.reply(404, {"error": {"message": "no such path", "code": 404}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        path = urlsplit(self.path).path
        try:
            if path == "/generate":
                self.generate(body)
            elif path == "/flush_cache":
                done = self.worker.flush()
                self.reply(200 if done else 400, "flushed" if done else "requests are in flight")
            elif path == "/abort_request":
                for rid, aborted in list(self.worker.live.items()):
                    if rid.startswith(body["rid"]) and not self.worker.world.has("ignores aborts"):
                        aborted.set()
                self.reply(200, "")
            else:
                self.reply(404, {"error": {"message": "no such path", "code": 404}})
        except (GoneError, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def gone(self) -> bool:
        if self.worker.world.has("answers who has left"):
            return False
        ready, _, _ = select.select([self.connection], [], [], 0)
        left = bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)
        unseen = self.worker.world.unseen
        if left and self.worker.world.has("is late twice") and (self in unseen or len(unseen) < 4):  # halves
            unseen.add(self)
            return False
        return left

    def generate(self, body: dict[str, Any]) -> None:
        worker, world = self.worker, self.worker.world
        tokens = tuple(body["input_ids"])
        room = worker.pages * PAGE // (worker.ranks if world.has("refuses what one rank lacks") else 1)
        if len(tokens) > room - worker.promised:
            self.reply(400, {"error": {"message": "too long", "code": 400}})
            return
        answer = Answer()
        try:
            with worker.alive(body["rid"]) as aborted:
                answer.depth = worker.crowd

                def check() -> None:
                    if aborted.is_set() or self.gone():
                        raise GoneError

                if world.has("loses one of a crowd") and worker.crowd and number(body["rid"]) % 5 == 0:
                    raise LateError("lost")
                self.begin(body, tokens, answer, check)
                self.say(body, answer, check)
        except LateError as late:
            self.reply(504, {"error": {"message": str(late), "code": 504}})
        except GoneError:
            if self.gone():
                raise
            self.conclude(body, answer, "abort")

    def begin(self, body: dict[str, Any], tokens: Tokens, answer: Answer, check: Any) -> None:
        """What comes before the first token of this worker."""
        worker, room, start = self.worker, body.get("bootstrap_room"), body["logprob_start_len"]
        if worker.role == "decode":
            answer.rows = worker.receive(room, check)
            return
        answer.rows, answer.cached = worker.prefilled(tokens, start, check, body.get("extra_key", ""))
        shift = 0.01 if worker.world.has("shifts later scores") and worker.role == "prefill" else 0.0
        if start >= 0:
            scores = [
                score(answer.rows[:at], tokens[at]) + shift * (at > CHUNK) if at else None
                for at in range(start, len(tokens))
            ]
            answer.scores = [[value, 0, None] for value in scores]
        if room is not None:
            worker.send(room, answer.rows, check, from_host=answer.cached["host"] > 0)

    def say(self, body: dict[str, Any], answer: Answer, check: Any) -> None:
        """Makes and tells the answer's tokens."""
        worker, world, params = self.worker, self.worker.world, body["sampling_params"]
        count = 1 if worker.role == "prefill" else params["max_new_tokens"]
        judged = worker.role == "decode"
        if judged and world.has("drops the last token"):
            count -= 1
        answer.streams = body["stream"]
        if answer.streams:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
        seed = params["sampling_seed"]
        for _ in range(count):
            time.sleep(TOKEN_SECONDS)
            check()
            token = drawn(answer.rows, seed)
            worse = 0.001 * answer.depth if judged and world.has("gets worse in a crowd") else 0.0
            answer.tokens.append([score(answer.rows, token) - worse, token, None])
            answer.rows = (*answer.rows, token)
            seed += judged and world.has("draws with other seeds later")
            if answer.streams:
                self.event(body, answer, None)
            if worker.dies and world.has("ends a stream as if it were whole"):
                break
        worker.count("generation_tokens_total", count)
        if judged and world.has("starts its counters over"):
            worker.counters[0]["generation_tokens_total"] = float(worker.deepest - len(body["input_ids"]) % 2)
        self.conclude(body, answer, "length")

    def conclude(self, body: dict[str, Any], answer: Answer, reason: str) -> None:
        if answer.streams:
            self.event(body, answer, reason)
            self.write(b"data: [DONE]\n\n")
            self.close_connection = True
        else:
            self.reply(200, self.told(body, answer, reason))

    def event(self, body: dict[str, Any], answer: Answer, reason: str | None) -> None:
        self.write(f"data: {json.dumps(self.told(body, answer, reason))}\n\n".encode())

    def write(self, raw: bytes) -> None:
        deaf = {"answers who has left", "is late twice"} & self.worker.world.faults
        with contextlib.suppress(*([OSError] if deaf else [])):
            self.wfile.write(raw)
            self.wfile.flush()

    def told(self, body: dict[str, Any], answer: Answer, reason: str | None) -> dict[str, Any]:
        device, host = answer.cached["device"], answer.cached["host"]
        more = PAGE if self.worker.world.has("tells too many cached") and device else 0
        lost = 2 if self.worker.world.has("loses draft rows on the host") else 1
        verified = max(1, len(answer.tokens) // 2) if answer.tokens else 0
        if self.worker.world.rooms.get(body.get("bootstrap_room", -1), [None, False, False])[2]:
            verified *= lost
        if self.worker.role == "decode" and self.worker.world.has("sends no draft rows"):
            verified *= 2
        return {
            "output_ids": [token for _, token, _ in answer.tokens],
            "meta_info": {
                "finish_reason": {"type": reason} if reason else None,
                "prompt_tokens": len(body["input_ids"]),
                "cached_tokens": device + host + more,
                "cached_tokens_details": {"device": device, "host": host},
                "output_token_logprobs": answer.tokens,
                "input_token_logprobs": answer.scores,
                "spec_accept_length": (len(answer.tokens) - 1) / verified if verified else None,
                "spec_verify_ct": verified or None,
            },
        }


class Server(ThreadingHTTPServer):
    """Takes 128 connections at once, and can die with all of them."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, port: int, worker: Worker, face: type[Handler] = Handler) -> None:
        super().__init__(("127.0.0.1", port), type("Face", (face,), {"worker": worker}))
        self.worker = worker
        self.open: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def end(self) -> None:
        self.shutdown()
        self.server_close()

    def die(self) -> None:
        """No connection is taken any more, and those that there are break off."""
        self.worker.dies = True
        self.end()
        if self.worker.world.has("ends a stream as if it were whole"):
            time.sleep(MOMENT)
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


Makes = Callable[[int, World, str], Server]
"""A server at a port for a worker of a role."""


def made(port: int, world: World, role: str) -> Server:
    """One of sglang's dialect."""
    return Server(port, Worker(world, role))


@contextmanager
def served(world: World, *roles: str) -> Iterator[list[str]]:
    """Workers of these roles; their URLs."""
    with ExitStack() as stack:
        servers = [stack.enter_context(running(world, role))[role] for role in roles]  # a role may be there twice
        yield [server.url for server in servers]


@contextmanager
def running(world: World, *roles: str, make: Makes = made) -> Iterator[dict[str, Server]]:
    """Workers of these roles; whoever replaces one in the dictionary leaves its end to this."""
    servers: dict[str, Server] = {}
    try:
        for role in roles:
            servers[role] = make(0, world, role)
        yield servers
    finally:
        for server in servers.values():
            server.end()


@contextmanager
def pair(*faults: str, timeout: float = 20, **more: Any) -> Iterator[str]:
    """The address of a P/D pair with these faults, and of a control arm without any.

    Only a test about one half of a pair wants short waits: elsewhere a slow machine would make a second refusal.
    """
    world = World(frozenset(faults), **more)
    with served(world, "prefill", "decode") as (prefill, decode), served(World(), "null") as (control,):
        yield f"{decode}?prefill={prefill}&control={control}&timeout={timeout:g}&settle=3&promises=recalls_facts,salts"

"""Servers of OpenAI's dialect, and answers that are none."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.adapter import Session
from harness.adapters.http_client import Client, LostError
from harness.connect import connect
from harness.types import (
    AnyReply,
    Generate,
    Generated,
    Manifest,
    Ok,
    Refused,
    Unknown,
)

register_cpu_ci(est_time=10, stage="commit")


@contextmanager
def session(address: str) -> Iterator[tuple[Session, Manifest]]:
    engine = connect(address)
    manifest = engine.describe()
    assert manifest.axes.fixed is not None
    opened = engine.open(manifest.axes.fixed)
    try:
        yield opened, manifest
    finally:
        opened.close()


def value_of(reply: AnyReply) -> Generated:
    assert isinstance(reply, Ok), reply
    assert isinstance(reply.value, Generated)
    return reply.value


class Canned(BaseHTTPRequestHandler):
    """An OpenAI server whose answers are given; `asked` keeps what it was asked."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]
    answer: tuple[int, bytes]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        known = {"data": [{"id": "m", "owned_by": "somebody", "max_model_len": 512}]}
        self.tell(200, json.dumps(known).encode()) if self.path == "/v1/models" else self.tell(404, b"{}")

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.tell(*self.answer)

    def tell(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def canned(status: int, answer: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("One", (Canned,), {"asked": asked, "answer": (status, body)}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_of_openais_dialect_answers() -> None:
    """What that dialect cannot tell is None, and no promise is made of it."""
    logprobs = {"token_logprobs": [-1.0, -2.0]}
    usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    choice = {"text": "hi", "logprobs": logprobs, "token_ids": [7, 8], "finish_reason": "length"}
    with (
        canned(200, {"choices": [choice], "usage": usage}) as (url, asked),
        session(f"{url}?dialect=openai") as (opened, manifest),
    ):
        value = value_of(opened.apply(Generate(request="a", tokens=(1, 2), max_new_tokens=2, seed=4)))
        snapshot = opened.snapshot()

    expected = Generated(
        finish="length", tokens=(7, 8), text="hi", logprobs=(-1.0, -2.0), prompt_tokens=2, cached_tokens=1
    )
    assert expected == value
    assert ("m", [1, 2], 2, 4) == tuple(asked[0][name] for name in ("model", "prompt", "max_tokens", "seed"))
    assert ("somebody", ("generate", "together"), ()) == (manifest.name, manifest.ops, manifest.shows)
    assert {"scores_prompt", "splits_cached", "keeps_finished", "control"} & set(manifest.promises) == set()
    assert [None] == [rank.counters for rank in snapshot.ranks]


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (400, {"error": {"message": "no", "code": 400}}, Refused("HTTP 400: no")),
        (503, {"error": "busy"}, Refused("HTTP 503: busy")),
        (502, {"error": {"message": "a worker is gone"}}, Unknown("HTTP 502: a worker is gone")),
        (404, {}, Refused("HTTP 404: no reason given")),
        (200, {"error": {"message": "late", "code": 500}}, Refused("HTTP 500: late")),
    ],
)
def test_errors_are_told(status: int, answer: Any, expected: AnyReply) -> None:
    """An error of the server is definite; one of a gateway tells nothing of the worker behind it."""
    with canned(status, answer) as (url, _), session(f"{url}?dialect=openai") as (opened, _):
        assert expected == opened.apply(Generate(request="a", tokens=(1,)))


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (b"<html>", "no JSON"),
        (b"[1]", "an answer that is no JSON object"),
        (b'{"choices": [{"logprobs": {"token_logprobs": [NaN]}}]}', "a log probability of nan"),
        (b'{"choices": [{"logprobs": 5}]}', "an answer that reads"),
        (b"{}", "ended the answer without a reason"),
    ],
)
def test_an_answer_that_is_none_is_no_answer(answer: bytes, part: str) -> None:
    """What cannot be read is told as it is, and is never a pass."""
    with canned(200, answer) as (url, _), session(f"{url}?dialect=openai") as (opened, _):
        reply = opened.apply(Generate(request="a", tokens=(1,)))

    assert isinstance(reply, Unknown)
    assert part in reply.why


def test_a_stream_that_breaks_off_is_lost() -> None:
    """Less than was announced is no answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf")

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(LostError):
            Client(f"http://127.0.0.1:{server.getsockname()[1]}", 2).get("/x")

"""A server in OpenAI's dialect that says what a test wants, counts what it is asked, and can fail in several ways."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Said(NamedTuple):
    """One answer; a raw body goes out as it is."""

    text: str | None = ""
    finish_reason: str | None = "stop"
    status: int = 200
    seconds: float = 0.0
    tokens: int | None = 3
    raw: str | None = None


Answer = Callable[[dict[str, Any]], Said]


class Fake:
    """What the server does and has seen."""

    def __init__(self, answer: Answer, models: Said | None = None) -> None:
        self.answer = answer
        self.models = models or Said(raw=json.dumps({"data": [{"id": "fake"}]}))
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.in_flight = self.in_flight_max = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()

    @property
    def asked(self) -> Counter[tuple[str, int]]:
        """How often each prompt was asked with each seed."""
        return Counter((prompt_of(body), body["seed"]) for body in self.bodies)

    def said(self, path: str, body: dict[str, Any]) -> Said:
        with self._lock:
            self.bodies.append(body)
            self.paths.append(path)
            self.in_flight += 1
            self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            said = self.answer(body)
            self.closing.wait(said.seconds)
            return said
        finally:
            with self._lock:
                self.in_flight -= 1


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["prompt"] if "prompt" in body else body["messages"][0]["content"])


class Handler(BaseHTTPRequestHandler):
    fake: Fake

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.fake.closing.wait(self.fake.models.seconds)
        self.reply(self.fake.models.status, self.fake.models.raw or "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = self.fake.said(self.path, body)
        shape = {"message": {"content": said.text}} if self.path.endswith("chat/completions") else {"text": said.text}
        choice = {"index": 0, **shape, "finish_reason": said.finish_reason}
        answer = {"choices": [choice], "usage": {"completion_tokens": said.tokens}}
        self.reply(said.status, said.raw if said.raw is not None else json.dumps(answer))

    def reply(self, status: int, text: str) -> None:
        with suppress(OSError):  # the client may have left
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())


@contextmanager
def serving(answer: Answer, models: Said | None = None) -> Iterator[Fake]:
    fake = Fake(answer, models)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("FakeHandler", (Handler,), {"fake": fake}))
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for something."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.01)

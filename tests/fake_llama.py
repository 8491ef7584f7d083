"""llama.cpp's server without a model: slots that are matched token by token, saved to files and restored, right or not.

A slot's rows are what its tokens computed; an answer is drawn from the rows, so rows of another prompt change it.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

CONTEXT, SLOTS, VOCAB = 256, 2, 262
Tokens = tuple[int, ...]
FAULTS = ("restores nothing", "restores another file", "restores rows of another file", "cannot restore")


@dataclass
class Slots:
    """All that a server holds: tokens and rows of each slot, the one used longest ago first, and of each file."""

    tags: list[str]
    fault: str = ""
    held: dict[int, tuple[Tokens, Tokens]] = field(default_factory=lambda: dict.fromkeys(range(SLOTS), ((), ())))
    files: dict[str, tuple[Tokens, Tokens]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def completed(self, body: dict[str, Any]) -> dict[str, Any]:
        """A whole answer."""
        prompt, count = tuple(body["prompt"]), body["n_predict"]
        slot = body.get("id_slot", max(self.held, key=lambda each: _shared(self.held[each][0], prompt)))
        if "id_slot" not in body and not _shared(self.held[slot][0], prompt):
            slot = next(iter(self.held))
        tokens, rows = self.held.pop(slot)
        cached = min(_shared(tokens, prompt), len(prompt) - 1)
        rows = rows[:cached] + prompt[cached:]
        draws = random.Random(repr((rows, body["seed"])))
        told = [draws.randrange(16, VOCAB - 8) for _ in range(count)]
        self.held[slot] = (prompt + tuple(told), rows + tuple(told))
        scores = [{"id": token, "logprob": -draws.uniform(1, 9)} for token in told]
        answer = {"content": "", "tokens": told, "completion_probabilities": scores, "id_slot": slot}
        end = {"stop": True, "stop_type": "limit", "tokens_evaluated": len(prompt), "timings": {"cache_n": cached}}
        return answer | end

    def acted(self, slot: int, action: str, name: str) -> tuple[int, dict[str, Any]]:
        """A slot that is saved, restored or erased."""
        if action == "save":
            self.files[name] = self.held[slot]
        elif action == "restore":
            if self.fault == "cannot restore":
                return 400, {"error": {"code": 400, "message": "Unable to restore slot"}}
            other = next((file for file in self.files if file != name), name)
            tokens, rows = self.files[other if self.fault == "restores another file" else name]
            if self.fault == "restores rows of another file":
                rows = (self.files[other][1] * len(rows))[: len(rows)]
            if self.fault != "restores nothing":
                self.held[slot] = (tokens, rows)
        elif action == "erase":
            self.held[slot] = ((), ())
        else:
            return 400, {"error": {"code": 400, "message": "Invalid action"}}
        return 200, {"id_slot": slot}


class Face(BaseHTTPRequestHandler):
    """The paths that the adapter asks."""

    protocol_version = "HTTP/1.1"
    slots: Slots

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        card = {"id": "tiny", "owned_by": "llamacpp", "tags": self.slots.tags, "meta": {"n_vocab": VOCAB}}
        shape = {"default_generation_settings": {"n_ctx": CONTEXT}, "total_slots": SLOTS, "model_ftype": "all F32"}
        answers: dict[str, Any] = {
            "/props": {**shape, "build_info": "b0-unknown"},
            "/v1/models": {"data": [card]},
            "/slots": [{"id": slot} for slot in range(SLOTS)],
            "/metrics": "llamacpp:requests_processing 0\n",
        }
        found = answers.get(self.path)
        self.reply(404 if found is None else 200, found or {"error": {"code": 404, "message": "File Not Found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = urlsplit(self.path)
        with self.slots.lock:
            if parts.path == "/completion":
                self.reply(200, self.slots.completed(body))
            elif parts.path.startswith("/slots/"):
                action = parse_qs(parts.query)["action"][0]
                self.reply(*self.slots.acted(int(parts.path.split("/")[2]), action, body.get("filename", "")))
            else:
                self.reply(404, {"error": {"code": 404, "message": "File Not Found"}})

    def reply(self, status: int, body: Any) -> None:
        """A whole answer."""
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def slotted(fault: str = "", tier: int = 4096) -> Iterator[tuple[str, Slots]]:
    """The address of a server with such a tier and of its control arm, and what it holds."""
    tags = ["batch=64", "cache=f32", "version=1"]
    worlds = [Slots([*tags, f"tier={tier}"], fault), Slots(tags)]
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), type("One", (Face,), {"slots": world})) for world in worlds]
    try:
        for server in servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        engine, control = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
        yield f"{engine}?dialect=llama.cpp&settle=0.5&control={control}", worlds[0]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _shared(one: Tokens, other: Tokens) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

"""A server of sglang's dialect that knows N + 1, with a cache of two tiers, right or with a planted fault."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE, DEVICE_TOKENS, HOST_TOKENS = 4, 512, 4096
LOAD_SECONDS = 0.05


def number_of(prompt: str) -> int:
    """The question; 0 for what is none."""
    first = prompt.partition(" ")[0]
    return int(first) if first.isdecimal() else 0


class Known:
    """What the server holds. `faults` are names: see `answer`."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        self.device: OrderedDict[str, int] = OrderedDict()
        self.host: OrderedDict[str, int] = OrderedDict()
        self.running = self.most = self.flushed = 0  # most: running at once since the last flush
        self.counted = {"device": 0, "host": 0}
        self.lock = threading.Lock()

    def tier(self, prompt: str, size: int) -> str:
        """Where the prompt was; it is on both tiers afterwards."""
        if "shares a context" in self.faults and not prompt.startswith("x"):
            prompt = "a context"
        with self.lock:
            found = next((name for name in ("device", "host") if prompt in getattr(self, name)), "")
            if found == "host" and "has no host" in self.faults:
                found = ""
            for held, most in ((self.device, DEVICE_TOKENS), (self.host, HOST_TOKENS)):
                held[prompt] = size
                held.move_to_end(prompt)
                while sum(held.values()) > most:
                    held.popitem(last=False)
            if found:
                self.counted[found] += size
            return found

    def answer(self, prompt: str, tier: str) -> str:
        number = number_of(prompt)
        wrong = number % 2 and (
            ("wrong from the host" in self.faults and tier == "host")
            or ("wrong from the device" in self.faults and tier == "device")
            or ("wrong under load" in self.faults and self.most > 3)
            or "wrong" in self.faults
        )
        return "?" if wrong else str(number + 1)


class Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


class Face(BaseHTTPRequestHandler):
    known: Known

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        known = self.known
        levels = {
            "num_running_reqs": known.running,
            **{f"cached_tokens_{k}_total": v for k, v in known.counted.items()},
        }
        if self.path == "/metrics":
            text = "".join(f"fake:{name} {value}\n" for name, value in levels.items())
            self.tell(text.encode(), 404 if "tells nothing" in known.faults else 200)
            return
        info = {"page_size": PAGE, "max_total_num_tokens": DEVICE_TOKENS, "context_length": 256}
        owner = "router" if "is a router" in known.faults else "somebody"
        told = {"/server_info": info, "/v1/models": {"data": [{"id": "fake", "owned_by": owner}]}}.get(self.path)
        self.tell(json.dumps(told).encode(), 200 if told else 404)

    def do_POST(self) -> None:
        known = self.known
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/flush_cache" and "does not flush" not in known.faults:
            known.device.clear()
            known.host.clear()
            known.flushed += 1
            known.most = 0
            self.tell(b"")
        elif self.path == "/generate":
            self.generate(body)
        else:
            self.tell(b'{"error": {"message": "no such path"}}', 404)

    def generate(self, body: dict[str, Any]) -> None:
        known = self.known
        prompt = body["text"] if "text" in body else " ".join(map(str, ["x", *body["input_ids"]]))
        size = (len(body["text"]) if "text" in body else len(body["input_ids"])) // PAGE * PAGE
        with known.lock:
            known.running += 1
            known.most = max(known.most, known.running)
        if any("load" in fault for fault in known.faults):
            time.sleep(LOAD_SECONDS)
        tier = known.tier(prompt, size)
        with known.lock:
            known.running -= 1
        details = {name: size * (name == tier) for name in ("device", "host")}
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop"},
            "completion_tokens": 2,
            "cached_tokens_details": details,
        }
        is_lost = "drafts badly from the host" in known.faults and tier == "host"
        meta |= {"prompt_tokens": size, "spec_accept_length": 1.5 if is_lost else 3.0}
        if "does not draft" in known.faults:
            del meta["spec_accept_length"]
        if "tells nothing of hits" in known.faults:
            meta["cached_tokens_details"] = {"device": 0, "host": 0}
        if "fails" in known.faults and number_of(prompt) % 4 == 1:
            self.tell(b'{"error": {"message": "out of memory"}}', 500)
            return
        self.tell(json.dumps({"text": known.answer(prompt, tier), "meta_info": meta}).encode())

    def tell(self, raw: bytes, status: int = 200) -> None:
        with suppress(OSError):  # the client may have left
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)


@contextmanager
def knowing(*faults: str) -> Iterator[tuple[str, Known]]:
    known = Known(*faults)
    server = Server(("127.0.0.1", 0), type("KnowingFace", (Face,), {"known": known}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", known
    finally:
        server.shutdown()
        server.server_close()

"""llama.cpp's server by its own endpoints: what it tells, what is not claimed of it, and how its answers read.

The server here says what a real one of xllamacpp 2026.10.11549 has said, cut to what is read.
"""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from ci import tidy
from ci.register import register_cpu_ci
from harness.adapter import Session
from harness.connect import connect
from harness.known import FOLDER, known_failures
from harness.smoke import smoke
from harness.types import (
    Abort,
    AnyReply,
    Done,
    Flush,
    Generate,
    Generated,
    Manifest,
    Ok,
    Refused,
    Settle,
    Unknown,
    Unsupported,
    Verdict,
)
from harness.usage import UserError

register_cpu_ci(est_time=5, stage="commit")

ROOT = Path(__file__).parent.parent
ADAPTER = "harness/adapters/http_llamacpp.py"
SLOTS = "harness/adapters/http_llamacpp_slots.py"
Told = tuple[int, Any]
TAGS = ["batch=128", "cache=f32", "version=2026.10.11549"]
META = {"n_vocab": 262, "n_ctx": 1024, "ftype": "all F32"}
SETTINGS = {"default_generation_settings": {"n_ctx": 1024}, "total_slots": 2, "model_ftype": "all F32"}
METRICS = """# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total 49
llamacpp:requests_processing 0
llamacpp:requests_deferred 0
llamacpp:tokens_predicted_total 7
"""
OFF = {"error": {"code": 501, "message": "This server does not support it", "type": "not_supported_error"}}
SCORES = [{"id": 59, "token": ";", "logprob": -5.5}, {"id": 85, "token": "U", "logprob": -4.75}]
TIMINGS = {"cache_n": 49, "prompt_n": 1, "predicted_n": 2}
END = {"stop": True, "stop_type": "limit", "tokens_evaluated": 50, "tokens_cached": 51, "timings": TIMINGS}
WHOLE = {"content": ";U", "tokens": [59, 85], "completion_probabilities": SCORES, **END}
EVENTS = [
    {"content": ";", "tokens": [59], "stop": False, "completion_probabilities": SCORES[:1]},
    {"content": "U", "tokens": [85], "stop": False, "completion_probabilities": SCORES[1:]},
    {"content": "", "tokens": [], **END},
]
ASK = Generate(request="a", tokens=(40, 41), max_new_tokens=2, temperature=1.0, seed=7)


def answers(**changed: Told) -> dict[str, Told]:
    """What a server says, by path; `changed` by the last word of the path."""
    card = {"id": "tiny", "owned_by": "llamacpp", "tags": TAGS, "meta": META}
    usual = {
        "/props": (200, {**SETTINGS, "build_info": "b0-unknown"}),
        "/v1/models": (200, {"data": [card]}),
        "/slots": (200, [{"id": 0, "is_processing": False}, {"id": 1, "is_processing": False}]),
        "/metrics": (200, METRICS),
        "/slots/0?action=none": (400, {"error": {"code": 400, "message": "Invalid action"}}),
        "/slots/0?action=erase": (200, {"id_slot": 0, "n_erased": 51}),
        "/slots/1?action=erase": (200, {"id_slot": 1, "n_erased": 0}),
        "/completion": (200, WHOLE),
    }
    for name, told in changed.items():
        usual |= {path: told for path in usual if path.endswith(name)}
    return usual


class Face(BaseHTTPRequestHandler):
    """Says what it was given; `asked` keeps what came by POST."""

    protocol_version = "HTTP/1.1"
    said: dict[str, Told]
    asked: list[tuple[str, Any]]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        status, body = self.said.get(self.path, (404, {"error": {"code": 404, "message": "File Not Found"}}))
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_POST(self) -> None:
        self.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        self.do_GET()


@contextmanager
def served(said: dict[str, Told]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """The address of such a server, and what it was asked."""
    asked: list[tuple[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("One", (Face,), {"said": said, "asked": asked}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}?dialect=llama.cpp&settle=0.3", asked
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def session(said: dict[str, Told]) -> Iterator[tuple[Session, list[tuple[str, Any]]]]:
    with served(said) as (address, asked):
        engine = connect(address)
        fixed = engine.describe().axes.fixed
        assert fixed is not None
        yield engine.open(fixed), asked


def manifest_of(**changed: Told) -> Manifest:
    with served(answers(**changed)) as (address, _):
        return connect(address).describe()


def value_of(reply: AnyReply) -> Generated:
    assert isinstance(reply, Ok), reply
    assert isinstance(reply.value, Generated)
    return reply.value


def test_what_it_tells_is_claimed() -> None:
    """Limits and vocabulary are the server's own, the chunk and the cache's type those of its tags."""
    manifest = manifest_of()
    config, service = manifest.axes.fixed, manifest.service

    assert ("llama.cpp", "2026.10.11549") == (manifest.name, manifest.version)
    assert ("generate", "together", "settle", "flush") == manifest.ops
    assert {"seeded", "scores", "counts_cached", "keeps_last"} == set(manifest.promises)
    assert config is not None
    assert service is not None
    assert (1, 128, 1024) == (config.page_size, config.chunk_tokens, config.context_tokens)
    assert ((16, 254), 2048) == (service.token_ids, service.tokens_max)
    assert (1e-4, 0.02) == (service.logprob_near, service.logprob_far)


def test_without_tags_nothing_is_made_up() -> None:
    """A cache whose type is not told is not taken for float32, and a build's own number is the version."""
    card = {"id": "tiny", "owned_by": "llamacpp", "tags": [""], "meta": META}
    manifest = manifest_of(models=(200, {"data": [card]}), props=(200, {**SETTINGS, "build_info": "b7000-abc"}))

    assert "b7000-abc" == manifest.version
    assert manifest.service is not None
    assert (0.05, 0.5) == (manifest.service.logprob_near, manifest.service.logprob_far)
    assert manifest.axes.fixed is not None
    assert 1024 == manifest.axes.fixed.chunk_tokens


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({"none": (501, OFF)}, {"flush"}),
        ({"slots": (501, OFF)}, {"flush"}),
        ({"metrics": (501, OFF)}, {"settle"}),
    ],
)
def test_what_a_server_was_not_started_with_is_not_claimed(changed: dict[str, Told], lacking: set[str]) -> None:
    """Erasing slots and counters are options of the server."""
    assert {"generate", "together", "settle", "flush"} - lacking == set(manifest_of(**changed).ops)


@pytest.mark.parametrize("answer", [WHOLE, "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS)])
def test_an_answer_reads_the_same_whole_and_as_a_stream(answer: Any) -> None:
    """What was found in the cache is `cache_n`; `tokens_cached` is what the slot holds at the end."""
    with session(answers(completion=(200, answer))) as (opened, asked):
        value = value_of(opened.apply(ASK))

    expected = Generated(
        finish="length", tokens=(59, 85), text=";U", logprobs=(-5.5, -4.75), prompt_tokens=50, cached_tokens=49
    )
    assert expected == value
    path, body = asked[-1]
    assert "/completion" == path
    wanted = {"prompt": [40, 41], "n_predict": 2, "temperature": 1.0, "seed": 7, "samplers": ["temperature"]}
    assert wanted.items() <= body.items()


def test_a_token_without_a_score_is_seen() -> None:
    """What the server leaves out is not filled in: 2 tokens, 1 log probability."""
    with session(answers(completion=(200, {**WHOLE, "completion_probabilities": SCORES[:1]}))) as (opened, _):
        value = value_of(opened.apply(ASK))

    assert ((59, 85), (-5.5,)) == (value.tokens, value.logprobs)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ((400, {"error": {"code": 400, "message": "exceeds the context"}}), Refused("HTTP 400: exceeds the context")),
        ((200, {"content": "", "stop": True}), Unknown("an answer that reads KeyError('tokens')")),
        ((200, EVENTS[0]), None),
        ((200, {**WHOLE, "completion_probabilities": [{"logprob": None}]}), Unknown("a log probability of None")),
    ],
)
def test_what_is_no_answer_is_told(told: Told, expected: AnyReply | None) -> None:
    """An error is definite; what cannot be read, or has no end, is never a pass."""
    with session(answers(completion=told)) as (opened, _):
        reply = opened.apply(ASK)

    assert isinstance(reply, Unknown) if expected is None else expected == reply


def test_a_flush_erases_every_slot() -> None:
    """Each slot in turn, at the start of a session and when asked; the first refusal is the answer."""
    said = answers()
    with session(said) as (opened, asked):
        assert Ok(Done()) == opened.apply(Flush())
        erased = [path for path, _ in asked if path.endswith("=erase")]
        said["/slots/1?action=erase"] = (400, {"error": {"message": "no such slot"}})
        reply = opened.apply(Flush())

    assert ["/slots/0?action=erase", "/slots/1?action=erase"] * 2 == erased
    assert isinstance(reply, Refused)
    assert "no such slot" in reply.why


def test_it_is_at_rest_when_no_request_is() -> None:
    """Requests under way have the names that other servers give them, and a settle waits for their end."""
    said = answers()
    with session(said) as (opened, _):
        counters = opened.snapshot().ranks[0].counters
        said["/metrics"] = (200, METRICS.replace("deferred 0", "deferred 2"))
        reply = opened.apply(Settle())

    levels = {"num_running_reqs": 0.0, "num_queue_reqs": 0.0}
    assert {"prompt_tokens_cached_total": 49.0, "generation_tokens_total": 7.0, **levels} == counters
    assert isinstance(reply, Unknown)
    assert "num_queue_reqs = 2" in reply.why


def test_no_request_is_ended_by_its_id() -> None:
    """It has no such endpoint, so it is not asked."""
    with session(answers()) as (opened, _):
        assert isinstance(opened.apply(Abort("a")), Unsupported)


def test_no_request_has_a_salt() -> None:
    """It keeps none apart, so a salt is not passed over in silence, and nobody can promise it."""
    with session(answers()) as (opened, _):
        reply = opened.apply(structs.replace(ASK, salt="blue"))
    with pytest.raises(UserError, match=r"promises=salts; dialect llama\.cpp has no salt in a request: leave it out"):
        connect("http://127.0.0.1:1?dialect=llama.cpp&promises=salts")

    assert Unsupported("nobody has promised that salts are heeded") == reply


def test_what_is_not_claimed_is_not_tried() -> None:
    """`kvshard smoke` tries requests together, and none of them beside an abort, which nobody claims."""
    with served(answers()) as (address, _):
        engine = connect(address)
        tried = {each.claim: each.verdict for each in smoke(engine, engine.describe())}

    assert (Verdict.PASS, Verdict.PASS, None) == (tried["op.generate"], tried["op.together"], tried.get("op.abort"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("llama.cpp*.toml")), ids=lambda path: path.stem)
def test_what_it_is_known_to_fail_can_be_read(path: Path) -> None:
    """Each entry has its page and a trace of its case, and applies to the pinned version."""
    lock = (ROOT / "ci" / "llamacpp.lock").read_text().split()
    assert "xllamacpp==2026.10.11549" in lock
    assert 1 == len(known_failures(manifest_of(), path).entries)


@pytest.mark.parametrize("path", [ADAPTER, SLOTS])
def test_the_page_counts_the_adapter(path: str) -> None:
    """docs/engines.md says how many lines of code the whole adapter is, and how many more its slots as a tier."""
    text = (ROOT / path).read_text()
    lines = tidy.code_lines(tidy.Source(path, path.removesuffix(".py").replace("/", "."), text, ast.parse(text)))

    assert f"`{path}`, {lines} lines of code" in (ROOT / "docs" / "engines.md").read_text()

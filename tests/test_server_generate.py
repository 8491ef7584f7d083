from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ci.register import register_cpu_ci
from kvshard_ref.server.api import ABORT, STOP, Ask, RefusedAsk, Step
from tests.server_face_rig import EOS, FakeBackend, post, refusal, says, scored, steps, streamed

register_cpu_ci(est_time=10, stage="commit")

FEW = {"max_new_tokens": 5}


def test_an_answer() -> None:
    """Text, tokens and what is told beside them; the backend got the prompt."""
    backend = FakeBackend()
    answer = post(backend, "/generate", {"text": "ab", "rid": "r", "sampling_params": FEW})
    assert 0 < answer["meta_info"].pop("e2e_latency") < 60
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": 5},
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "cached_tokens": 0,
        "cached_tokens_details": {"device": 0, "host": 0},
    }
    assert {"text": "hello", "output_ids": list(b"hello"), "meta_info": meta} == answer
    assert [Ask("r", (97, 98), 5, temperature=1.0, stop_tokens=(EOS,))] == backend.asks
    assert [] == backend.ended_early


def test_log_probabilities() -> None:
    """Of the prompt from a start on and of the answer, with the likeliest; the first prompt token has none."""
    body = {
        "input_ids": [97, 98],
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 2},
    }
    meta = post(FakeBackend(scored), "/generate", body)["meta_info"]
    top = [[-0.25, 122, None], [-0.5, 121, None]]
    assert {
        "input_token_logprobs": [[None, 97, None], [-0.98, 98, None]],
        "input_top_logprobs": [None, top],
        "output_token_logprobs": [[-1.04, 104, None], [-1.05, 105, None]],
        "output_top_logprobs": [top, top],
        "cached_tokens": 3,
        "cached_tokens_details": {"device": 2, "host": 1},
    } == {name: meta[name] for name in meta if name.endswith("logprobs") or name.startswith("cached")}
    meta = post(FakeBackend(scored), "/generate", {**body, "return_text_in_logprobs": True})["meta_info"]
    assert ([-1.04, 104, "h"], [-0.5, 121, "y"]) == (
        meta["output_token_logprobs"][0],
        meta["output_top_logprobs"][0][1],
    )
    meta = post(FakeBackend(scored), "/generate", {**body, "top_logprobs_num": 0, "logprob_start_len": -1})["meta_info"]
    assert ([], False) == (meta["input_token_logprobs"], "output_top_logprobs" in meta)


def test_a_batch_keeps_its_order() -> None:
    """Answers stand where their prompts stand, whichever is ready first; a list of one prompt has a list of one."""

    def script(ask: Ask) -> list[Step]:
        return steps(ask.rid, ask.tokens * (3 if ask.tokens == (97,) else 1), finished="length")

    body = {"text": ["a", "b", "c"], "rid": "r", "sampling_params": FEW}
    answers = post(FakeBackend(script), "/generate", body)
    assert [("aaa", "r_0"), ("b", "r_1"), ("c", "r_2")] == [(each["text"], each["meta_info"]["id"]) for each in answers]
    assert ["b"] == [
        each["text"] for each in post(FakeBackend(script), "/generate", {"input_ids": [[98]], "sampling_params": FEW})
    ]


def test_a_stream_is_cumulative() -> None:
    """Every event has all of the text and tokens so far; the last one says why it is over. Characters stay whole."""
    events = streamed(FakeBackend(says("é!")), "/generate", {"text": "a", "sampling_params": FEW})
    assert [("", [0xC3]), ("é", [0xC3, 0xA9]), ("é!", [0xC3, 0xA9, 33])] == [
        (each["text"], each["output_ids"]) for each in events
    ]
    assert [None, None, {"type": "length", "length": 3}] == [each["meta_info"]["finish_reason"] for each in events]
    assert [1, 2, 3] == [each["meta_info"]["completion_tokens"] for each in events]


def test_a_step_without_tokens_is_no_event() -> None:
    """Such as the first one, that tells what was cached; what it told is in the next event."""
    backend = FakeBackend(lambda ask: [Step(ask.rid, cached_device=16), *steps(ask.rid, b"ab", finished="length")])
    events = streamed(backend, "/generate", {"text": "a", "sampling_params": FEW})
    assert [("a", 16), ("ab", 16)] == [(each["text"], each["meta_info"]["cached_tokens"]) for each in events]


def test_a_stream_of_a_batch_tells_the_index() -> None:
    """Each prompt's last event has its whole answer."""
    events = streamed(
        FakeBackend(lambda ask: steps(ask.rid, ask.tokens, finished="length")),
        "/generate",
        {"text": ["abc", "d"], "sampling_params": FEW},
    )
    assert {0: "abc", 1: "d"} == {each["index"]: each["text"] for each in events}
    assert 4 == len(events)


def test_a_stop_string_ends_the_ask() -> None:
    """It is cut, a stream never shows its beginning, and the ranks are not left to go on."""
    body = {"text": "a", "rid": "r", "sampling_params": {**FEW, "stop": "ll"}}
    backend = FakeBackend()
    answer = post(backend, "/generate", body)
    assert ("he", list(b"hell"), {"type": "stop", "matched": "ll"}) == (
        answer["text"],
        answer["output_ids"],
        answer["meta_info"]["finish_reason"],
    )
    assert ["r"] == backend.ended_early
    assert ["h", "he", "he", "he"] == [each["text"] for each in streamed(FakeBackend(), "/generate", body)]


def test_the_models_end() -> None:
    """The end token stops, is the last of output_ids and not in the text."""
    answer = post(
        FakeBackend(lambda ask: steps(ask.rid, [97, EOS], finished=STOP)),
        "/generate",
        {"text": "a", "sampling_params": FEW},
    )
    assert ("a", [97, EOS], {"type": "stop", "matched": EOS}) == (
        answer["text"],
        answer["output_ids"],
        answer["meta_info"]["finish_reason"],
    )


def test_an_aborted_answer_is_no_error() -> None:
    """What came until somebody ended it is the answer."""
    answer = post(
        FakeBackend(lambda ask: steps(ask.rid, [97], finished=ABORT)),
        "/generate",
        {"text": "a", "sampling_params": FEW},
    )
    assert ("a", "abort") == (answer["text"], answer["meta_info"]["finish_reason"]["type"])


def test_a_routers_body_is_taken() -> None:
    """What sglang's router adds is known or passed over; null is as if left out."""
    added = {
        "log_metrics": True,
        "no_logs": False,
        "background": False,
        "return_bytes": False,
        "return_entropy": False,
        "model": None,
        "lora_path": None,
        "session_params": None,
        "return_hidden_states": False,
        "custom_logit_processor": None,
        "rid": None,
        "extra_key": None,
        "data_parallel_rank": None,
        "image_data": None,
        "input_embeds": None,
        "top_logprobs_num": None,
        "input_ids": None,
        "stream": False,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": None,
        "bootstrap_room": 1 << 62,
    }
    params = {
        **FEW,
        "sampling_seed": 3,
        "n": 1,
        "top_p": 1.0,
        "top_k": -1,
        "stop": None,
        "min_new_tokens": 0,
        "frequency_penalty": 0.0,
    }
    backend = FakeBackend()
    assert "hello" == post(backend, "/generate", {"text": "a", "sampling_params": params, **added})["text"]
    assert 3 == backend.asks[0].seed


WRONG: dict[str, tuple[Any, str]] = {
    "no prompt": ({}, "expected one of text and input_ids, none is given"),
    "two prompts": ({"text": "a", "input_ids": [1]}, "expected one of text and input_ids, both are given"),
    "empty text": ({"text": ""}, "the prompt has 0 tokens, expected at least one"),
    "empty tokens": (
        {"input_ids": [[1], []], "sampling_params": FEW},
        "the prompt has 0 tokens, expected at least one",
    ),
    "empty batch": ({"input_ids": []}, "the batch is [], expected at least one prompt"),
    "token above": ({"input_ids": [1, 260]}, "the prompt has token 260, expected 0 to 259, the vocabulary"),
    "token below": (
        {"input_ids": [[3], [-1]], "sampling_params": FEW},
        "the prompt has token -1, expected 0 to 259, the vocabulary",
    ),
    "number as text": ({"text": 5}, "text is 5: Input should be a valid string or Input should be a valid list"),
    "text as token": (
        {"input_ids": ["a"]},
        "input_ids.0 is 'a': Input should be a valid integer or Input should be a valid list",
    ),
    "true as token": (
        {"input_ids": [True]},
        "input_ids.0 is True: Input should be a valid integer or Input should be a valid list",
    ),
    "half a pair": (
        {"text": "\ud800"},
        "text is '\\ud800': expected Unicode text, character 0 is half of a surrogate pair",
    ),
    "params no object": ({"text": "a", "sampling_params": 3}, "sampling_params is 3: Input should be "),
    "negative length": (
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        "sampling_params.max_new_tokens is -1: Input should be greater than or equal to 0",
    ),
    "length as text": (
        {"text": "a", "sampling_params": {"max_new_tokens": "5"}},
        "sampling_params.max_new_tokens is '5': Input should be a valid integer",
    ),
    "too long": (
        {"text": "a" * 60},
        "prompt of 60 tokens + 128 new ones (max_new_tokens, max_tokens) = 188, expected at most 64, the context",
    ),
    "cold": (
        {"text": "a", "sampling_params": {"temperature": -0.5}},
        "sampling_params.temperature is -0.5: Input should be greater than or equal to 0",
    ),
    "extra_key": ({"text": "a", "extra_key": "blue"}, "extra_key is 'blue': Input should be None"),
    "cache_salt": ({"text": "a", "cache_salt": ""}, "cache_salt is '': Input should be None"),
    "top_p": (
        {"text": "a", "sampling_params": {"top_p": 0.9}},
        "sampling_params: top_p is 0.9: this server does not have it, expected 1 or nothing",
    ),
    "n": (
        {"text": "a", "sampling_params": {"n": 2}},
        "sampling_params: n is 2: this server does not have it, expected 1 or nothing",
    ),
    "empty stop": (
        {"text": "a", "sampling_params": {**FEW, "stop": ["x", ""]}},
        "stop is ['x', ''], expected strings that are not empty",
    ),
    "stop token": (
        {"text": "a", "sampling_params": {**FEW, "stop_token_ids": [999]}},
        "stop_token_ids has token 999, expected 0 to 259, the vocabulary",
    ),
    "seed": (
        {"text": "a", "sampling_params": {"sampling_seed": -1}},
        "sampling_params.sampling_seed is -1: Input should be greater than or equal to 0",
    ),
    "rooms": (
        {"text": ["a", "b"], "bootstrap_room": [1, 2, 3], "sampling_params": FEW},
        "bootstrap_room is [1, 2, 3] with 3 values, expected 2, one for each prompt",
    ),
    "hosts": (
        {"text": ["a", "b"], "bootstrap_host": ["h"], "sampling_params": FEW},
        "bootstrap_host is ['h'] with 1 values, expected 2, one for each prompt",
    ),
    "params of a batch": ({"text": ["a", "b"], "sampling_params": [FEW]}, "sampling_params is [SamplingParams("),
    "the same id": (
        {"text": ["a", "b"], "rid": ["r", "r"], "sampling_params": FEW},
        "rid is ['r', 'r'], expected ids that are not empty and differ",
    ),
    "start": (
        {"text": "ab", "logprob_start_len": 3, "sampling_params": FEW},
        "logprob_start_len is 3, expected -1 to 2, the length of the prompt",
    ),
    "tops": (
        {"text": "ab", "top_logprobs_num": 261, "sampling_params": FEW},
        "top_logprobs_num is 261, expected 0 to 260, the vocabulary",
    ),
    "stream": ({"text": "a", "stream": "yes"}, "stream is 'yes': Input should be a valid boolean"),
    "room": ({"text": "a", "bootstrap_room": "x"}, "bootstrap_room is 'x': Input should be a valid integer"),
    "no object": ([1], "the body is [1]: Input should be "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_body(wrong: str) -> None:
    """400 with the value, what was expected and the field; the ranks see nothing of it."""
    body, why = WRONG[wrong]
    backend = FakeBackend()
    status, said = refusal(backend, "/generate", body)
    assert (400, why) == (status, said[: len(why)])
    assert [] == backend.asks


def refused(ask: Ask) -> list[Step | RefusedAsk | None]:
    return [RefusedAsk("the pages are all in use", 429)]


def failed(ask: Ask) -> list[Step | RefusedAsk | None]:
    return [Step(ask.rid, finished=ABORT, error="the prefill worker is gone", status=502)]


def failed_later(ask: Ask) -> list[Step | RefusedAsk | None]:
    return [Step(ask.rid, (97,)), *failed(ask)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "status"), [(refused, 429), (failed, 502)])
def test_a_failure_before_the_first_token(script: Callable[[Ask], Any], status: int, stream: bool) -> None:  # noqa: FBT001  # parametrized
    """The status says whose fault it was, also for a stream."""
    code, said = refusal(FakeBackend(script), "/generate", {"text": "a", "stream": stream, "sampling_params": FEW})
    assert status == code
    assert said in {"the pages are all in use", "the prefill worker is gone"}


def test_a_later_failure() -> None:
    """Without a stream it still has its status; in a stream it is an event."""
    body = {"text": "a", "sampling_params": FEW}
    assert (502, "the prefill worker is gone") == refusal(FakeBackend(failed_later), "/generate", body)
    first, last = streamed(FakeBackend(failed_later), "/generate", body)
    assert ("a", "the prefill worker is gone", 502) == (first["text"], last["error"]["message"], last["error"]["code"])


def test_one_of_a_batch_fails() -> None:
    """Without a stream the others are ended; in a stream they go on."""

    def script(ask: Ask) -> list[Any]:
        return (
            failed_later(ask)
            if ask.rid == "r_1"
            else [*steps(ask.rid, b"abcde"), *([None] if wait else steps(ask.rid, b"f", finished="length"))]
        )

    body, wait = {"text": ["a", "b"], "rid": "r", "sampling_params": FEW}, True
    backend = FakeBackend(script)
    assert 502 == refusal(backend, "/generate", body)[0]
    assert ["r_0"] == backend.ended_early
    wait = False
    events = streamed(FakeBackend(script), "/generate", body)
    assert [1] == [each["index"] for each in events if "error" in each]
    assert "abcdef" == events[-1]["text"]


def test_an_answer_that_just_ends() -> None:
    """Steps without a finished one are a fault of the worker."""
    answer = refusal(
        FakeBackend(lambda ask: [Step(ask.rid, (97,))]), "/generate", {"text": "a", "sampling_params": FEW}
    )
    assert (500, "the worker ended the answer without a reason") == answer


def test_a_broken_worker() -> None:
    """503 with the reason, and nothing is asked."""
    backend = FakeBackend(why_broken="rank 1 is gone")
    assert (503, "rank 1 is gone") == refusal(backend, "/generate", {"text": "a", "sampling_params": FEW})
    assert [] == backend.asks

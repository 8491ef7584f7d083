from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ci.register import register_cpu_ci
from kvshard_ref.server.api import STOP, Ask, Step
from tests.server_face_rig import EOS, INFO, FakeBackend, post, refusal, says, scored, steps, streamed

register_cpu_ci(est_time=10, stage="commit")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def echoed(ask: Ask) -> list[Step]:
    return steps(ask.rid, ask.tokens, finished="length", cached_device=1)


def test_a_completion() -> None:
    """One choice with the usage, cached tokens in it; the ask has what the body says."""
    backend = FakeBackend(echoed)
    body = {
        "model": "mine",
        "prompt": "abc",
        "max_tokens": 7,
        "temperature": 0,
        "seed": 5,
        "ignore_eos": True,
        "stop": ["x"],
        "rid": "r",
    }
    answer = post(backend, COMPLETIONS, body)
    assert ("text_completion", "mine") == (answer["object"], answer["model"])
    assert [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "matched_stop": None}] == answer[
        "choices"
    ]
    assert {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    } == answer["usage"]
    assert [Ask("r", tuple(b"abc"), 7, temperature=0.0, seed=5)] == backend.asks


def test_defaults() -> None:
    """16 tokens for a completion, 128 for a chat; the model's own name."""
    backend = FakeBackend(says("x"))
    assert "tiny" == post(backend, COMPLETIONS, {"prompt": "a"})["model"]
    body = {"messages": [{"role": "user", "content": "a"}]}
    status, why = refusal(backend, CHAT, body)
    assert (400, "prompt of 18 tokens + 128 new ones") == (status, why[:34])
    assert [(16, 1.0, (EOS,))] == [(each.max_new_tokens, each.temperature, each.stop_tokens) for each in backend.asks]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"]), (["ab"], ["ab"])],
)
def test_four_forms_of_a_prompt(prompt: Any, texts: list[str]) -> None:
    """A string, strings, tokens, lists of tokens: a choice for each prompt, and the usage of all."""
    answer = post(FakeBackend(echoed), COMPLETIONS, {"prompt": prompt})
    assert list(enumerate(texts)) == [(each["index"], each["text"]) for each in answer["choices"]]
    assert (sum(map(len, texts)), len(texts)) == (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored(max_tokens: int) -> None:
    """Echo with log probabilities: all prompt tokens, the first without one, then the answer's; offsets in the text."""
    backend = FakeBackend(scored)
    body = {"prompt": [[97, 0xC3, 0xA9, 98]], "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
    [choice] = post(backend, COMPLETIONS, body)["choices"]
    logprobs = choice["logprobs"]
    assert "aéb" + "h" * max_tokens == choice["text"]
    assert ["a", "bytes:\\xc3", "bytes:\\xa9", "b"] + ["h"] * max_tokens == logprobs["tokens"]
    assert [None, -1.95, -1.69, -0.98] + [-1.04] * max_tokens == logprobs["token_logprobs"]
    assert [0, 1, 1, 2] + [3] * max_tokens == logprobs["text_offset"]
    assert [None, {"z": -0.25, "bytes:\\xc3": -1.95}] == logprobs["top_logprobs"][:2]
    [ask] = backend.asks
    assert (0, 1, True, max_tokens) == (ask.logprob_start, ask.top_logprobs, ask.logprobs, ask.max_new_tokens)


def test_a_score_as_a_benchmark_reads_it() -> None:
    """The usual evaluation sums the continuation's log probabilities, and asks whether each was the likeliest."""
    body = {"prompt": [[97, 122, 121]], "max_tokens": 1, "echo": True, "logprobs": 1}
    logprobs = post(FakeBackend(scored), COMPLETIONS, body)["choices"][0]["logprobs"]
    context = 1
    values, tops = logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1]
    assert (-0.75, [True, False]) == (
        sum(values),
        [value == max(top.values()) for value, top in zip(values, tops, strict=True)],
    )


def test_no_log_probabilities_are_asked_for_an_echo() -> None:
    """Echo alone gives the text."""
    backend = FakeBackend(scored)
    [choice] = post(backend, COMPLETIONS, {"prompt": "ab", "echo": True})["choices"]
    assert ("abhi", None, -1) == (choice["text"], choice["logprobs"], backend.asks[0].logprob_start)


def test_zero_log_probabilities_are_the_tokens_own() -> None:
    """`logprobs: 0` asks for no others."""
    logprobs = post(FakeBackend(scored), COMPLETIONS, {"prompt": "ab", "logprobs": 0})["choices"][0]["logprobs"]
    assert [{"h": -1.04}, {"i": -1.05}] == logprobs["top_logprobs"]


def test_a_stream_of_completions() -> None:
    """Each event has what is new; together they are the whole answer; the usage comes last if asked for."""
    body = {"prompt": ["ab", "é"], "echo": True, "logprobs": 1, "stream_options": {"include_usage": True}}
    *events, last = streamed(FakeBackend(scored), COMPLETIONS, body)
    whole = post(FakeBackend(scored), COMPLETIONS, body)
    for choice in whole["choices"]:
        mine = [each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]]
        assert choice["text"] == "".join(each["text"] for each in mine)
        for name, values in choice["logprobs"].items():
            assert values == [value for each in mine for value in each["logprobs"][name]]
        assert [None] * (len(mine) - 1) + ["length"] == [each["finish_reason"] for each in mine]
    assert ([], whole["usage"]) == (last["choices"], last["usage"])
    assert 1 == len({each["id"] for each in [*events, last]})


def test_a_stream_waits_for_whole_characters_and_stop_strings() -> None:
    """What is sent is never taken back."""
    events = streamed(FakeBackend(says("é!?x")), COMPLETIONS, {"prompt": "a", "stop": "!?"})
    assert ["", "é", "", ""] == [each["choices"][0]["text"] for each in events]
    assert ("stop", "!?") == (events[-1]["choices"][0]["finish_reason"], events[-1]["choices"][0]["matched_stop"])


def test_a_chat() -> None:
    """One line per role, then the assistant's; content may be in parts."""
    backend = FakeBackend(lambda ask: steps(ask.rid, [*b"hi", EOS], finished=STOP))
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = post(backend, CHAT, {"messages": messages, "max_tokens": 99, "max_completion_tokens": 4})
    assert b"system: be\nuser: ab\nassistant:" == bytes(backend.asks[0].tokens)
    assert 4 == backend.asks[0].max_new_tokens
    expected = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": EOS,
    }
    assert ([expected], "chat.completion", 3) == (
        answer["choices"],
        answer["object"],
        answer["usage"]["completion_tokens"],
    )


def test_log_probabilities_of_a_chat() -> None:
    """Each token with its bytes and the likeliest."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    content = post(FakeBackend(scored), CHAT, body)["choices"][0]["logprobs"]["content"]
    top = [{"token": "z", "bytes": [122], "logprob": -0.25}]
    assert [
        {"token": "h", "bytes": [104], "logprob": -1.04, "top_logprobs": top},
        {"token": "i", "bytes": [105], "logprob": -1.05, "top_logprobs": top},
    ] == content


def test_a_stream_of_a_chat() -> None:
    """The first event names the role; the usage comes last if asked for."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_completion_tokens": 2,
        "stream_options": {"include_usage": True},
    }
    first, second, last = streamed(FakeBackend(scored), CHAT, body)
    assert [{"role": "assistant", "content": "h"}, {"content": "i"}] == [
        each["choices"][0]["delta"] for each in (first, second)
    ]
    assert [None, "length"] == [each["choices"][0]["finish_reason"] for each in (first, second)]
    assert ("chat.completion.chunk", [], 3) == (
        last["object"],
        last["choices"],
        last["usage"]["prompt_tokens_details"]["cached_tokens"],
    )
    assert 2 == len(streamed(FakeBackend(scored), CHAT, {**body, "stream_options": None}))


def test_a_routers_body_is_taken() -> None:
    """The bootstrap's fields pass, what else is added is passed over."""
    added = {
        "separate_reasoning": True,
        "stream_reasoning": True,
        "skip_special_tokens": True,
        "bootstrap_host": "h",
        "bootstrap_port": 4,
        "bootstrap_room": 9,
        "tools": None,
        "no_stop_trim": False,
    }
    backend = FakeBackend(says("x"))
    post(
        backend,
        CHAT,
        {"messages": [{"role": "user", "content": "a", "name": "x"}], "max_completion_tokens": 4, **added},
    )
    post(
        backend,
        COMPLETIONS,
        {
            "prompt": ["a", "b"],
            **added,
            "bootstrap_host": ["h", "h"],
            "bootstrap_port": [4, 4],
            "bootstrap_room": [9, 8],
        },
    )
    assert 3 == len(backend.asks)


WRONG: dict[str, tuple[str, Any, str]] = {
    "no prompt": (COMPLETIONS, {}, "prompt is missing: Field required"),
    "empty prompt": (COMPLETIONS, {"prompt": ""}, "the prompt has 0 tokens, expected at least one"),
    "no prompts": (COMPLETIONS, {"prompt": []}, "the batch is [], expected at least one prompt"),
    "mixed prompts": (
        COMPLETIONS,
        {"prompt": ["a", 1]},
        "prompt is ['a', 1]: Input should be a valid string; prompt.1 is 1: Input should be a valid string",
    ),
    "length": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": -1},
        "max_tokens is -1: Input should be greater than or equal to 0",
    ),
    "many": (
        COMPLETIONS,
        {"prompt": "a", "n": 3},
        "the body: n is 3: this server does not have it, expected 1 or nothing",
    ),
    "long": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 64},
        "prompt of 1 tokens + 64 new ones (max_new_tokens, max_tokens) = 65, expected at most 64, ",
    ),
    "rooms": (
        COMPLETIONS,
        {"prompt": ["a", "b"], "bootstrap_room": [1]},
        "bootstrap_room is [1] with 1 values, expected 2, one for each prompt",
    ),
    "no messages": (CHAT, {"messages": []}, "messages is []: List should have at least 1 item"),
    "no role": (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role is missing: Field required"),
    "logprobs": (
        CHAT,
        {"messages": [{"role": "user"}], "logprobs": 3},
        "logprobs is 3: Input should be a valid boolean",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_body(wrong: str) -> None:
    """400 with the value, what was expected and the field."""
    path, body, why = WRONG[wrong]
    status, said = refusal(FakeBackend(), path, body)
    assert (400, why) == (status, said[: len(why)])


def test_a_decode_worker_scores_no_prompt() -> None:
    """It says so instead of leaving the scores out."""
    backend = FakeBackend(info=replace(INFO, mode="decode"))
    expected = (400, "echo is true with logprobs 1: a decode worker does not compute the prompt")
    assert expected == refusal(backend, COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1})


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "u"}], "max_tokens": 1})]
)
def test_a_broken_worker(path: str, body: Any) -> None:
    """503 with the reason."""
    assert (503, "rank 1 is gone") == refusal(FakeBackend(why_broken="rank 1 is gone"), path, body)

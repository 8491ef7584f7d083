from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ci.register import register_cpu_ci
from kvshard_ref.server.api import ABORT, LENGTH, STOP, Ask, Logprob, RefusedAsk, Step
from kvshard_ref.server.dialect import Answer, Desk, GenerateBody, Wanted, meta_info, shown
from tests.server_face_rig import EOS, INFO, steps, tokenizer

register_cpu_ci(est_time=10, stage="commit")


def asks(mode: str = "null", **body: Any) -> list[Ask]:
    desk = Desk(replace(INFO, mode=mode), tokenizer())
    return [each.ask for each in desk.generate(GenerateBody.model_validate(body))]


def answer(*taken: Step, stops: tuple[str, ...] = (), **ask: Any) -> Answer:
    made = Answer(Wanted(Ask("r", (1, 2, 3), 9, **ask), stops), tokenizer())
    for step in taken:
        made.add(step)
    return made


def test_defaults_are_sglangs() -> None:
    """128 tokens at temperature 1, seed 0, the model's own end, no log probabilities, an id of its own."""
    info = replace(INFO, model={**INFO.model, "context_length": 129})
    [wanted], [again] = [Desk(info, tokenizer()).generate(GenerateBody(input_ids=[5])) for _ in range(2)]
    assert Wanted(Ask(wanted.ask.rid, (5,), 128, temperature=1.0, stop_tokens=(EOS,))) == wanted
    assert wanted.ask.rid != again.ask.rid


def test_every_field_arrives() -> None:
    """What a body says is what the ask says."""
    params = {
        "max_new_tokens": 3,
        "temperature": 0.5,
        "sampling_seed": 7,
        "stop_token_ids": [59],
        "ignore_eos": True,
        "stop": ["x"],
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    body = GenerateBody.model_validate(
        {
            "text": "é",
            "rid": "mine",
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": 1,
            "top_logprobs_num": 2,
            "bootstrap_host": "h",
            "bootstrap_port": 9,
            "bootstrap_room": 1 << 62,
        }
    )
    expected = Ask(
        "mine",
        (0xC3, 0xA9),
        3,
        temperature=0.5,
        seed=7,
        stop_tokens=(59,),
        logprobs=True,
        logprob_start=1,
        top_logprobs=2,
        room=1 << 62,
    )
    wanted = Desk(replace(INFO, mode="prefill"), tokenizer()).generate(body)
    assert [Wanted(expected, ("x",), keep_stop=True, special=True)] == wanted


def test_log_probabilities_need_return_logprob() -> None:
    """Without it neither a start nor tops are asked for."""
    [ask] = asks(input_ids=[5], logprob_start_len=0, top_logprobs_num=3, sampling_params={"max_new_tokens": 1})
    assert (False, -1, 0) == (ask.logprobs, ask.logprob_start, ask.top_logprobs)


def test_a_start_at_the_end_is_none() -> None:
    """No prompt token is left to score."""
    few = {"max_new_tokens": 1}
    made = [
        asks(input_ids=[5, 6], return_logprob=True, logprob_start_len=start, sampling_params=few) for start in (1, 2)
    ]
    assert [1, -1] == [ask.logprob_start for [ask] in made]


def test_a_prompt_is_scored_by_the_prefill_worker_only() -> None:
    """A router joins the scores of both halves, and a decode worker never computes the prompt."""
    pair = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 1, "sampling_params": {"max_new_tokens": 1}}
    made = [
        asks(mode, text="a", return_logprob=True, logprob_start_len=0, top_logprobs_num=2, **pair)
        for mode in ("prefill", "decode")
    ]
    assert [(True, 0, 2), (True, -1, 2)] == [(ask.logprobs, ask.logprob_start, ask.top_logprobs) for [ask] in made]


def test_a_batch_has_lists() -> None:
    """One value for each prompt, or one for all; a single id and a single room are counted up."""
    made = asks(
        "prefill",
        text=["a", "b"],
        rid="r",
        bootstrap_room=[7, 5],
        bootstrap_host=["h", "h"],
        return_logprob=[True, False],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
    )
    assert [("r_0", 7, 1, True, ""), ("r_1", 5, 2, False, "")] == [
        (each.rid, each.room, each.max_new_tokens, each.logprobs, each.source) for each in made
    ]
    few = {"max_new_tokens": 1}
    made = asks(
        "decode",
        input_ids=[[1], [2]],
        rid=["x", "y"],
        bootstrap_room=40,
        bootstrap_host="h",
        bootstrap_port=[1, 2],
        sampling_params=few,
    )
    assert [("x", 40, "h:1"), ("y", 41, "h:2")] == [(each.rid, each.room, each.source) for each in made]


def test_a_plain_worker_knows_no_rooms() -> None:
    """What a router adds is passed over where there is no other half."""
    [ask] = asks(
        text="a", bootstrap_room=4, bootstrap_host="h", bootstrap_port=3, sampling_params={"max_new_tokens": 1}
    )
    assert (None, "") == (ask.room, ask.source)


@pytest.mark.parametrize(
    ("mode", "body", "why"),
    [
        ("prefill", {}, "bootstrap_room is None, a prefill worker expected one for each prompt"),
        ("decode", {"bootstrap_room": 1, "bootstrap_host": "h"}, "bootstrap_port is None, a decode worker"),
        ("decode", {"bootstrap_room": 1, "bootstrap_port": 1}, "bootstrap_host is None, a decode worker"),
        (
            "null",
            {"bootstrap_room": [1, 2]},
            r"bootstrap_room is \[1, 2\] with 2 values, expected 1, one for each prompt",
        ),
        ("null", {"rid": ""}, "rid is '', expected ids that are not empty"),
    ],
)
def test_what_a_pair_needs(mode: str, body: dict[str, Any], why: str) -> None:
    """A worker of a pair refuses what a router would not send, and says what is missing."""
    with pytest.raises(RefusedAsk, match=why):
        asks(mode, text="a", sampling_params={"max_new_tokens": 1}, **body)


def test_prompt_and_new_tokens_fill_the_context() -> None:
    """64 tokens are the context: 60 and 4 fit, 60 and 5 do not."""
    assert 60 == len(asks(input_ids=[1] * 60, sampling_params={"max_new_tokens": 4})[0].tokens)
    with pytest.raises(
        RefusedAsk, match=r"prompt of 60 tokens . 5 new ones .* = 65, expected at most 64, the context length"
    ):
        asks(input_ids=[1] * 60, sampling_params={"max_new_tokens": 5})


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_a_stop_string_cuts_everywhere_alike(size: int) -> None:
    """However tokens come in steps: text before the stop string, tokens and log probabilities up to its last."""
    said = list(b"ab;cd, e;")
    made = answer(stops=("cd,", ", e"))
    for step in steps("r", said, size, finished=LENGTH):
        if not made.finish:
            made.add(replace(step, logprobs=tuple(Logprob(token, -1.0) for token in step.tokens)))
    assert ("ab;", list(b"ab;cd,"), 6) == (made.text, made.tokens, len(made.logprobs))
    assert {"type": "stop", "matched": "cd,"} == made.finish


def test_the_text_is_without_its_stop_token() -> None:
    """In output_ids it stays; the text keeps it only if asked, and special ones only if asked."""
    last = Step("r", tuple(b"ab;"), finished=STOP)
    made = answer(last, stop_tokens=(59,))
    assert ("ab", list(b"ab;"), {"type": "stop", "matched": 59}) == (made.text, made.tokens, made.finish)
    kept = Answer(Wanted(Ask("r", (1,), 9, stop_tokens=(59,)), keep_stop=True), tokenizer())
    kept.add(last)
    assert "ab;" == kept.text
    for special, text in ((False, "a"), (True, "a<|eos|>")):
        made = Answer(Wanted(Ask("r", (1,), 9, stop_tokens=(EOS,)), keep_stop=True, special=special), tokenizer())
        made.add(Step("r", (97, EOS), finished=STOP))
        assert text == made.text


def test_why_it_is_over() -> None:
    """Each reason has its form, with what stopped it; a failure has its status too."""
    assert {"type": "length", "length": 2} == answer(Step("r", (1, 2), finished=LENGTH)).finish
    assert {"type": "abort", "message": "Aborted", "status_code": None} == answer(Step("r", finished=ABORT)).finish
    failed = answer(Step("r", (97,), finished=ABORT, error="the other half is gone", status=502))
    assert {"type": "abort", "message": "the other half is gone", "status_code": 502} == failed.finish
    assert 500 == answer(Step("r", error="no status")).status
    assert None is answer(Step("r", (1,))).finish


def test_a_cut_character_is_told_at_the_end_only() -> None:
    """While bytes are missing nothing is said; when none will come, U+FFFD is."""
    made = answer(Step("r", (97, 0xE6)))
    assert "a" == made.text
    made.add(Step("r", (0xBC,), finished=LENGTH))
    assert "a�" == made.text


def test_meta_info_of_a_drafting_worker() -> None:
    """9 tokens: one of the prefill, 8 of 4 verifications that accepted 4 of 12 drafts; cached tokens by tier."""
    first = Step("r", (1,), cached_device=32, cached_host=16)
    made = answer(first, Step("r", (1,) * 8, drafted=12, accepted=4, verified=4, finished=LENGTH))
    meta = meta_info(made, None)
    assert 0 < meta.pop("e2e_latency") < 60
    assert {
        "id": "r",
        "finish_reason": {"type": "length", "length": 9},
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "cached_tokens": 48,
        "cached_tokens_details": {"device": 32, "host": 16},
        "spec_accept_length": 2.0,
        "spec_accept_rate": 4 / 12,
        "spec_verify_ct": 4,
        "spec_num_correct_drafts": 4,
        "spec_num_proposed_drafts": 12,
    } == meta


def test_what_is_long_is_cut() -> None:
    """A message shows the beginning of a long value."""
    assert ("[1, 2]", "'" + "a" * 99 + "..") == (shown([1, 2]), shown("a" * 1000))

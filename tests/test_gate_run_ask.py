"""Questions to a server in OpenAI's dialect: what is sent, what is an answer, and servers that cannot be asked."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.adapters.http_client import Client, Told
from harness.cli import main
from harness.gate_ask import (
    CLOSING_SECONDS,
    Asker,
    Endpoint,
    Question,
    Reply,
    before_stop,
    endpoint,
    generation_of,
    reply_of,
)
from harness.usage import UserError
from tests.fake_openai import Said, serving, until
from tests.gate_run_rig import right

register_cpu_ci(est_time=10, stage="commit")

LISTED = Said(raw=json.dumps({"data": [{"id": "GLM-5.2"}, {"id": "tiny"}]}))


def completion(text: str | None, reason: str | None, tokens: int | None = 3) -> bytes:
    choice = {"text": text, "finish_reason": reason}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode()


@pytest.mark.parametrize(
    ("body", "text", "reason", "tokens"),
    [
        (completion("18", "stop"), "18", "stop", 3),
        (completion("18\nQ: more", "stop"), "18", "stop", 3),
        (completion("18 and", "length", 8), "18 and", "length", 8),
        (completion("", "length", 8), "", "length", 8),
        (completion(None, "length", 8), "", "length", 8),
        (completion("", "stop", 1), "", "stop", 1),
        (completion("18 and", None, 8), "18 and", "length", 8),
        (completion("18", None, 7), "18", None, 7),
        (b'{"choices": [{"text": "18"}]}', "18", None, None),
        (b'{"choices": [{"message": {"content": "18"}, "finish_reason": "stop"}]}', "18", "stop", None),
    ],
)
def test_an_answer(body: bytes, text: str, reason: str | None, tokens: int | None) -> None:
    """Up to the stop string; cut off where the server says so, or where it says nothing and the limit is reached."""
    reply = reply_of(Question(4, 2, {"max_tokens": 8, "stop": ["\n"]}), Told(200, body))
    assert Reply(4, 2, text, reason, tokens) == reply


def test_an_answer_of_generate() -> None:
    """The same limits under its own names, a finish reason with a type, and the prompt's tokens by tier."""
    server = Endpoint(Client("http://h:1", 1), "m", is_native=True)
    body = server.body("1 + 1 = ", {"max_tokens": 8, "temperature": 0.0, "stop": ["\n"]}, 3)
    params = {"max_new_tokens": 8, "temperature": 0.0, "stop": ["\n"], "sampling_seed": 3}
    assert ("/generate", {"text": "1 + 1 = ", "sampling_params": params}) == (server.path, body)
    meta = {"completion_tokens": 8, "prompt_tokens": 20, "cached_tokens_details": {"device": 16, "host": 0}}
    meta["spec_accept_length"] = 3.5
    for finish, reason in (({"type": "stop"}, "stop"), (None, "length")):
        told = json.dumps({"text": "2\nmore", "meta_info": {**meta, "finish_reason": finish}}).encode()
        expected = Reply(4, 2, "2", reason, 8, cached_device=16, cached_host=0, prompt_tokens=20, accept_length=3.5)
        assert expected == reply_of(Question(4, 2, body), Told(200, told))
    assert Reply(4, 2, error="finish_reason 'abort'", finish_reason="abort") == reply_of(
        Question(4, 2, body), Told(200, b'{"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}')
    )


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b'{"error": {"message": "out of\\n  memory"}}', "HTTP 500: out of memory"),
        (404, b"<html>\n\nno such page", "HTTP 404: <html> no such page"),
        (200, completion("", "stop"), "empty answer, finish_reason 'stop'"),
        (200, completion(None, None), "empty answer, finish_reason None"),
        (200, completion("18", "abort"), "finish_reason 'abort'"),
        (200, completion("", "error"), "finish_reason 'error'"),
        (200, b"18", "no choice with a text in the answer b'18'"),
        (200, b'{"choices": []}', "no choice with a text"),
        (200, b'{"error": "busy"}', "no choice with a text"),
        (200, b'{"choices": [{"text": 18}]}', "text 18 and finish_reason None: expected texts"),
        (200, b"{", "HTTP 200 with a body that is no JSON"),
    ],
)
def test_no_answer(status: int, body: bytes, why: str) -> None:
    """A request that failed has a reason on one line, and no text that could be scored."""
    reply = reply_of(Question(0, 0, {"max_tokens": 8}), Told(status, body))
    assert reply.error is not None
    assert (why, "") == (reply.error[: len(why)], reply.text)
    assert "\n" not in reply.error


def test_before_the_first_of_several_stops() -> None:
    """The stop that comes first in the text counts, not the first in the list."""
    assert "a" == before_stop("a</s>b\nc", ["\n", "</s>"])
    assert "ab" == before_stop("ab", ["\n"])
    assert "" == before_stop("\nab", ["\n"])


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {"max_tokens": 256, "temperature": 0.0}),
        ({"until": "\n", "do_sample": False}, {"max_tokens": 256, "temperature": 0.0, "stop": ["\n"]}),
        ({"until": [], "max_gen_toks": 9, "temperature": 1}, {"max_tokens": 9, "temperature": 1.0}),
        ({"max_tokens": 7, "max_gen_toks": 9}, {"max_tokens": 7, "temperature": 0.0}),
        ({"do_sample": True, "top_p": 0.9}, {"max_tokens": 256, "temperature": 0.0, "top_p": 0.9}),
    ],
)
def test_settings_of_generation(settings: dict[str, Any], fields: dict[str, Any]) -> None:
    """As lm-eval sends them: max_tokens before max_gen_toks, temperature 0 unless said, and nothing of do_sample."""
    before = dict(settings)
    assert fields == generation_of(settings)
    assert before == settings


def test_bodies() -> None:
    """A prompt for completions; the same as one message for a chat. The seed is in both."""
    with serving(right) as fake:
        plain = endpoint(fake.url, None, 5, is_chat=False)
        chat = endpoint(f"{fake.url}/v1/chat/completions", "fake", 5, is_chat=True)
    sent = {"max_tokens": 8, "temperature": 0.5, "seed": 3, "model": "fake"}
    assert {**sent, "prompt": "1 + 1 = "} == plain.body("1 + 1 = ", {"max_tokens": 8, "temperature": 0.5}, 3)
    message = {"role": "user", "content": "1 + 1 = "}
    assert {**sent, "messages": [message]} == chat.body("1 + 1 = ", {"max_tokens": 8, "temperature": 0.5}, 3)
    assert (fake.url, "/v1/chat/completions") == (chat.client.url, chat.path)


def test_a_server_that_does_not_list_its_models() -> None:
    """With a name it is asked all the same."""
    with serving(right, Said(status=404, raw="no")) as fake:
        assert "mine" == endpoint(fake.url, "mine", 5, is_chat=False).model


@pytest.mark.parametrize(
    ("models", "words", "says"),
    [
        (
            LISTED,
            ["--model", "tinny"],
            "--model 'tinny': {url} has no such model; did you mean 'tiny'? It has: GLM-5.2",
        ),
        (LISTED, [], "{url} has 2 models (GLM-5.2, tiny); choose one with --model"),
        (Said(status=404, raw="no"), [], "{url} does not list its models; give the name with --model"),
        (Said(status=500, raw="broken"), [], "{url}/v1/models says HTTP 500: broken; expected a list of models"),
        (Said(raw="{}"), [], "{url}/v1/models: expected {{data: [{{id: ..}}, ..]}}"),
        (Said(raw="[]"), [], "{url}/v1/models: expected {{data: [{{id: ..}}, ..]}}"),
        (Said(raw="hello"), [], "HTTP 200 with a body that is no JSON: b'hello'; expected a server"),
        (Said(seconds=30), ["--timeout", "0.2"], "{url}/v1/models did not answer within 0.2 s; expected a server"),
    ],
)
def test_a_server_that_cannot_be_asked(
    capsys: pytest.CaptureFixture[str], models: Said, words: list[str], says: str
) -> None:
    """One line and exit code 2, before a task is loaded."""
    with serving(right, models) as fake:
        assert main(["gate", "run", "--engine", fake.url, "--task", "no such task", *words]) == 2
        says = says.format(url=fake.url)
    shown = capsys.readouterr()
    assert ("", 1) == (shown.out, shown.err.count("\n"))
    assert f"kvshard: {says}" == shown.err[: len(says) + 9]
    assert fake.bodies == []


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    """A port where nobody listens, and what is no address, are told on one line."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so nobody else gets it, and not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for address, says in (
            (url, f"{url}/v1/models is lost: ConnectionRefusedError"),
            ("localhost:80", "'localhost:80' is no URL of a server; expected http://host:port"),
            (f"{url}?dialect=sglang", f"--engine '{url}?dialect=sglang': expected http://host:port alone"),
        ):
            assert main(["gate", "run", "--engine", address, "--task", "gsm8k"]) == 2
            shown = capsys.readouterr()
            assert ("", 1, True) == (shown.out, shown.err.count("\n"), says in shown.err)


def test_so_many_requests_are_in_flight() -> None:
    """No more than asked for, and as many; each question is asked once and has its own reply."""
    with serving(lambda body: right(body)._replace(seconds=0.05)) as fake:
        server = endpoint(fake.url, None, 5, is_chat=False)
        asked = [Question(at, 0, server.body(f"{at} + 1 = ", {"max_tokens": 8}, 0)) for at in range(20)]
        with Asker(server, asked, 4) as asker:
            replies = [asker.next(5.0) for _ in asked]
    assert 4 == fake.in_flight_max
    assert {at: str(at + 1) for at in range(20)} == {reply.at: reply.text for reply in replies if reply is not None}
    assert {1} == set(fake.asked.values())


def test_closing_leaves_what_is_in_flight() -> None:
    """It does not wait for a server that hangs, and gives what has come."""
    with serving(lambda body: Said("x", seconds=0 if body["prompt"] == "0" else 60)) as fake:
        server = endpoint(fake.url, None, 60, is_chat=False)
        asked = [Question(at, 0, server.body(str(at), {"max_tokens": 8}, 0)) for at in range(9)]
        with Asker(server, asked, 2) as asker:
            until(lambda: len(fake.bodies) == 3)
            began = time.monotonic()
            assert [0] == [reply.at for reply in asker.close()]
            assert time.monotonic() - began < CLOSING_SECONDS
        assert {"0", "1", "2"} == {body["prompt"] for body in fake.bodies}


def test_nothing_is_asked_far_ahead_or_after_closing() -> None:
    """Where nobody takes replies, as many wait as are in flight; what is asked when it is closed is the last."""
    with serving(right) as fake:
        server = endpoint(fake.url, None, 5, is_chat=False)
        asked = [Question(at, 0, server.body(f"{at} + 1 = ", {"max_tokens": 8}, 0)) for at in range(100)]
        with Asker(server, asked, 3) as asker:
            until(lambda: len(fake.bodies) == 6)
            time.sleep(0.3)
            assert 6 == len(fake.bodies)
            replies = asker.close()
        assert sorted(reply.at for reply in replies) == list(range(len(replies)))
        assert 6 <= len(replies) == len(fake.bodies) <= 9


def test_a_server_that_hangs() -> None:
    """The time limit makes it a failed request that says so."""
    with serving(lambda _: Said("x", seconds=60)) as fake:
        server = endpoint(fake.url, None, 2, is_chat=False)
        with Asker(server, [Question(0, 0, server.body("1", {"max_tokens": 8}, 0))], 1) as asker:
            reply = asker.next(20.0)
    assert reply is not None
    assert f"{fake.url}/v1/completions did not answer within 2 s" == reply.error


def test_a_url_with_a_wrong_port() -> None:
    """A port that is no number is no address."""
    with pytest.raises(UserError, match="is no URL of a server"):
        endpoint("http://localhost:http", None, 1, is_chat=False)

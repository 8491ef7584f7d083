"""Prompts with their continuations for a token gate, from a file of JSON lines, as text or as token ids.

    {"prompt": "text", "continuation": " more text", "id": "a name"}
    {"input_ids": [5, 17, ..], "continuation": [8, 9]}

Continuation and id may be left out. A server makes token ids of text, so that both servers get the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.adapters.http_client import Client, LostError
from harness.usage import UserError

EXPECTED = 'a line is {"prompt": "text"} or {"input_ids": [1, 2]}, perhaps with "continuation" and "id"'
Tokens = tuple[int, ...]


class Prompt(NamedTuple):
    """What is asked, as text or as token ids; without a continuation it is what the baseline writes."""

    name: str
    given: str | Tokens
    continuation: str | Tokens = ()


class Encoded(NamedTuple):
    """A prompt in token ids."""

    name: str
    tokens: Tokens
    continuation: Tokens


def read(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first prompts of a file. Raises `UserError`."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UserError(f"--prompts {path}: cannot be read: {why}; expected JSON lines: {EXPECTED}") from error
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError(f"--prompts {path}: holds no prompt; {EXPECTED}")
    names = [prompt.name for prompt in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--prompts {path}: the id {twice!r} is there twice; expected ids that differ")
    return prompts[:limit]


def _prompt(path: Path, number: int, line: str) -> Prompt:
    where = f"--prompts {path}:{number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: is no JSON ({error}); {EXPECTED}") from error
    if not isinstance(row, dict) or ("prompt" in row) == ("input_ids" in row):
        has = f"has {', '.join(row) or 'nothing'}" if isinstance(row, dict) else f"is a {type(row).__name__}"
        raise UserError(f"{where}: {has}; {EXPECTED}")
    given: Any = row.get("prompt", row.get("input_ids"))
    more: Any = row.get("continuation", "" if "prompt" in row else [])
    if "prompt" in row:
        fits = isinstance(given, str) and given and isinstance(more, str)
    else:
        fits = _are_ids(given) and bool(given) and _are_ids(more)
        given, more = tuple(given) if fits else (), tuple(more) if fits else ()
    if not fits:
        raise UserError(f"{where}: a prompt that is empty, or a continuation of another kind; {EXPECTED}")
    return Prompt(str(row.get("id", number)), given, more)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and each >= 0 for each in value)


def encoded(prompts: Sequence[Prompt], client: Client) -> list[Encoded]:
    """In token ids, which the server makes of texts. Raises `UserError`."""
    return [_encoded(prompt, client) for prompt in prompts]


def _encoded(prompt: Prompt, client: Client) -> Encoded:
    if not isinstance(prompt.given, str):
        return Encoded(prompt.name, prompt.given, tuple(map(int, prompt.continuation)))
    tokens = tokens_of(client, prompt.given)
    whole = tokens_of(client, f"{prompt.given}{prompt.continuation}") if prompt.continuation else tokens
    return Encoded(prompt.name, whole[: len(tokens)], whole[len(tokens) :])


def tokens_of(client: Client, text: str) -> Tokens:
    """A server's own tokens of a text: of /tokenize, or of /generate that scores it. Raises `UserError`."""
    try:
        told = client.post("/tokenize", {"prompt": text})
        if told.ok:
            return tuple(int(each) for each in told.json["tokens"])
        params = {"max_new_tokens": 1, "temperature": 0.0}
        body = {"text": text, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        told = client.post("/generate", body)
        if told.ok:
            return tuple(int(each[1]) for each in told.json["meta_info"]["input_token_logprobs"])
        why = told.why
    except LostError as error:
        why = str(error)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        why = f"an answer that reads {error!r}"
    raise UserError(
        f"{client.url} makes no token ids of a text by /tokenize or /generate ({why}); give them: "
        '{"input_ids": [..]} on each line of --prompts'
    )

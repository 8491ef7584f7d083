"""Request traffic: the trace format, a reader that names what is wrong, and a seeded generator of chat traffic.

One JSON object a line, in arrival order (the schema of the published Mooncake traces):

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [ids of 512-token prefix blocks]}

A block id stands for the block *and everything before it*, so equal ids mean a reusable prefix. The last block may be
partial.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec

BLOCK_TOKENS = 512

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=1)]


class TrafficError(Exception):
    """A trace that cannot be used; the message names the file, the line and the reason."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One request: arrival in ms, prompt and answer lengths in tokens, ids of the prompt's 512-token prefix blocks."""

    timestamp: _Count
    input_length: _Length
    output_length: _Count
    hash_ids: tuple[_Count, ...]


def read_trace(path: Path | str) -> Iterator[Request]:
    """The requests of a JSONL trace, one at a time. TrafficError names file, line number and reason.

    Refused: an unreadable or empty file, a blank line, bad JSON, a missing, extra, mistyped or negative field, a number
    of hash_ids other than ceil(input_length / 512), a timestamp before the previous one (file order is arrival order).
    """
    decoder = msgspec.json.Decoder(Request)
    previous_ms = 0
    lines = 0
    try:
        with Path(path).open("rb") as file:
            for line in file:
                lines += 1
                try:
                    request = _decode(decoder, line, previous_ms)
                except TrafficError as error:
                    raise TrafficError(f"{path} line {lines}: {error}") from None
                previous_ms = request.timestamp
                yield request
    except OSError as error:
        raise TrafficError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not lines:
        raise TrafficError(f"{path}: is empty; expected one JSON request a line")


def _decode(decoder: msgspec.json.Decoder[Request], line: bytes, previous_ms: int) -> Request:
    shown = line.strip()[:80].decode("utf-8", "replace")
    if not shown:
        raise TrafficError("is blank; expected one JSON request a line")
    try:
        request = decoder.decode(line)
    except msgspec.ValidationError as error:
        raise TrafficError(
            f"{error}; fields are {', '.join(Request.__struct_fields__)}; line begins {shown!r}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TrafficError(f"is not JSON ({error}); line begins {shown!r}") from None
    blocks = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != blocks:
        raise TrafficError(
            f"has {len(request.hash_ids)} hash_ids; expected {blocks}, one per {BLOCK_TOKENS} tokens of "
            f"input_length {request.input_length}"
        )
    if request.timestamp < previous_ms:
        raise TrafficError(
            f"timestamp {request.timestamp} is before the previous line's {previous_ms}; sort the file by timestamp"
        )
    return request


# --- the generator. Chat as prefix caches meet it: few system prompts under many sessions, prompts that grow by answer
# and next message, users that think between turns, most messages short and a few very long.
_SESSION_GAP_MS = 500.0
_THINK_MS = 45_000.0
_ANSWER_MS_PER_TOKEN = 15
_TURNS_MEAN = 2.0
_DOCUMENT_SHARE = 0.5
_PROMPT_TOKENS_MAX = 120_000
_ANSWER_TOKENS_MAX = 2_000
_SYSTEM_TOKENS = (740, 1_536, 2_350, 410, 5_130, 3_000, 1_024, 8_200, 620, 1_900)


@dataclass(slots=True)
class _Session:
    system: int  # which system prompt
    blocks: list[int]  # ids of the whole blocks of the conversation so far
    tokens: int  # length of the conversation so far, answers included
    turns_left: int
    opening: bool  # the system prompt's blocks are not in `blocks` yet


def generate(seed: int, requests: int) -> Iterator[Request]:
    """`requests` requests of seeded multi-turn chat traffic, ascending in time, ids numbered by first occurrence.

    The same seed gives the same traffic on every machine; a longer run begins with the shorter one.
    """
    draw = random.Random(seed)
    fresh = count()
    system_blocks: dict[int, list[int]] = {}
    waiting: list[tuple[int, int, _Session]] = [(0, 0, _new_session(draw))]
    sessions = 1
    for _ in range(requests):
        now_ms, number, session = heapq.heappop(waiting)
        if session.opening:
            next_ms = now_ms + round(draw.expovariate(1 / _SESSION_GAP_MS))
            heapq.heappush(waiting, (next_ms, sessions, _new_session(draw)))
            sessions += 1
            session.opening = False
            session.blocks = _system_prompt(session.system, system_blocks, fresh)
        request = _turn(draw, session, now_ms, fresh)
        yield request
        session.turns_left -= 1
        if session.turns_left and session.tokens < _PROMPT_TOKENS_MAX:
            pause_ms = request.output_length * _ANSWER_MS_PER_TOKEN + round(draw.expovariate(1 / _THINK_MS))
            heapq.heappush(waiting, (now_ms + pause_ms, number, session))


def _new_session(draw: random.Random) -> _Session:
    # popularity of system prompts falls as 1/rank
    popularity = [1 / (place + 1) for place in range(len(_SYSTEM_TOKENS))]
    system = draw.choices(range(len(_SYSTEM_TOKENS)), popularity)[0]
    turns = 1 + int(draw.expovariate(1 / (_TURNS_MEAN - 1)))
    return _Session(system, [], _SYSTEM_TOKENS[system], turns, True)


def _system_prompt(system: int, known: dict[int, list[int]], fresh: count[int]) -> list[int]:
    """Ids of the blocks wholly inside the system prompt: shared by its sessions, numbered at the first one."""
    if system not in known:
        known[system] = [next(fresh) for _ in range(_SYSTEM_TOKENS[system] // BLOCK_TOKENS)]
    return list(known[system])


def _turn(draw: random.Random, session: _Session, now_ms: int, fresh: count[int]) -> Request:
    message = 1 + int(draw.lognormvariate(4.6, 1.2))
    if draw.random() < _DOCUMENT_SHARE:
        message += int(2_000 * draw.paretovariate(1.1))
    prompt = min(session.tokens + message, max(session.tokens + 1, _PROMPT_TOKENS_MAX))
    answer = min(_ANSWER_TOKENS_MAX, 1 + int(draw.lognormvariate(5.4, 0.9)))
    while len(session.blocks) < prompt // BLOCK_TOKENS:
        session.blocks.append(next(fresh))
    # a partial last block is named for its content so far; the next turn fills it, so that name never comes again
    tail = [next(fresh)] if prompt % BLOCK_TOKENS else []
    session.tokens = prompt + answer
    return Request(now_ms, prompt, answer, (*session.blocks, *tail))

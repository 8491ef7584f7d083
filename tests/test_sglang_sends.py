"""P/D transfer of the real sglang components: its sender chooses; a wrong choice is seen at the other end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from ci.register import register_cpu_ci
from harness import types as t
from harness.adapter import ConfigError
from harness.adapters.sglang import SglangEngine, SglangSession
from harness.fault import Edit, planted
from harness.fault_files import Library, library
from harness.smoke import stamps

register_cpu_ci(est_time=25, stage="commit", runner="ubuntu-sglang")

pytestmark = [
    pytest.mark.slow,  # sglang takes many seconds to import
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
FAULTS = Path(__file__).parent.parent / "fixtures" / "faults" / "sglang" / "sends.py"
PLANTED = (
    "again-what-was-sent",
    "each-chunk-from-start",
    "no-empty-last-chunk",
    "paired-after-filter",
    "state-of-all-ranks",
    "state-to-first-pages",
    "whole-pages-only",
    "without-owner-filter",
)
PS = 4
CONFIG = t.Config(
    shards=3,
    page_size=PS,
    pages_per_rank=8,
    layers=2,
    components=("kv", "draft"),
    chunk_tokens=64,
    context_tokens=64,
    decode_pages=24,
)
INDEXED = replace(
    CONFIG,
    page_size=64,
    pages_per_rank=4,
    components=("kv", "index", "draft", "draft_index"),
    chunk_tokens=512,
    context_tokens=640,
)
Opener = Callable[..., SglangSession]


@cache
def faults() -> Library:
    return library(str(FAULTS), checked=False)


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens sessions that are closed at the end."""
    sessions: list[SglangSession] = []

    def make(config: t.Config = CONFIG, **options: str) -> SglangSession:
        sessions.append(SglangEngine({"decode": "on", **options}).open(config))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def config_of(attention: str) -> t.Config:
    return INDEXED if attention == "dsa" else CONFIG


def value(reply: t.AnyReply) -> t.AnyValue:
    assert isinstance(reply, t.Ok), reply
    return reply.value


def rows(tokens: tuple[int, ...], start: int, end: int, config: t.Config) -> t.Rows:
    return {name: tuple(layer[start:end] for layer in layers) for name, layers in stamps(tokens, config).items()}


def begin(session: SglangSession, name: str, room: int, tokens: tuple[int, ...]) -> int:
    """Opened, with a room that all ranks know; its cached tokens."""
    hit = value(session.apply(t.Open(name, tokens)))
    assert isinstance(hit, t.Opened)
    value(session.apply(t.Reserve(room, len(tokens))))
    value(session.apply(t.Settle()))
    return hit.cached


def move(
    session: SglangSession, name: str, room: int, tokens: tuple[int, ...], ends: tuple[int, ...], config: t.Config
) -> t.AnyReply:
    """A request that is sent early and after each of its chunks; what the decode worker then has."""
    at = begin(session, name, room, tokens)
    value(session.apply(t.Send(name, room)))
    for end in (*ends, len(tokens)):
        if end > at:
            value(session.apply(t.Extend(name, end - at, rows(tokens, at, end, config))))
            session.apply(t.Send(name, room))  # refused once the transfer has failed
            at = end
    value(session.apply(t.Finish(name)))
    value(session.apply(t.Settle()))
    return session.apply(t.Receive(room))


def prompt(start: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(start, start + tokens))


class TestWhatArrives:
    @pytest.mark.parametrize("attention", ["mha", "mla", "dsa"])
    @pytest.mark.parametrize("device", ["host", "order"])
    def test_all_rows_of_a_request(self, opened: Opener, attention: str, device: str) -> None:
        config = config_of(attention)
        page = config.page_size
        session = opened(config, attention=attention, device=device)
        first = prompt(1, 4 * page + 2)
        second = first[: 3 * page] + prompt(1000, 2 * page)
        for room, tokens in ((1, first), (2, second)):  # the second has a prefix that is sent early
            reply = move(session, f"to {room}", room, tokens, (2 * page, 4 * page), config)
            assert reply == t.Ok(t.Received(rows(tokens, 0, len(tokens), config)))
        assert not session.snapshot().ranks[0].requests

    def test_one_page_of_eight_ranks(self, opened: Opener) -> None:
        """Seven of them own nothing of it, and report."""
        config = replace(CONFIG, shards=8, pages_per_rank=2)
        tokens = prompt(1, PS)
        reply = move(opened(config), "r", 1, tokens, (), config)
        assert reply == t.Ok(t.Received(rows(tokens, 0, PS, config)))

    def test_one_token_of_one_layer(self, opened: Opener) -> None:
        config = replace(INDEXED, layers=1)
        tokens = prompt(1, 1)
        reply = move(opened(config, attention="dsa"), "r", 1, tokens, (), config)
        assert reply == t.Ok(t.Received(rows(tokens, 0, 1, config)))


class TestEnds:
    def test_pages_stay_until_the_transfer_has_ended(self, opened: Opener) -> None:
        config = replace(CONFIG, network=t.NetworkPlan(write_ticks=(40,)))
        session = opened(config)
        tokens = prompt(1, 3 * PS)
        begin(session, "r", 1, tokens)
        value(session.apply(t.Extend("r", len(tokens), rows(tokens, 0, len(tokens), config))))
        value(session.apply(t.Send("r", 1)))
        assert value(session.apply(t.Finish("r"))) == t.Finished(3 * PS)
        (view,) = (session.snapshot().ranks[0].requests or {}).values()
        assert (view.room, len(view.pages)) == (1, 3)
        assert isinstance(session.apply(t.Flush()), t.Refused)
        value(session.apply(t.Settle()))
        assert not session.snapshot().ranks[0].requests
        value(session.apply(t.Flush()))

    def test_an_abort_is_told(self, opened: Opener) -> None:
        session = opened()
        tokens = prompt(1, 3 * PS)
        begin(session, "r", 1, tokens)
        value(session.apply(t.Extend("r", PS, rows(tokens, 0, PS, CONFIG))))
        value(session.apply(t.Send("r", 1)))
        value(session.apply(t.Abort("r")))
        value(session.apply(t.Settle()))
        after = session.snapshot()
        assert after.decode is not None
        assert after.decode.rooms[1].state == "failed"
        assert len(after.decode.free) == CONFIG.decode_pages


class TestRefusals:
    def test_a_room_that_nobody_knows(self, opened: Opener) -> None:
        session = opened()
        value(session.apply(t.Open("r", prompt(1, PS))))
        reply = session.apply(t.Send("r", 7))
        assert isinstance(reply, t.Refused)
        assert "room 7" in reply.why

    def test_another_page_size(self, opened: Opener) -> None:
        reply = opened(replace(CONFIG, decode_page_size=16)).apply(t.Reserve(1, PS))
        assert isinstance(reply, t.Refused)
        assert {"4", "16"} <= set("".join(each if each.isdigit() else " " for each in reply.why).split())

    def test_without_a_decode_worker(self) -> None:
        engine = SglangEngine({"decode": "off"})
        assert "send" not in engine.describe().ops
        with pytest.raises(ConfigError, match="decode_pages"):
            engine.open(CONFIG)


class TestWhatWouldBeSeen:
    def test_each_planted_fault_is_tried_here(self) -> None:
        assert sorted(faults().faults) == sorted(f"sglang.sends-{name}" for name in PLANTED)

    @pytest.mark.parametrize("name", PLANTED)
    def test_a_planted_fault(self, opened: Opener, name: str) -> None:
        fault = faults().faults[f"sglang.sends-{name}"]
        attention = "dsa" if "dsa" in fault.engine else "mha"
        config = config_of(attention)
        tokens = prompt(1, 4 * config.page_size + 1)  # three owners: two of them have no part in the last page
        with planted(fault.changes) as reached:
            session = opened(config, attention=attention)
            reply = move(session, "r", 1, tokens, (2 * config.page_size, 4 * config.page_size), config)
        assert reached.times
        assert reply != t.Ok(t.Received(rows(tokens, 0, len(tokens), config)))

    def test_state_pages_of_another_number_fail_the_room(self, opened: Opener) -> None:
        state = "sglang.srt.mem_cache.common:suffix_page_indices"
        shorter = Edit(state, "prefix_len:seq_len", "prefix_len + page_size:seq_len")
        session = opened(INDEXED, attention="dsa")
        tokens = prompt(1, 3 * 64)
        with planted([shorter]):
            reply = move(session, "r", 1, tokens, (), INDEXED)
        assert isinstance(reply, t.Refused)
        assert "prefill=2, dst=3" in reply.why

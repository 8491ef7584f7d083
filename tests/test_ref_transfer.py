"""A request from prefill to decode, through the contract, on every way to run the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ci.register import register_cpu_ci
from harness import types as t
from harness.adapter import ConfigError, Session
from harness.adapters.ref import RefEngine
from harness.sim.schedule import LAZY
from suites.oracle import Oracle

register_cpu_ci(est_time=35, stage="commit")

COMPONENTS = ("kv", "index", "draft", "draft_index")
PROMPT = tuple(range(1, 10))
WAYS = [
    {},
    {"device": "order"},
    {"device": "adversary"},
    {"group": "gloo"},
]


def config(**changes: object) -> t.Config:
    base = t.Config(
        shards=2, page_size=2, pages_per_rank=8, layers=3, components=COMPONENTS, decode_pages=12, host_pages_per_rank=8
    )
    return t.decode(t.encode(base) if not changes else t.encode(_changed(base, changes)), t.Config)


def _changed(base: t.Config, changes: dict[str, object]) -> t.Config:
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    return t.Config(**(fields | changes))


@pytest.fixture(params=WAYS, ids=lambda way: "&".join(f"{name}={value}" for name, value in way.items()) or "plain")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    engine = RefEngine(request.param)
    schedule = LAZY if request.param.get("device") == "adversary" else ()
    opened = engine.open(config(schedule=schedule))
    yield opened
    opened.close()
    engine.close()


def rows(start: int, end: int) -> t.Rows:
    return Oracle({name: t.layers_of(config(), name) for name in COMPONENTS}, 2).rows(PROMPT, start, end)


def done(session: Session, *ops: t.AnyOp) -> t.AnyReply:
    """The last reply; all of them must be good."""
    reply: t.AnyReply = t.Refused("no op")
    for op in ops:
        reply = session.apply(op)
        assert isinstance(reply, t.Ok), (op, reply)
    return reply


def test_chunks_arrive_at_decode(session: Session) -> None:
    """A prompt sent in two chunks, the second with a partial page, is received whole, in every component and layer."""
    done(session, t.Open("a", PROMPT), t.Reserve(7, 9), t.Settle(), t.Extend("a", 4, rows(0, 4)), t.Send("a", 7))
    assert isinstance(session.apply(t.Receive(7)), t.Refused)
    done(session, t.Extend("a", 5, rows(4, 9)), t.Send("a", 7), t.Finish("a"), t.Settle())
    assert t.Ok(t.Received(rows(0, 9))) == session.apply(t.Receive(7))
    view = session.snapshot()
    assert view.decode is not None
    assert ("complete", 9, 5) == (
        view.decode.rooms[7].state,
        view.decode.rooms[7].tokens,
        len(view.decode.rooms[7].pages),
    )
    page_bytes = 2 * 8 * (3 * (3 + 3) + 1 * (2 + 3))
    assert [3 * page_bytes, 2 * page_bytes] == [rank.moved.sent_bytes for rank in view.ranks if rank.moved]
    done(session, t.Release(7), t.Flush())
    after = session.snapshot()
    assert after.decode is not None
    assert (12, {}) == (len(after.decode.free), after.decode.rooms)


def test_a_restored_prefix_is_sent(session: Session) -> None:
    """What comes back from the host is not sent before it is there, and then like any other page."""
    done(session, t.Open("a", PROMPT), t.Extend("a", 9, rows(0, 9)), t.Finish("a"), t.Settle(), t.Evict(100))
    opened = done(session, t.Open("b", PROMPT))
    assert t.Ok(t.Opened(8, from_host=8)) == opened
    done(session, t.Reserve(1, 9), t.Settle(), t.Send("b", 1), t.Settle())
    view = session.snapshot()
    assert [0, 0] == [rank.moved.sent_bytes for rank in view.ranks if rank.moved]
    done(session, t.Extend("b", 1, rows(8, 9)), t.Send("b", 1), t.Finish("b"), t.Settle())
    assert t.Ok(t.Received(rows(0, 9))) == session.apply(t.Receive(1))


def test_a_lost_rank_fails_the_room(session: Session) -> None:
    """When one rank's connection is gone, the room fails, both sides are free, and it says so."""
    done(session, t.Open("a", PROMPT), t.Reserve(1, 9), t.Settle(), t.Extend("a", 4, rows(0, 4)), t.Send("a", 1))
    done(session, t.Lose(1), t.Settle(), t.Abort("a"), t.Settle())
    refused = session.apply(t.Receive(1))
    assert isinstance(refused, t.Refused)
    assert "failed" in refused.why
    view = session.snapshot()
    assert view.decode is not None
    assert ({}, 12) == (view.ranks[0].requests, len(view.decode.free))


def test_ops_of_a_transfer_without_a_decode_worker_are_refused() -> None:
    """A session that was opened without decode pages says how to get a decode worker."""
    engine = RefEngine({})
    session = engine.open(config(decode_pages=0))
    for op in (t.Reserve(1, 9), t.Send("a", 1), t.Receive(1), t.Release(1), t.Lose(-1)):
        reply = session.apply(op)
        assert isinstance(reply, t.Refused)
        assert "decode_pages" in reply.why
    session.close()
    engine.close()


def test_simulated_devices_need_ranks_in_lockstep() -> None:
    """Options that do not go together are an error with both values."""
    with pytest.raises(ConfigError, match="device=order with group=gloo"):
        RefEngine({"device": "order", "group": "gloo"})

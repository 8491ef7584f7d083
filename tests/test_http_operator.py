"""An address with `operate`: ops that end and restart servers, what is seen of them meanwhile, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.adapter import Session
from harness.connect import AddressError, connect, manifest_of
from harness.smoke import smoke
from harness.trace import told
from harness.types import (
    AnyOp,
    Done,
    Flush,
    Generate,
    Kill,
    Ok,
    Refused,
    Replies,
    Restart,
    Settle,
    Together,
    Unknown,
    Unsupported,
    Verdict,
    decode,
    encode,
)
from tests.fake_operator import operated
from tests.fake_server import pair
from tests.fake_worker import PAGE, RANKS

register_cpu_ci(est_time=10, stage="commit")

PROMPT = tuple(range(20, 20 + 3 * PAGE + 1))
DONE = Ok(Done())


@contextmanager
def session(address: str) -> Iterator[Session]:
    engine = connect(address)
    fixed = engine.describe().axes.fixed
    assert fixed is not None
    opened = engine.open(fixed)
    try:
        yield opened
    finally:
        opened.close()


def test_a_worker_is_left_out_until_it_is_back() -> None:
    """While it is down only the others settle and flush, and its ranks show no counter; then all is as at first."""
    ask = Generate(request="a", tokens=PROMPT)
    with operated() as address, session(address) as opened:
        answer = opened.apply(ask)
        first = opened.snapshot()
        assert DONE == opened.apply(Kill("prefill"))
        down = opened.snapshot()
        replies = [opened.apply(op) for op in (Settle(), Flush(), ask, Kill("prefill"))]
        assert DONE == opened.apply(Restart("prefill"))
        again, last = opened.apply(ask), opened.snapshot()

    assert [True] * RANKS + [False] == [rank.counters == {} for rank in down.ranks]
    assert [rank.role for rank in first.ranks] == [rank.role for rank in down.ranks]
    assert ([DONE, DONE], Refused, Unknown) == (replies[:2], type(replies[2]), type(replies[3]))
    assert isinstance(answer, Ok)
    assert answer == again
    assert first.ranks[:RANKS] == last.ranks[:RANKS]


def test_beside_an_answer() -> None:
    """A death comes when the answer before it has so many tokens; what was asked of the dead worker is lost."""
    op = Generate(request="a", tokens=PROMPT, max_new_tokens=64)
    with operated() as address, session(address) as opened:
        reply = opened.apply(Together((op, Kill("decode", "rank", 3))))

    assert isinstance(reply, Replies)
    assert (Unknown, DONE) == (type(reply.replies[0]), reply.replies[1])


def test_a_session_begins_with_all_workers() -> None:
    """What the session before has left dead is started first."""
    with operated() as address:
        with session(address) as opened:
            opened.apply(Kill("decode"))
        with session(address) as opened:
            assert isinstance(opened.apply(Generate(request="a", tokens=PROMPT)), Ok)


def test_roles() -> None:
    """A role that there is not is refused; a restart without one is for all."""
    with operated() as address, session(address) as opened:
        for op in (Kill(""), Kill("router"), Kill("decode", "thread"), Restart("router")):
            assert isinstance(opened.apply(op), Refused), op
        assert [DONE, DONE] == [opened.apply(op) for op in (Kill("decode"), Restart())]


def test_every_claim_holds() -> None:
    """`kvshard smoke` tries the ops; without `operate` they are neither claimed nor carried out."""
    with operated() as address:
        engine = connect(address)
        tried = {each.claim: each.verdict for each in smoke(engine, engine.describe())}
    assert (Verdict.PASS, Verdict.PASS) == (tried["op.kill"], tried["op.restart"])

    with pair() as address:
        assert not {"kill", "restart"} & set(connect(address).describe().ops)
        with session(address) as opened:
            assert [Unsupported] * 2 == [type(opened.apply(op)) for op in (Kill("prefill"), Restart())]


def test_what_cannot_be_operated(tmp_path: Path) -> None:
    """A folder where nothing runs, servers that another one runs, and a router before them are errors."""
    with operated() as address, operated() as other:
        head, _, folder = address.rpartition("&operate=")
        for wrong, said in (
            (f"{head}&operate={tmp_path}", f"{tmp_path}: nothing is controlled there (No such file or directory)"),
            (f"{other.rpartition('&operate=')[0]}&operate={folder}", "no worker there answers at http://127.0.0.1:"),
            (f"{address}&through=http://r:1", "operate with through: a router decides for itself"),
        ):
            with pytest.raises(AddressError) as caught:
                manifest_of(connect(wrong), wrong)
            assert said in str(caught.value)


def test_ops_survive_json() -> None:
    """Also one of a trace that knew no roles yet; a line for people leaves out what goes without saying."""
    for op, line in ((Kill("prefill", "rank", 2), "kill prefill rank 2"), (Kill(), "kill"), (Restart(), "restart")):
        assert (op, line) == (decode(encode(op), AnyOp), told(op))
    assert Restart() == decode(b'{"op":"restart"}', AnyOp)

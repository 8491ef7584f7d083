"""The reference as an engine: sessions, groups, codec, and what happens when ranks disagree."""

from __future__ import annotations

import msgspec
import psutil
import pytest
import torch

from ci.register import register_cpu_ci
from harness.adapter import ConfigError, EngineFault
from harness.adapters.ref import RefEngine, merged
from harness.adapters.ref_processes import RankProcesses
from harness.adapters.ref_rank import RefRank
from harness.adapters.ref_rows import TORN, RowCodec
from harness.lockstep import CollectiveMismatch
from harness.types import (
    Abort,
    AnyOp,
    AnyReply,
    Config,
    Evicted,
    Extend,
    Extended,
    Finish,
    Finished,
    Ok,
    Open,
    Opened,
    Refused,
    Replies,
    Rows,
    Together,
    decode,
    encode,
)
from suites.oracle import Oracle

register_cpu_ci(est_time=15, stage="commit")

CONFIG = Config(shards=2, page_size=4, pages_per_rank=6, layers=2, components=("kv", "index"), chunk_tokens=16)
PROMPT = tuple(range(1, 12))


def chunk(name: str, tokens: tuple[int, ...], start: int, end: int) -> Extend:
    return Extend(
        name, end - start, Oracle(dict.fromkeys(CONFIG.components, CONFIG.layers), 4).rows(tokens, start, end)
    )


def rank_processes() -> list[psutil.Process]:
    """The rank processes of this test process, in rank order."""
    children = psutil.Process().children()
    return [child for child in children if "harness.adapters.ref_process" in child.cmdline()]


def ops() -> list[AnyOp]:
    longer = (*PROMPT[:8], 77, 78)
    return [
        Open("a", PROMPT),
        chunk("a", PROMPT, 0, 8),
        Open("b", longer),
        Together((chunk("a", PROMPT, 8, 11), chunk("b", longer, 8, 10))),
        Finish("a"),
        Abort("b"),
    ]


def test_ops_survive_json() -> None:
    """Every op comes back equal from JSON, rows included."""
    assert [decode(encode(op), AnyOp) for op in ops()] == ops()


def test_two_sessions_do_not_disturb_each_other() -> None:
    """Ops that alternate between two sessions of one process get the replies and state of two sessions on their own."""
    engine = RefEngine()
    alone = engine.open(CONFIG)
    expected = [(alone.apply(op), alone.snapshot()) for op in ops()]
    alone.close()
    one, two = engine.open(CONFIG), engine.open(CONFIG)
    seen = [[(session.apply(op), session.snapshot()) for session in (one, two)] for op in ops()]
    engine.close()

    assert [pair[0] for pair in seen] == expected
    assert [pair[1] for pair in seen] == expected


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_answer_as_threads_do(ranks: int) -> None:
    """Real processes over Gloo give the replies and views of the ranks in lockstep, and are gone after close."""
    config = msgspec.structs.replace(CONFIG, shards=ranks)
    threads, processes = RefEngine(), RefEngine({"group": "gloo"})
    left, right = threads.open(config), processes.open(config)
    children = rank_processes()
    seen = [(left.apply(op), right.apply(op), left.snapshot(), right.snapshot()) for op in ops()]
    threads.close()
    processes.close()

    assert [reply for reply, *_ in seen] == [reply for _, reply, *_ in seen]
    assert [view for *_, view, _ in seen] == [view for *_, view in seen]
    assert len(children) == ranks
    assert [child.pid for child in children if child.is_running()] == []


@pytest.mark.slow
def test_a_dead_rank_is_told() -> None:
    """When a rank process dies, the next op names it instead of waiting, and nothing is left running."""
    engine = RefEngine({"group": "gloo"})
    session = engine.open(CONFIG)
    children = rank_processes()
    children[1].kill()
    children[1].wait()

    with pytest.raises(EngineFault, match=r"ranks \[1\] of 2 have ended"):
        session.apply(Open("a", PROMPT))
    engine.close()
    assert [child.pid for child in children if child.is_running()] == []


def test_backends_are_those_of_torch() -> None:
    """A backend that torch does not know ends in an error that names the rank, not in a wait."""
    with pytest.raises(EngineFault, match=r"rank \d ended with code 1 instead of an answer"):
        RankProcesses(1, "no-such-backend")


def test_a_row_copied_in_part_is_torn() -> None:
    """A row whose columns come from two stamps reads as TORN, a whole one as its stamp."""
    codec = RowCodec()
    rows = codec.encode(Extend("a", 2, {"kv": ((5, 6),)}))["kv"].clone()
    assert codec.decode({"kv": rows}) == {"kv": ((5, 6),)}
    rows[0, 1, 2] = rows[0, 0, 2]
    assert codec.decode({"kv": rows}) == {"kv": ((5, TORN),)}
    assert torch.equal(codec.encode(Extend("a", 1, {"kv": ((5,),)}))["kv"][0, 0], rows[0, 0])


def test_ranks_that_disagree_are_a_fault_of_the_engine() -> None:
    """Different answers of two ranks are no reply; equal ones are, with the reads of all ranks in order."""
    with pytest.raises(EngineFault, match=r"All ranks give the same answer.*rank 0: Ok.*rank 1: Refused"):
        merged([Ok(Opened(4)), Refused("no page")])
    with pytest.raises(EngineFault, match="All ranks give the same answer"):
        merged([Replies((Ok(Finished(4)),)), Replies((Ok(Finished(8)),))])
    reads: list[Rows] = [{"kv": ((1, 2),)}, {"kv": ((1, 3),)}]
    assert merged([Ok(Extended(0, 2, (read,))) for read in reads]) == Ok(Extended(0, 2, tuple(reads)))
    assert merged([Ok(Evicted(4))] * 3) == Ok(Evicted(4))


def test_a_missing_collective_is_a_fault_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves out a collective is told with both sides, not waited for."""
    healthy = RefRank.do_open

    def leaves(self: RefRank, op: Open) -> object:
        if self._group.rank == 0:
            self._group.minimum([1])
        return healthy(self, op)

    monkeypatch.setattr(RefRank, "do_open", leaves)
    engine = RefEngine()
    session = engine.open(CONFIG)
    with pytest.raises(EngineFault, match=r"(?s)same collectives.*ranks 0: minimum.*ranks 1: ended") as caught:
        session.apply(Open("a", PROMPT))
    engine.close()
    assert isinstance(caught.value.__cause__, CollectiveMismatch)


def test_a_rank_that_never_returns_is_a_fault_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that never ends is told with rank and place after a while; the next session works."""
    monkeypatch.setattr("harness.adapters.ref.OP_SECONDS", 0.3)
    healthy = RefRank.do_open

    def loops(self: RefRank, op: Open) -> AnyReply:
        while self._group.rank == 1:
            pass
        return healthy(self, op)

    engine = RefEngine()
    session = engine.open(CONFIG)
    monkeypatch.setattr(RefRank, "do_open", loops)
    with pytest.raises(EngineFault, match=r"answers every op in time.*rank 1 of 2"):
        session.apply(Open("a", PROMPT))
    session.close()
    monkeypatch.setattr(RefRank, "do_open", healthy)
    assert engine.open(CONFIG).apply(Open("a", PROMPT)) == Ok(Opened(0))
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": "5"}, r"option shards='5' of engine ref; expected one of 1, 2, 3, 4, 8"),
        ({"shards": "four"}, r"option shards='four'"),
        ({"layout": "striped"}, r"option layout='striped' of engine ref; expected one of sharded, replicated"),
        ({"group": "mpi"}, r"option group='mpi' of engine ref; expected one of lockstep, gloo, nccl"),
        ({"shard": "2"}, r"option 'shard' of engine ref; expected group, transport, device, padding, split, layout, "),
    ],
)
def test_wrong_options_are_one_clear_line(options: dict[str, str], message: str) -> None:
    """An option that does not exist, or a value it cannot have, is named with what is possible."""
    with pytest.raises(ConfigError, match=message):
        RefEngine(options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": 5}, r"shards=5; the engine can be opened with \(1, 2, 3, 4, 8\)"),
        ({"layout": "striped"}, r"layout='striped'"),
        (
            {"host_policy": "write_around"},
            r"host_policy='write_around'; the engine can be opened with \('write_through', ",
        ),
        ({"components": ("draft",)}, "a draft's never first"),
        (
            {"components": ("kv", "mamba")},
            r"components \('kv', 'mamba'\); expected some of \('kv', 'index', 'draft', 'draft_",
        ),
    ],
)
def test_configs_outside_the_axes_are_refused(change: dict[str, object], message: str) -> None:
    """A session that the manifest does not offer is refused with the field, its value and what is possible."""
    with pytest.raises(ConfigError, match=message):
        RefEngine().open(msgspec.structs.replace(CONFIG, **change))

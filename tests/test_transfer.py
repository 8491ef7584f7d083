from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.transports.memory import Faults, Network
from kvshard_ref.components import Component
from kvshard_ref.decode import DecodeWorker
from kvshard_ref.errors import RefusedError
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.sender import KVSender
from kvshard_ref.transfer import blocks, flaw, geometry_of, pair, unequal
from kvshard_ref.transport import Block
from tests.transfer_rig import INDEX, KV, LAYERS, Rig, used_pages

register_cpu_ci(est_time=10, stage="commit")


def test_pair_example() -> None:
    """Pages [4, 9, 12] for [70, 71, 72] at N=4: rank 0 has (4, 70) and (12, 72), rank 1 (9, 71), the others nothing."""
    shares = [pair([4, 9, 12], [70, 71, 72], rank, Placement(4, 64)) for rank in range(4)]
    assert [[(4, 70), (12, 72)], [(9, 71)], [], []] == shares


def test_pair_keeps_positions() -> None:
    """Of pages [3, 6, 4, 9, 12] rank 0 of 4 owns those at positions 2 and 4."""
    assert [(4, 52), (12, 54)] == pair([3, 6, 4, 9, 12], [50, 51, 52, 53, 54], 0, Placement(4, 64))


@given(st.lists(st.integers(0, 60), unique=True, max_size=20), st.integers(1, 8))
def test_pair_covers(pages: list[int], shards: int) -> None:
    """Over all ranks: every position once, from its owner, to its own page; then D finds no flaw."""
    dst = [100 + 3 * position for position in range(len(pages))]
    shares = [pair(pages, dst, rank, Placement(shards, 4)) for rank in range(shards)]
    expected = [
        [(page, to) for page, to in zip(pages, dst, strict=True) if page % shards == rank] for rank in range(shards)
    ]
    assert expected == shares
    assert "" == flaw(shares, dst)


def test_blocks_are_runs() -> None:
    """Local pages that are consecutive at both ends are one block, in every region; no copies are no blocks."""
    copies = [(2 * src, dst) for src, dst in [(1, 70), (2, 71), (3, 73), (5, 74), (6, 75)]]
    spans = [(1, 70, 2), (3, 73, 1), (5, 74, 2)]
    names = ["kv.0", "kv.1"]
    assert [Block(name, *span) for name in names for span in spans] == blocks(names, copies, Placement(2, 4))
    assert [] == blocks(names, [], Placement(2, 4))


FLAWS = {
    "no copy of a page": [[(4, 70)], [(5, 71)]],
    "a copy twice": [[(4, 70), (6, 72), (6, 72)], [(5, 71)]],
    "two ranks copy one page": [[(4, 70), (6, 72)], [(5, 71), (7, 72)]],
    "another rank's page": [[(4, 70), (6, 72)], [(4, 71)]],
    "a page that is not the request's": [[(4, 70), (6, 73)], [(5, 71)]],
    "one page instead of another": [[(4, 70), (6, 70)], [(5, 71)]],
}


@pytest.mark.parametrize("case", FLAWS)
def test_flaws(case: str) -> None:
    """Copies that are not one of each page of D, by the owner: what was written and what was expected is named."""
    why = flaw(FLAWS[case], [72, 70, 71])
    assert "expected [(70, True), (71, True), (72, True)]" in why
    assert str(sorted((to, page % 2 == rank) for rank, made in enumerate(FLAWS[case]) for page, to in made)) in why


def pool(page_size: int = 4, layers: int = 2, components: tuple[Component, ...] = (KV, INDEX)) -> ShardPool:
    return ShardPool(0, Placement(1, page_size), 3, layers, components)


def test_equal_geometries_in_any_order() -> None:
    """The order of the components is no difference."""
    mine, theirs = geometry_of([pool()], 2, 0), geometry_of([pool(components=(INDEX, KV))], 2, 0)
    assert "" == unequal(mine, theirs, "p0")


KEYS, INDEXER = "'kv': '2 layers, 2 torch.float32, 0 scales'", "'index': '2 layers, 5 torch.uint8, 1 scales'"
MISFITS = [
    (pool(page_size=8), 2, 0, "'page_size': (4, 8)"),
    (pool(layers=1), 2, 0, "'kv': '1 layers, 2 torch.float32, 0 scales'"),
    (pool(components=(KV,)), 2, 0, f"{{{KEYS}}})"),
    (pool(components=(Component("kv", 2, torch.int32), INDEX)), 2, 0, "'kv': '2 layers, 2 torch.int32, 0 scales'"),
    (pool(components=(KV, Component("index", 5, torch.uint8))), 2, 0, "'index': '2 layers, 5 torch.uint8, 0 scales'"),
    (pool(components=(Component("kv", 3, torch.float32), INDEX)), 2, 0, "'kv': '2 layers, 3 torch.float32, 0 scales'"),
    (pool(), 4, 0, "'shards': (2, 4)"),
    (pool(), 2, 1, "'rank': (0, 1)"),
]


@pytest.mark.parametrize(("other", "shards", "rank", "text"), MISFITS)
def test_unequal_geometries(other: ShardPool, shards: int, rank: int, text: str) -> None:
    """Every difference is named with both values, and nothing else."""
    mine, theirs = geometry_of([pool()], 2, 0), geometry_of([other], shards, rank)
    why = unequal(mine, theirs, "p0")
    assert text in why
    assert ("components" in text or "layers" in text) == (f"'components': ({{{KEYS}, {INDEXER}}}, " in why)
    assert 1 == why.count(": (")
    assert "" != unequal(theirs, mine, "p0")


@pytest.mark.parametrize("which", range(4))
def test_both_sides_refuse(which: int) -> None:
    """Sides of different page size, layers, components, dtype or page layout: D cannot reserve, P cannot start."""
    network = Network()
    sender = KVSender([ShardPool(0, Placement(1, 4), 3, 2, (KV, INDEX))], network.end("p0"))
    decode = DecodeWorker([MISFITS[[0, 1, 2, 4][which]][0]], network.end("d"), ["p0"])
    decode.connect()
    sender.poll()
    decode.poll()
    field = "components" if which else "page_size"
    with pytest.raises(RefusedError, match=rf"'p0' does not fit, .*{{'{field}': \("):
        decode.reserve(1, 4)
    sending = sender.find("d", 1, 1)
    assert f"'d' does not fit, expected here and there the same: {{'{field}': (" in sending.why
    assert (True, 0, []) == (sending.concluded, used_pages(decode), network.landed)


def test_swapped_ranks_are_refused() -> None:
    """D that takes P's rank 1 for its rank 0 is refused at the hello."""
    rig = Rig()
    decode = DecodeWorker([ShardPool(0, Placement(1, 2), 4, LAYERS, (KV, INDEX))], rig.network.end("d2"), ["p1", "p0"])
    decode.connect()
    rig.step()
    decode.poll()
    with pytest.raises(RefusedError, match=r"'rank': \(0, 1\)"):
        decode.reserve(1, 4)


def test_example_arrives() -> None:
    """Pages [4, 9, 12] at N=4, five tokens in two chunks: bit for bit, ranks 2 and 3 conclude with nothing."""
    rig = Rig(ranks=4)
    request = rig.request(1, [4, 9, 12], 5, ends=[3])
    assert "complete" == rig.through(request)
    assert rig.expected(request) == rig.rows(request)
    page = rig.page_bytes()
    assert [2 * page, page, 0, 0] == [sender.link.sent_bytes for sender in rig.source.senders]
    assert {"done"} == {sending.word for sending in request.sendings.values()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_partial_page_of_a_chunk(ranks: int) -> None:
    """Chunks that end inside a page (sglang#5588): pages of 4 tokens, 15 tokens by 6; every page is written once."""
    rig = Rig(ranks=ranks, ps=4)
    request = rig.request(1, [4, 7, 2, 5], 15, ends=[6, 12])
    assert "complete" == rig.through(request)
    assert rig.expected(request) == rig.rows(request)
    assert {1} == set(rig.landings[1, 1].values())


@pytest.mark.parametrize("faults", [Faults((7,), (3, 0), (0, 5)), Faults((9, 0, 4), (3, 0), (0, 5), torn=True)])
def test_rows_that_come_late(faults: Faults) -> None:
    """Slow events, slow and torn writes, messages twice: nothing is read before it is there."""
    rig = Rig(ranks=3, faults=faults)
    request = rig.request(1, [9, 4, 7, 3, 11], 10, ends=[4, 6], ready=6)
    assert "complete" == rig.through(request)
    assert rig.expected(request) == rig.rows(request)


def test_two_decode_workers() -> None:
    """One worker may send to several decode workers, which use the same room numbers and generations."""
    rig = Rig()
    other = DecodeWorker([ShardPool(0, Placement(1, 2), 9, LAYERS, (KV, INDEX))], rig.network.end("d2"), rig.names)
    other.connect()
    rig.step()
    other.poll()
    first, second = rig.request(1, [5, 2, 3], 6), rig.request(2, [8, 4], 4)
    assert 1 == other.reserve(1, 4)
    assert "complete" == rig.through(first)
    second.sendings = {rank: sender.find("d2", 1, 2) for rank, sender in enumerate(rig.source.senders)}
    rig.send(second)
    for _ in range(4):
        rig.step()
        other.poll()
    assert rig.expected(first) == rig.rows(first)
    assert "complete" == other.slots[1].state
    assert rig.expected(second) == {
        n: r.contiguous().view(torch.uint8).flatten().tolist() for n, r in other.rows(1).items()
    }


def test_rank_comes_back() -> None:
    """A rank that died and came back under its name: rooms of its time fail, after `connect` new ones complete."""
    rig = Rig(faults=Faults(write_ticks=(4,)))
    lost = rig.request(1, [5, 2, 3], 6)
    rig.step()
    lost.generation = rig.decode.reserve(1, 6)
    rig.step()
    assert rig.start(lost)
    rig.send(lost)
    rig.step()
    rig.lose("p1")
    rig.step(6)
    assert "failed" == rig.state(1)
    assert "'p1' is lost" in rig.decode.slots[1].why
    with pytest.raises(RefusedError, match="'p1' has not answered the hello"):
        rig.decode.reserve(2, 4)
    rig.source.senders[1] = KVSender([rig.source.pools[1]], rig.network.end("p1"))
    rig.dead.clear()
    rig.decode.connect()
    again = rig.request(2, [8, 9], 4, room=1)
    assert "complete" == rig.through(again)
    assert rig.expected(again) == rig.rows(again)


def test_decode_worker_comes_back() -> None:
    """A new D of the old name: the old one's transfers fail at P and are not told to the new one, whatever the room."""
    rig = Rig(faults=Faults(write_ticks=(5,)))
    lost = rig.request(1, [5, 2, 3], 6)
    rig.step()
    lost.generation = rig.decode.reserve(1, 6)
    rig.step()
    assert rig.start(lost)
    rig.send(lost)
    rig.step()
    landed = len(rig.network.landed)
    rig.decode = DecodeWorker([rig.decode_pool], rig.network.end("d"), rig.names)
    rig.decode.connect()
    again = rig.request(2, [8, 9], 4)
    assert "complete" == rig.through(again)
    assert rig.expected(again) == rig.rows(again)
    assert {"lost"} == {sending.word for sending in lost.sendings.values()}
    assert landed + 2 * 2 * LAYERS == len(rig.network.landed)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.transports.memory import Network
from kvshard_ref.decode import DecodeWorker
from kvshard_ref.errors import RefusedError, UnknownRequestError
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.transfer import Message
from tests.transfer_rig import INDEX, KV, LAYERS, Hand, used_pages

register_cpu_ci(est_time=10, stage="commit")

PS = 4
PAGES = 9
Copies = list[list[int]]
"""What a rank says it copied: [P's page, D's page]."""


class Side:
    """D, and hands that play all ranks of P. Position p of a request has page p + N at P, owned by rank p mod N."""

    def __init__(self, ranks: int = 2) -> None:
        self.network = Network()
        pool = ShardPool(0, Placement(1, PS), PAGES, LAYERS, (KV, INDEX))
        place = Placement(ranks, PS)
        self.hands = [
            Hand(self.network, f"p{rank}", ShardPool(rank, place, 8, LAYERS, (KV, INDEX)), ranks)
            for rank in range(ranks)
        ]
        self.decode = DecodeWorker([pool], self.network.end("d"), [hand.end.name for hand in self.hands])
        self.decode.connect()
        for rank, hand in enumerate(self.hands):
            hand.hello("d", rank)
        self.decode.poll()

    def copies(self, rank: int, room: int = 1) -> Copies:
        """What a rank has to copy."""
        ranks = len(self.hands)
        return [[p + ranks, dst] for p, dst in enumerate(self.decode.slots[room].pages) if p % ranks == rank]

    def state(self, room: int = 1) -> str:
        return self.decode.slots[room].state

    def used(self) -> int:
        """Pages that are not free."""
        return used_pages(self.decode)

    def say(self, rank: int, kind: str, body: Any = None, generation: int = 1) -> None:
        """To room 1."""
        self.hands[rank].say("d", Message(kind, 1, generation, body))
        self.decode.poll()

    def heard(self, rank: int) -> list[str]:
        return [message.kind for message in self.hands[rank].heard()]


def test_complete_when_all_ranks_have_concluded() -> None:
    """One page at three ranks: only when the empty ranks have said done too are the rows given out."""
    side = Side(ranks=3)
    assert 1 == side.decode.reserve(1, 3)
    for rank in (2, 0, 1):
        assert "waiting" == side.state()
        with pytest.raises(RefusedError, match="room 1 is waiting"):
            side.decode.rows(1)
        side.say(rank, "done", side.copies(rank))
    assert "complete" == side.state()
    assert {"kv": (LAYERS, 3, 2), "index": (LAYERS, 3, 5)} == {
        n: tuple(r.shape) for n, r in side.decode.rows(1).items()
    }
    side.decode.release(1)
    assert 0 == side.used()


def test_reservation_is_told() -> None:
    """All ranks get the pages by position, and the names of the components that go there."""
    side = Side()
    side.decode.reserve(1, 2 * PS + 1)
    pages = side.decode.slots[1].pages
    expected = [Message("reserved", 1, 1, [pages, ["index", "kv"]])]
    assert [expected, expected] == [hand.heard() for hand in side.hands]
    assert (3, 3) == (len(set(pages)), side.used())


WRONG: dict[str, Callable[[Copies], Copies]] = {
    "no copy of a page": lambda copies: copies[1:],
    "no copies": lambda _: [],
    "a copy twice": lambda copies: copies * 2,
    "the other rank's page": lambda copies: [[3, copies[0][1]], *copies[1:]],
    "another page of D": lambda copies: [[copies[0][0], 9], *copies[1:]],
    "a page of D twice": lambda copies: [copies[0], [copies[1][0], copies[0][1]]],
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_copies(case: str) -> None:
    """Done with copies that are not the rank's part of the request: the room fails, and says what was expected."""
    side = Side()
    side.decode.reserve(1, 4 * PS)
    side.say(0, "done", WRONG[case](side.copies(0)))
    side.say(1, "done", side.copies(1))
    slot = side.decode.slots[1]
    assert ("failed", 0) == (slot.state, side.used())
    assert f"expected {[(page, True) for page in sorted(slot.pages)]}" in slot.why


def test_two_ranks_copy_one_page() -> None:
    """Each says that it owned the page: refused, whoever is right."""
    side = Side()
    side.decode.reserve(1, 2 * PS)
    side.say(0, "done", side.copies(0))
    side.say(1, "done", [[3, side.decode.slots[1].pages[0]], *side.copies(1)])
    assert "failed" == side.state()


@pytest.mark.parametrize("again", ["done", "failed", "ack"])
def test_repeated_word(again: str) -> None:
    """A rank concludes once: what it says after that, the same again or not, changes nothing."""
    side = Side(ranks=3)
    side.decode.reserve(1, 3 * PS)
    copies = [side.copies(rank) for rank in range(3)]
    side.say(0, "done", copies[0])
    side.say(0, again, copies[1])
    assert ("waiting", ["p1", "p2"]) == (side.state(), side.decode.slots[1].writers)
    side.say(1, "done", copies[1])
    side.say(2, "done", copies[2])
    side.say(0, again, copies[1])
    assert "complete" == side.state()


def test_word_of_another_generation() -> None:
    """What is said of an earlier use of the room, or of one to come, or of another room, changes nothing."""
    side = Side()
    side.decode.reserve(1, 2 * PS)
    old = [side.copies(0), side.copies(1)]
    for rank in range(2):
        side.say(rank, "done", old[rank])
    side.decode.release(1)
    assert 2 == side.decode.reserve(1, 2 * PS)
    for generation in (1, 3):
        for rank in range(2):
            side.say(rank, "done", old[rank], generation)
            side.say(rank, "failed", "late", generation)
    side.hands[0].say("d", Message("failed", 2, 2, "another room's"))
    side.decode.poll()
    assert ("waiting", ["p0", "p1"]) == (side.state(), side.decode.slots[1].writers)


@pytest.mark.parametrize("last", ["done", "failed", "ack", "lost"])
def test_pages_are_held_until_all_have_concluded(last: str) -> None:
    """Abort with a writer paused (sglang#24527): its pages go to nobody before it has concluded, however it does."""
    side = Side()
    side.decode.reserve(1, 6 * PS)
    side.say(0, "done", side.copies(0))
    for _ in range(2):
        side.decode.release(1)
    assert [["reserved"], ["reserved", "abort"]] == [side.heard(0), side.heard(1)]
    with pytest.raises(RefusedError, match=r"room 1 is aborting: release it"):
        side.decode.reserve(1, PS)
    with pytest.raises(RefusedError, match=r"16 tokens need 4 pages, expected 1..3"):
        side.decode.reserve(2, 4 * PS)
    side.say(0, "ack")
    assert ("aborting", 6) == (side.state(), side.used())
    if last == "lost":
        side.hands[1].end.close()
        side.decode.poll()
    else:
        side.say(1, last, side.copies(1) if last == "done" else "why")
    assert ("failed", 0, "released before it was complete") == (side.state(), side.used(), side.decode.slots[1].why)
    side.decode.release(1)
    with pytest.raises(UnknownRequestError, match="room 1 is not in use"):
        side.decode.release(1)


def test_failed_rank() -> None:
    """A rank that failed fails the room: the others are stopped, why is kept, a word that comes late does no harm."""
    side = Side(ranks=3)
    side.decode.reserve(1, 3 * PS)
    side.say(1, "failed", "prompt too long")
    assert ("aborting", "rank 'p1': failed, prompt too long") == (side.state(), side.decode.slots[1].why)
    assert [["reserved", "abort"], ["reserved"], ["reserved", "abort"]] == [side.heard(rank) for rank in range(3)]
    side.say(0, "done", side.copies(0))
    side.say(0, "ack")
    assert "aborting" == side.state()
    side.say(2, "ack")
    assert ("failed", "rank 'p1': failed, prompt too long") == (side.state(), side.decode.slots[1].why)


def test_ack_without_an_abort() -> None:
    """A rank that has stopped by itself has not sent everything."""
    side = Side()
    side.decode.reserve(1, 2 * PS)
    side.say(0, "ack")
    side.say(1, "done", side.copies(1))
    assert "failed" == side.state()


def test_lost_rank() -> None:
    """A lost rank fails the rooms that it may still write, not those that it has concluded; the rest are awaited."""
    side = Side()
    side.decode.reserve(1, 2 * PS)
    side.decode.reserve(2, 2 * PS)
    side.say(0, "done", side.copies(0))
    side.hands[0].end.close()
    side.decode.poll()
    assert ["waiting", "aborting"] == [side.state(room) for room in (1, 2)]
    side.say(1, "done", side.copies(1))
    side.hands[1].say("d", Message("ack", 2, 2))
    side.decode.poll()
    assert ["complete", "failed"] == [side.state(room) for room in (1, 2)]
    with pytest.raises(RefusedError, match="'p0' has not answered the hello"):
        side.decode.reserve(3, PS)


def test_reserve_before_the_hello() -> None:
    """Nothing is reserved before all ranks have answered; a geometry that differs is refused by name."""
    network = Network()
    decode = DecodeWorker([ShardPool(0, Placement(1, PS), 3, LAYERS, (KV,))], network.end("d"), ["p0"])
    hand = Hand(network, "p0", ShardPool(0, Placement(1, 2 * PS), 3, LAYERS, (KV,)), 1)
    decode.connect()
    with pytest.raises(RefusedError, match="'p0' has not answered the hello"):
        decode.reserve(1, PS)
    hand.hello("d", 0)
    decode.poll()
    with pytest.raises(RefusedError, match=r"'p0' does not fit, .*'page_size': \(4, 8\)"):
        decode.reserve(1, PS)
    assert 0 == used_pages(decode)


@pytest.mark.parametrize("tokens", [0, -3, PAGES * PS + 1])
def test_refused_tokens(tokens: int) -> None:
    """No tokens, or more than fit: refused with the numbers, and nothing changed."""
    side = Side()
    with pytest.raises(RefusedError, match=f"{tokens} tokens need .* pages, expected 1..{PAGES}"):
        side.decode.reserve(1, tokens)
    assert (0, {}, [[], []]) == (side.used(), side.decode.slots, [side.heard(rank) for rank in range(2)])


def test_room_in_use() -> None:
    """A room is reserved again after its release, or when it failed."""
    side = Side()
    side.decode.reserve(1, PS)
    with pytest.raises(RefusedError, match="room 1 is waiting: release it"):
        side.decode.reserve(1, PS)
    side.say(0, "failed", "?")
    side.say(1, "ack")
    assert 2 == side.decode.reserve(1, PS)
    for rank in range(2):
        side.say(rank, "done", side.copies(rank), generation=2)
    with pytest.raises(RefusedError, match="room 1 is complete: release it"):
        side.decode.reserve(1, PS)
    side.decode.release(1)
    assert (3, 1) == (side.decode.reserve(1, PS), side.used())


def test_last_words() -> None:
    """What a rank said before it was lost counts."""
    side = Side()
    side.decode.reserve(1, 2 * PS)
    for rank, hand in enumerate(side.hands):
        hand.say("d", Message("done", 1, 1, side.copies(rank)))
        hand.end.close()
    side.decode.poll()
    assert "complete" == side.state()


def test_stranger() -> None:
    """An end that is no rank of this worker is not heard, hello or not."""
    side = Side()
    side.decode.reserve(1, PS)
    stranger = Hand(side.network, "x", side.hands[0].pool, 2)
    stranger.hello("d", 0)
    stranger.say("d", Message("failed", 1, 1, "?"))
    side.decode.poll()
    assert "waiting" == side.state()

from __future__ import annotations

from collections.abc import Callable

import pytest

from ci.register import register_cpu_ci
from harness.transports.memory import Faults, Network
from kvshard_ref.errors import GeometryError
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.sender import KVSender, Sending, Use
from kvshard_ref.transfer import Message
from tests.transfer_rig import INDEX, KV, LAYERS, Hand

register_cpu_ci(est_time=10, stage="commit")

PS = 4
USE = ("d", 7, 1)
ROOM = (7, 1)
COMPONENTS = (KV, INDEX)


class Flag:
    """An event that happens when it is told to."""

    def __init__(self, happened: bool = True) -> None:  # noqa: FBT001, FBT002 - reads best as Flag(False)
        self.happened = happened

    def query(self) -> bool:
        return self.happened


class Side:
    """Rank 1 of 2, and a hand that plays D."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.network = Network(faults)
        self.pool = ShardPool(1, Placement(2, PS), 8, LAYERS, COMPONENTS)
        self.sender = KVSender([self.pool], self.network.end("p1"))
        self.hand = self.new_hand()

    def new_hand(self) -> Hand:
        hand = Hand(self.network, "d", ShardPool(0, Placement(1, PS), 9, LAYERS, COMPONENTS), 2)
        hand.hello("p1", 1)
        self.sender.poll()
        return hand

    def reserve(self, *dst: int, generation: int = 1) -> None:
        self.hand.say("p1", Message("reserved", 7, generation, [dst, ["index", "kv"]]))
        self.sender.poll()

    def started(self, *dst: int) -> Sending:
        self.reserve(*dst)
        return self.sender.find("d", 7, len(dst))

    def reserved(self) -> list[Use]:
        """What has not been started."""
        return [sending.use for sending in self.sender.sendings if not sending.started]

    @property
    def bytes(self) -> int:
        return self.sender.link.sent_bytes

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.sender.poll()

    def written(self) -> list[int]:
        """D's pages of component kv, layer 0, in the order in which they were written."""
        return [landing.dst for landing in self.network.landed if landing.region == "kv.0"]


def kinds(messages: list[Message]) -> list[str]:
    return [message.kind for message in messages]


def test_waits_for_the_rows() -> None:
    """Nothing is written before the event behind the rows, not even when a later chunk's event has happened."""
    side, first = Side(), Flag(False)
    sending = side.started(1, 2)
    sending.send([3], PS, first)
    sending.send([3, 5], 2 * PS, Flag(), last=True)
    side.poll(3)
    assert ([], 0, []) == (side.network.landed, side.bytes, side.hand.heard())
    first.happened = True
    side.poll(2)
    assert [1, 2] == side.written()
    assert ["done"] == kinds(side.hand.heard())


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_done_is_told_when_all_has_landed(torn: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """The last of all writes ends before the first message; what is told is what was copied."""
    side = Side(Faults(write_ticks=(9, 2), torn=torn))
    sending = side.started(1, 2)
    sending.send([3], PS, Flag())
    sending.send([3, 5], 2 * PS, Flag(), last=True)
    told = None
    for _ in range(20):
        side.poll()
        assert sending.finished == (len(side.network.landed) == 2 * 2 * LAYERS)
        told = told or next(iter(side.hand.heard()), None)
        assert bool(told) == sending.finished
    assert Message("done", *ROOM, [[3, 1], [5, 2]]) == told


def test_only_whole_pages_before_the_last() -> None:
    """Chunks that end inside a page: the page goes with the chunk that fills it, the partial one with the last."""
    side = Side()
    sending = side.started(1, 2, 3, 4)
    seen = []
    for tokens, last in ((3, False), (6, False), (12, False), (15, True)):
        pages = (3, 5, 7, 9)[: -(-tokens // PS)]
        sending.send(list(pages), tokens, Flag(), last=last)
        side.poll()
        seen.append(side.written())
    assert [[], [1], [1, 2, 3], [1, 2, 3, 4]] == seen


def test_empty_last_chunk_concludes() -> None:
    """A rank that owns nothing, and a last chunk without new pages, still say done."""
    side = Side()
    sending = side.started(1)
    sending.send([2], PS, Flag())
    side.poll()
    assert [] == side.hand.heard()
    sending.send([2], PS, Flag(), last=True)
    side.poll()
    assert ([], 0, "done") == (side.network.landed, side.bytes, sending.word)
    assert [Message("done", *ROOM, [])] == side.hand.heard()


def test_page_list_is_copied() -> None:
    """The caller may change its list after the call."""
    side = Side()
    sending, pages = side.started(1, 2), [3, 5]
    sending.send(pages, 2 * PS, Flag(), last=True)
    pages[:] = [9, 11]
    side.poll(2)
    assert [1, 2] == [landing.src for landing in side.network.landed if landing.region == "kv.0"]


@pytest.mark.parametrize(
    ("count", "components"),
    [(1, ["index", "kv"]), (3, ["index", "kv"]), (2, ["kv"]), (2, ["index", "kv", "state"])],
    ids=["fewer pages", "more pages", "a component less", "a component more"],
)
def test_reserved_otherwise(count: int, components: list[str]) -> None:
    """Another number of pages or other components: both are named, D is told, nothing is written."""
    side = Side()
    side.hand.say("p1", Message("reserved", *ROOM, [[1, 2], components]))
    sending = side.sender.find("d", 7, count)
    text = f"there are {(count, ['index', 'kv'])} pages and components, reserved {(2, components)}"
    assert text in sending.why
    sending.send([3, 5, 7][:count], count * PS, Flag(), last=True)
    side.poll()
    heard = side.hand.heard()
    assert (["failed"], [], True) == (kinds(heard), side.network.landed, sending.finished)
    assert text in heard[0].body


@pytest.mark.parametrize(
    ("pages", "tokens", "last"),
    [
        ([3], PS, True),
        ([3, 5, 7], 3 * PS, True),
        ([3, 5, 7], 3 * PS, False),
        ([], PS, False),
    ],
    ids=["too few", "too many", "too many, not last", "fewer than before"],
)
def test_chunk_of_wrong_length(pages: list[int], tokens: int, last: bool) -> None:  # noqa: FBT001 - as above
    """A chunk that does not lead to the reserved count is refused and changes nothing."""
    side = Side()
    sending = side.started(1, 2)
    sending.send([3], PS, Flag())
    with pytest.raises(GeometryError, match=r"pages after 1, expected 2 in the end"):
        sending.send(pages, tokens, Flag(), last=last)
    side.poll()
    assert [1] == side.written()
    sending.send([3, 5], 2 * PS, Flag(), last=True)
    side.poll(2)
    assert ([1, 2], ["done"]) == (side.written(), kinds(side.hand.heard()))


def test_chunk_after_the_last() -> None:
    """A request has one last chunk: what comes after it is not sent."""
    side = Side()
    sending = side.started(1)
    for last in (True, True, False):
        sending.send([3], PS, Flag(), last=last)
    side.poll(2)
    assert ([1], ["done"]) == (side.written(), kinds(side.hand.heard()))


ENDS: list[tuple[str, Callable[[Side, Sending], None], str, list[str]]] = [
    ("P aborts", lambda side, sending: sending.abort("grammar"), "failed", ["failed"]),
    ("D aborts", lambda side, sending: side.hand.say("p1", Message("abort", *ROOM, "left")), "ack", ["ack"]),
]


@pytest.mark.parametrize(("how", "end", "state", "told"), ENDS, ids=[each[0] for each in ENDS])
def test_abort_in_flight(how: str, end: Callable[[Side, Sending], None], state: str, told: list[str]) -> None:
    """After an abort no write begins; it is over, and D is told, only when the writes under way have ended."""
    side = Side(Faults(write_ticks=(6,)))
    sending = side.started(1, 2)
    sending.send([3], PS, Flag())
    side.poll()
    sending.send([3, 5], 2 * PS, Flag(), last=True)
    end(side, sending)
    heard: list[Message] = []
    for _ in range(12):
        side.poll()
        assert sending.finished == bool(side.network.landed)
        heard += side.hand.heard()
        assert bool(heard) == sending.finished
    assert (state, told, [1]) == (sending.word, kinds(heard), side.written())


def test_abort_before_the_start() -> None:
    """D gives up before P starts: acknowledged at once, and P can start no more."""
    side = Side()
    side.reserve(1)
    side.hand.say("p1", Message("abort", *ROOM, "left"))
    side.poll()
    assert [Message("ack", *ROOM, "left")] == side.hand.heard()
    sending = side.sender.find("d", 7, 1)
    assert ("'d' has not told of room 7: reserve it, poll", True) == (sending.why, sending.concluded)


def test_abort_of_another_use() -> None:
    """An abort of an earlier generation, or of another room, is acknowledged and ends nothing else."""
    side = Side()
    side.reserve(1, generation=4)
    sending = side.sender.find("d", 7, 1)
    for room, generation in ((7, 3), (8, 4)):
        side.hand.say("p1", Message("abort", room, generation, "left"))
    side.poll()
    assert [Message("ack", 7, 3, "left"), Message("ack", 8, 4, "left")] == side.hand.heard()
    assert not sending.finished


def test_reservation_counts_once() -> None:
    """A reservation that arrives again, or after a later one, cannot be started again."""
    side = Side()
    sending = side.started(1)
    sending.send([3], PS, Flag(), last=True)
    side.poll(2)
    side.reserve(1)
    side.reserve(1, generation=2)
    side.reserve(2)
    assert ("done", [("d", 7, 2)]) == (sending.word, side.reserved())


def test_failed_write() -> None:
    """D's page outside of D's pool: the write fails, so does the transfer, and D is told why."""
    side = Side()
    sending = side.started(99)
    sending.send([3], PS, Flag(), last=True)
    side.poll(2)
    assert ("failed", ["failed"], []) == (sending.word, kinds(side.hand.heard()), side.network.landed)
    assert "a write failed" in sending.why


def test_failed_write_beside_a_slow_one() -> None:
    """One write has failed, another is under way: it is over when that one has ended."""
    side = Side(Faults(write_ticks=(6, 0)))
    sending = side.started(1, 99)
    sending.send([3], PS, Flag())
    sending.send([3, 5], 2 * PS, Flag(), last=True)
    heard = []
    for _ in range(10):
        side.poll()
        assert sending.finished == bool(side.written())
        heard += side.hand.heard()
        assert sending.finished == bool(heard)
    assert ("failed", ["failed"]) == (sending.word, kinds(heard))


def test_new_process_of_the_name() -> None:
    """D dies and comes back before P has looked: the old one's transfers fail untold, its reservations are gone."""
    side = Side(Faults(write_ticks=(5,)))
    live = side.started(1)
    side.reserve(2, generation=2)
    live.send([3], PS, Flag(), last=True)
    side.poll()
    side.hand = side.new_hand()
    side.reserve(1)
    side.poll(9)
    assert ("lost", [], []) == (live.word, side.hand.heard(), side.network.landed)
    assert "'d' is lost" in live.why
    assert [USE] == side.reserved()


def test_lost_at_the_last_word() -> None:
    """D dies when all is written and nothing told: the transfer is over."""
    side = Side()

    class Killer(Flag):
        def query(self) -> bool:
            side.hand.end.close()
            return True

    sending = side.started(1)
    sending.send([2], PS, Killer(), last=True)
    side.poll(2)
    assert (True, []) == (sending.finished, side.sender.sendings)


def test_refusal_is_of_one_peer() -> None:
    """A decode worker that does not fit cannot be sent to; others can."""
    side = Side()
    Hand(side.network, "x", ShardPool(0, Placement(1, 2 * PS), 9, LAYERS, COMPONENTS), 2).hello("p1", 1)
    sending = side.started(1)
    assert (
        "'x' does not fit, expected here and there the same: {'page_size': (4, 8)}" in side.sender.find("x", 7, 1).why
    )
    assert not sending.concluded


def test_strange_messages() -> None:
    """What is no message, and what comes before a hello, is dropped; what follows is heard."""
    side = Side()
    stranger = side.network.end("x")
    stranger.connect("p1")
    stranger.notify("p1", b'["reserved", 7, 1, [[1], ["index", "kv"]]]')
    for data in (b"", b"\xff", b"{}", b"[1]", b'["reserved"', b'["hello", 0, 0, 5]', b"[1, 2, 3, 4, 5]"):
        side.hand.end.notify("p1", data)
    side.reserve(1)
    assert [USE] == side.reserved()


def test_bytes() -> None:
    """Bytes are pages times layers times bytes of a page, over all components."""
    side = Side()
    sending = side.started(1, 2, 3)
    sending.send([3, 4, 5], 3 * PS, Flag(), last=True)
    side.poll()
    assert 2 * LAYERS * PS * (2 * 4 + 5) == side.bytes


def test_order_of_pages() -> None:
    """Chunks do not reorder pages: positions go up in what is told."""
    side = Side()
    sending = side.started(*range(1, 9))
    sending.send([3, 5, 7, 9], 4 * PS, Flag())
    sending.send([3, 5, 7, 9, 11, 13, 15, 17], 8 * PS, Flag(), last=True)
    side.poll(2)
    assert [[page, at] for at, page in enumerate(range(3, 18, 2), start=1)] == side.hand.heard()[0].body


def test_loss_is_of_one_peer() -> None:
    """A decode worker that is gone takes no other one's transfers with it."""
    side = Side()
    other = Hand(side.network, "x", ShardPool(0, Placement(1, PS), 9, LAYERS, COMPONENTS), 2)
    other.hello("p1", 1)
    sending = side.started(1)
    other.say("p1", Message("reserved", *ROOM, [[1], ["index", "kv"]]))
    gone = side.sender.find("x", 7, 1)
    other.end.close()
    side.poll()
    assert ("lost", "done") == (gone.word, sending.word)


def test_room_is_found_until_it_is_used() -> None:
    """A reservation is for one request: while that is on its way no other one finds the room."""
    side = Side()
    sending = side.started(1, 2)
    assert sending is side.sender.find("d", 7, 2)
    sending.send([3], PS, Flag())
    other = side.sender.find("d", 7, 2)
    assert ("lost", "done") == (other.word, sending.word)


def test_misfit_is_not_heard() -> None:
    """A decode worker that does not fit cannot reserve."""
    side = Side()
    other = Hand(side.network, "x", ShardPool(0, Placement(1, 2 * PS), 9, LAYERS, COMPONENTS), 2)
    other.hello("p1", 1)
    other.say("p1", Message("reserved", *ROOM, [[1], ["index", "kv"]]))
    side.poll()
    assert [] == side.reserved()


def test_ack_to_a_peer_that_is_gone() -> None:
    """D dies right after its abort: nobody is told, nothing is left."""
    side = Side()
    side.reserve(1)
    side.hand.say("p1", Message("abort", *ROOM, "left"))
    side.hand.end.close()
    side.poll(2)
    assert [] == side.sender.sendings

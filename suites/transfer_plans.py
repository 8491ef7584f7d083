"""The plans of the cases about transfers: requests on their way, and what overtakes, loses or repeats them."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.types import Abort, Evict, Finish, Ok, Receive, Release, Reserve, Send, Settle
from suites.machine import Hand, machine
from suites.prompts import pool_pages, prompt

MIXED = {
    "remote": 6,
    "send": 6,
    "extend": 5,
    "open": 3,
    "finish": 3,
    "abort": 2,
    "receive": 2,
    "release": 2,
    "settle": 2,
}
mixed = machine({**MIXED, "evict": 2, "batch": 2, "serve": 2}, kinds=("fork", "repeat", "fresh"))


def side_by_side(draw: Draw, table: Table) -> None:
    """Several requests with common prefixes, each on its way to its room while the others are computed."""
    hand = Hand(draw, table)
    for _ in range(draw(st.integers(1, 2))):
        hand.serve_remote(prompt(draw, hand.story, ("fresh", "fork", "repeat"), pages_max=4))
    rooms: dict[str, int] = {}
    for _ in range(draw(st.integers(1, 3))):
        name = hand.open(prompt(draw, hand.story, ("fork", "repeat", "fresh"), pages_max=4))
        room = hand.reserve(name) if name is not None else None
        if name is not None and room is not None:
            rooms[name] = room
            if draw(st.booleans()):
                hand.send(name, room)
    for _ in range(draw(st.integers(1, 4))):
        hand.batch()
        for name, room in rooms.items():
            if name in hand.story.live and draw(st.booleans()):
                hand.send(name, room)
    for name, room in rooms.items():
        if name in hand.story.live:
            hand.end_remote(name, room)
    if draw(st.booleans()):
        hand.close_all()


def scattered(draw: Draw, table: Table) -> None:
    """Both pools have holes, so that the pages of a request lie in no order: prefix, others', rest."""
    hand = Hand(draw, table)
    page = table.config.page_size
    for _ in range(draw(st.integers(1, 2))):
        hand.serve_remote(hand.story.new_tokens(draw(st.integers(1, 2)) * page))
    trunk = hand.story.new_tokens(page)
    hand.serve(trunk)
    hand.serve(hand.story.new_tokens(draw(st.integers(1, 3)) * page))
    for tokens in (trunk, trunk + hand.story.new_tokens(page), hand.story.new_tokens(page)):
        name = hand.open(tokens + hand.story.new_tokens(draw(st.integers(1, 2 * page))))
        room = hand.reserve(name) if name is not None else None
        if name is not None and hand.complete(name) and room is not None:
            hand.end_remote(name, room)  # all of it at once
        elif name in hand.story.live:
            table.do(Abort(name))


def from_host(draw: Draw, table: Table) -> None:
    """Requests whose prefix is, in part or whole, on the host only when their transfer begins."""
    hand = Hand(draw, table)
    page = table.config.page_size
    trunk = hand.story.new_tokens(draw(st.integers(1, 3)) * page)
    for end in (page, len(trunk), len(trunk)):  # a selective policy copies what is used again
        hand.serve(trunk[:end] + hand.story.new_tokens(1))
    for _ in range(draw(st.integers(1, 2))):
        table.do(Settle())
        if hand.can("evict"):
            table.do(Evict(draw(st.sampled_from((pool_pages(table.config), 1))) * page))
        name = hand.open(trunk + hand.story.new_tokens(draw(st.integers(1, page + 1))))
        room = hand.reserve(name) if name is not None else None
        if name is not None and room is not None:
            hand.send(name, room)
            hand.complete(name)
        if name in hand.story.live:
            if room is None:
                table.do(Abort(name))
            else:
                hand.end_remote(name, room)


def overtaken(draw: Draw, table: Table) -> None:
    """While a request's pages are on their way it ends, and others want the pages of both workers at once."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    for _ in range(draw(st.integers(1, 2))):
        name = hand.open(hand.story.new_tokens(draw(st.integers(1, max(1, most // 2))) * page))
        room = hand.reserve(name) if name is not None else None
        done = name is not None and hand.complete(name)
        sent = room is not None and name is not None and done and hand.send(name, room)
        early = draw(st.booleans())
        if room is not None and early:
            table.do(Release(room))  # while the ranks' last words are on their way
        if name in hand.story.live:
            table.do(Finish(name) if done and draw(st.booleans()) else Abort(name))
        if room is not None and (early or draw(st.booleans())):
            table.do(Release(room))
            hand.reserve_pages(room + 4, draw(st.integers(1, 3)))
        if hand.can("evict"):
            table.do(Evict(most * page))
        hand.serve(hand.story.new_tokens(max(1, most - 1) * page))
        if draw(st.booleans()):
            table.do(Settle())
        if sent and room is not None:
            hand.receive(room)
    hand.close_all()


def reserved_in_time(hand: Hand, name: str) -> bool:
    """Reserves room 1 again as soon as its last use has ended; the ops between let the network go on."""
    for _ in range(12):
        if isinstance(hand.table.do(Reserve(1, len(hand.story.live[name].tokens))), Ok):
            return True
        if hand.can("evict"):
            hand.table.do(Evict(1))
    return False


def echoes(draw: Draw, table: Table) -> None:
    """One room, used again as soon as it can be: what is said about its last use may come late, or once more.

    All is computed before, so that nothing but reserve and send lies between two uses.
    """
    hand = Hand(draw, table)
    page, few = table.config.page_size, draw(st.integers(1, 2))
    names = []
    for _ in range(draw(st.integers(2, 4))):
        name = hand.open(hand.story.new_tokens(draw(st.sampled_from((few, few, 3))) * page))
        if name is not None and hand.complete(name):
            names.append(name)
    for name in names:
        if not reserved_in_time(hand, name):
            break
        sent = any(hand.send(name, 1) for _ in range(6))  # each lets the network go on; a settle would wait for all
        how = draw(st.sampled_from(("received", "settled", "given up", "aborted", "left")))
        if how == "aborted" or draw(st.sampled_from((False, False, True))):
            table.do(Abort(name) if how == "aborted" else Finish(name))
        for _ in range(12 if sent and how == "received" else 0):
            if isinstance(table.do(Receive(1)), Ok):
                break
            table.do(Send(name, 1) if name in hand.story.live else Evict(1))  # again: it tells nothing new
        for _ in range(draw(st.sampled_from((0, 0, 20)))):  # what is late must not change it
            hand.receive(1)
        if how == "settled":
            table.do(Settle())
            hand.receive(1)
        if 1 in hand.story.rooms and (how != "left" or name is not names[-1]):
            table.do(Release(1))
    table.do(Settle())
    hand.receive(1)
    hand.close_all()


def piece_by_piece(draw: Draw, table: Table) -> None:
    """One room for requests that are sent in pieces: a piece may take longer than those behind it, and than all words.

    Read as soon as it can be, and again by whoever has the room next.
    """
    hand = Hand(draw, table)
    page, pieces = table.config.page_size, table.config.shards * 2
    for _ in range(draw(st.integers(1, 3))):
        name = hand.open(hand.story.new_tokens(draw(st.integers(2, max(2, pieces))) * page))
        if name is None or not reserved_in_time(hand, name):
            break
        any(hand.send(name, 1) for _ in range(6))  # nothing is computed yet: until the rank has heard of the room
        while name in hand.story.live and hand.story.live[name].left:
            op = hand.chunk(name, draw(st.sampled_from((1, table.config.shards))) * page, whole=True)
            if op is None or not isinstance(table.do(op), Ok):
                break
            hand.send(name, 1)
        how = draw(st.sampled_from(("received", "received", "settled", "given up")))
        for _ in range(12 if how == "received" else 0):
            if name not in hand.story.live or isinstance(table.do(Receive(1)), Ok):
                break
            table.do(Send(name, 1))  # again: it tells nothing new
        if how == "settled":
            table.do(Settle())
            hand.receive(1)
        if name in hand.story.live:
            table.do(Finish(name) if hand.story.live[name].left == 0 else Abort(name))
        for _ in range(draw(st.sampled_from((0, 0, 20)))):  # what is late must not change it
            hand.receive(1)
        if 1 in hand.story.rooms:
            table.do(Release(1))
    table.do(Settle())
    hand.close_all()


def outlived(draw: Draw, table: Table) -> None:
    """Transfers are given up by one side or the other while they write; the next request wants the same pages at once.

    All is computed before, so that a slow write lands among the next one's rows.
    """
    hand = Hand(draw, table)
    few = draw(st.integers(1, 2))
    names = [hand.open(hand.story.new_tokens(few * table.config.page_size)) for _ in range(draw(st.integers(2, 4)))]
    for name in [name for name in names if name is not None and hand.complete(name)]:
        if not reserved_in_time(hand, name) or not any(hand.send(name, 1) for _ in range(6)):
            break
        if draw(st.booleans()):
            table.do(Send(name, 1))  # tells nothing new, but what was begun goes on
        for _ in range(draw(st.sampled_from((0, 0, 6)))):
            hand.receive(1)
        if draw(st.booleans()):
            table.do(Abort(name))
        if name is not names[-1]:
            table.do(Release(1))
    for _ in range(12):
        hand.receive(1)
        if hand.can("evict"):
            table.do(Evict(1))  # the ranks go on
    hand.close_all()


def taken_again(draw: Draw, table: Table) -> None:
    """A room, given up before or while it is written to, or after a peer was lost, is there for the next request."""
    hand = Hand(draw, table)
    page = table.config.page_size
    for _ in range(draw(st.integers(1, 3))):
        name = hand.open(hand.story.new_tokens(draw(st.integers(1, 3)) * page))
        if name is None or not reserved_in_time(hand, name):
            break
        if draw(st.booleans()):
            table.do(Settle())
        if draw(st.booleans()):
            hand.complete(name)
        sent = draw(st.booleans()) and any(hand.send(name, 1) for _ in range(6))
        if not sent and draw(st.sampled_from((True, True, False))) and 1 in hand.story.rooms:
            table.do(Settle())
            hand.send(name, 1)
        how = draw(st.sampled_from(("given up", "given up", "settled", "aborted", "lost")))
        if how == "settled":
            table.do(Settle())
            hand.receive(1)
        if how == "lost" and hand.can("lose"):
            hand.move_lose()
            hand.move_restart()
        for _ in range(draw(st.sampled_from((0, 1, 2, 4))) if sent and name in hand.story.live else 0):
            table.do(Send(name, 1))  # tells nothing new: the ranks go on, and the last words get on their way
        if name in hand.story.live and (how == "aborted" or draw(st.booleans())):
            table.do(Abort(name))
        if 1 in hand.story.rooms:
            table.do(Release(1))
    name = hand.open(hand.story.new_tokens(page))
    if name is not None and reserved_in_time(hand, name):
        table.do(Settle())
        hand.complete(name)
        hand.send(name, 1)
        table.do(Settle())
        hand.receive(1)
    hand.close_all()


def rooms_without_their_rank(draw: Draw, table: Table) -> None:
    """Several rooms wait, some are written to, when one end is lost."""
    hand = Hand(draw, table)
    for room in range(1, 1 + draw(st.integers(1, 4))):
        name = hand.open(hand.story.new_tokens(draw(st.integers(1, 2)) * table.config.page_size))
        if name is None or not isinstance(table.do(Reserve(room, len(hand.story.live[name].tokens))), Ok):
            break
        if draw(st.booleans()):
            table.do(Settle())
            hand.extend(name)
            hand.send(name, room)
    hand.move_lose()
    table.do(Settle())
    hand.close_all()


def reserved_again(draw: Draw, table: Table) -> None:
    """A room is reserved once more while it waits, is written to, is given up in flight, or is complete."""
    hand = Hand(draw, table)
    page = table.config.page_size
    for _ in range(draw(st.integers(1, 2))):
        name = hand.open(hand.story.new_tokens(draw(st.integers(1, 3)) * page))
        if name is None:
            return
        table.do(Reserve(1, len(hand.story.live[name].tokens)))
        how = draw(st.sampled_from(("waits", "sent", "given up", "complete")))
        if how != "waits":
            if draw(st.booleans()):
                table.do(Settle())
            hand.complete(name)
            hand.send(name, 1)
        if how == "given up" and 1 in hand.story.rooms:
            table.do(Release(1))
        if how == "complete":
            table.do(Settle())
        hand.reserve_pages(1, draw(st.integers(1, 3)))
        table.do(Finish(name) if hand.story.live[name].left == 0 else Abort(name))
        table.do(Settle())
        if 1 in hand.story.rooms:
            table.do(Release(1))
    hand.close_all()


def two_rooms(draw: Draw, table: Table) -> None:
    """A request on its way to one room is sent to another one as well: the lower number first, or last."""
    hand = Hand(draw, table)
    page = table.config.page_size
    name = hand.open(hand.story.new_tokens(draw(st.integers(1, 2)) * page))
    if name is None:
        return
    for room in (1, 2):
        table.do(Reserve(room, len(hand.story.live[name].tokens)))
    table.do(Settle())
    if hand.complete(name):
        for room in draw(st.permutations((1, 2))):
            hand.send(name, room)
    table.do(Settle())
    for room in (1, 2):
        hand.receive(room)
    hand.close_all()


def wrong_sizes(draw: Draw, table: Table) -> None:
    """Rooms that were reserved for more or fewer pages than the request has."""
    hand = Hand(draw, table)
    page = table.config.page_size
    for room in range(1, draw(st.integers(2, 3))):
        name = hand.open(hand.story.new_tokens(draw(st.integers(1, 3)) * page))
        if name is None:
            continue
        length = len(hand.story.live[name].tokens)
        table.do(Reserve(room, length + page if length == page else length + draw(st.sampled_from((page, -page)))))
        table.do(Settle())
        if draw(st.booleans()):
            hand.send(name, room)
        if hand.complete(name):
            hand.send(name, room)
        table.do(Settle())
        hand.receive(room)
        if name in hand.story.live:
            table.do(Finish(name) if hand.story.live[name].left == 0 else Abort(name))
        table.do(Settle())
        hand.receive(room)
        if room in hand.story.rooms:
            table.do(Release(room))


def reused_rooms(draw: Draw, table: Table) -> None:
    """Few rooms, used again and again, given up in flight and reserved anew at once."""
    hand = Hand(draw, table)
    for _ in range(max(2, table.steps_max // 4)):
        getattr(hand, draw(st.sampled_from(("move_remote", "move_remote", "move_send", "move_abort"))))()
        on_the_way = [name for name in hand.story.live if hand.room_of(name) is not None]
        if draw(st.booleans()) and on_the_way:
            table.do(Abort(hand.pick(on_the_way)))
        getattr(hand, draw(st.sampled_from(("move_release", "move_receive", "move_settle", "move_extend"))))()
    if draw(st.booleans()):
        hand.close_all()


def lossy(draw: Draw, table: Table) -> None:
    """Transfers, and at some point the connection of one end is lost."""
    hand = Hand(draw, table)
    for _ in range(draw(st.integers(1, 2))):
        hand.move_remote()
    for _ in range(draw(st.integers(1, 4))):
        getattr(hand, draw(st.sampled_from(("move_send", "move_extend", "move_send", "move_settle"))))()
    for _ in range(draw(st.integers(0, 2))):  # rooms that wait, each for its own request
        name = hand.open(hand.story.new_tokens(table.config.page_size))
        room = hand.reserve(name) if name is not None else None
        if name is not None and room is not None and draw(st.booleans()):
            hand.send(name, room)
    hand.move_lose()
    for _ in range(draw(st.integers(0, 4))):
        getattr(hand, draw(st.sampled_from(("move_send", "move_extend", "move_receive", "move_finish"))))()
    if draw(st.booleans()):
        hand.move_restart()
        hand.move_remote()
    hand.close_all()


def misfits(draw: Draw, table: Table) -> None:
    """A request for a decode worker that has another page size."""
    hand = Hand(draw, table)
    name = hand.open(prompt(draw, hand.story, ("fresh",), pages_max=3))
    if name is not None and hand.complete(name):
        table.do(Reserve(1, len(hand.story.live[name].tokens)))
        table.do(Send(name, 1))
        table.do(Settle())
        table.do(Receive(1))

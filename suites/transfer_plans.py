"""The plans of the cases about transfers: requests on their way, and what overtakes, loses or repeats them."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.types import Abort, Evict, Finish, Receive, Release, Reserve, Send, Settle
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


def right_behind(draw: Draw, table: Table) -> None:
    """A prefix is sent right behind the forward that computes it, or behind its way back from the host."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    trunk = hand.story.new_tokens(draw(st.integers(1, 3)) * page)
    tokens = trunk + hand.story.new_tokens(draw(st.integers(1, page + 1)))
    if draw(st.booleans()) and hand.can("evict"):
        for _ in range(2):  # a selective policy copies what is used again
            hand.serve(trunk + hand.story.new_tokens(1))
        table.do(Settle())
        table.do(Evict(most * page))
    table.do(Reserve(1, len(tokens)))
    table.do(Settle())
    carrier = hand.open(trunk + hand.story.new_tokens(draw(st.sampled_from((1, page)))))
    if carrier is not None and hand.complete(carrier) and draw(st.booleans()):
        table.do(Finish(carrier))
    name = hand.open(tokens)
    if name is None:
        return
    hand.send(name, 1)
    hand.complete(name)
    hand.end_remote(name, 1)


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


def sent_to_a_released_room(draw: Draw, table: Table) -> None:
    """A room is given up before anything is sent to it; its request is sent there all the same, beside the next one."""
    hand = Hand(draw, table)
    page, pages = table.config.page_size, draw(st.integers(1, 2))
    names = [hand.open(hand.story.new_tokens(pages * page)) for _ in range(2)]
    rooms = {room: name for room, name in enumerate(names, 1) if name is not None and hand.complete(name)}
    for room in rooms:
        table.do(Reserve(room, pages * page))
        if draw(st.sampled_from((True, True, False))):
            table.do(Settle())
        if room == 1:
            table.do(Release(room))
            table.do(Settle())
    table.do(Settle())
    for room in draw(st.permutations(list(rooms))):
        hand.send(rooms[room], room)
        table.do(Settle())
    hand.receive(2)
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

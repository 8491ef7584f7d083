"""The plans of the cases about rooms: used again and again, given up at any moment, by requests that come in pieces."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.types import Abort, Evict, Finish, Flush, Ok, Receive, Release, Reserve, Send, Settle
from suites.machine import Hand
from suites.prompts import pool_pages


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


def sources_wanted(draw: Draw, table: Table) -> None:
    """Requests end, one way or the other, while their pages are sent; the next one wants the pages at once."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    sent = draw(st.integers(1, max(1, most // 2)))
    if draw(st.booleans()):  # all other pages are in use
        filler = hand.open(hand.story.new_tokens(min((most - sent) * page, table.config.context_tokens)))
        if filler is not None:
            hand.complete(filler)
    for _ in range(draw(st.integers(1, 3))):
        name = hand.open(hand.story.new_tokens(sent * page))
        room = hand.reserve(name) if name is not None else None
        if name is None or room is None or not hand.complete(name):
            break
        waiting = hand.open(hand.story.new_tokens(draw(st.integers(1, sent)) * page))
        if not any(hand.send(name, room) for _ in range(6)):
            break
        for _ in range(draw(st.sampled_from((0, 0, 1)))):
            hand.send(name, room)  # tells nothing new, but what was begun goes on
        table.do(Finish(name) if draw(st.sampled_from((False, False, True))) else Abort(name))
        if draw(st.sampled_from((False, False, True))):
            table.do(Release(room))
        if waiting is not None:
            hand.complete(waiting)
            table.do(Abort(waiting))
        table.do(Release(room))
        table.do(Settle())
    hand.close_all()


def crossed(draw: Draw, table: Table) -> None:
    """Two requests go on from one prefix with the same tokens; one is kept while the longer one is on its way.

    What the longer one has twice is read by its transfer, while others want pages; then its prompt comes again.
    """
    hand = Hand(draw, table)
    page, counts = table.config.page_size, st.integers(1, 2)
    trunk, both = hand.story.new_tokens(page * draw(counts)), hand.story.new_tokens(page * draw(counts))
    hand.serve(trunk)
    short = hand.open(trunk + both + hand.story.new_tokens(draw(st.sampled_from((1, page)))))
    tokens = trunk + both + hand.story.new_tokens(page * draw(counts) + draw(st.sampled_from((0, 1))))
    name = hand.open(tokens)
    room = hand.reserve(name) if name is not None else None
    if short is None or name is None or room is None:
        return
    early = draw(st.booleans()) and any(hand.send(name, room) for _ in range(6))  # what it has hit
    if hand.complete(short):
        table.do(Finish(short))
    most = pool_pages(table.config)
    rest = max(1, most - -(-len(tokens) // page) - len(both) // page)  # all that they leave, or less
    waiting = hand.open(hand.story.new_tokens(page * draw(st.sampled_from((1, rest, rest + 1, most)))))
    dropped = False
    if hand.complete(name) and any(hand.send(name, room) for _ in range(6)):
        for _ in range(0 if early else draw(st.sampled_from((0, 0, 1)))):
            hand.send(name, room)  # tells nothing new, but what was begun goes on
        table.do(Finish(name))
        if waiting is not None and draw(st.sampled_from((False, False, True))) and hand.can("flush"):
            table.do(Abort(waiting))
            dropped = isinstance(table.do(Flush()), Ok)  # then nothing of it is hit any more
    if waiting in hand.story.live:
        hand.complete(waiting)
        table.do(Abort(waiting))
    table.do(Settle())
    if not dropped:  # else the rows are there, but nobody knows any more whose they are
        hand.receive(room)
    if room in hand.story.rooms:
        table.do(Release(room))
    again = hand.open(tokens)
    if again is not None:
        table.do(Abort(again))
    hand.close_all()


def asked_when_settled(hand: Hand) -> None:
    """Requests whose rooms nothing stands against: all is settled, the room's number is new or has been used."""
    draw, page = hand.draw, hand.table.config.page_size
    hand.table.do(Settle())
    names = [name for _ in range(draw(st.sampled_from((2, 3, 1)))) if (name := hand.open(hand.story.new_tokens(page)))]
    rooms = dict(enumerate(names, draw(st.sampled_from((5, 1)))))  # a number that was never used, or that one
    for room in rooms:
        hand.table.do(Settle())
        hand.table.do(Reserve(room, page))
    for name in rooms.values():
        hand.complete(name)
    hand.table.do(Settle())
    for room, name in rooms.items():
        hand.send(name, room)  # beside those that are on their way
    hand.table.do(Settle())
    for room in rooms:
        hand.receive(room)


def one_beside_another(draw: Draw, table: Table) -> None:
    """Nothing but requests whose rooms nothing stands against, each on its way while the next one is sent."""
    hand = Hand(draw, table)
    asked_when_settled(hand)
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
    asked_when_settled(hand)
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

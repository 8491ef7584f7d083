"""Prefill to decode: every page arrives once, in its place, of the right request; whatever fails, both sides close."""

from __future__ import annotations

from collections import Counter

from harness.case import Violation
from harness.register import register_cpu_ci
from harness.types import (
    Flush,
    Ok,
    Receive,
    Received,
    Refused,
    Reserve,
    Send,
    Settle,
    layers_of,
)
from harness.views import DecodeView
from suites.claim import Step, case, expect, require
from suites.configs import ROOMY, Bounds, configs
from suites.invariants.test_reads import first_wrong, whose
from suites.machine import either, machine
from suites.room_plans import echoes, piece_by_piece, reserved_again, rooms_without_their_rank
from suites.story import held_pages
from suites.transfer_plans import (
    MIXED,
    from_host,
    lossy,
    misfits,
    mixed,
    overtaken,
    reused_rooms,
    right_behind,
    scattered,
    sent_to_a_released_room,
    side_by_side,
    two_rooms,
    wrong_sizes,
)

register_cpu_ci(est_time=60, stage="cases")

UNDER_WAY = ("waiting", "aborting")
TRANSFERS = ("op.reserve", "op.send", "op.receive", "op.release", "op.settle")
remote = configs(Bounds(decode_parts=(2, 3, 1), pages_max=4, scratch_contexts=ROOMY))


def received_rows_are_right(step: Step) -> None:
    """What a room has got are the rows of the request that was sent to it, all of them, and no other."""
    for op, reply in step.parts():
        if not (isinstance(op, Receive) and isinstance(reply, Ok) and isinstance(reply.value, Received)):
            continue
        room = step.story.rooms.get(op.room)
        if room is None or room.prompt is None or not room.concluded:
            raise Violation(
                f"rows received for room {op.room}",
                "a refusal",
                "nothing was sent to it" if room is None or room.prompt is None else "its last chunk was not sent",
            )
        expected = step.story.oracle.rows(room.prompt, 0, len(room.prompt))
        if reply.value.rows != expected:
            component, layer, position, stamp = first_wrong(reply.value.rows, expected)
            raise Violation(
                f"{whose(step.story, stamp)}, received in room {op.room} for {component} layer {layer} "
                f"position {position}",
                f"the row of position {position} of request {room.request}",
                f"the request with the prompt {room.prompt} was sent to this room",
            )


@case(
    "transfer.received_rows",
    invariants=("I16", "I19", "I10"),
    needs=TRANSFERS,
    seen={"received": 3, "sent early": 1, "sent in chunks": 3, "hit": 1},
    seen_in_groups={"sent with an empty owner": 1},
    plan=either(side_by_side, scattered, from_host, mixed, overtaken, right_behind, overtaken, wrong_sizes),
    configs=remote,
    examples=3,
)
def test_received_rows(step: Step) -> None:
    """The decode worker gets for every position, layer and component the row that was computed for it.

    Pages paired by id instead of position, shifted by a partial chunk, sent before they are written, written to another
    page, or a component left out (sglang#28718, sglang#5588, sglang#31239, vllm#42097, sglang#23773).
    """
    received_rows_are_right(step)


@case(
    "transfer.reused_rooms",
    invariants=("I18", "I16", "I11"),
    needs=TRANSFERS,
    seen={"received": 3, "given up in flight": 1, "aborted in flight": 1},
    plan=either(reused_rooms, echoes, echoes, piece_by_piece, piece_by_piece, sent_to_a_released_room),
    configs=remote,
    examples=4,
)
def test_reused_rooms(step: Step) -> None:
    """A room that is used again gets the rows of its new request only, however its last use ended.

    A late notification or write of the room's earlier use counts for the new one (sglang#17259, sglang#24527,
    sglang#6857).
    """
    received_rows_are_right(step)


@case(
    "transfer.all_ranks_report",
    invariants=("I06", "I16"),
    needs=(*TRANSFERS, "snapshot.decode"),
    seen={"concluded": 3, "received": 3},
    seen_in_groups={"sent with an empty owner": 1},
    plan=either(side_by_side, two_rooms, mixed, reused_rooms, echoes, echoes, two_rooms),
    configs=remote,
    examples=2,
)
def test_all_ranks_report(step: Step) -> None:
    """A request whose last chunk was sent is complete at the decode worker once all is settled.

    A rank that owns no page of the last chunk never concludes, a notification is lost or comes before its room is
    known: decode waits for ever (sglang#26486, vllm#43509).
    """
    view = step.after.decode
    if not isinstance(step.op, Settle) or not isinstance(step.reply, Ok) or view is None:
        return
    for number, room in step.story.rooms.items():
        if room.concluded and not room.doomed and not step.story.lost:
            state = view.rooms[number].state if number in view.rooms else "unknown"
            expect(state, "complete", f"state of room {number}", f"request {room.request} was sent to its end")


@case(
    "transfer.bytes_add_up",
    invariants=("I15", "I16", "I22"),
    needs=(*TRANSFERS, "snapshot.moved", "snapshot.buffers", "snapshot.requests", "snapshot.free"),
    seen={"concluded": 3, "sent in chunks": 1},
    seen_in_groups={"sent with an empty owner": 1},
    plan=side_by_side,
    configs=remote,
)
def test_bytes_add_up(step: Step) -> None:
    """Each rank sends the bytes of its own pages, once; together they are those of an unsharded transfer.

    A page sent twice at a chunk border, a replicated component sent by every rank, empty chunks that count
    (sglang#5588, sglang#34343).
    """
    if not (isinstance(step.op, Settle) and isinstance(step.reply, Ok) and step.story.untroubled):
        return
    if any(not room.concluded for room in step.story.rooms.values()):
        return  # on the way
    buffers = step.after.ranks[0].buffers or {}
    token_bytes = sum(buffer.row_bytes * layers_of(step.config, name) for name, buffer in buffers.items())
    page_bytes = token_bytes * step.config.page_size
    for rank in step.after.ranks:
        sharded = step.config.layout == "sharded"
        own = step.story.owned_pages[rank.rank] if sharded else step.story.owned_pages.total() * (rank.rank == 0)
        expect(
            rank.moved.sent_bytes if rank.moved else None,
            own * page_bytes,
            f"bytes that rank {rank.rank} has sent",
            f"it owns {own} pages of {page_bytes} bytes of the requests that were sent",
        )


def kept_apart(view: DecodeView, capacity: int) -> str:
    """What is wrong with the pages of the decode worker; empty when nothing is."""
    used = [page for room in view.rooms.values() if room.state != "failed" for page in room.pages]
    twice = sorted(page for page, count in Counter([*used, *view.free]).items() if count > 1)
    if twice:
        return f"pages {twice} in two places"
    missing = capacity - len(used) - len(view.free)
    return f"{missing} pages missing" if missing else ""


@case(
    "transfer.pages_stay_until_the_end",
    invariants=("I11", "I05", "I04"),
    needs=(*TRANSFERS, "snapshot.decode", "snapshot.requests", "snapshot.free", "snapshot.nodes"),
    seen={"concluded": 1, "given up in flight": 1, "aborted in flight": 1, "sent in chunks": 1},
    plan=either(reused_rooms, mixed, mixed, overtaken, reserved_again),
    configs=remote,
)
def test_pages_stay_until_the_end(step: Step) -> None:
    """A page that a transfer may read or write is free on neither side until every rank has finished with it.

    Pages returned on abort while another rank still writes to them, source pages freed by the end of the request
    (sglang#24527, sglang#38961).
    """
    if step.after.decode is not None:
        wrong = kept_apart(step.after.decode, step.config.decode_pages)
        expect(wrong, "", "pages of the decode worker", "a page is free or belongs to one room")
    for rank in step.after.ranks:
        held = held_pages(rank)
        lost = sorted(page for pages in rank.free or () for page in pages if page in held)
        expect(lost, [], f"free pages of rank {rank.rank} that requests or transfers hold", "a held page is not free")


def released_rooms_are_over(step: Step, view: DecodeView) -> None:
    """After a settle nobody keeps a room that was released, whatever the ranks said of it last."""
    kept = {number: its.state for number, its in view.rooms.items() if number not in step.story.rooms}
    left = {number: state for number, state in kept.items() if state != "failed"}
    expect(left, {}, "rooms that were released and have not ended", "all is settled")


@case(
    "transfer.both_sides_close",
    invariants=("I17", "I04", "I06"),
    needs=(*TRANSFERS, "op.lose", "op.flush", "snapshot.decode", "snapshot.free"),
    seen={"lost": 3, "dropped": 1, "aborted": 1},
    plan=either(
        lossy,
        overtaken,
        reused_rooms,
        side_by_side,
        rooms_without_their_rank,
        machine({**MIXED, "release": 4, "abort": 4}, idle=True),
    ),
    configs=remote,
)
def test_both_sides_close(step: Step) -> None:
    """Whatever was aborted, given up or lost, both sides hold nothing once all requests and rooms have ended.

    An abort that only one side knows of: decode waits, prefill keeps its pages, a room never ends (sglang#30233,
    sglang#30053, vllm#43509).
    """
    received_rows_are_right(step)
    view = step.after.decode
    if isinstance(step.op, Settle) and isinstance(step.reply, Ok) and view is not None:
        released_rooms_are_over(step, view)
        under_way = {number for number, its in view.rooms.items() if its.state in UNDER_WAY}
        if not step.story.lost:
            ended = {number for number, room in step.story.rooms.items() if room.doomed and room.request}
            expect(sorted(ended & under_way), [], "rooms that wait for requests that have ended", "all is settled")
        elif step.config.layout == "sharded":  # of replicas one sends, and another one may be the one that is lost
            expect(sorted(under_way), [], "rooms that wait", "an end is lost that every room needs, all is settled")
    if not isinstance(step.op, Flush):
        return
    if isinstance(step.reply, Refused):
        idle = step.story.settled and not step.story.live and not step.story.rooms
        require(
            not idle, f"flush refused: {step.reply.why}", "accepted", "all requests and rooms ended, all is settled"
        )
        return
    first = step.story.first or step.before
    for rank, fresh in zip(step.after.ranks, first.ranks, strict=True):
        expect(
            [sorted(pages) for pages in rank.free or ()],
            [sorted(pages) for pages in fresh.free or ()],
            f"free pages per owner class on rank {rank.rank}",
            "nothing is alive and nothing is cached",
        )
    if view is not None and not step.story.rooms and step.story.settled:
        expect(len(view.free), step.config.decode_pages, "free pages of the decode worker", "no room is in use")


@case(
    "transfer.idle_is_settled",
    invariants=("I17", "I06"),
    needs=(*TRANSFERS, "op.lose", "snapshot.requests"),
    seen={"lost": 3, "concluded": 3},
    plan=either(lossy, side_by_side, wrong_sizes, lossy),
    configs=remote,
)
def test_idle_is_settled(step: Step) -> None:
    """After a settle no request that has ended is held by a transfer, also when a peer is gone.

    A dead peer that is waited for: pages pinned until a time-out of minutes, or for ever (sglang#30233).
    """
    if isinstance(step.op, Settle) and isinstance(step.reply, Ok):
        for rank in step.after.ranks:
            left = sorted(name for name in rank.requests or {} if name not in step.story.live)
            expect(left, [], f"ended requests that rank {rank.rank} still holds", "all is settled")


@case(
    "transfer.misfits_are_refused",
    invariants=("I26", "I17"),
    needs=TRANSFERS,
    seen={"refused": 3, "extended": 1},
    plan=misfits,
    configs=configs(Bounds(decode_parts=(2,), pages_max=4, scratch_contexts=ROOMY, misfit=True)),
    examples=0.5,
)
def test_misfits_are_refused(step: Step) -> None:
    """A decode worker with another page size is served right or refused on both sides, with both values.

    The handshake does not know the page size: wrong pages at low load, an address error at high load (sglang#14474,
    sglang#19398).
    """
    received_rows_are_right(step)
    if not isinstance(step.reply, Refused):
        return
    op = step.op
    room = step.story.rooms.get(op.room) if isinstance(op, Send | Receive) else None  # its reserve was accepted
    sent = isinstance(op, Send) and op.request in step.story.live
    if isinstance(op, Reserve) or (room is not None and (sent or (room.concluded and step.story.settled))):
        sizes = {str(step.config.page_size), str(step.config.decode_page_size)}
        missing = sorted(size for size in sizes if size not in step.reply.why)
        expect(missing, [], f"page sizes that the refusal {step.reply.why!r} leaves out", "both values help")


@case(
    "transfer.some_request_gets_through",
    invariants=("I06", "I17"),
    needs=(*TRANSFERS, "snapshot.decode"),
    seen={"received": 3, "refused": 1},
    plan=machine({**MIXED, "remote": 8, "release": 1, "open": 4}, kinds=("fresh", "fork")),
    configs=configs(Bounds(decode_parts=(1,), pages_max=2, scratch_contexts=ROOMY)),
)
def test_some_request_gets_through(step: Step) -> None:
    """With little room on both sides a reserve is refused at once, or its pages are there: nobody waits for pages.

    Prefill holds one request and waits for decode, which holds another and waits for prefill (sglang#31473).
    """
    received_rows_are_right(step)
    op, view = step.op, step.after.decode
    if isinstance(op, Reserve) and isinstance(step.reply, Ok) and view is not None:
        pages = view.rooms[op.room].pages if op.room in view.rooms else ()
        expect(len(pages), -(-op.tokens // step.config.page_size), f"pages of room {op.room}", "it was accepted")

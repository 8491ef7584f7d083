"""Rooms at the decode worker are there for whoever asks next, whatever became of their last use."""

from __future__ import annotations

from harness.register import register_cpu_ci
from harness.types import Ok, Refused, Reserve, Send, Settle
from suites.claim import Step, case, expect, require
from suites.configs import ROOMY, Bounds, configs
from suites.invariants.test_hits import hits_were_computed, repeats_hit
from suites.invariants.test_transfer import TRANSFERS, received_rows_are_right, released_rooms_are_over
from suites.machine import either
from suites.room_plans import crossed, one_beside_another, outlived, sources_wanted, taken_again
from suites.transfer_plans import lossy, reused_rooms

register_cpu_ci(est_time=20, stage="cases")


def must_be_reserved(step: Step, op: Reserve) -> bool:
    """Whether nothing stands against a reserve: all ranks are there, the room is new, its pages are free."""
    view, pages = step.before.decode, -(-op.tokens // step.config.page_size)
    if view is None or step.story.lost or not step.story.settled:
        return False
    return op.room not in view.rooms and 0 < pages <= len(view.free)


def must_be_taken(step: Step, op: Send) -> bool:
    """Whether nothing stands against a send: every rank knows the room, nobody was sent to it, the sizes are equal."""
    room, request = step.story.rooms.get(op.room), step.story.live.get(op.request)
    if room is None or request is None or not room.known or room.doomed or room.request or step.story.lost:
        return False
    page = step.config.page_size
    return op.request not in step.story.sent and -(-room.tokens // page) == -(-len(request.tokens) // page)


@case(
    "transfer.rooms_are_there",
    invariants=("I18", "I17", "I06"),
    needs=(*TRANSFERS, "op.restart", "snapshot.decode"),
    seen={"given up in flight": 1, "received": 3, "dropped": 1, "room was there": 3},
    plan=either(taken_again, taken_again, taken_again, one_beside_another, reused_rooms, lossy),
    configs=configs(Bounds(decode_parts=(2, 3, 1), pages_max=4, scratch_contexts=ROOMY)),
    examples=3,
)
def test_rooms_are_there(step: Step) -> None:
    """A room that all ranks know of waits until something is sent to it, and takes it; a free one can be reserved.

    What is said late about a room's last use ends the new one before it began; a peer that is back is not greeted
    again, so that every later request is refused (sglang#24527, sglang#17259).
    """
    received_rows_are_right(step)
    if isinstance(step.reply, Refused):
        if isinstance(step.op, Reserve):
            why = "all is settled, all ranks are there, the room is not in use, its pages are free"
            require(not must_be_reserved(step, step.op), f"refused: {step.reply.why}", "reserved", why)
        if isinstance(step.op, Send):
            why = "every rank has heard of the room, nothing was sent to it, and it has the request's size"
            require(not must_be_taken(step, step.op), f"refused: {step.reply.why}", "sent", why)
    view = step.after.decode
    if isinstance(step.op, Settle) and isinstance(step.reply, Ok) and view is not None and not step.story.lost:
        released_rooms_are_over(step, view)
        for number, room in step.story.rooms.items():
            if not (room.request or room.doomed):
                state = view.rooms[number].state if number in view.rooms else "unknown"
                expect(state, "waiting", f"state of room {number}", "nothing was sent to it, nothing was lost")


@case(
    "transfer.sources_outlive_writes",
    invariants=("I11", "I10", "I16"),
    needs=TRANSFERS,
    seen={"aborted in flight": 1},
    plan=sources_wanted,
    configs=configs(
        Bounds(decode_parts=(2,), pages_max=4, shards=(1, 2, 2, 3, 4, 8), scratch_contexts=ROOMY, slow_writes=True)
    ),
    examples=2,
)
def test_sources_outlive_writes(step: Step) -> None:
    """The pages of a request that has ended are written to by the next one only when no transfer reads them any more.

    Pages that are free at the end of the request, its abort or its last chunk, not of the last write: the network
    sends another's rows, and only luck decides whether anybody uses them (sglang#38961).
    """
    received_rows_are_right(step)


@case(
    "transfer.pages_outlive_writes",
    invariants=("I11", "I18", "I16"),
    needs=TRANSFERS,
    seen={"given up in flight": 3, "aborted in flight": 1, "received": 1},
    plan=outlived,
    configs=configs(
        Bounds(decode_parts=(1,), pages_max=3, shards=(1, 1, 2, 2, 3, 4, 8), scratch_contexts=ROOMY, slow_writes=True)
    ),
    examples=3,
)
def test_pages_outlive_writes(step: Step) -> None:
    """The pages of a transfer that was given up go to another request only when nobody writes to them any more.

    A rank reports its end with a write under way: it lands in what was received since, a single wrong page that no
    log tells of (sglang#24527, sglang#38961).
    """
    received_rows_are_right(step)


@case(
    "transfer.finished_is_kept",
    invariants=("I11", "I21", "I13"),
    needs=(*TRANSFERS, "promise.keeps_finished", "snapshot.nodes"),
    seen={"finished on its way": 1, "received": 1, "hit": 3},
    plan=crossed,
    configs=configs(
        Bounds(decode_parts=(2,), pages_max=8, shards=(2, 1, 2, 3, 4), scratch_contexts=ROOMY, slow_writes=True)
    ),
    examples=2,
)
def test_finished_is_kept(step: Step) -> None:
    """A prompt that finished while it was sent is in the cache whole once that is over, and what was sent is right.

    Another request has kept the same pages meanwhile: those that both have are free before the transfer has read them,
    or what only the longer one has is never kept. A flush in between that says it is done and leaves what is sent.
    """
    received_rows_are_right(step)
    repeats_hit(step)
    hits_were_computed(step)

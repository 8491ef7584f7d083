"""Clients that leave: that is all a client can do where no request has an id by which it could be ended."""

from __future__ import annotations

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Generate, Settle
from suites.claim import require
from suites.e2e.alike import all_alike
from suites.e2e.claim import Step, case
from suites.e2e.hand import Hand
from suites.e2e.rest import at_rest
from suites.e2e.story import Story, generated

register_cpu_ci(est_time=30, stage="servers")

LEFT_TOKENS = 400  # of an answer whose client leaves: seconds of a small model on a CPU
# Until an engine notices, all may be made: on a busy machine what tells it waits for what computes. Not so often in a
# row, with answers that grow.
TRIES = 4
CROWD = 8


def leaving(draw: Draw, table: Table) -> None:
    """A client leaves an answer that is known in full, then others at each stage: alone, beside others, in a crowd."""
    hand = Hand(draw, table)
    page = hand.config.page_size
    context = hand.config.context_tokens
    most = min(context // 2, (hand.service.tokens_max or context) // 2)
    count = min(LEFT_TOKENS, most)
    short, long = hand.fresh(page + 2), hand.fresh(hand.long(8))
    hand.both(short)
    for leave in (1,) if hand.small else (1, 3, 9):
        for late in range(TRIES):
            _leave(hand, leave, min(count << late, most))
            if not hand.story.unnoticed:
                break
    hand.ask(long, leave_after=0)
    hand.ask(short)
    hand.settle()
    hand.together([hand.request(short), hand.request(hand.fresh(len(long)), leave_after=0), hand.request(long[:page])])
    crowd = [hand.request(hand.fresh(2 * page), max_new_tokens=count, leave_after=at % 3) for at in range(CROWD)]
    hand.together([*crowd, hand.request(short)])
    hand.settle()
    hand.fill()
    hand.ask(short)
    hand.settle()
    hand.flush()
    hand.ask(short)


def _leave(hand: Hand, leave: int, count: int) -> None:
    """One client leaves; then another goes on from what would have been its answer."""
    prompt = hand.fresh(2 * hand.config.page_size + 3)
    known = hand.ask(prompt, arm="control", max_new_tokens=count) if hand.story.promises("control") else None
    hand.ask(prompt, max_new_tokens=count, leave_after=leave)
    hand.settle()
    if known is not None and known.tokens:
        hand.ask(prompt + known.tokens + hand.fresh(1), max_new_tokens=1)
        hand.settle()


@case(
    "abort.by_leaving",
    invariants=("I04", "I11", "I17"),
    needs=("op.flush", "op.settle", "op.together", "snapshot.counters", "promise.scores"),
    seen={"left": 6, "ended in decode": 4, "ended early": 1, "at rest": 1, "compared": 3},
    plan=leaving,
)
def test_by_leaving(step: Step) -> None:
    """A client that leaves ends its request, before its answer or within: it is not made to its end, nothing stays.

    A server that makes the answer for nobody, pages that stay with a client that is gone, a slot or a place in the
    queue that is never free again, one client's end that takes another's answer along (sglang#24527).
    """
    all_alike(step)
    at_rest(step)
    story = step.story
    if isinstance(step.op, Settle) and story.left and story.made:  # 0: nobody counts answers there
        left, made = story.left[-1], (generated(step.after) or 0.0) - story.made
        seen, most = f"tokens made for request {left.request} = {made:g}", left.max_new_tokens
        _ends_early(left, story, early=made < most, seen=seen, expected=f"less than {most}")
    for op, value in step.answers():
        for left in story.left if not op.arm else ():
            _goes_on(op, value.cached_tokens, left, story)


def _goes_on(op: Generate, cached: int | None, left: Generate, story: Story) -> None:
    """A prompt that goes on from a whole answer hits what was made of it."""
    end, page = len(left.tokens) + left.max_new_tokens, story.config.page_size
    if cached is None or len(op.tokens) <= end or op.tokens[: len(left.tokens)] != left.tokens:
        return
    most = (end - 1) // page * page - page
    seen = f"{cached} cached tokens of request {op.request}, which goes on from request {left.request}"
    _ends_early(left, story, early=cached < most, seen=seen, expected=f"less than {most}")


def _ends_early(left: Generate, story: Story, *, early: bool, seen: str, expected: str) -> None:
    if early and left.request not in story.unnoticed:
        story.unnoticed.clear()
        story.seen["ended early"] += 1
    if early:
        return
    story.unnoticed.add(left.request)
    because = f"its client left after the first ones, the {len(story.unnoticed)}th in a row that nobody noticed"
    require(len(story.unnoticed) < TRIES, seen, expected, because)

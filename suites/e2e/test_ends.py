"""Requests that do not come to their end, and floods of them: nothing is left behind, and the others are right."""

from __future__ import annotations

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Abort, Flush, Generate, Refused
from suites.claim import expect, require
from suites.e2e.alike import all_alike
from suites.e2e.claim import Step, case, running
from suites.e2e.hand import Hand, only_if
from suites.e2e.rest import SMOKE_WAIT_SECONDS_MAX, WAIT_SECONDS_MAX, at_rest, late_seconds

register_cpu_ci(est_time=60, stage="servers")

ANSWER_TOKENS = 48  # of an answer that is ended on its way


def given_up(draw: Draw, table: Table) -> None:
    """Clients that leave and requests that are aborted: in the queue, in prefill, in decode, alone and among others."""
    hand = Hand(draw, table)
    page = hand.config.page_size
    short, long = hand.fresh(page + 2), hand.long(8)
    hand.both(short)
    for leave in (0, 1, 3):
        hand.ask(hand.fresh(long if leave == 0 else page + 1), max_new_tokens=ANSWER_TOKENS, leave_after=leave)
    for after in (0, 1, 3):
        op = hand.request(hand.fresh(long if after == 0 else page + 1), max_new_tokens=ANSWER_TOKENS)
        hand.together([op, Abort(op.request, after)])
    hand.settle()
    for _ in range(2):  # the second one's prompt is on its way when the first one's answer has come
        hand.together([hand.request(short, max_new_tokens=1), hand.request(hand.fresh(long), leave_after=0)])
        first, op = hand.request(short, max_new_tokens=2), hand.request(hand.fresh(long))
        hand.together([first, op, Abort(first.request, 1), Abort(op.request)])
    hand.settle()
    crowd = [hand.request(hand.fresh(3 * page), max_new_tokens=ANSWER_TOKENS, leave_after=at % 3) for at in range(3)]
    ended = hand.request(hand.fresh(2 * page), max_new_tokens=ANSWER_TOKENS)
    hand.together([*crowd, ended, hand.request(short), Abort(ended.request, 2)])
    hand.settle()
    hand.fill()
    hand.ask(short)
    hand.settle()
    hand.flush()
    hand.ask(short)


@case(
    "abort.leaves_nothing",
    invariants=("I04", "I11", "I17"),
    needs=("op.abort", "op.flush", "op.settle", "op.together", "snapshot.counters"),
    seen={"aborted": 2, "left": 3, "ended in prefill": 1, "ended in decode": 2, "at rest": 1, "compared": 2},
    plan=given_up,
)
def test_leaves_nothing(step: Step) -> None:
    """A request that is aborted or whose client leaves, at whatever stage, leaves nothing behind and harms no other.

    Pages of an ended request that stay used or promised, so that prompts for the whole device no longer fit; a transfer
    that goes on into pages of the next one, a room that is never closed, ranks that end it at different times
    (sglang#24527, sglang#30053).
    """
    ends = {each.request for each, _ in step.parts() if isinstance(each, Abort)}
    if not any(isinstance(each, Generate) and each.request in ends for each, _ in step.parts()):
        all_alike(step)
    at_rest(step)


def in_flight(draw: Draw, table: Table) -> None:
    """A flush while an answer is on its way, and one when all is done."""
    hand = Hand(draw, table)
    prompt = hand.fresh(3 * hand.config.page_size)
    hand.ask(prompt)
    hand.together([hand.request(prompt, max_new_tokens=ANSWER_TOKENS), Flush()])
    hand.settle()
    hand.ask(prompt)
    hand.settle()
    hand.flush()
    hand.ask(prompt)


@case(
    "flush.waits_for_requests",
    invariants=("I04", "I05"),
    needs=("op.flush", "op.settle", "op.together", "snapshot.counters", "promise.counts_cached"),
    seen={"flush refused in flight": 1, "flushed": 1, "at rest": 1, "hit": 1, "compared": 2},
    plan=in_flight,
)
def test_waits_for_requests(step: Step) -> None:
    """A flush is refused while a request is in flight, and drops everything when none is.

    A cache that is dropped under a request, pages that are free and used, a flush that only one rank carries out.
    """
    told = list(step.parts())
    if len(told) > 1:
        flushed = next(reply for op, reply in told if isinstance(op, Flush))
        seen = f"a flush beside a request in flight: {type(flushed).__name__.lower()}"
        require(isinstance(flushed, Refused), seen, "refused", f"its answer of {ANSWER_TOKENS} tokens has begun")
    all_alike(step)
    at_rest(step)
    for op, value in step.answers():
        if not step.story.served and value.cached_tokens is not None and not op.arm:
            expect(value.cached_tokens, 0, f"cached tokens of request {op.request}", "the cache was dropped")


def crowd(draw: Draw, table: Table) -> None:
    """Prompts one after the other, then all of them at once, each twice."""
    hand = Hand(draw, table)
    page, count, new_tokens = hand.config.page_size, 16 if hand.small else 32, 2 if hand.small else 4
    shared = hand.fresh(2 * page)
    lengths = [hand.random.randrange(1, 4 * page) for _ in range(count)]
    prompts = [shared + hand.fresh(n) if at % 4 == 0 else hand.fresh(n) for at, n in enumerate(lengths)]
    for prompt in prompts:
        hand.ask(prompt, max_new_tokens=new_tokens)
    hand.settle()
    hand.flush()
    hand.together([hand.request(prompt, max_new_tokens=new_tokens) for prompt in prompts * (64 // count)])
    hand.settle()
    hand.flush()


@case(
    "load.answers_as_alone",
    invariants=("I04", "I18", "I27"),
    needs=("op.flush", "op.settle", "op.together", "promise.scores", "snapshot.counters"),
    seen={"together": 1, "answered": 64, "compared": 64, "at rest": 1},
    plan=crowd,
)
def test_answers_as_alone(step: Step) -> None:
    """Of 64 requests at once each is answered as it was alone, the last as well as the first; then all is at rest.

    Requests lost in a queue, answers that get worse the longer the queue is, rooms mixed up, a deadlock of requests
    that wait for each other's pages (sglang#17259, sglang#31473, vllm#46278).
    """
    all_alike(step)
    at_rest(step)


def orphans(draw: Draw, table: Table) -> None:
    """Each half of a request without the other, alone and beside a whole one."""
    hand = Hand(draw, table)
    wait = hand.service.wait_seconds
    only_if(wait is not None, "the server does not tell how long one half of a pair waits for the other")
    most = SMOKE_WAIT_SECONDS_MAX if hand.small else WAIT_SECONDS_MAX
    only_if((wait or 0) <= most, f"one half of a pair waits {wait:g} s for the other; {most:g} s are spent on it")
    prompt = hand.fresh(2 * hand.config.page_size + 1)
    hand.both(prompt)
    halves = [hand.request(hand.fresh(hand.config.page_size + 3), half=half) for half in ("prefill", "decode")]
    for half in halves[: 0 if hand.small else 2]:
        hand.asked(half)
    hand.together([*halves, hand.request(prompt)])
    hand.settle()
    hand.ask(prompt)
    hand.settle()
    hand.flush()
    hand.ask(prompt)


@case(
    "orphan.ends_in_time",
    invariants=("I06", "I17"),
    needs=("op.flush", "op.settle", "op.together", "snapshot.counters", "promise.halves_wait"),
    seen={"orphan ended": 2, "compared": 2, "at rest": 1},
    plan=orphans,
    configs=running(pair=True),
)
def test_ends_in_time(step: Step) -> None:
    """Half of a request whose other half never comes ends with an error in time, and leaves nothing behind.

    A prefill worker that keeps pages for a room that nobody opens, a decode worker that waits for ever, an orphan that
    keeps the requests behind it waiting (sglang#30233, vllm#43509).
    """
    limit = late_seconds(step.story.service)
    for op, reply in step.parts():
        if isinstance(op, Generate) and op.half:
            seen = f"request {op.request} of the {op.half} half alone: {type(reply).__name__.lower()} {reply}"
            require(isinstance(reply, Refused), seen, "an error that the server tells", "the other half never came")
            require(step.seconds <= limit, f"its end after {step.seconds:.1f} s", f"at most {limit:g} s", "it says so")
    all_alike(step)
    at_rest(step)

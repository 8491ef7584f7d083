"""Halves of a request that are asked in turn: pages wait for whoever comes late, and for nobody for ever."""

from __future__ import annotations

from msgspec import structs

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import AnyReply, Generate, Kill, Ok, Refused, Restart
from suites.claim import require
from suites.e2e.alike import alike, all_alike, answered
from suites.e2e.claim import Step, case, running
from suites.e2e.hand import Hand, only_if
from suites.e2e.rest import SMOKE_WAIT_SECONDS_MAX, WAIT_SECONDS_MAX, at_rest, late_seconds
from suites.e2e.story import Tokens, grown, is_whole

register_cpu_ci(est_time=60, stage="servers")

NEEDS = ("op.flush", "op.settle", "op.together", "snapshot.counters", "promise.scores", "promise.hands_over")
DEATH_EXAMPLES = 0.01  # of a budget's: a server takes long to start


def _referenced(hand: Hand, prompts: list[Tokens]) -> None:
    """What the answers must be, by the control arm or by whole requests whose pages are then dropped."""
    for prompt in prompts:
        hand.ask(prompt, arm="control" if hand.story.promises("control") else "")
    hand.settle()
    hand.flush()


def _other(half: Generate) -> Generate:
    """The decode half of the same request."""
    return structs.replace(half, half="decode")


def late(draw: Draw, table: Table) -> None:
    """Prefill halves, then other prompts that fill both workers, then the decode halves, last ones first."""
    hand = Hand(draw, table)
    page = hand.config.page_size
    shared = hand.fresh(2 * page)
    lengths = (3 * page, page + 3, 1, hand.long(1.2))
    prompts = [shared + hand.fresh(page // 2 + 1), *(hand.fresh(count) for count in lengths[: 3 if hand.small else 4])]
    prompts.append(shared + hand.fresh(page + 1))
    _referenced(hand, prompts)
    halves = [hand.request(prompt, half="prefill") for prompt in prompts]
    hand.together(halves[:2])
    for half in halves[2:]:
        hand.asked(half)
    for _ in range(1 if hand.small else 2):
        hand.fill()
    later = [_other(half) for half in reversed(halves)]
    hand.together(later[:2])
    for half in later[2:]:
        hand.asked(half)
    hand.settle()
    hand.ask(prompts[0])
    hand.settle()
    hand.flush()
    hand.ask(prompts[0])


@case(
    "handover.late_answers",
    invariants=("I06", "I14", "I19"),
    needs=NEEDS,
    seen={"handed over": 4, "taken over": 4, "compared": 4, "at rest": 1},
    plan=late,
    configs=running(pair=True),
)
def test_late_answers(step: Step) -> None:
    """A decode half that comes after other prompts have filled the pool is answered as if it had come at once.

    Pages that go to another prompt between the hand-over and the transfer, a shared page that the first decode half
    releases for the others, pages that stay held once they are taken, a hand-over that is not found again, so that
    decode computes all anew (vllm#43509, vllm#46278).
    """
    for op, reply in step.parts():
        if isinstance(op, Generate) and op.half == "prefill":
            seen = f"the prefill half of request {op.request}: {type(reply).__name__.lower()}: {reply}"
            require(isinstance(reply, Ok), seen, "an answer by itself", "it hands over, and waits for nobody")
        elif isinstance(op, Generate) and op.half == "decode":
            alike(op, answered(op, reply), step.story)
    if isinstance(step.op, Generate) and step.op.half == "decode":
        _came(step.op, step)
    all_alike(step)
    at_rest(step)


def _came(op: Generate, step: Step) -> None:
    """Its pages came from prefill; an answer is as right where decode has computed them anew."""
    if step.story.promises("counts_received") and len(op.tokens) > step.story.config.page_size:
        came = sum(grown(step.before, step.after, "received_tokens_total", "decode"))
        seen = f"{came:g} tokens of request {op.request} came from prefill"
        require(came > 0, seen, f"some of {len(op.tokens)}", "its pages wait there, and decode has not had them")


def _only_in_time(hand: Hand) -> None:
    """Raises `NoConfig` where pages wait longer for a decode half than a case may."""
    wait, most = hand.service.wait_seconds, SMOKE_WAIT_SECONDS_MAX if hand.small else WAIT_SECONDS_MAX
    only_if(wait is not None, "the server does not tell how long pages wait for the decode half")
    only_if((wait or 0) <= most, f"pages wait {wait:g} s for the decode half; {most:g} s are spent on it")


def forgotten(draw: Draw, table: Table) -> None:
    """Prefill halves that nobody comes for, beside whole requests; after the wait they come all the same."""
    hand = Hand(draw, table)
    _only_in_time(hand)
    page = hand.config.page_size
    prompt, others = hand.fresh(2 * page + 1), [hand.fresh(count) for count in (page + 3, 3 * page, 2)]
    _referenced(hand, [prompt, *others])
    halves = [hand.request(other, half="prefill") for other in others]
    hand.together([*halves, hand.request(prompt)])
    hand.ask(prompt)
    hand.settle()
    hand.flush()
    hand.fill()
    for half in halves:
        hand.table.do(_other(half))
    hand.ask(prompt)
    hand.settle()
    hand.flush()
    hand.ask(prompt)


@case(
    "handover.forgotten_is_dropped",
    invariants=("I06", "I17"),
    needs=NEEDS,
    seen={"handed over": 3, "came too late": 3, "compared": 3, "at rest": 2},
    plan=forgotten,
    configs=running(pair=True),
)
def test_forgotten_is_dropped(step: Step) -> None:
    """Pages that nobody takes over are free again after the wait, and who comes then is answered rightly or refused.

    A prefill worker that keeps pages for ever for a decode half that never comes, or that hands pages to one which
    comes after they have gone to another prompt (sglang#30233, vllm#43509).
    """
    for op, reply in step.parts():
        if isinstance(op, Generate) and op.half == "decode":
            _right_or_told(op, reply, step)
            step.story.seen["came too late"] += 1
    all_alike(step)
    at_rest(step)


def orphaned(draw: Draw, table: Table) -> None:
    """The prefill worker dies between both halves of requests; it comes back, and prompts of before are asked."""
    hand = Hand(draw, table)
    _only_in_time(hand)
    page = hand.config.page_size
    prompts = [hand.fresh(count) for count in (2 * page + 1, page + 3)]
    _referenced(hand, prompts)
    halves = [hand.request(prompt, half="prefill") for prompt in prompts]
    hand.asked(hand.request(prompts[0]))  # so that both know each other
    for half in halves:
        hand.asked(half)
    hand.table.do(Kill("prefill", "worker"))
    hand.table.do(_other(halves[0]))
    hand.settle()
    hand.flush()
    hand.table.do(Restart("prefill"))
    hand.table.do(_other(halves[1]))
    for prompt in prompts:
        hand.ask(prompt)
    hand.settle()
    hand.flush()


@case(
    "handover.prefill_dies",
    invariants=("I06", "I11", "I17"),
    needs=("op.kill", "op.restart", *NEEDS),
    seen={"handed over": 2, "worker killed": 1, "restarted": 1, "came for the dead": 2, "compared": 2, "at rest": 1},
    plan=orphaned,
    configs=running(pair=True),
    examples=DEATH_EXAMPLES,
)
def test_prefill_dies(step: Step) -> None:
    """When prefill dies after it handed over, the decode half is answered rightly or ends with an error, in time.

    A decode half that waits for ever for pages which nobody has, one that takes pages of the process that came back,
    pages that stay reserved on the decode worker.
    """
    for op, reply in step.parts():
        if isinstance(op, Kill | Restart):
            seen = f"{op}: {type(reply).__name__.lower()}: {getattr(reply, 'why', '')}"
            require(isinstance(reply, Ok), seen, "done", "whoever starts workers must see that one has ended")
        elif isinstance(op, Generate) and op.half == "decode":
            _right_or_told(op, reply, step)
            step.story.seen["came for the dead"] += 1
    all_alike(step)
    at_rest(step)


def _right_or_told(op: Generate, reply: AnyReply, step: Step) -> None:
    """A decode half whose pages are gone."""
    if is_whole(reply):
        alike(op, answered(op, reply), step.story)
    else:
        seen = f"the decode half of request {op.request}: {type(reply).__name__.lower()}: {reply}"
        is_told = isinstance(reply, Refused | Ok)
        require(is_told, seen, "a whole answer, or an error that is told", "the decode worker goes on")
    limit = late_seconds(step.story.service)
    require(step.seconds <= limit, f"its end after {step.seconds:.1f} s", f"at most {limit:g} s", "it says so")

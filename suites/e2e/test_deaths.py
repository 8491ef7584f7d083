"""Processes that end: workers that are restarted, ranks and workers that are killed while requests are under way."""

from __future__ import annotations

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import AnyReply, Generate, Generated, Kill, Ok, Refused, Restart, Unknown
from suites.claim import expect, require
from suites.e2e.alike import alike, all_alike, answered
from suites.e2e.claim import Plan, Step, case, running
from suites.e2e.hand import Hand, only_if
from suites.e2e.rest import SMOKE_WAIT_SECONDS_MAX, WAIT_SECONDS_MAX, at_rest, late_seconds
from suites.e2e.story import is_whole

register_cpu_ci(est_time=120, stage="servers")

EXAMPLES = 0.01  # of a budget's: a server takes long to start
ANSWER_TOKENS = 128  # of an answer that a death meets on its way
NEEDS = ("op.kill", "op.restart", "op.flush", "op.settle", "op.together", "snapshot.counters", "promise.scores")


def restarts(draw: Draw, table: Table) -> None:
    """Each worker in turn, then all at once; before and after each the same prompt, cold and from the cache."""
    hand = Hand(draw, table)
    page = hand.config.page_size
    prompt, long = hand.fresh(3 * page + 1), hand.fresh(hand.long(1.5))
    hand.both(prompt)
    hand.both(long)
    each = ("prefill", "decode") if hand.service.pair else ("",)
    for role in each if hand.small else (*each, ""):
        hand.table.do(Restart(role))
        hand.together([hand.request(long), hand.request(prompt)])
        hand.ask(prompt)
    hand.settle()
    hand.flush()


@case(
    "restart.answers_as_before",
    invariants=("I13", "I18", "I19"),
    needs=("op.restart", "op.flush", "op.settle", "op.together", "snapshot.counters", "promise.counts_cached"),
    seen={"restarted": 1, "cold": 4, "hit": 1, "compared": 3, "at rest": 1},
    plan=restarts,
    examples=EXAMPLES,
)
def test_answers_as_before(step: Step) -> None:
    """After a restart a worker answers as it did before, and nothing is in the cache that went with its process.

    A peer that goes on with the connection, the rooms or the addresses of the process before, so that the first
    requests fail or get another one's rows; a tier that outlives the index of what it holds; a worker that is called
    healthy before its ranks are there.
    """
    if isinstance(step.op, Restart):
        seen = f"a restart: {type(step.reply).__name__.lower()}: {getattr(step.reply, 'why', '')}"
        require(isinstance(step.reply, Ok), seen, "a healthy worker", "it has started with the same command before")
    all_alike(step)
    at_rest(step)
    for op, value in step.answers():
        if not step.story.served and value.cached_tokens is not None and not op.arm:
            expect(value.cached_tokens, 0, f"cached tokens of request {op.request}", "the cache was that of a process")


def prompts_cut(what: str) -> Plan:
    """The prefill worker, or a rank of it, goes: after, while and before prompts are sent; then it comes back."""

    def plan(draw: Draw, table: Table) -> None:
        hand = Hand(draw, table)
        _only_in_time(hand)
        short, longs = hand.fresh(hand.config.page_size + 2), [hand.fresh(hand.long(8)) for _ in range(2)]
        hand.both(short)
        moments = (0, 1) if not hand.small else (0,) if what == "rank" else (1,)
        for after in moments:  # tokens of a short prompt's answer, which decode has all of by the first
            asked = [hand.request(prompt) for prompt in longs]
            on_its_way = [hand.request(short, max_new_tokens=_answer_tokens(hand, short))] if after else []
            _reference(hand, [*on_its_way, *asked])
            kill = Kill("prefill", what, after)
            hand.together([*on_its_way, kill, *asked] if after else [*asked, kill])
            _survived(hand)
            if what == "worker":
                hand.ask(short)  # and nobody is there to send it
                _survived(hand)
            _come_back(hand, "prefill", [short, longs[0]])

    return plan


def answers_cut(what: str) -> Plan:
    """The worker that answers, or a rank of it, goes with answers on their way; then it comes back."""

    def plan(draw: Draw, table: Table) -> None:
        hand = Hand(draw, table)
        _only_in_time(hand)
        role, page = "decode" if hand.service.pair else "", hand.config.page_size
        short, long = hand.fresh(page + 2), hand.fresh(hand.long(8))
        hand.both(short)
        for _ in range(1 if hand.small else 2):
            asked = [hand.request(short, max_new_tokens=_answer_tokens(hand, short)), hand.request(long)]
            _reference(hand, asked)
            hand.together([asked[0], Kill(role, what, 1), asked[1]])
            _survived(hand)
            if what == "worker" and not hand.small:
                hand.ask(short)  # and nobody is there to take it
                _survived(hand)
            _come_back(hand, role, [short, long])

    return plan


def _only_in_time(hand: Hand) -> None:
    """Raises `NoConfig` where one half of a pair waits longer for the other than a case may."""
    wait, most = hand.service.wait_seconds, SMOKE_WAIT_SECONDS_MAX if hand.small else WAIT_SECONDS_MAX
    if hand.service.pair:
        only_if(wait is not None, "the server does not tell how long one half of a pair waits for the other")
        only_if((wait or 0) <= most, f"one half of a pair waits {wait:g} s for the other; {most:g} s are spent on it")


def _answer_tokens(hand: Hand, prompt: tuple[int, ...]) -> int:
    return max(1, min(ANSWER_TOKENS, hand.config.context_tokens - 80 - len(prompt)))


def _reference(hand: Hand, asked: list[Generate]) -> None:
    """The control arm's answers, as the judged arm's would be in the cache."""
    for op in asked if hand.story.promises("control") else ():
        hand.ask(op.tokens, max_new_tokens=op.max_new_tokens, arm="control")


def _survived(hand: Hand) -> None:
    """Whoever goes on comes to rest."""
    hand.settle()
    hand.flush()


def _come_back(hand: Hand, role: str, prompts: list[tuple[int, ...]]) -> None:
    """The worker starts again, and prompts of before are asked."""
    hand.table.do(Restart(role))
    for prompt in prompts:
        hand.ask(prompt)
    _survived(hand)


def ends_well(step: Step) -> None:
    """Beside a death, and until the worker is back, a request is answered rightly or ends with an error, in time."""
    told = list(step.parts())
    killed = {op.role for op, _ in told if isinstance(op, Kill)}
    for op, reply in told:
        if isinstance(op, Kill | Restart):
            seen = f"{op}: {type(reply).__name__.lower()}: {getattr(reply, 'why', '')}"
            is_gone = "no worker, as it cannot go on without its rank" if isinstance(op, Kill) else "a healthy worker"
            require(isinstance(reply, Ok), seen, is_gone, "whoever starts workers must see that one has ended")
        elif isinstance(op, Generate) and (is_whole(reply) or op.arm or not (killed or step.story.down)):
            alike(op, answered(op, reply), step.story)
        elif isinstance(op, Generate):
            _ended(op, reply, step, killed | step.story.down)
    limit = late_seconds(step.story.service)
    if killed or (step.story.down and isinstance(step.op, Generate)):
        seen = f"the end of all requests after {step.seconds:.1f} s"
        require(step.seconds <= limit, seen, f"at most {limit:g} s", "nothing can come any more")
    at_rest(step)


def _ended(op: Generate, reply: AnyReply, step: Step, down: set[str]) -> None:
    """Told by the server that was asked, unless that is the one which has gone."""
    asked = {"decode" if step.story.service.pair else ""}
    if step.story.promises("hands_over"):
        asked.add("prefill")  # whose answer comes first
    is_told = isinstance(reply, Refused) or (isinstance(reply, Ok) and _is_aborted(reply.value))
    is_lost = isinstance(reply, Unknown) and bool(asked & down)
    seen = f"request {op.request}, with {' and '.join(sorted(down)) or 'the worker'} gone: {reply}"
    require(is_told or is_lost, seen, "a whole answer, or an error that is told", "the server that was asked goes on")


def _is_aborted(value: object) -> bool:
    return isinstance(value, Generated) and value.finish == "abort"


@case(
    "death.rank_of_prefill",
    invariants=("I06", "I11", "I17"),
    needs=(*NEEDS, "promise.rank_processes"),
    seen={"rank killed": 1, "cut off": 1, "restarted": 1, "compared": 1, "at rest": 2},
    plan=prompts_cut("rank"),
    configs=running(pair=True),
    examples=EXAMPLES,
)
def test_rank_of_prefill(step: Step) -> None:
    """A prefill worker that loses a rank ends, its requests end with an error in time, and decode is as before.

    Ranks that wait for ever in a collective for the one that is gone, a worker that is called healthy without it, a
    decode worker that keeps the pages of a room which the lost rank can conclude no more.
    """
    ends_well(step)


@case(
    "death.rank_that_answers",
    invariants=("I06", "I11", "I17"),
    needs=(*NEEDS, "promise.rank_processes"),
    seen={"rank killed": 1, "cut off": 1, "restarted": 1, "compared": 1, "at rest": 1},
    plan=answers_cut("rank"),
    examples=EXAMPLES,
)
def test_rank_that_answers(step: Step) -> None:
    """A worker that loses a rank while it answers ends, no answer goes on or hangs, and prefill is as before.

    Half a stream that ends as if it were whole, streams that stay open without a token, a prefill worker that goes on
    writing to memory which is another process' by then.
    """
    ends_well(step)


@case(
    "death.prefill",
    invariants=("I06", "I11", "I17"),
    needs=NEEDS,
    seen={"worker killed": 1, "turned away": 1, "restarted": 1, "compared": 1, "at rest": 2},
    plan=prompts_cut("worker"),
    configs=running(pair=True),
    examples=EXAMPLES,
)
def test_prefill(step: Step) -> None:
    """When the prefill worker is gone, each request is answered rightly or ends with an error in time.

    Pages that came in part and are read as if all were there, a room that waits for the rest, a request that hangs as
    nobody is there to send it; a decode worker that takes the process that comes back for the one that was.
    """
    ends_well(step)


@case(
    "death.worker_that_answers",
    invariants=("I06", "I11", "I17"),
    needs=NEEDS,
    seen={"worker killed": 1, "cut off": 1, "restarted": 1, "compared": 1, "at rest": 1},
    plan=answers_cut("worker"),
    examples=EXAMPLES,
)
def test_worker_that_answers(step: Step) -> None:
    """When the worker that answers is gone, so are its requests at once, and prefill is as before.

    Prompts that are computed and kept for a decode worker that takes them no more, locks that stay on their pages,
    transfers that go on to the process that comes back.
    """
    ends_well(step)

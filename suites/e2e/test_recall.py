"""A model that finds facts in its context is asked about every page: an answer says which page's rows it lacks."""

from __future__ import annotations

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Generate
from suites.claim import require
from suites.e2e.alike import answered
from suites.e2e.claim import Step, case, running
from suites.e2e.facts import FACT_MAX, context
from suites.e2e.hand import Hand, only_if
from suites.e2e.story import Tokens

register_cpu_ci(est_time=60, stage="servers")

PAGES_MAX = 16
FACTS = 8
MISSES_MAX = 8  # of so many facts the control arm may not know one, for the questions to be of use
ACCEPTED_PART = 0.95  # of what the control arm's drafts bring, and
SPARE_PASSES = 2  # more may be needed: at a tie another token is drafted


def tokens_of(text: str) -> Tokens:
    """Of a model with a token for each byte."""
    return tuple(text.encode())


def every_page(draw: Draw, table: Table) -> None:
    """Contexts with a fact a page: each is computed once, then each page's fact is asked; again when they were away."""
    hand = Hand(draw, table)
    page, story = hand.config.page_size, hand.story
    questions: list[tuple[Tokens, int]] = []
    while len(questions) < (FACTS if hand.small else 2 * FACTS):
        text, facts = context(hand.random, min(PAGES_MAX * max(page, FACT_MAX), hand.long(1.5)), page)
        only_if(
            facts, f"a prompt has at most {hand.long(1.5)} tokens, on pages of {page}: no room for a fact of {FACT_MAX}"
        )
        for fact in facts:
            prompt = tokens_of(text + fact.question)
            story.facts[prompt] = (fact.page, tokens_of(fact.answer))
            questions.append((prompt, len(fact.answer)))
    rounds = 2 if hand.config.host_pages_per_rank and hand.service.tokens_max else 1
    for prompt, count in questions:
        hand.ask(prompt, arm="control", max_new_tokens=count, temperature=0.0)
    for number in range(rounds):
        if number:
            hand.settle()
            hand.flood(hand.service.tokens_max or 0)
            hand.settle()
        for prompt, count in questions:
            hand.ask(prompt, max_new_tokens=count, temperature=0.0)


@case(
    "recall.every_page_is_read",
    invariants=("I12", "I16", "I19"),
    needs=("promise.control", "promise.recalls_facts"),
    seen={"facts": 8, "facts of control": 8, "hit": 6},
    plan=every_page,
)
def test_every_page_is_read(step: Step) -> None:
    """A fact that the control arm finds is found, whichever page it is on: computed, cached and back from the host.

    A page that is missing, stale or another request's is one wrong answer, and the question names the page
    (sglang#36738, sglang-jax#1386).
    """
    story = step.story
    for op, reply in step.parts():
        if not isinstance(op, Generate) or op.tokens not in story.facts:
            continue
        page, answer = story.facts[op.tokens]
        value = answered(op, reply)
        right = value.tokens == answer
        if op.arm:
            story.seen["facts of control"] += right
            story.seen["misses of control"] += not right
            if right:
                story.known.add(op.tokens)
        elif op.tokens in story.known:
            story.seen["facts"] += right
            what = f"answer about page {page}, request {op.request}, {value.cached_tokens} tokens cached"
            said = bytes(value.tokens or ()).decode(errors="replace")
            require(right, f"{what} = {said!r}", repr(bytes(answer).decode()), "the control arm finds it there")
    misses, most = story.seen["misses of control"], max(1, story.seen["facts of control"] // MISSES_MAX)
    why = "it promises recalls_facts: the model finds nearly all"
    require(misses <= most, f"facts that the control arm misses = {misses}", f"at most {most}", why)


@case(
    "recall.drafts_read_every_page",
    invariants=("I12", "I20"),
    needs=("promise.control", "promise.recalls_facts", "promise.counts_drafts"),
    seen={"passes of control": 8, "facts": 8, "hit": 6},
    plan=every_page,
    configs=running(draft=True),
)
def test_drafts_read_every_page(step: Step) -> None:
    """The answers about all pages take as few passes as the control arm's: a draft reads the pages as the target does.

    An answer that has to be looked up can be drafted from the draft's own rows of that page alone. Rows of the draft
    that a tier or a transfer leaves out change no answer, and text that goes on by itself is drafted without them
    (sglang#10846, sglang#32176).
    """
    story = step.story
    for op, value in step.answers():
        if op.tokens not in story.facts or value.verify_calls is None:
            continue
        if op.arm:
            story.passes[op.tokens] = value.verify_calls
            story.seen["passes of control"] += value.verify_calls
        elif op.tokens in story.passes and value.tokens == story.facts[op.tokens][1]:
            story.seen["facts"] += 1
            story.seen["passes"] += value.verify_calls
            story.seen["passes expected"] += story.passes[op.tokens]
    most = story.seen["passes expected"] / ACCEPTED_PART + SPARE_PASSES
    what = f"passes that verified a draft = {story.seen['passes']}"
    why = f"the control arm took {story.seen['passes expected']} for the same answers"
    require(story.seen["passes"] <= most, what, f"at most {most:.1f}", why)

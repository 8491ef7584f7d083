"""A sharded cache, a transfer and a draft change no answer: whatever is asked, the plain engine says the same."""

from __future__ import annotations

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from suites.claim import require
from suites.e2e.alike import all_alike
from suites.e2e.claim import Step, case, running
from suites.e2e.hand import Hand, only_if
from suites.e2e.story import key_of

register_cpu_ci(est_time=60, stage="servers")

ACCEPTED_PART = 0.95  # of what the control arm's drafts bring, and
SPARE_PASSES = 2  # more may be needed: at a tie another token is drafted
DRAFTED_TOKENS = 24  # of an answer: a draft is accepted or not once in each pass


def boundary_lengths(hand: Hand) -> list[int]:
    """Around the ends of pages and chunks, fewer tokens than ranks, and long."""
    page, chunk, ranks = hand.config.page_size, hand.config.chunk_tokens, hand.config.shards
    around = [1, ranks - 1, page - 1, page, page + 1, ranks * page, chunk - 1, chunk, chunk + 1, hand.long()]
    around += (
        []
        if hand.small
        else [
            ranks * page - 1,
            ranks * page + 1,
            2 * page - 1,
            2 * page,
            2 * chunk - 1,
            2 * chunk,
            2 * chunk + 1,
            hand.long(2.5),
        ]
    )
    return sorted({count for count in around if 0 < count <= hand.long()})


def at_boundaries(draw: Draw, table: Table) -> None:
    """Every length in both arms."""
    hand = Hand(draw, table)
    for count in boundary_lengths(hand):
        hand.both(hand.fresh(count))


@case(
    "parity.answers_as_control",
    invariants=("I16", "I19", "I23", "I24"),
    needs=("promise.control", "promise.scores"),
    seen={"compared with control": 5, "exact pages": 1, "tail": 1, "several chunks": 1},
    plan=at_boundaries,
)
def test_answers_as_control(step: Step) -> None:
    """An answer is the control arm's, token by token and in its log probabilities, whatever the prompt's length.

    Pages gathered in the wrong order, a rank without a page that writes none of a batch, a chunk's end that is not a
    page's, pages sent out of step with those of decode (sglang#28718, sglang#5588).
    """
    all_alike(step)


def scored_prompts(draw: Draw, table: Table) -> None:
    """Prompts scored from their first token, from a page's end, and from within."""
    hand = Hand(draw, table)
    page, chunk = hand.config.page_size, hand.config.chunk_tokens
    for count in (page, min(chunk, hand.long()), hand.long()):
        prompt = hand.fresh(count)
        hand.both(prompt, logprob_start=0, max_new_tokens=1)
        for start in {count // 2, count // page * page // 2, max(0, count - 1)}:
            hand.ask(prompt, logprob_start=start, max_new_tokens=1)


@case(
    "parity.scores_as_control",
    invariants=("I19", "I23", "I24"),
    needs=("promise.control", "promise.scores_prompt"),
    seen={"compared with control": 3, "prompt tokens compared": 20, "several chunks": 1},
    plan=scored_prompts,
)
def test_scores_as_control(step: Step) -> None:
    """Every prompt token has the control arm's log probability, wherever the scores begin.

    An answer's few tokens forgive much: a page of another request, rows of a wrong rank or an offset between chunks
    move the scores of all tokens behind them (vllm#46114, sglang-jax#1386).
    """
    all_alike(step)


def drafted(draw: Draw, table: Table) -> None:
    """Long answers of the control arm, in which drafts are accepted; then the same of the other, cold and cached."""
    hand = Hand(draw, table)
    page, ranks = hand.config.page_size, hand.config.shards
    prompts = [hand.fresh(count) for count in (page + 1, 2 * ranks * page + 1, hand.long(1.5))]
    answers = [hand.ask(prompt, arm="control", max_new_tokens=DRAFTED_TOKENS) for prompt in prompts]
    accepted = sum(value is not None and (value.accept_length or 0) > 1 for value in answers)
    only_if(accepted, "no draft of this model was accepted by the control arm")
    for prompt in (*prompts, *prompts):
        hand.ask(prompt, max_new_tokens=DRAFTED_TOKENS)


@case(
    "parity.draft_accepts_as_control",
    invariants=("I20",),
    needs=("promise.control", "promise.counts_drafts"),
    seen={"passes of control": 20},
    plan=drafted,
    configs=running(draft=True),
)
def test_draft_accepts_as_control(step: Step) -> None:
    """A draft is accepted as often as the control arm's.

    Draft rows that a transfer leaves out change no answer, and do not differ between what is computed and what is
    cached: only the draft is worse than it would be on one worker (sglang#10846).
    """
    seen = step.story.seen
    for op, value in step.answers():
        request, known = step.story.references.get(key_of(op), (op, value))
        if request.arm == "control" != op.arm and value.tokens == known.tokens:
            seen["passes"] += value.verify_calls or 0
            seen["passes of control"] += known.verify_calls or 0
    most = seen["passes of control"] / ACCEPTED_PART + SPARE_PASSES
    what = f"passes that verified a draft = {seen['passes']}"
    require(seen["passes"] <= most, what, f"at most {most:.1f}", f"the control arm took {seen['passes of control']}")

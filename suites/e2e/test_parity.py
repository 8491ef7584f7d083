"""A sharded cache, a transfer and a draft change no answer: whatever is asked, the plain engine says the same."""

from __future__ import annotations

from harness.case import Draw, Table
from suites.e2e.alike import all_alike
from suites.e2e.claim import Step, case
from suites.e2e.hand import Hand


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

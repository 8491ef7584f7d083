"""What comes from the cache is what would have been computed, and as much as was kept."""

from __future__ import annotations

from typing import TypeGuard

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Generate
from suites.claim import expect, require
from suites.e2e.alike import all_alike, answered
from suites.e2e.claim import Step, case
from suites.e2e.hand import Hand
from suites.e2e.story import stays

register_cpu_ci(est_time=120, stage="servers")


def warm(draw: Draw, table: Table) -> None:
    """Each prompt as cold as the control arm's or as another seed's first answer, then from the cache; forks; turns."""
    hand = Hand(draw, table)
    page = hand.config.page_size
    for count in (page + 1, 2 * page, hand.long(1.5)):
        prompt = hand.fresh(count)
        hand.both(prompt)
        hand.ask(prompt)
    prompt = hand.fresh(4 * page + 3)
    hand.both(prompt)
    for at in (page, 2 * page + 1) if hand.small else (page - 1, page, 2 * page + 1, 4 * page):
        fork = hand.fork(prompt, at, page + 2)
        hand.both(fork)
        hand.ask(fork)
    turns = hand.fresh(page + 3)
    for _ in range(3 if hand.small else 6):
        value = hand.both(turns)
        answer = value.tokens if value is not None and value.tokens else ()
        turns = turns + answer + hand.fresh(page // 2 + 1)


@case(
    "cache.answers_as_computed",
    invariants=("I05", "I19"),
    needs=("promise.scores", "promise.counts_cached"),
    seen={"hit": 5, "cold": 3, "compared": 5},
    plan=warm,
)
def test_answers_as_computed(step: Step) -> None:
    """An answer from the cache is the one that was computed: for the repeat of a prompt, its forks and its next turns.

    Rows of another prompt behind a shared page, a prefix gathered with the wrong rotation, a page split between two
    prompts, a prompt of exactly some chunks that is hit in full (LMCache#5249, sglang#31239).
    """
    all_alike(step)


def arithmetic(draw: Draw, table: Table) -> None:
    """Fresh prompts, repeats and forks around page ends; all fits the pool."""
    hand = Hand(draw, table)
    page = hand.config.page_size
    for count in (1, page, page + 1, 3 * page - 1, 3 * page, 3 * page + 1):
        prompt = hand.fresh(count)
        hand.ask(prompt, max_new_tokens=1)
        hand.ask(prompt, max_new_tokens=1)
    for at in (1, page - 1, page, page + 1, 2 * page):
        hand.ask(hand.fork(prompt, at, page), max_new_tokens=1)
    hand.settle()
    hand.flush()
    hand.ask(prompt, max_new_tokens=1)


@case(
    "cache.counts_whole_pages",
    invariants=("I21",),
    needs=("promise.counts_cached", "promise.keeps_finished"),
    seen={"hit": 5, "cold": 5, "exact pages": 2, "tail": 2},
    plan=arithmetic,
)
def test_counts_whole_pages(step: Step) -> None:
    """A repeat has all whole pages before its last token in the cache, a fork those of what it shares, another none.

    Hits counted per rank or twice, pages of one rank alone that match, a last page lost, a flush that one rank missed,
    tiers that do not add up (sglang#11900, vllm#25787, TensorRT-LLM#15655).
    """
    for op, reply in step.parts():
        if not stays_judged(op):
            continue
        value = answered(op, reply)
        if value.cached_tokens is None:
            continue
        least, most = step.story.cached_bounds(op)
        what = f"{value.cached_tokens} cached tokens of request {op.request} with {len(op.tokens)}"
        why = "its longest common prefix with an earlier prompt is so long, in whole pages and without the last token"
        require(least <= value.cached_tokens <= most, what, f"{least} to {most}" if least < most else f"{most}", why)
        if value.cached_device is not None:
            tiers = value.cached_device + (value.cached_host or 0)
            expect(tiers, value.cached_tokens, f"cached tokens of request {op.request} on device and host", "no third")


def stays_judged(op: object) -> TypeGuard[Generate]:
    """Whether it is a whole request to the judged arm."""
    return isinstance(op, Generate) and stays(op) and not op.arm


def mixes(draw: Draw, table: Table) -> None:
    """Requests alone, then together: short and long, cold and cached, the same twice."""
    hand = Hand(draw, table)
    page = hand.config.page_size
    lengths = (page, hand.long(1.2), 3, 2 * page + 1, hand.config.chunk_tokens + 1, 5 * page, 1, page + 1)
    for size in (2, 6) if hand.small else (2, 3, 5, 8):
        prompts = [hand.fresh(min(count, hand.long(1.2))) for count in lengths[:size]]
        for prompt in prompts:
            hand.ask(prompt, arm="control" if hand.story.promises("control") else "")
        hand.together([hand.request(prompt) for prompt in prompts])
        again = [*prompts[: size // 2], *prompts[: size - size // 2]]
        hand.together([hand.request(prompt) for prompt in again])


@case(
    "cache.batch_as_alone",
    invariants=("I05", "I19", "I24"),
    needs=("op.together", "promise.scores"),
    seen={"together": 4, "compared": 10, "hit": 2, "cold": 2},
    plan=mixes,
)
def test_batch_as_alone(step: Step) -> None:
    """A request is answered in a batch as it is alone.

    Rows gathered for one request that another of the batch reads, offsets within a batch of cold and cached requests,
    two equal prompts of one batch that share a page before it is written (vllm#46114).
    """
    all_alike(step)

"""Chunks shared out over the ranks that compute them: the split and its gather are the identity."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Finish, Together
from suites.claim import Step, case, expect
from suites.configs import ROOMY, Bounds, configs
from suites.invariants.test_reads import rows_are_right
from suites.machine import Hand

register_cpu_ci(est_time=30, stage="cases")

SEVERAL = configs(Bounds(shards=(2, 3, 4, 8), page_sizes=(2, 4, 1, 16), pages_max=12, scratch_contexts=ROOMY))


def every_length(draw: Draw, table: Table) -> None:
    """Prompts of 1 to 4N tokens, cold and again with 1 to 2N+1 more tokens."""
    hand = Hand(draw, table)
    ranks, chunk = table.config.shards, table.config.chunk_tokens
    for _ in range(max(2, table.steps_max // 5)):
        tokens = hand.story.new_tokens(min(chunk, draw(st.integers(1, 4 * ranks))))
        hand.serve(tokens)
        hand.serve(tokens + hand.story.new_tokens(draw(st.integers(1, 2 * ranks + 1))))


@case(
    "split.every_length",
    invariants=("I23",),
    needs=(),
    seen={"extended": 3, "tiny": 1, "few new tokens": 1, "hit": 1},
    plan=every_length,
    configs=SEVERAL,
)
def test_every_length(step: Step) -> None:
    """A chunk of any length, also shorter than the number of ranks, reaches every rank whole and in order.

    With a prefix hit fewer tokens than ranks remain: a rank without work leaves, or its padding overwrites a row
    (sglang#19656).
    """
    rows_are_right(step)


def batch_mixes(draw: Draw, table: Table) -> None:
    """Batches of chunks of every size, the last one tiny."""
    hand = Hand(draw, table)
    for _ in range(max(1, table.steps_max // 7)):
        names = []
        tiny = draw(st.sampled_from((False, False, True)))  # one page each: more pages than a chunk of one request has
        crowd = table.config.chunk_tokens // table.config.page_size + 1
        for _ in range(min(9, crowd) if tiny else draw(st.integers(2, 4))):
            name = hand.open(hand.story.new_tokens(1 if tiny else draw(st.integers(1, 2 * table.config.shards + 1))))
            if name is not None:
                names.append(name)
        if tiny:
            one_each = [hand.extend_op(name, hand.story.live[name], 1) for name in names]
            table.do(Together(tuple(one_each[: table.config.chunk_tokens])))
        hand.batch()
        for name in names:
            if name in hand.story.live and hand.complete(name):
                table.do(Finish(name))


@case(
    "split.batch_mixes",
    invariants=("I23", "I24"),
    needs=("op.together",),
    seen={"batch": 3, "tiny": 1},
    plan=batch_mixes,
    configs=SEVERAL,
)
def test_batch_mixes(step: Step) -> None:
    """In a batch of chunks of any lengths every request gets its own tokens back, in order, on every rank.

    Arrays that describe the batch cut at different places: lengths of one request, tokens of the next (vllm#46114).
    """
    rows_are_right(step)


@case(
    "split.no_rank_left_out",
    invariants=("I23", "I08"),
    needs=("snapshot.collectives",),
    seen={"extended": 3, "tiny": 1, "few new tokens": 1},
    plan=every_length,
    configs=SEVERAL,
)
def test_no_rank_left_out(step: Step) -> None:
    """For every number of new tokens all ranks run the same collectives.

    A split that is entered by total length instead of by uncached length: one rank skips a collective (sglang#19656).
    """
    first = step.after.ranks[0].collectives
    for rank in step.after.ranks[1:]:
        expect(rank.collectives, first, f"collectives of rank {rank.rank}", "rank 0 ran these")

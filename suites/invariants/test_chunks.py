"""Chunk size, batch mix and order of arrival change nothing that a request gets."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Abort, AnyOp, Extend, Finish, Ok, Open, Opened, Restart
from suites.claim import Step, case, expect
from suites.configs import ROOMY, Bounds, configs
from suites.invariants.test_reads import rows_are_right
from suites.machine import Hand, machine
from suites.prompts import length

register_cpu_ci(est_time=10, stage="cases")


def many_cuts(draw: Draw, table: Table) -> None:
    """The same prompt in chunks of different sizes, with the cache dropped in between."""
    hand = Hand(draw, table)
    tokens = hand.story.new_tokens(length(draw, table.config.page_size, 6))
    for _ in range(draw(st.integers(2, 3))):
        name = hand.open(tokens)
        while name is not None and name in hand.story.live and hand.story.live[name].left:
            if not hand.extend(name):
                break
        hand.close_all()


@case(
    "chunks.any_cut_reads_the_same",
    invariants=("I24", "I19"),
    needs=("op.flush",),
    seen={"continued": 3, "dropped": 3, "tail": 1, "exact pages": 1},
    plan=many_cuts,
    configs=configs(Bounds(pages_max=12, scratch_contexts=ROOMY)),
)
def test_any_cut_reads_the_same(step: Step) -> None:
    """A prompt reads the same rows whatever chunks it is computed in.

    Chunk boundaries off the page grid, a partial page computed or sent twice, a prefix that is reset per chunk
    (vllm#46114, sglang#5588).
    """
    rows_are_right(step)


@case(
    "chunks.pages_at_the_end",
    invariants=("I24", "I03"),
    needs=("snapshot.requests",),
    seen={"continued": 3, "tail": 1, "exact pages": 1, "batch": 1},
    plan=machine({"open": 5, "extend": 9, "batch": 9, "finish": 3, "serve": 1, "abort": 1}),
)
def test_pages_at_the_end(step: Step) -> None:
    """A request that is computed to its end holds exactly the pages of its prompt, however it was cut.

    Pages that pile up with the number of chunks, or a page lost at each boundary (sglang-jax#1386).
    """
    for rank in step.after.ranks:
        for name, request in (rank.requests or {}).items():
            if request.computed == request.tokens:
                pages = -(-request.tokens // step.config.page_size)
                expect(
                    len(request.pages),
                    pages,
                    f"pages of request {name} on rank {rank.rank}",
                    f"its {request.tokens} tokens are computed",
                )


@case(
    "chunks.computed_is_told",
    invariants=("I24",),
    needs=("snapshot.requests",),
    seen={"continued": 3, "hit": 1, "finished": 1, "aborted": 1},
    plan=machine(),
)
def test_computed_is_told(step: Step) -> None:
    """The engine's live requests and their computed tokens are those that the replies told.

    A request that lives on after its end, or whose progress the engine and its caller count differently (sglang#6857).
    """
    expected = {name: (len(live.tokens), live.cached, live.computed) for name, live in step.story.live.items()}
    for op, reply in step.parts():
        if isinstance(reply, Ok):
            told(expected, op, reply)
    for rank in step.after.ranks:
        shown = {
            name: (view.tokens, view.cached, view.computed)
            for name, view in (rank.requests or {}).items()
            if name in expected or view.room is None  # a transfer may keep one that has ended
        }
        expect(shown, expected, f"(tokens, cached, computed) of the requests on rank {rank.rank}", "the replies say so")


def told(expected: dict[str, tuple[int, int, int]], op: AnyOp, reply: Ok) -> None:
    """What one accepted op does to the table of live requests."""
    if isinstance(op, Open) and isinstance(reply.value, Opened):
        expected[op.request] = (len(op.tokens), reply.value.cached, reply.value.cached)
    elif isinstance(op, Extend):
        tokens, cached, computed = expected[op.request]
        expected[op.request] = (tokens, cached, computed + op.count)
    elif isinstance(op, Finish | Abort):
        expected.pop(op.request)
    elif isinstance(op, Restart):
        expected.clear()

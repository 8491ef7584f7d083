"""Misuse: an op that makes no sense is refused and harms nobody."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Abort, AnyOp, Evict, Extend, Finish, Flush, Ok, Open
from suites.claim import Step, case, expect, require
from suites.configs import any_config
from suites.machine import Hand
from suites.story import Story, states

register_cpu_ci(est_time=5, stage="cases")

STATE = ("capacity", "free", "requests", "nodes")


def nobody(story: Story) -> list[AnyOp]:
    """Ops on requests that do not live or a tier that does not exist, and a prompt without tokens."""
    rows = story.oracle.rows((1,), 0, 1)
    return [Finish("nobody"), Abort("nobody"), Extend("nobody", 1, rows), Open("empty", ()), Evict(1, "nowhere")]


def wrong_chunks(story: Story, name: str) -> list[AnyOp]:
    """Chunks that a live request cannot be given: beyond its end, empty, off the page grid, with rows missing."""
    request, page = story.live[name], story.config.page_size
    longer = (*request.tokens, 10**6)
    counts = [request.left + 1, 0]
    if page > 1 and request.left > 1:
        counts.append(1)
    start = request.computed
    ops: list[AnyOp] = [Extend(name, count, story.oracle.rows(longer, start, start + count)) for count in counts]
    count = min(request.left, page)
    if count:
        ops.append(Extend(name, count, story.oracle.rows(longer, start, start + count - 1)))
    return ops


def too_long(story: Story, name: str) -> list[AnyOp]:
    """A chunk longer than the config asks room for: an engine may take it or refuse it, but it has to answer."""
    request, count = story.live[name], story.config.chunk_tokens + story.config.page_size
    if request.left < count:
        return []
    return [Extend(name, count, story.oracle.rows(request.tokens, request.computed, request.computed + count))]


def nonsense(draw: Draw, story: Story) -> AnyOp:
    """An op that cannot make sense now, or hardly does."""
    ops = nobody(story)
    if story.live:
        name = draw(st.sampled_from(list(story.live)))
        ops += [Open(name, story.live[name].tokens), Flush(), *wrong_chunks(story, name), *too_long(story, name)]
    return draw(st.sampled_from(ops))


def misuse(draw: Draw, table: Table) -> None:
    """Sensible moves with nonsense in between."""
    hand = Hand(draw, table)
    for _ in range(table.steps_max // 2):
        getattr(hand, "move_" + draw(st.sampled_from(("open", "extend", "serve", "finish"))))()
        table.do(nonsense(draw, hand.story))


def makes_sense(step: Step) -> bool:
    """Whether the op may be carried out, by the contract's own words."""
    op, story = step.op, step.story
    if isinstance(op, Open):
        return bool(op.tokens) and op.request not in story.live
    if isinstance(op, Finish | Abort):
        return op.request in story.live
    if isinstance(op, Flush):
        return not story.live
    if isinstance(op, Extend):
        request = story.live.get(op.request)
        if request is None or not 1 <= op.count <= request.left:
            return False
        on_grid = op.count == request.left or (request.computed + op.count) % step.config.page_size == 0
        shapes = [len(stamps) for layers in op.rows.values() for stamps in layers]
        return on_grid and set(shapes) == {op.count}
    return True


@case(
    "misuse.refused_and_harmless",
    invariants=("I04", "I17"),
    needs=("promise.refuses_misuse", *(f"snapshot.{name}" for name in STATE)),
    seen={"refused": 3, "extended": 3},
    plan=misuse,
    configs=any_config,
)
def test_refused_and_harmless(step: Step) -> None:
    """Unknown requests, second opens, empty prompts, chunks off the page grid or beyond the prompt: refused, no change.

    Asserts that vanish outside of debug mode: a double free or an unaligned prefix goes through in silence.
    """
    if makes_sense(step):
        return
    require(not isinstance(step.reply, Ok), "accepted", "a refusal", "the op makes no sense here")
    for old, new in zip(step.before.ranks, step.after.ranks, strict=True):
        for name, was, now in states(old, new, step.story):
            expect(now, was, f"{name} of rank {new.rank} after a refusal", "a refusal changes nothing")

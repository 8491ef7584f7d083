"""What attention reads: every row of every position, layer and component, on every rank."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table, Violation
from harness.register import register_cpu_ci
from harness.types import Abort, Extend, Extended, Finish, Ok, Rows
from suites.claim import Step, case
from suites.configs import ROOMY, Bounds, configs
from suites.machine import MIXED, Hand, either, machine
from suites.prompts import pool_pages, prompt
from suites.story import Story

register_cpu_ci(est_time=60, stage="cases")


def first_wrong(actual: Rows, expected: Rows) -> tuple[str, int, int, int | None]:
    """(component, layer, position, stamp) of the first row that differs; the stamp is None where rows are missing."""
    for component, layers in expected.items():
        for layer, stamps in enumerate(layers):
            got = actual.get(component, ())[layer] if layer < len(actual.get(component, ())) else ()
            for position, stamp in enumerate(stamps):
                if position >= len(got):
                    return component, layer, position, None
                if got[position] != stamp:
                    return component, layer, position, got[position]
    return "?", 0, 0, None


def whose(story: Story, stamp: int | None) -> str:
    """A stamp in words: whose row it is."""
    if stamp is None:
        return "no row"
    return next(story.oracle.owners_of(stamp), f"a row that nobody wrote ({stamp})")


def rows_are_right(step: Step) -> None:
    """Every accepted chunk of the step read exactly the rows of its own tokens."""
    for op, reply in step.parts():
        if not (isinstance(op, Extend) and isinstance(reply, Ok) and isinstance(reply.value, Extended)):
            continue
        request = step.story.live[op.request]
        expected = step.story.oracle.rows(request.tokens, 0, request.computed + op.count)
        if not reply.value.reads:
            raise Violation(
                "no reads of any rank", "what attention read, of one rank or more", "the chunk was accepted"
            )
        for rank, rows in enumerate(reply.value.reads):
            if rows == expected:
                continue
            component, layer, position, stamp = first_wrong(rows, expected)
            raise Violation(
                f"{whose(step.story, stamp)}, read by request {op.request} on rank {rank} "
                f"for {component} layer {layer} position {position}",
                f"its own row of position {position}",
                f"[0, {request.computed}) was cached or computed before, "
                f"[{request.computed}, {request.computed + op.count}) is this chunk",
            )


@case(
    "reads.every_row",
    invariants=("I19", "I12"),
    needs=(),
    seen={"raced": 1, "extended": 3, "read a prefix": 3, "hit": 1, "continued": 1},
    plan=machine(),
)
def test_every_row(step: Step) -> None:
    """Attention reads for every position, layer and component the row of exactly these tokens, on every rank.

    A wrong row: owner filter, translation, gather order, double buffer, stale or foreign pages (sglang#28718).
    """
    rows_are_right(step)


def warm_plan(draw: Draw, table: Table) -> None:
    """Prompts around page and chunk boundaries, each again and again, with forks in between."""
    hand = Hand(draw, table)
    for _ in range(max(2, table.steps_max // 4)):
        tokens = prompt(draw, hand.story, ("fresh", "fork"))
        for _ in range(draw(st.integers(1, 2)) + 1):
            hand.serve(tokens)


def looks_alike(draw: Draw, table: Table) -> None:
    """Prompts that differ in one page or one token of their middle, and agree again behind it."""
    hand = Hand(draw, table)
    page = table.config.page_size
    pages = draw(st.integers(2, max(2, min(8, pool_pages(table.config) - 1))))
    trunk = hand.story.new_tokens(pages * page)
    hand.serve(trunk)
    for _ in range(draw(st.integers(1, 4))):
        at, tokens = draw(st.integers(0, pages * page - 1)), draw(st.sampled_from((1, page)))
        hand.serve(trunk[:at] + hand.story.new_tokens(tokens) + trunk[at + tokens :] + hand.story.new_tokens(1))


@case(
    "reads.warm_as_cold",
    invariants=("I19",),
    needs=(),
    seen={"hit": 3, "read a prefix": 3, "exact pages": 1, "tail": 1},
    plan=either(warm_plan, looks_alike),
    configs=configs(Bounds(scratch_contexts=ROOMY)),
)
def test_warm_as_cold(step: Step) -> None:
    """A repeated prompt reads the rows of the first time, for lengths at and around page and chunk boundaries.

    A full hit that is off by one token or one page, as on prompts that are exact multiples (LMCache#5249, vllm#52617).
    """
    rows_are_right(step)


def in_company(draw: Draw, table: Table) -> None:
    """Prompts are repeated alone and then side by side: the same pages, in another plan."""
    hand = Hand(draw, table)
    page = table.config.page_size
    prompts = [hand.story.new_tokens(draw(st.integers(1, 2)) * page + draw(st.sampled_from((1, page)))) for _ in "ab"]
    for tokens in draw(st.permutations(prompts * 2)):
        hand.serve(tokens)
    for tokens in draw(st.permutations(prompts)):
        hand.open(tokens)
    hand.batch()
    for name in list(hand.story.live):
        table.do(Abort(name))


@case(
    "reads.batches",
    invariants=("I19", "I24"),
    needs=("op.together",),
    seen={"batch": 3, "read a prefix": 3, "hit": 1},
    plan=either(
        in_company,
        machine(
            {"open": 6, "batch": 8, "extend": 2, "finish": 4, "serve": 2, "abort": 1}, kinds=("fork", "repeat", "fresh")
        ),
    ),
    configs=configs(Bounds(scratch_contexts=ROOMY)),
)
def test_batches(step: Step) -> None:
    """Requests of one batch read their own rows, also when they share pages or start on different owners.

    One gather plan for several requests: a shared page in two slots, blocks that overlap, rows of the neighbour.
    """
    rows_are_right(step)


def prefix_crowd(draw: Draw, table: Table) -> None:
    """Long prompts are cached, then batches of requests come that hit different ones of them."""
    hand = Hand(draw, table)
    config, page = table.config, table.config.page_size
    longest = min(config.context_tokens, config.pages_per_rank * page) // page
    trunks = [
        hand.story.new_tokens(draw(st.integers(1, max(1, longest))) * page) for _ in range(draw(st.integers(2, 4)))
    ]
    for tokens in trunks:
        hand.serve(tokens)
    for _ in range(draw(st.integers(1, 2))):
        for tokens in trunks:
            hand.open(tokens + hand.story.new_tokens(draw(st.integers(1, page))))
        hand.batch()
        for name in list(hand.story.live):
            table.do(Finish(name) if not hand.story.live[name].left else Abort(name))


@case(
    "reads.crowded_scratch",
    invariants=("I19", "I06"),
    needs=("op.together",),
    seen={"batch": 3, "read a prefix": 3, "refused": 1},
    plan=prefix_crowd,
    configs=configs(Bounds(pages_max=8, scratch_contexts=(1,), context_parts=(2, 3))),
)
def test_crowded_scratch(step: Step) -> None:
    """Requests of a batch whose prefixes together may not fit the scratch are refused or read their own rows.

    Scratch counted per request and not per batch: the batch is admitted and overflows, or overwrites (sglang#38356).
    """
    rows_are_right(step)


@case(
    "reads.reused_pages",
    invariants=("I19", "I05"),
    needs=("op.evict",),
    seen={"evicted": 3, "read a prefix": 3, "aborted": 3, "hit": 1},
    plan=machine({"open": 4, "extend": 5, "serve": 6, "finish": 3, "abort": 4, "evict": 4, "flush": 2, "restart": 1}),
    configs=configs(Bounds(pages_max=3)),
)
def test_reused_pages(step: Step) -> None:
    """Rows are right while pages are evicted, freed by aborts and used again at once.

    A page given to a new chain while an old reader or writer still uses it, a hit on a dropped cache (sglang#36738,
    sglang#24527).
    """
    rows_are_right(step)


def race_plan(draw: Draw, table: Table) -> None:
    """Requests with a common prefix are opened before any of them is in the cache, so that their bases differ."""
    hand = Hand(draw, table)
    page = table.config.page_size
    for _ in range(draw(st.integers(0, 2))):
        hand.serve(hand.story.new_tokens(draw(st.integers(1, 3)) * page))
    pages = draw(st.integers(1, 4))
    trunk = hand.story.new_tokens(pages * page)
    cuts = draw(st.lists(st.integers(1, pages), min_size=2, max_size=4))
    prompts = [trunk[: cut * page] + hand.story.new_tokens(draw(st.integers(1, 2 * page))) for cut in cuts]
    names = [name for name in map(hand.open, prompts) if name is not None]
    for name in names:
        if draw(st.booleans()):
            hand.extend(name)
    if hand.can("together"):
        hand.batch()
    for name in draw(st.permutations(names)):
        done = name in hand.story.live and hand.complete(name)
        if name in hand.story.live:
            table.do(Finish(name) if done else Abort(name))
    hand.serve(trunk + hand.story.new_tokens(1))
    hand.serve(prompt(draw, hand.story, ("fork", "repeat")))


@case(
    "reads.same_prefix_race",
    invariants=("I19", "I01"),
    needs=(),
    seen={"raced": 3, "read a prefix": 3, "hit": 3, "finished": 3},
    plan=race_plan,
    configs=configs(Bounds(pages_max=12, scratch_contexts=ROOMY)),
)
def test_same_prefix_race(step: Step) -> None:
    """Requests that compute one prefix side by side, on different owners, and whoever hits it later read right rows.

    Two rotation runs spliced into one path: a tail that continues another chain's owners (sglang#37614).
    """
    rows_are_right(step)


@case(
    "reads.no_hit_on_a_dropped_cache",
    invariants=("I19", "I18"),
    needs=("op.flush",),
    seen={"dropped": 3, "read a prefix": 3, "finished": 3},
    plan=machine({**MIXED, "flush": 6, "restart": 3, "serve": 8, "finish": 6}, kinds=("repeat", "fork", "fresh")),
)
def test_no_hit_on_a_dropped_cache(step: Step) -> None:
    """After the cache is dropped, no row of before is read again.

    Nodes, slots or generations that survive a flush or a restart and are matched by an old key (sglang#17259).
    """
    rows_are_right(step)

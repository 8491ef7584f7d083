"""Units: tokens, pages and bytes mean the same on every surface."""

from __future__ import annotations

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from suites.claim import Step, case, expect, require
from suites.configs import Bounds, configs
from suites.machine import Hand, machine
from suites.prompts import pool_pages
from suites.story import held_pages

register_cpu_ci(est_time=15, stage="cases")


@case(
    "units.used_is_what_is_held",
    invariants=("I22", "I04"),
    needs=("snapshot.tokens_used", "snapshot.tokens_max", "snapshot.requests", "snapshot.nodes"),
    seen={"raced": 1, "extended": 3, "finished": 3},
    plan=machine(),
)
def test_used_is_what_is_held(step: Step) -> None:
    """Used tokens are the pages that live requests hold or lock times the page size, and never more than the capacity.

    Usage derived from the tightest owner class: one cached page counts N times in the used tokens. A page whose copy is
    under way may count as well: it cannot be evicted at the moment.
    """
    page = step.config.page_size
    for rank in step.after.ranks:
        locked = {page for node in rank.nodes or () if node.locks for page in node.pages}
        pinned = {page for node in rank.nodes or () if node.pins for page in node.pages}
        held = locked | held_pages(rank)
        least, most, used = len(held) * page, len(held | pinned) * page, rank.tokens_used or 0
        require(
            least <= used <= most and used % page == 0,
            f"tokens_used of rank {rank.rank} = {rank.tokens_used}",
            f"{least}" if least == most else f"{least} to {most}",
            f"{len(held)} pages are held or locked",
        )
        require(
            (rank.tokens_used or 0) <= (rank.tokens_max or 0),
            f"tokens_used {rank.tokens_used} of rank {rank.rank}",
            f"at most tokens_max {rank.tokens_max}",
            "used is a part of the capacity",
        )


def one_prompt(draw: Draw, table: Table) -> None:
    """One small request, to have a state to look at."""
    hand = Hand(draw, table)
    hand.serve(hand.story.new_tokens(table.config.page_size + 1))


@case(
    "units.capacity_scales",
    invariants=("I22",),
    needs=("snapshot.tokens_max", "snapshot.capacity", "snapshot.free"),
    seen={"extended": 1},
    plan=one_prompt,
    examples=0.4,
)
def test_capacity_scales(step: Step) -> None:
    """N ranks that share one cache hold N times the tokens of one rank; replicated ranks hold those of one.

    Capacity widened twice or not at all, a draft pool that is widened on its own, a per-rank number shown as the total.
    """
    page = step.config.page_size
    pages = pool_pages(step.config)
    for rank in step.before.ranks:
        expect(
            rank.tokens_max,
            pages * page,
            f"tokens_max of rank {rank.rank}",
            f"{pages} pages of {page} tokens can be allocated",
        )
        expect(sum(rank.capacity or ()), pages, f"capacity of rank {rank.rank} in pages", "the config asks for it")


@case(
    "units.host_pages_are_those_asked",
    invariants=("I22", "I25"),
    needs=("snapshot.host_free", "snapshot.free"),
    seen={"extended": 1},
    plan=one_prompt,
    configs=configs(Bounds(host_parts=(2, 1, 4))),
    examples=0.4,
)
def test_host_pages_are_those_asked(step: Step) -> None:
    """A fresh session has in every owner class as many free host pages as the config gives a rank.

    One budget that is given to each of several host pools, or a pool without the pages of all its ranks (sglang#32373).
    """
    for rank in (step.story.first or step.before).ranks:
        expect(
            [len(pages) for pages in rank.host_free or ()],
            [step.config.host_pages_per_rank] * len(rank.free or ()),
            f"free host pages per owner class of rank {rank.rank}",
            "the config asks for so many",
        )
        per_class = [len(free) for free in rank.free or ()]
        if not rank.requests and not rank.nodes:
            expect(
                per_class,
                list(rank.capacity or ()),
                f"free pages per owner class of rank {rank.rank}",
                "nothing is used yet",
            )


@case(
    "units.planned_bytes_are_allocated",
    invariants=("I22", "I01"),
    needs=("snapshot.buffers", "snapshot.plan"),
    seen={"extended": 1},
    plan=one_prompt,
    configs=configs(),
    examples=0.4,
)
def test_planned_bytes_are_allocated(step: Step) -> None:
    """The bytes of every component's buffer are those that the memory plan charges.

    A planner that forgets a factor: start-up runs out of memory (sglang#32373).
    """
    for rank in step.after.ranks:
        allocated = {name: buffer.allocated_bytes for name, buffer in (rank.buffers or {}).items()}
        expect(allocated, rank.plan, f"bytes of a layer's buffers on rank {rank.rank}", "the plan says so")


@case(
    "units.buffers_hold_their_rows",
    invariants=("I22", "I01"),
    needs=("snapshot.buffers",),
    seen={"extended": 1},
    plan=one_prompt,
    configs=configs(),
    examples=0.4,
)
def test_buffers_hold_their_rows(step: Step) -> None:
    """Every rank has one buffer per component, and its bytes are those of its rows.

    A part of a row that has a smaller buffer than the others, a buffer that ends too early (sglang#36990).
    """
    for rank in step.after.ranks:
        expect(
            sorted(rank.buffers or {}),
            sorted(step.config.components),
            f"buffers of rank {rank.rank}",
            "one per component",
        )
        for name, buffer in (rank.buffers or {}).items():
            expect(
                buffer.allocated_bytes,
                buffer.rows * buffer.row_bytes,
                f"bytes of {name} on rank {rank.rank}",
                "rows * row_bytes",
            )

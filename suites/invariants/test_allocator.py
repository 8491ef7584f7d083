"""Pages: none lost, none twice, none held beyond need."""

from __future__ import annotations

from collections import Counter

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Flush, Ok, Open
from harness.views import RankView
from suites.claim import Step, case, expect, require
from suites.configs import ROOMY, Bounds, configs, sharded
from suites.machine import Hand, either, machine, splits
from suites.prompts import pool_pages
from suites.story import cached_entries, cached_pages, held_pages, prefix_entries

register_cpu_ci(est_time=20, stage="cases")

POOL = ("snapshot.capacity", "snapshot.free", "snapshot.requests", "snapshot.nodes")


@case(
    "allocator.conserved_per_class",
    invariants=("I04",),
    needs=POOL,
    seen={"raced": 1, "extended": 3, "hit": 1, "evicted": 1, "finished": 1, "aborted": 1},
    plan=machine(),
)
def test_conserved_per_class(step: Step) -> None:
    """After every op, free pages and pages in use add up to the capacity in every owner class on every rank.

    A tail page, a duplicate, a declined suffix or an aborted request's page that is never freed (sglang#31616,
    sglang#30053).
    """
    for rank in step.after.ranks:
        owner = step.classes(rank)
        used = Counter(owner.get(page, -1) for page in cached_pages(rank) | held_pages(rank))
        free = [len(pages) for pages in rank.free or ()]
        expect(
            [free[index] + used[index] for index in range(len(free))],
            list(rank.capacity or ()),
            f"free {free} + in use {[used[index] for index in range(len(free))]} per owner class on rank {rank.rank}",
            "a page is free, cached or held by a request",
        )


@case(
    "allocator.idle_baseline",
    invariants=("I04", "I03"),
    needs=(*POOL, "op.flush"),
    seen={"raced": 1, "dropped": 1, "finished": 1, "aborted": 1},
    plan=machine(idle=True),
)
def test_idle_baseline(step: Step) -> None:
    """With no request alive and the cache dropped, all pages of the fresh session are free, each in its own class.

    Leaks that only idleness shows, and pages that come back to another owner's class (sglang#30053, sglang#31616).
    """
    if not (isinstance(step.op, Flush) and isinstance(step.reply, Ok)):
        return
    first = (step.story.first or step.before).ranks
    for rank, fresh in zip(step.after.ranks, first, strict=True):
        expect(
            [sorted(pages) for pages in rank.free or ()],
            [sorted(pages) for pages in fresh.free or ()],
            f"free pages per owner class on rank {rank.rank}",
            "nothing is alive and nothing is cached",
        )
        expect(rank.nodes, (), f"radix tree of rank {rank.rank}", "the cache was dropped")
        expect(dict(rank.requests or {}), {}, f"requests of rank {rank.rank}", "a flush is refused while requests live")


@case(
    "allocator.no_page_twice",
    invariants=("I05", "I03"),
    needs=POOL,
    seen={"raced": 1, "extended": 3, "hit": 1, "evicted": 1, "aborted": 1},
    plan=machine(),
)
def test_no_page_twice(step: Step) -> None:
    """No page is free twice, free and in use, in two nodes, or held by two requests outside of the tree.

    Double frees, adjacent frees that share a page, pages freed while a request still holds them (sglang#38941,
    sglang#24527).
    """
    for rank in step.after.ranks:
        where: dict[int, list[str]] = {}
        for index, pages in enumerate(rank.free or ()):
            for page in pages:
                where.setdefault(page, []).append(f"free class {index}")
        for node in rank.nodes or ():
            for page in node.pages:
                where.setdefault(page, []).append(f"node {node.node}")
        cached = cached_pages(rank)
        for name, request in (rank.requests or {}).items():
            for page in request.pages:
                if page not in cached:
                    where.setdefault(page, []).append(f"request {name}")
        twice = {page: places for page, places in sorted(where.items()) if len(places) > 1}
        expect(twice, {}, f"pages in two places on rank {rank.rank}", "a page has one keeper")
        known = set(step.classes(rank))
        strangers = sorted(set(where) - known)
        expect(strangers, [], f"pages outside of the pool on rank {rank.rank}", "reserved pages are never handed out")


@case(
    "allocator.shared_pages_are_the_trees",
    invariants=("I05", "I09"),
    needs=POOL,
    seen={"hit": 3, "extended": 3, "split": 1},
    plan=either(machine(kinds=("fork", "fresh", "repeat")), splits),
)
def test_shared_pages_are_the_trees(step: Step) -> None:
    """Where a request and the tree hold the same page, the tree keeps it for the same tokens in a locked node.

    A request row that was not rewritten to the canonical pages, or a lock that did not move with an insert or a split.
    """
    for rank in step.after.ranks:
        at = {page: node for node in rank.nodes or () for page in node.pages}
        entries = cached_entries(rank)
        for name, request in (rank.requests or {}).items():
            tokens = tokens_of(step, name)
            for entry in prefix_entries(tokens, request.pages, step.config.page_size):
                page = entry[0]
                if page not in at:
                    continue
                node = at[page]
                require(
                    entry in entries,
                    f"page {page} of request {name} in node {node.node} of rank {rank.rank} for other tokens",
                    "the same tokens up to the page's end",
                    "a request shares only its own prefix",
                )
                require(
                    node.locks > 0,
                    f"node {node.node} of rank {rank.rank} without a lock, page {page} held by request {name}",
                    "a locked node",
                    "an eviction would take the page away",
                )


def tokens_of(step: Step, name: str) -> tuple[int, ...]:
    """The prompt of a live request; empty when nobody opened it."""
    for op, _ in step.parts():
        if isinstance(op, Open) and op.request == name:
            return op.tokens
    live = step.story.live.get(name)
    return live.tokens if live else ()


@case(
    "allocator.held_pages_match_tokens",
    invariants=("I03", "I24"),
    needs=("snapshot.requests",),
    seen={"extended": 3, "continued": 1, "tail": 1, "exact pages": 1},
    plan=machine(),
)
def test_held_pages_match_tokens(step: Step) -> None:
    """A live request holds at least the pages of its computed tokens and never more than those of its prompt.

    Lengths recorded without rounding to the page, so that the tail page is missing or one too many is kept
    (sglang#31616).
    """
    page = step.config.page_size
    for rank in step.after.ranks:
        for name, request in (rank.requests or {}).items():
            least = -(-request.computed // page) - len(request.host_pages)  # not brought back yet
            most = -(-request.tokens // page)
            require(
                least <= len(request.pages) <= most,
                f"{len(request.pages)} pages held by request {name} on rank {rank.rank}",
                f"{least} to {most} pages",
                f"{request.computed} of {request.tokens} tokens are computed at {page} tokens per page",
            )


def one_page_chains(draw: Draw, table: Table) -> None:
    """Cold prompts of one page on a fresh session, kept or finished, fewer than the pool holds."""
    hand = Hand(draw, table)
    for _ in range(min(pool_pages(table.config), table.steps_max)):
        name = hand.open(hand.story.new_tokens(table.config.page_size))
        if name is not None and hand.extend(name, whole=True):
            hand.move_finish()


def skew(rank: RankView) -> int:
    """Pages between the owner class with most and with fewest free pages."""
    counts = [len(pages) for pages in rank.free or ()]
    return max(counts) - min(counts)


@case(
    "allocator.seeding_balances",
    invariants=("I06",),
    needs=("snapshot.free", "promise.balanced_seeding"),
    seen={"extended": 3},
    plan=one_page_chains,
    configs=configs(Bounds(layouts=("sharded",), scratch_contexts=ROOMY)),
    examples=0.3,
)
def test_seeding_balances(step: Step) -> None:
    """New chains of one page on a fresh pool leave the owner classes at most one page apart.

    Every chain seeded at owner 0: one class runs empty while the others are full, and nothing more is admitted
    (sglang#38356).
    """
    for rank in step.after.ranks:
        free = [len(pages) for pages in rank.free or ()]
        require(
            skew(rank) <= 1,
            f"free pages {free} on rank {rank.rank}",
            "classes at most 1 apart",
            "a chain starts where most is free",
        )


@case(
    "allocator.skew_is_bounded",
    invariants=("I06",),
    needs=(*POOL, "promise.rotates"),
    seen={"extended": 3, "finished": 1},
    plan=machine(),
    configs=sharded,
)
def test_skew_is_bounded(step: Step) -> None:
    """Free pages of two owner classes differ by at most one page per run of a chain that is in use.

    A run of pages that is not spread over the owners in turn (pages per class of one run differ by at most one).
    """
    for rank in step.after.ranks:
        cached = cached_pages(rank)
        own = sum(1 for request in (rank.requests or {}).values() if set(request.pages) - cached)
        runs = sum(bool(node.pages) for node in rank.nodes or ()) + own
        free = [len(pages) for pages in rank.free or ()]
        require(
            skew(rank) <= runs,
            f"free pages {free} on rank {rank.rank} with {runs} runs in use",
            f"classes at most {runs} apart",
            "each run of pages takes turns over the owners",
        )

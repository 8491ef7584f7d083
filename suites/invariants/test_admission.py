"""Admission: what is accepted can be finished, what is refused changes nothing, and nothing is evicted for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from harness.register import register_cpu_ci
from harness.types import Config, Extend, Open, Refused, Together
from harness.views import RankView
from suites.admission_plans import (
    CROWD,
    alone,
    beyond_the_context,
    ended_while_sent,
    locks_on_promised,
    promised_apart,
    roots_held,
    same_next_class,
    shared_prefixes,
    tight_class,
    to_the_brim,
)
from suites.claim import Step, case, expect, require
from suites.configs import ROOMY, Bounds, configs
from suites.machine import either, machine
from suites.prompts import pool_pages
from suites.story import cached_entries, held_pages, states

register_cpu_ci(est_time=60, stage="cases")

POOL = ("snapshot.free", "snapshot.requests", "snapshot.nodes")


def an_admitted_request_goes_on(step: Step) -> None:
    """One chunk alone, of a request whose first chunk was accepted, is not refused."""
    if not isinstance(step.op, Extend) or not isinstance(step.reply, Refused):
        return
    request = step.story.live.get(step.op.request)
    require(
        request is None or not request.admitted,
        f"chunk of {step.op.count} tokens of {step.op.request} refused: {step.reply.why}",
        "accepted",
        "it was admitted to its end",
    )


@case(
    "admission.admitted_can_finish",
    invariants=("I06",),
    needs=("promise.admits_to_the_end", "snapshot.requests", "snapshot.free"),
    seen={"continued": 3, "refused": 3},
    plan=either(tight_class, same_next_class, promised_apart),
    configs=configs(Bounds(pages_max=10, scratch_contexts=ROOMY)),
)
def test_admitted_can_finish(step: Step) -> None:
    """A request whose first chunk was accepted is never refused a later chunk, whichever owner class is tight.

    A budget of total free and evictable pages, though the class that is needed is empty or locked (sglang#38356,
    sglang#38468).
    """
    an_admitted_request_goes_on(step)


@case(
    "admission.brim_can_finish",
    invariants=("I06",),
    needs=("promise.admits_to_the_end", "snapshot.requests", "snapshot.free"),
    seen={"continued": 3, "refused": 3, "hit": 1},
    plan=to_the_brim,
    configs=configs(Bounds(pages_max=8, scratch_contexts=ROOMY)),
    examples=1.5,
)
def test_brim_can_finish(step: Step) -> None:
    """When all that is granted is taken, to the last page of the tightest owner, each admitted request still goes on.

    A budget that is right but for one page, or but for the requests of one batch, or counts what a newcomer then locks
    (sglang#38356, sglang#31473).
    """
    an_admitted_request_goes_on(step)


@case(
    "admission.scarce_owner_can_finish",
    invariants=("I06",),
    needs=("promise.admits_to_the_end", "snapshot.requests", "snapshot.free"),
    seen={"continued": 3, "refused": 3},
    plan=roots_held,
    configs=configs(Bounds(pages_max=10, layouts=("sharded",), scratch_contexts=ROOMY)),
)
def test_scarce_owner_can_finish(step: Step) -> None:
    """A request that was admitted goes on, also when one owner's pages are all held and the others' could be evicted.

    A budget that adds to the scarcest owner what other owners could evict, or that takes one owner's pages for
    another's (sglang#38356).
    """
    an_admitted_request_goes_on(step)


@case(
    "admission.crowd_can_finish",
    invariants=("I06",),
    needs=("promise.admits_to_the_end",),
    seen={"continued": 3, "refused": 3, "hit": 1},
    plan=either(locks_on_promised, to_the_brim, promised_apart, machine(CROWD), beyond_the_context),
    configs=configs(Bounds(pages_max=6, scratch_contexts=(*ROOMY, 1), context_parts=(1, 2, 3))),
)
def test_crowd_can_finish(step: Step) -> None:
    """Among many half-done requests that share prefixes and pages, every admitted one can go on alone.

    Two requests that each hold what the other needs, a lock of a newcomer on pages that were counted as evictable, a
    prompt that is let in although its last chunks can never fit the scratch (sglang#31473).
    """
    an_admitted_request_goes_on(step)


@case(
    "admission.sent_can_finish",
    invariants=("I06", "I17"),
    needs=("promise.admits_to_the_end", "op.reserve", "op.send", "op.settle", "snapshot.requests", "snapshot.free"),
    seen={"continued": 3, "refused": 3, "aborted in flight": 1},
    plan=ended_while_sent,
    configs=configs(Bounds(pages_max=6, scratch_contexts=ROOMY, host_parts=(0,), decode_parts=(2,))),
)
def test_sent_can_finish(step: Step) -> None:
    """An admitted request goes on also after others have ended halfway, while a transfer still held their pages.

    An end in two steps, of the request and of its transfer, that gives back twice what was promised to it, or never:
    the budget grows by pages that are not there, or shrinks for good (sglang#24527, sglang#30053).
    """
    an_admitted_request_goes_on(step)


@case(
    "admission.idle_pool_serves_what_fits",
    invariants=("I06",),
    needs=("promise.serves_what_fits",),
    seen={"extended": 3, "hit": 1, "continued": 1},
    plan=alone,
    configs=configs(Bounds(scratch_contexts=(1, 1, 1, *ROOMY), context_parts=(1, 2, 3))),
    examples=3,
)
def test_idle_pool_serves_what_fits(step: Step) -> None:
    """While no other request lives, a prompt that fits the pool and the context is opened and computed to its end.

    Capacity that is lost for good: stranded pages, an owner class that never refills, limits that count pages twice.
    """
    if not isinstance(step.reply, Refused) or len(step.story.live) - isinstance(step.op, Extend) > 0:
        return
    config = step.config
    if isinstance(step.op, Open):
        tokens = len(step.op.tokens)
    elif isinstance(step.op, Extend) and step.op.request in step.story.live:
        tokens = len(step.story.live[step.op.request].tokens)
    else:
        return
    fits = tokens <= config.context_tokens and -(-tokens // config.page_size) <= pool_pages(config)
    require(
        not fits,
        f"a prompt of {tokens} tokens refused: {step.reply.why}",
        "accepted",
        f"it is alone, the pool has {pool_pages(config)} pages of {config.page_size}, "
        f"the context is {config.context_tokens}",
    )


@case(
    "admission.shared_pages_count_once",
    invariants=("I19", "I06"),
    needs=("op.together", "promise.batches_what_fits", *POOL),
    seen={"batch shares a page": 3},
    plan=shared_prefixes,
    configs=configs(Bounds(layouts=("sharded",), pages_max=16, scratch_contexts=(2, 1), context_parts=(4, 8, 16))),
    examples=2,
)
def test_shared_pages_count_once(step: Step) -> None:
    """Requests go into one batch while their distinct prefix pages and their chunks fit the scratch.

    Scratch that is counted for each request: many requests with one short prefix fill it with padding, so that batches
    stay small and the gather moves what nobody reads.
    """
    if not isinstance(step.op, Together):
        return
    chunks = {op.request: op for op, _ in step.parts() if isinstance(op, Extend) and op.request in step.story.live}
    if any(step.story.live[name].left != op.count for name, op in chunks.items()) or len(chunks) < len(step.op.ops):
        return  # a batch ends with a prompt that it cuts
    taken = [op.request for op in step.accepted_extends()]
    for op, reply in step.parts():
        if isinstance(reply, Refused) and isinstance(op, Extend):
            require(
                batch_is_short(step, [*taken, op.request], chunks),
                f"chunk of {op.request} refused beside {len(taken)} that were taken: {reply.why}",
                "taken with them",
                f"the scratch holds {prefix_room(step.config)} prefix pages, the distinct ones of these padded to the "
                "owner that has most, and their chunks",
            )


def prefix_room(config: Config) -> int:
    """Pages of the prefix region of the scratch: contexts in whole groups of one page per owner."""
    group = config.shards * config.page_size
    return config.scratch_contexts * -(-config.context_tokens // group) * config.shards


def batch_is_short(step: Step, names: list[str], chunks: Mapping[str, Extend]) -> bool:
    """Whether a rank lacks scratch for these requests in one batch, or has no pages to spare in some class."""
    config, page = step.config, step.config.page_size
    new = sum(-(-chunks[name].count // page) for name in names)
    if new > -(-config.chunk_tokens // page):
        return True
    for old, now in zip(step.before.ranks, step.after.ranks, strict=True):
        requests, owners = old.requests or {}, step.classes(now)
        prefix = {number for name in names for number in requests[name].pages[: requests[name].computed // page]}
        most = max(Counter(owners[number] for number in prefix).values(), default=0)
        spare = min(map(len, old.free or ((),)))
        if config.shards * most > prefix_room(config) or spare < new + len(step.story.live):
            return True
    return False


def a_refusal_changes_nothing(step: Step) -> None:
    """After an op that was refused as a whole every rank has the state of before."""
    if not all(isinstance(reply, Refused) for _, reply in step.parts()):
        return
    for old, new in zip(step.before.ranks, step.after.ranks, strict=True):
        for name, was, now in states(old, new, step.story):
            expect(now, was, f"{name} of rank {new.rank} after a refusal", "a refusal is definite")


@case(
    "admission.refusal_changes_nothing",
    invariants=("I04", "I06"),
    needs=(*POOL, "snapshot.capacity"),
    seen={"refused": 3, "extended": 3},
    plan=either(machine(CROWD), to_the_brim),
    configs=configs(Bounds(pages_max=4)),
    examples=1.5,
)
def test_refusal_changes_nothing(step: Step) -> None:
    """A refused op leaves free pages, requests and radix tree exactly as they were on every rank.

    Early returns that keep a lock, a half-made allocation, or a cache that was evicted for a request that is then
    refused.
    """
    a_refusal_changes_nothing(step)


def drawn_pages(step: Step, old: RankView, new: RankView) -> list[int]:
    """The pages that the step's chunks took, read off the requests."""
    pages: list[int] = []
    for op in step.accepted_extends():
        had = len((old.requests or {})[op.request].pages)
        pages += (new.requests or {})[op.request].pages[had:]
    return pages


def victims_of(old: RankView, new: RankView, drawn: set[int]) -> list[set[int]]:
    """The pages that left each evicted node.

    A page may be drawn again at once, even for its old tokens; then only the node's name tells that it was evicted.
    """
    stayed, names = cached_entries(old) & cached_entries(new), {node.node for node in new.nodes or ()}
    kept = {page for page, _ in stayed}
    victims = []
    for node in old.nodes or ():
        pages = set(node.pages)
        gone = pages - kept
        if node.node not in names and (gone or pages & drawn):
            gone = pages
        if gone:
            victims.append(gone)
    return victims


@case(
    "admission.evicts_only_when_short",
    invariants=("I06",),
    needs=(*POOL, "promise.lazy_eviction"),
    seen={"evicted": 3, "extended": 3},
    plan=machine({"open": 2, "extend": 2, "serve": 8, "batch": 1, "finish": 2, "abort": 1}),
    configs=configs(Bounds(pages_max=6)),
)
def test_evicts_only_when_short(step: Step) -> None:
    """Chunks evict only if an owner class is short of pages for them, and stop at the last victim that they need.

    Fruitless eviction: the whole cache goes for a level of free pages that cannot be reached or is not needed.
    """
    if not step.accepted_extends():
        return
    for old, new in zip(step.before.ranks, step.after.ranks, strict=True):
        drawn = drawn_pages(step, old, new)
        victims = victims_of(old, new, set(drawn))
        if not victims:
            continue
        owner = step.classes(new)
        free = [len(pages) for pages in old.free or ()]
        need = Counter(owner[page] for page in drawn)
        freed = Counter(owner[page] for victim in victims for page in victim)
        short_without = [
            any(free[c] + freed[c] - sum(owner[page] == c for page in victim) < need[c] for c in range(len(free)))
            for victim in victims
        ]
        require(
            any(short_without),
            f"{freed.total()} cached pages evicted on rank {new.rank} with free pages {free} per class and "
            f"{[need[c] for c in range(len(free))]} to draw",
            "no eviction, or one that stops at its last necessary victim",
            "no evicted node was needed for the pages that were drawn",
        )


@case(
    "admission.held_pages_survive_pressure",
    invariants=("I05", "I06"),
    needs=(*POOL, "op.evict"),
    seen={"evicted": 3, "hit": 3},
    plan=machine({"open": 5, "extend": 4, "serve": 5, "finish": 2, "abort": 1, "evict": 4}),
    configs=configs(Bounds(pages_max=6)),
)
def test_held_pages_survive_pressure(step: Step) -> None:
    """No eviction takes a page that a live request holds.

    Locks that cover too little: the page is reused while its reader still counts on it (sglang#36738, vllm#46278).
    """
    for rank in step.after.ranks:
        held = held_pages(rank)
        lost = sorted(page for pages in rank.free or () for page in pages if page in held)
        expect(lost, [], f"free pages of rank {rank.rank} that live requests hold", "a held page is not free")

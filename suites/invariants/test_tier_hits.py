"""Two tiers: which pages have copies, what a hit finds of them, and what using them leaves behind on the device."""

from __future__ import annotations

from collections import Counter

from harness.register import register_cpu_ci
from harness.types import Evict, Extend, Flush, Ok, Open, Opened, Refused, Restart, Settle
from harness.views import RankView
from suites.claim import Step, case, expect, require
from suites.configs import ROOMY, Bounds, configs
from suites.invariants.test_admission import a_refusal_changes_nothing
from suites.invariants.test_radix import told_is_what_left
from suites.invariants.test_reads import rows_are_right
from suites.invariants.test_tiers import TIERS, distinct_pages, host_pages_add_up
from suites.machine import either
from suites.prompts import pool_pages
from suites.story import cached_entries, cached_pages, chained_entries, held_pages, prefix_entries
from suites.tier_plans import (
    asked_while_held,
    back_in_one_batch,
    by_turns,
    chains_leave,
    come_back,
    crowded_host,
    dropped_copies,
    emptied,
    half_gone,
    hits_together,
    late_computer,
    one_too_large,
    pressure,
    roomy_host,
    tiered,
    used_again,
)

register_cpu_ci(est_time=60, stage="cases")

PARTLY = ("write_through", "write_through_selective", "write_through_selective", "write_back")
MOSTLY_BACK = ("write_through", "write_back", "write_back", "write_through_selective")


def page_states(tokens: tuple[int, ...], page: int) -> list[int]:
    """What `cached_entries` tells of each whole page of a prompt."""
    return [state for _, state in prefix_entries(tokens, tuple(range(len(tokens) // page)), page)]


def tiers_of(step: Step, rank: RankView, tokens: tuple[int, ...]) -> list[str]:
    """Where a rank's cache holds each whole page of a prompt: "device", "host" (alone) or "nowhere"."""
    states = page_states(tokens, step.config.page_size)
    device = {state for _, state in cached_entries(rank)}
    host = {state for _, state in cached_entries(rank, "host")}
    return [("device" if state in device else "host" if state in host else "nowhere") for state in states]


@case(
    "tiers.hit_is_covered",
    invariants=("I13", "I21"),
    needs=TIERS,
    seen={"host hit": 3, "hit on both tiers": 1, "copies dropped": 1},
    plan=either(pressure, come_back, half_gone, dropped_copies),
    configs=tiered,
)
def test_hit_is_covered(step: Step) -> None:
    """A hit covers only pages that are in a tier, and says which of them are on the host alone.

    A node counted as backed up without rows, a hit length that counts what was dropped, tiers that do not add up
    (sglang#8901, sglang#37149, vllm#28585).
    """
    page = step.config.page_size
    for op, reply in step.parts():
        if not (isinstance(op, Open) and isinstance(reply, Ok) and isinstance(reply.value, Opened)):
            continue
        cached, from_host = reply.value.cached // page, reply.value.from_host // page
        for rank in step.before.ranks:
            found = tiers_of(step, rank, op.tokens)
            expect(
                found[:cached],
                ["device"] * (cached - from_host) + ["host"] * from_host,
                f"tiers of the {cached} cached pages of request {op.request} on rank {rank.rank}",
                f"{reply.value.from_host} of {reply.value.cached} cached tokens are told to come from the host",
            )


@case(
    "tiers.hit_misses_nothing",
    invariants=("I21", "I13"),
    needs=(*TIERS, "promise.keeps_finished", "promise.keeps_copies"),
    seen={"host hit": 3, "hit on both tiers": 1, "split": 1},
    plan=either(half_gone, come_back, dropped_copies, pressure),
    configs=tiered,
)
def test_hit_misses_nothing(step: Step) -> None:
    """A hit has all whole pages up to the first one that is in neither tier, however they lie in nodes.

    A match that ends where the device ends, or that takes a node on the host whole or not at all: a prefix is computed
    again although its copy is there (sglang#19570, vllm#51771).
    """
    page = step.config.page_size
    for op, reply in step.parts():
        if not (isinstance(op, Open) and isinstance(reply, Ok) and isinstance(reply.value, Opened)):
            continue
        for rank in step.before.ranks:
            found = [*tiers_of(step, rank, op.tokens)[: (len(op.tokens) - 1) // page], "nowhere"]
            expect(
                reply.value.cached // page,
                found.index("nowhere"),
                f"cached pages of request {op.request} on rank {rank.rank}",
                f"where its whole pages are: {found[:-1]}",
            )


def chains_gone(before: RankView, cached: set[int]) -> bool:
    """Whether a node left the cache together with the one before it; `cached` are the prefixes that are left."""
    states = {page: state for page, state, _ in chained_entries(before)}
    nodes = before.nodes or ()
    gone = {node.node for node in nodes if node.pages and not cached & {states[page] for page in node.pages}}
    return any(node.node in gone and node.parent in gone for node in nodes)


@case(
    "tiers.copies_leave_for_copies",
    invariants=("I13", "I04"),
    needs=(*TIERS, "promise.keeps_copies"),
    seen={"host full": 3, "evicted": 1},
    plan=either(crowded_host, crowded_host, one_too_large, one_too_large, pressure),
    configs=configs(Bounds(shards=(2, 4, 2, 1), host_parts=(2, 1, 3), pages_max=6, scratch_contexts=ROOMY)),
    examples=3,
)
def test_copies_leave_for_copies(step: Step) -> None:
    """While its prefix is cached, a page loses its copy only in an op that makes another, or asks for room on the host.

    Room that is made in another owner class than the one that is short, or for a copy that cannot be made anyway: the
    host empties itself, and later prompts miss what it had.
    """
    if isinstance(step.op, Evict | Flush | Restart):
        return
    for before, after in zip(step.before.ranks, step.after.ranks, strict=True):
        old, new = chained_entries(before, "host"), chained_entries(after, "host")
        cached = {state for _, state in cached_entries(after) | cached_entries(after, "host")}
        lost = sorted(page for page, _, prefix in old - new if prefix in {0, *cached})
        # written back and lost again: behind a node that left in the same op and found no room
        lost_again = step.config.host_policy == "write_back" and chains_gone(before, cached)
        require(
            not lost or new - old or lost_again,
            f"host pages {lost} dropped on rank {after.rank}, none filled",
            "none dropped, or another copy made",
            "nothing needed their room, and a hit would reach them",
        )


@case(
    "tiers.selective_copies_what_is_shared",
    invariants=("I13", "I22"),
    needs=(*TIERS, "op.settle", "promise.copies_all"),
    seen={"finished": 3, "hit": 3, "split": 1},
    plan=used_again,
    configs=configs(
        Bounds(host_parts=(16,), pages_max=6, scratch_contexts=ROOMY, host_policies=("write_through_selective",))
    ),
    examples=0.5,
)
def test_selective_copies_what_is_shared(step: Step) -> None:
    """A selective policy copies the pages that two finished prompts share, and none that only one prompt has.

    Every chunk or retry of one request counts as a use, or uses are lost in a split: the host fills up with what nobody
    asks for again, or never gets what everybody does.
    """
    room = distinct_pages(step) <= step.config.host_pages_per_rank
    if not (isinstance(step.op, Settle) and isinstance(step.reply, Ok) and room):
        return
    page = step.config.page_size
    uses = Counter(state for tokens in step.story.past for state in page_states(tokens, page))
    kept = Counter(state for tokens, end in step.story.finished.items() for state in page_states(tokens[:end], page))
    for rank in step.after.ranks:
        device = {state for _, state in cached_entries(rank)}
        host = {state for _, state in cached_entries(rank, "host")}
        bare = sum(kept[state] > 1 for state in device - host)
        expect(bare, 0, f"pages without a copy on rank {rank.rank} that two finished prompts share", "used often")
        once = sum(uses[state] == 1 for state in host)
        expect(once, 0, f"copies on rank {rank.rank} of pages that only one prompt has", "used once")


@case(
    "tiers.written_back_when_evicted",
    invariants=("I13", "I22"),
    needs=(*TIERS, "op.evict", "promise.copies_all"),
    seen={"evicted": 3, "finished": 3},
    plan=either(by_turns, half_gone, pressure),
    configs=configs(Bounds(host_parts=(16,), pages_max=6, scratch_contexts=ROOMY, host_policies=("write_back",))),
    examples=0.5,
)
def test_written_back_when_evicted(step: Step) -> None:
    """With write-back and room on the host, whatever leaves the device is on the host, whoever needed its place.

    One of several ways to evict, for a chunk, for a restore or because it was asked for, that drops pages and does not
    copy them: the host stays empty under just the load that it is for.
    """
    room = distinct_pages(step) <= step.config.host_pages_per_rank
    if isinstance(step.op, Flush | Restart) or (isinstance(step.op, Evict) and step.op.tier == "host") or not room:
        return
    for old, new in zip(step.before.ranks, step.after.ranks, strict=True):
        left = {state for _, state in cached_entries(old)} - {state for _, state in cached_entries(new)}
        lost = left - {state for _, state in cached_entries(new, "host")}
        expect(len(lost), 0, f"pages that left the device of rank {new.rank} without a copy", "the host has room")


@case(
    "tiers.device_conserved",
    invariants=("I04", "I05"),
    needs=(*TIERS, "snapshot.capacity", "snapshot.free", "snapshot.requests"),
    seen={"restored": 3, "batch": 1, "dropped": 1, "aborted": 1},
    plan=either(hits_together, late_computer, by_turns, come_back, half_gone, hits_together),
    configs=tiered,
    examples=2,
)
def test_device_conserved(step: Step) -> None:
    """In every owner class, free pages, cached ones and those of requests add up, whatever came back from the host.

    Pages drawn for a prefix that another request of the batch brings back too, restored pages that have no keeper
    (sglang#8901, sglang#30053).
    """
    for rank in step.after.ranks:
        owner = step.classes(rank)
        used = Counter(owner.get(page, -1) for page in cached_pages(rank) | held_pages(rank))
        free = [len(pages) for pages in rank.free or ()]
        expect(
            [count + used[index] for index, count in enumerate(free)],
            list(rank.capacity or ()),
            f"free {free} and used pages per owner class on rank {rank.rank}",
            "a page is free, cached or held by a request",
        )
        cached, held = cached_pages(rank), Counter[int]()
        for request in (rank.requests or {}).values():
            held.update(set(request.pages) - cached)
        twice = sorted(page for page, count in held.items() if count > 1)
        expect(twice, [], f"pages that two requests of rank {rank.rank} draw", "only cached pages are shared")


@case(
    "tiers.serves_what_fits",
    invariants=("I06", "I04"),
    needs=("promise.serves_what_fits",),
    seen={"restored": 3, "evicted": 3},
    plan=either(by_turns, one_too_large),
    configs=configs(Bounds(host_parts=(2, 1, 1, 4), host_policies=MOSTLY_BACK, pages_max=4, scratch_contexts=ROOMY)),
)
def test_serves_what_fits(step: Step) -> None:
    """However often prompts come back from the host, the next one that fits the pool is opened and computed to its end.

    Room that a restore has reserved and never returns, restored pages that stay locked or are counted twice: admission
    refuses more and more (sglang#9397, sglang#30053).
    """
    op, reply, page = step.op, step.reply, step.config.page_size
    if not isinstance(op, Open | Extend) or not isinstance(reply, Refused) or set(step.story.live) - {op.request}:
        return
    request = step.story.live.get(op.request)
    if isinstance(op, Open):
        tokens = len(op.tokens)
    elif request and (request.left == op.count or (request.computed + op.count) % page == 0):
        tokens = len(request.tokens)
    else:
        return
    if tokens <= min(step.config.context_tokens, pool_pages(step.config) * page):
        expect(f"refused: {reply.why}", "accepted", f"reply for request {op.request}", "it is alone and fits")


@case(
    "tiers.rows_change_places",
    invariants=("I12", "I10", "I27"),
    needs=("op.evict", "op.settle"),
    seen={"restored": 3},
    plan=by_turns,
    configs=roomy_host,
    examples=2,
)
def test_rows_change_places(step: Step) -> None:
    """A prompt that comes back into the pages of one that leaves for the host is right, and so is the other one later.

    Pages that are overwritten before they are copied, restored before the copy of their last use has landed, or copied
    to host pages that a restore still reads (vllm#46278, vllm#47324).
    """
    rows_are_right(step)


@case(
    "tiers.evictions_are_told",
    invariants=("I22", "I13"),
    needs=(*TIERS, "op.evict", "op.flush"),
    seen={"copies dropped": 1, "evicted": 3, "dropped": 1},
    plan=either(dropped_copies, emptied, asked_while_held, by_turns, crowded_host, asked_while_held),
    configs=configs(Bounds(host_parts=(2, 4, 1), host_policies=PARTLY, pages_max=4, scratch_contexts=ROOMY)),
)
def test_evictions_are_told(step: Step) -> None:
    """An eviction from one tier tells the tokens that left this tier; a flush those that were on either.

    Copies on the host counted as device pages, a node counted for a tier that it is not on.
    """
    told_is_what_left(step)


@case(
    "tiers.evictions_go_on",
    invariants=("I22", "I13", "I09"),
    needs=(*TIERS, "op.evict"),
    seen={"host full": 1, "evicted": 3},
    plan=chains_leave,
    configs=configs(
        Bounds(
            host_parts=(1, 1, 1, 2),
            host_policies=("write_back", "write_back", "write_back", "write_through"),
            context_parts=(1,),
            pages_max=6,
            layers_max=1,
            scratch_contexts=ROOMY,
        )
    ),
    examples=3,
)
def test_evictions_go_on(step: Step) -> None:
    """An eviction that must first copy what leaves goes on until there is room, or nothing is left that nobody holds.

    Copies that an eviction starts, or that others left in flight, are taken for pages that cannot leave: it frees less
    than it was asked for, and an admitted request does not fit.
    """
    told_is_what_left(step)
    host_pages_add_up(step)  # also of what leaves with a page that finds no room


@case(
    "tiers.crowded_scratch",
    invariants=("I19", "I06", "I13"),
    needs=(*TIERS, "op.evict", "op.settle", "op.together", "snapshot.free", "snapshot.requests"),
    seen={"restored": 3, "refused": 3, "batch": 1},
    plan=either(back_in_one_batch, back_in_one_batch, hits_together),
    configs=configs(Bounds(host_parts=(4, 2), pages_max=8, scratch_contexts=(1,), context_parts=(4, 8))),
)
def test_crowded_scratch(step: Step) -> None:
    """Prefixes that come back from the host together may not fit the scratch: refused without a change, or read right.

    Scratch counted before the pages from the host are there: the batch is admitted, and overflows when its pages have
    been drawn (sglang#38356).
    """
    a_refusal_changes_nothing(step)
    rows_are_right(step)

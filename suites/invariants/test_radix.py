"""The radix tree: well formed, locked where it is used, unharmed by splits."""

from __future__ import annotations

from harness.register import register_cpu_ci
from harness.types import Abort, Evict, Evicted, Finish, Flush, Ok
from harness.views import RankView
from suites.claim import Step, case, expect, require
from suites.configs import ROOMY, Bounds, configs
from suites.machine import either, machine, splits
from suites.story import cached_entries, cached_pages, held_host_pages, held_pages, node_pages

register_cpu_ci(est_time=15, stage="cases")

TREE = ("snapshot.nodes", "snapshot.requests")


@case(
    "radix.well_formed",
    invariants=("I03", "I09"),
    needs=TREE,
    seen={"finished": 3, "split": 1, "hit": 1},
    plan=either(machine(kinds=("fork", "fresh", "repeat")), splits),
)
def test_well_formed(step: Step) -> None:
    """Every node has pages, begins where its parent ends, shares its base, and is locked at most as often.

    Splits that keep base, length or locks on one half only, and empty nodes from keys shorter than a page
    (sglang#10637).
    """
    for rank in step.after.ranks:
        nodes = {node.node: node for node in rank.nodes or ()}
        for node in nodes.values():
            at = f"node {node.node} of rank {rank.rank}"
            require(
                node_pages(node) > 0,
                f"{at} without pages",
                "at least one page",
                "a key is cut to whole pages, an empty one is no node",
            )
            require(node.locks >= 0, f"{node.locks} locks on {at}", "0 or more", "every unlock has its lock")
            parent = nodes.get(node.parent) if node.parent is not None else None
            expect(
                node.start,
                parent.start + node_pages(parent) if parent else 0,
                f"start of {at}",
                "a node continues its parent",
            )
            if parent is not None:
                expect(
                    node.base,
                    parent.base,
                    f"base of {at}",
                    f"its parent, node {parent.node}, belongs to the same chain",
                )
                require(
                    parent.locks >= node.locks,
                    f"{node.locks} locks on {at}, {parent.locks} on its parent {parent.node}",
                    "at least as many locks on the parent",
                    "a lock covers the whole path from the root",
                )


@case(
    "radix.locked_while_used",
    invariants=("I09", "I04"),
    needs=TREE,
    seen={"finished": 3, "split while locked": 1, "hit": 3},
    plan=splits,
    configs=configs(Bounds(pages_max=12, scratch_contexts=ROOMY)),
)
def test_locked_while_used(step: Step) -> None:
    """A node is locked if and only if a live request holds pages of it.

    Locks lost or doubled when a node is split between lock and unlock, or when a request ends early (sglang#10637,
    sglang#30053).
    """
    for rank in step.after.ranks:
        held, held_copies = held_pages(rank), held_host_pages(rank)
        for node in rank.nodes or ():
            used = [page for page in node.pages if page in held]
            used += [page for page in node.host_pages if page in held_copies]
            if node.locks == 0:
                expect(
                    used,
                    [],
                    f"pages of unlocked node {node.node} held by requests on rank {rank.rank}",
                    "a held page is locked",
                )
            else:
                require(
                    used,
                    f"node {node.node} of rank {rank.rank} with {node.locks} locks and none of its pages held",
                    "no lock",
                    "a lock has a holder",
                )


@case(
    "radix.caches_what_was_computed",
    invariants=("I09", "I13", "I05"),
    needs=("snapshot.nodes",),
    seen={"raced": 1, "finished": 3, "continued": 1, "evicted": 1},
    plan=machine(),
)
def test_caches_what_was_computed(step: Step) -> None:
    """Every cached prefix was computed by some request since the cache was dropped, in whole pages, and is cached once.

    A key longer than its rows, a partial page published as a whole one, two nodes for one prefix (sglang#10637,
    sglang#8901).
    """
    page = step.config.page_size
    known = step.story.computed_states(step.op, step.reply)
    for rank in step.after.ranks:
        for node in rank.nodes or ():
            expect(
                len(node.tokens),
                node_pages(node) * page,
                f"tokens of node {node.node} on rank {rank.rank}",
                "whole pages are cached",
            )
        states = [state for _, state in cached_entries(rank)]
        expect(
            len(states),
            len(set(states)),
            f"cached pages of rank {rank.rank} and their different prefixes",
            "a prefix is cached once",
        )
        strange = sorted(entry[0] for entry in cached_entries(rank) if entry[1] not in known)
        expect(
            strange,
            [],
            f"cached pages of rank {rank.rank} whose tokens nobody computed",
            "a row is computed before it is shared",
        )


def own_pages(rank: RankView) -> dict[str, tuple[int, ...]]:
    """Pages of each live request, by name."""
    return {name: request.pages for name, request in (rank.requests or {}).items()}


@case(
    "radix.split_keeps_cover",
    invariants=("I09",),
    needs=TREE,
    seen={"split while locked": 3, "finished": 3},
    plan=splits,
    configs=configs(Bounds(pages_max=12, scratch_contexts=ROOMY)),
)
def test_split_keeps_cover(step: Step) -> None:
    """What a request holds stays cached and in place until it ends, whatever is split, inserted or evicted meanwhile.

    The lock or the cover of a request follows the node object, which a split leaves with a part of the path
    (sglang#16946).
    """
    ended = {op.request for op, reply in step.parts() if isinstance(op, Finish | Abort) and isinstance(reply, Ok)}
    for old, new in zip(step.before.ranks, step.after.ranks, strict=True):
        cached, before = cached_pages(new), cached_pages(old)
        for name, pages in own_pages(old).items():
            if name in ended or name not in own_pages(new):
                continue
            kept = [page for page in pages if page in before]
            expect(
                [page for page in kept if page in cached],
                kept,
                f"cached pages that request {name} still finds in the tree of rank {new.rank}",
                "it held them in the tree before this op and has not ended",
            )


def pages_on(rank: RankView, tier: str) -> int:
    """Pages of the tree on a tier; "" counts what is on either."""
    nodes = rank.nodes or ()
    if tier:
        return sum(len(node.pages if tier == "device" else node.host_pages) for node in nodes)
    return sum(node_pages(node) for node in nodes)


def loose(step: Step, rank: RankView, tier: str) -> set[int]:
    """Nodes with pages on a tier that no request holds and no copy between the tiers needs.

    While nothing lives and all is settled those are all, whatever locks an engine shows. An engine that does not
    promise to drop copies keeps those whose pages are on the device.
    """
    story = step.story
    idle = story.settled and not story.live and not story.rooms
    held, copies = held_pages(rank), "drops_copies" in step.manifest.promises
    return {
        node.node
        for node in rank.nodes or ()
        if (node.pages if tier == "device" else node.host_pages and (copies or not node.pages))
        and (idle or not (node.locks or node.pins or held & {*node.pages}))
    }


def told_is_what_left(step: Step) -> None:
    """The reply to an eviction or a flush tells what left, and too little only if nothing else could leave."""
    if not (
        isinstance(step.op, Evict | Flush) and isinstance(step.reply, Ok) and isinstance(step.reply.value, Evicted)
    ):
        return
    tier = step.op.tier if isinstance(step.op, Evict) else ""
    told = step.reply.value.tokens
    for old, new in zip(step.before.ranks, step.after.ranks, strict=True):
        left = (pages_on(old, tier) - pages_on(new, tier)) * step.config.page_size
        expect(told, left, f"tokens that the reply tells of rank {new.rank}", f"so many left {tier or 'the cache'}")
        if isinstance(step.op, Evict) and told < step.op.tokens:
            # before and after: a copy between the tiers may end at any time
            left_over = sorted(loose(step, old, tier) & loose(step, new, tier))
            expect(
                left_over,
                [],
                f"nodes of rank {new.rank} on the {tier} that nobody holds",
                f"{told} of {step.op.tokens} tokens were evicted",
            )


@case(
    "radix.evictions_are_told",
    invariants=("I22", "I09"),
    needs=(*TREE, "op.evict"),
    seen={"evicted": 3, "hit": 1, "finished": 3},
    plan=machine({"serve": 8, "open": 3, "extend": 4, "evict": 8, "finish": 3, "abort": 2, "flush": 2, "settle": 1}),
)
def test_evictions_are_told(step: Step) -> None:
    """An eviction frees as many tokens as were asked for, or all that nobody holds, and tells how many have left.

    A count of the wrong tier, in pages, or of what was asked: a scheduler goes on with room that is not there, or gives
    up before the cache is empty.
    """
    told_is_what_left(step)

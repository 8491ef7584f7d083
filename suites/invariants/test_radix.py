"""The radix tree: well formed, locked where it is used, unharmed by splits."""

from __future__ import annotations

from harness.types import Abort, Finish, Ok
from harness.views import RankView
from suites.claim import Step, case, expect, require
from suites.configs import ROOMY, Bounds, configs
from suites.machine import either, machine, splits
from suites.story import cached_entries, cached_pages, held_host_pages, held_pages, node_pages

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

"""Two tiers: what leaves the device comes back from the host, whole, to its owners, once."""

from __future__ import annotations

from collections import Counter

from harness.register import register_cpu_ci
from harness.types import Evict, Flush, Ok, Settle, layers_of
from harness.views import RankView
from suites.claim import Step, case, expect
from suites.configs import ROOMY, Bounds, configs
from suites.invariants.test_reads import rows_are_right
from suites.machine import either, machine
from suites.story import cached_entries
from suites.tier_plans import (
    PRESSURE,
    back_in_one_batch,
    by_turns,
    come_back,
    dropped_copies,
    half_gone,
    hits_together,
    in_flight_splits,
    pressure,
    tiered,
    wanted_at_once,
)

register_cpu_ci(est_time=90, stage="cases")

TIERS = ("snapshot.nodes", "snapshot.host_free")


@case(
    "tiers.restored_rows",
    invariants=("I12", "I19", "I10"),
    needs=("op.evict", "op.settle"),
    seen={"restored": 3, "hit on both tiers": 1, "batch": 1, "aborted": 1},
    seen_in_groups={"restored with an empty owner": 1},
    plan=either(
        come_back,
        back_in_one_batch,
        half_gone,
        half_gone,
        by_turns,
        in_flight_splits,
        hits_together,
        dropped_copies,
        pressure,
    ),
    configs=tiered,
    examples=2,
)
def test_restored_rows(step: Step) -> None:
    """A prefix that comes back from the host is read as it was computed: every position, layer and component.

    Rows not restored, restored to another page, read before they are there, or host pages used again too early
    (Mooncake#2236, sglang#38031, sglang#36738, vllm#46278).
    """
    rows_are_right(step)


@case(
    "tiers.pages_outlive_copies",
    invariants=("I10", "I11"),
    needs=("op.evict", "op.settle"),
    seen={"restored": 3, "batch": 3, "aborted": 3},
    plan=wanted_at_once,
    configs=tiered,
    examples=1.5,
)
def test_pages_outlive_copies(step: Step) -> None:
    """A page that is still being copied to the host is not written to by who gets it next, whatever else is awaited.

    A wait for the newest copy alone, or for those of one direction, while another one still reads the page
    (sglang#36738).
    """
    rows_are_right(step)


@case(
    "tiers.draft_comes_along",
    invariants=("I20", "I12"),
    needs=("op.evict", "op.settle"),
    seen={"restored": 3},
    plan=come_back,
    configs=configs(Bounds(host_parts=(2, 4), pages_max=4, scratch_contexts=ROOMY, drafts=True)),
)
def test_draft_comes_along(step: Step) -> None:
    """The draft's KV and indexer rows of a restored prefix are those of its first computation, as the target's are.

    Target restored, draft or draft indexer not: text stays right and the accept length falls (sglang#32176,
    sglang#28896).
    """
    rows_are_right(step)


def classes_of(pages: tuple[tuple[int, ...], ...] | None) -> dict[int, int]:
    """Page -> owner class, read off free lists."""
    return {page: owner for owner, free in enumerate(pages or ()) for page in free}


def fresh_rank(step: Step, rank: RankView) -> RankView:
    """The same rank when the session was fresh."""
    return (step.story.first or step.before).ranks[step.after.ranks.index(rank)]


def host_pages_add_up(step: Step) -> None:
    """Per owner class, free host pages and copies are the host's capacity, each page in one place."""
    for rank in step.after.ranks:
        first = fresh_rank(step, rank)
        owner = classes_of(first.host_free)
        used = [page for node in rank.nodes or () for page in node.host_pages]
        free = [page for pages in rank.host_free or () for page in pages]
        twice = sorted(page for page, count in Counter(used + free).items() if count > 1)
        expect(twice, [], f"host pages in two places on rank {rank.rank}", "a host page has one keeper")
        per_class = Counter(owner.get(page, -1) for page in used + free)
        expect(
            [per_class[index] for index in range(len(first.host_free or ()))],
            [len(pages) for pages in first.host_free or ()],
            f"free host pages and copies per owner class on rank {rank.rank}",
            "a host page is free or backs a node",
        )


@case(
    "tiers.host_conserved",
    invariants=("I04", "I05", "I11"),
    needs=TIERS,
    seen={"host hit": 1, "copied": 3, "copies dropped": 1, "split": 1},
    plan=either(pressure, come_back, in_flight_splits, in_flight_splits, dropped_copies),
    configs=tiered,
)
def test_host_conserved(step: Step) -> None:
    """In every owner class, free host pages and copies add up to the host's capacity, and no host page is used twice.

    Copies that leak when a node is split, dropped or aborted, host pages freed while a copy still uses them
    (sglang#30053, sglang#24527).
    """
    host_pages_add_up(step)


@case(
    "tiers.copies_have_the_owners",
    invariants=("I15", "I01"),
    needs=(*TIERS, "snapshot.free", "promise.rotates"),
    seen={"copied": 3, "restored": 1, "split": 1},
    plan=either(come_back, pressure),
    configs=tiered,
)
def test_copies_have_the_owners(step: Step) -> None:
    """Host page P of a chain belongs to the owner class of the chain's device page P: (base + P) mod N.

    Host pages drawn without a start owner, or from class 0 because an owner of 0 counts as none: a rank copies rows
    that it does not have.
    """
    for rank in step.after.ranks:
        first = fresh_rank(step, rank)
        hosts, devices = classes_of(first.host_free), classes_of(first.free)
        shards = len(first.free or ())
        for node in rank.nodes or ():
            rotation = [((node.base or 0) + node.start + index) % shards for index in range(len(node.host_pages))]
            expect(
                [hosts.get(page) for page in node.host_pages],
                rotation,
                f"owner classes of the host pages of node {node.node} on rank {rank.rank}",
                f"base {node.base}, first position {node.start}",
            )
            if node.pages and node.host_pages:
                expect(
                    [hosts.get(page) for page in node.host_pages],
                    [devices.get(page) for page in node.pages],
                    f"owner classes of the host pages of node {node.node} on rank {rank.rank}",
                    "its device pages have these",
                )


@case(
    "tiers.eviction_loses_no_copy",
    invariants=("I13", "I09"),
    needs=(*TIERS, "op.evict", "promise.keeps_copies"),
    seen={"evicted": 3, "copied": 3, "split in flight": 1},
    plan=either(pressure, come_back, in_flight_splits),
    configs=configs(
        Bounds(
            host_parts=(2, 4),
            pages_max=4,
            scratch_contexts=ROOMY,
            host_policies=("write_through", "write_through_selective"),
        )
    ),
)
def test_eviction_loses_no_copy(step: Step) -> None:
    """An eviction from the device keeps every page that has a copy on the host.

    A copy tied to a node object or a length that a split has changed: a part of the prefix is gone (sglang#16946).
    """
    if not (isinstance(step.op, Evict) and step.op.tier == "device" and isinstance(step.reply, Ok)):
        return
    for old, new in zip(step.before.ranks, step.after.ranks, strict=True):
        before, after = cached_entries(old, "host"), cached_entries(new, "host")
        lost = [] if after - before else sorted(page for page, _ in before - after)  # a new copy may need the room
        expect(lost, [], f"host pages of rank {new.rank} that an eviction from the device took", "they are a copy")


def distinct_pages(step: Step) -> int:
    """At most so many pages were ever inserted."""
    return sum(len(tokens) // step.config.page_size for tokens in set(step.story.past))


@case(
    "tiers.everything_has_a_copy",
    invariants=("I13", "I09", "I15"),
    needs=(*TIERS, "op.settle", "promise.copies_all"),
    seen={"split in flight": 1, "copied": 3, "host hit": 1},
    plan=in_flight_splits,
    configs=configs(Bounds(host_parts=(16,), pages_max=6, scratch_contexts=ROOMY, host_policies=("write_through",))),
    examples=2,
)
def test_everything_has_a_copy(step: Step) -> None:
    """With write-through and room on the host, every cached page has a whole copy once all is settled, however split.

    The copy or its acknowledgement finds the node split: only a part of it is copied or recorded (sglang#16946), or a
    rank that owns no page of it never acknowledges.
    """
    rows_are_right(step)
    room = distinct_pages(step) <= step.config.host_pages_per_rank
    if not (isinstance(step.op, Settle) and isinstance(step.reply, Ok) and room):
        return
    for rank in step.after.ranks:
        bare = [
            node.node for node in rank.nodes or () if len(node.host_pages) * step.config.page_size < len(node.tokens)
        ]
        expect(bare, [], f"nodes of rank {rank.rank} without a whole copy", "the host has room for all prompts")


@case(
    "tiers.settled_is_acknowledged",
    invariants=("I11", "I07", "I04"),
    needs=(*TIERS, "op.settle", "op.flush"),
    seen={"copied": 3, "restored": 1, "dropped": 1},
    plan=either(
        machine({**PRESSURE, "settle": 5, "flush": 3}, kinds=("repeat", "fork", "fresh"), idle=True), dropped_copies
    ),
    configs=tiered,
)
def test_settled_is_acknowledged(step: Step) -> None:
    """After a settle no copy is in flight on any rank; after a flush all host pages are free.

    Acknowledgements that one rank never sends or counts for itself, so that pages stay pinned for ever (sglang#28429).
    """
    if isinstance(step.op, Settle | Flush) and isinstance(step.reply, Ok):
        for rank in step.after.ranks:
            pinned = [node.node for node in rank.nodes or () if node.pins]
            expect(pinned, [], f"pinned nodes of rank {rank.rank}", "all copies are complete")
            if isinstance(step.op, Flush):
                expect(
                    [sorted(pages) for pages in rank.host_free or ()],
                    [sorted(pages) for pages in fresh_rank(step, rank).host_free or ()],
                    f"free host pages per owner class on rank {rank.rank}",
                    "the cache was dropped",
                )


@case(
    "tiers.each_rank_copies_its_own",
    invariants=("I15", "I22"),
    needs=(*TIERS, "snapshot.moved", "snapshot.buffers", "snapshot.requests"),
    seen={"copied": 3, "restored": 3},
    seen_in_groups={"restored with an empty owner": 1},
    plan=either(come_back, half_gone, pressure),
    configs=tiered,
)
def test_each_rank_copies_its_own(step: Step) -> None:
    """Each rank moves the bytes of its own pages, of all layers and components; tokens are counted once for the group.

    Every rank copies every page, only rank 0 copies, a component is left out of the copy or of the count
    (sglang#37149, Mooncake#2236, sglang#32373).
    """
    sharded = step.config.layout == "sharded"
    for verb in ("backup", "restored"):
        tokens = [getattr(rank.moved, f"{verb}_tokens") for rank in step.after.ranks]
        expect(tokens, [tokens[0]] * len(tokens), f"{verb} tokens of all ranks", "they are counted for the group")
        moved = [getattr(rank.moved, f"{verb}_bytes") for rank in step.after.ranks]
        token_bytes = sum(
            buffer.row_bytes * layers_of(step.config, name)
            for name, buffer in (step.after.ranks[0].buffers or {}).items()
        )
        whole = tokens[0] * token_bytes
        if sharded:
            expect(
                sum(moved), whole, f"{verb} bytes of all ranks together", f"{tokens[0]} tokens of {token_bytes} bytes"
            )
        else:
            expect(moved, [whole] * len(moved), f"{verb} bytes of each rank", "each rank has a whole copy")
    new_copies = [
        cached_entries(new, "host") - cached_entries(old, "host")
        for old, new in zip(step.before.ranks, step.after.ranks, strict=True)
    ]
    for index, (old, new) in enumerate(zip(step.before.ranks, step.after.ranks, strict=True)):
        if old.moved is None or new.moved is None or not sharded:
            continue
        delta = new.moved.backup_bytes - old.moved.backup_bytes
        tokens_delta = new.moved.backup_tokens - old.moved.backup_tokens
        if tokens_delta != len(new_copies[index]) * step.config.page_size:
            continue  # some copy was dropped again within the op
        if not isinstance(step.op, Settle) and any(node.pins for node in old.nodes or ()):
            continue  # what is counted now may have been copied before
        hosts = classes_of(fresh_rank(step, new).host_free)
        own = sum(hosts.get(page) == new.rank for page, _ in new_copies[index])
        expect(
            delta,
            own * step.config.page_size * token_bytes,
            f"bytes that rank {new.rank} copied to the host",
            f"it owns {own} of the {len(new_copies[index])} new copies",
        )


@case(
    "tiers.host_evictions_keep_the_device",
    invariants=("I04", "I13"),
    needs=(*TIERS, "op.evict"),
    seen={"copies dropped": 3, "restored": 1},
    plan=either(dropped_copies, machine({**PRESSURE, "evict": 12}, kinds=("repeat", "fork", "fresh"))),
    configs=tiered,
)
def test_host_evictions_keep_the_device(step: Step) -> None:
    """An eviction from the host leaves every page on the device, and takes no copy that a request is to bring back.

    One eviction path for both tiers: the node goes with its copy, or a waiting request loses its prefix (sglang#30053).
    """
    if not (isinstance(step.op, Evict) and step.op.tier == "host" and isinstance(step.reply, Ok)):
        return
    for old, new in zip(step.before.ranks, step.after.ranks, strict=True):
        lost = sorted(page for page, _ in cached_entries(old) - cached_entries(new))
        expect(lost, [], f"device pages of rank {new.rank} that left the cache", "only copies were to be evicted")
        held = {page for view in (old.requests or {}).values() for page in view.host_pages}
        kept = {page for node in new.nodes or () for page in node.host_pages}
        expect(sorted(held - kept), [], f"host pages of rank {new.rank} lost to waiting requests", "they are locked")

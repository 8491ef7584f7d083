"""The plans of the cases about two tiers: what fills both, empties one, and brings pages back."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.types import Abort, Evict, Extend, Finish, Settle, Together
from suites.configs import ROOMY, Bounds, configs
from suites.machine import Hand, machine
from suites.prompts import pool_pages, prompt

PRESSURE = {"serve": 10, "evict": 6, "batch": 3, "open": 3, "extend": 4, "settle": 2, "finish": 4, "abort": 2}
roomy_host = configs(Bounds(host_parts=(4, 2), pages_max=4, scratch_contexts=ROOMY))
tiered = configs(Bounds(host_parts=(2, 4, 1), pages_max=4, scratch_contexts=ROOMY))
pressure = machine(PRESSURE, kinds=("repeat", "fork", "fresh"))


def come_back(draw: Draw, table: Table) -> None:
    """Prompts are cached, leave the device, their pages are used by others, and several requests hit them at once."""
    hand = Hand(draw, table)
    page = table.config.page_size
    trunks = [hand.story.new_tokens(draw(st.integers(1, 4)) * page) for _ in range(draw(st.integers(1, 3)))]
    for tokens in trunks:
        for _ in range(draw(st.integers(1, 2))):  # a selective policy copies what is used again
            hand.serve(tokens + hand.story.new_tokens(draw(st.integers(1, page))))
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            table.do(Settle())
        if draw(st.booleans()):
            table.do(Evict(draw(st.integers(1, 2)) * page))  # a leaf or two: what is above it stays
        else:
            table.do(Evict(pool_pages(table.config) * page))
        if draw(st.booleans()):
            hand.serve(hand.story.new_tokens(pool_pages(table.config) * page // 2 + 1))
            table.do(Evict(pool_pages(table.config) * page))
        for tokens in trunks:
            cut = draw(st.integers(1, len(tokens) // page)) * page
            fork = tokens[:cut] + hand.story.new_tokens(draw(st.integers(1, 2 * page)))
            hand.open(draw(st.sampled_from((*hand.story.past[-4:], fork))))
        hand.batch()
        for name in draw(st.permutations(list(hand.story.live))):
            done = draw(st.booleans()) and hand.complete(name)
            if name in hand.story.live:
                table.do(Finish(name) if done else Abort(name))


def back_in_one_batch(draw: Draw, table: Table) -> None:
    """Chains leave the device and come back in one batch, where each has rows to wait for, or others are hit there."""
    hand = Hand(draw, table)
    config, page = table.config, table.config.page_size
    chains = [hand.story.new_tokens(draw(st.integers(1, 3)) * page) for _ in range(draw(st.integers(2, 4)))]
    for _ in range(2):  # a selective policy copies what is used again
        for tokens in chains:
            hand.serve(tokens + hand.story.new_tokens(1))
    table.do(Settle())
    table.do(Evict(pool_pages(config) * page))
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        chains.append(hand.story.new_tokens(draw(st.integers(1, 3)) * page))
        hand.serve(chains[-1] + hand.story.new_tokens(1))
    for tokens in draw(st.permutations(chains)):
        hand.open(tokens + hand.story.new_tokens(draw(st.sampled_from((1, 1, page)))))
    whole_batch(hand)
    for name in list(hand.story.live):
        table.do(Abort(name))


def whole_batch(hand: Hand) -> None:
    """A chunk of every request in one batch, as long as the chunk budget lasts."""
    config = hand.story.config
    ops, room = list[Extend](), config.chunk_tokens
    for name in hand.story.live:
        op = hand.chunk(name, room, whole=True)
        if op is not None:
            ops.append(op)
            room -= -(-op.count // config.page_size) * config.page_size
    if ops:
        hand.table.do(Together(tuple(ops)))


def wanted_at_once(draw: Draw, table: Table) -> None:
    """In one batch a chain comes back and others want pages that are still being copied to the host."""
    hand = Hand(draw, table)
    config, page = table.config, table.config.page_size
    back = hand.story.new_tokens(draw(st.integers(1, 2)) * page)
    for _ in range(2):  # a selective policy copies what is used again
        hand.serve(back + hand.story.new_tokens(1))
    table.do(Settle())
    table.do(Evict(pool_pages(config) * page))
    # the chain takes all that is free, or all but a page: who comes behind it in the batch gets what is evicted
    left = pool_pages(config) - len(back) // page - draw(st.sampled_from((1, 1, 2)))
    waiting = (back + hand.story.new_tokens(1), hand.story.new_tokens(draw(st.integers(1, 3)) * page))
    for tokens in waiting:
        hand.open(tokens)
    for pages in draw(st.sampled_from(((left,), (left - left // 2, left // 2)))):
        away = hand.story.new_tokens(pages * page)
        for _ in range(1 if config.host_policy == "write_through" else 2):
            hand.serve(away)
    whole_batch(hand)
    for name in list(hand.story.live):
        table.do(Abort(name))


def chains_leave(draw: Draw, table: Table) -> None:
    """A chain drives others out and leaves at once, while their copies and its own fill what room the host has."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    for _ in range(draw(st.integers(1, 2))):
        half = max(1, most // 2)  # as much as a small host holds
        for pages in (draw(st.one_of(st.just(half), st.integers(1, half))), most - draw(st.integers(0, most // 4))):
            end = min(pages, table.config.context_tokens // page)
            tokens = hand.story.new_tokens(end * page)
            ends = (end - 2, end - 1, end)
            grows = ((end,), (end // 2, end), (end // 4, end // 2, end), ends, ends)
            for length in draw(st.sampled_from(grows)):  # a node for each part
                hand.serve(tokens[: max(1, length) * page])
        if draw(st.booleans()):
            table.do(Settle())  # copies that have landed make room for those of the chain's end, not of its beginning
        table.do(Evict((most - draw(st.sampled_from((0, 0, 1, most // 4)))) * page))


def half_gone(draw: Draw, table: Table) -> None:
    """A chain of several nodes loses its end from the device; it is hit on both tiers, in part too."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    chain = hand.story.new_tokens(draw(st.integers(1, max(1, most // 4))) * page)
    chains = [chain]
    for _ in range(draw(st.integers(1, 2))):
        chain = chain + hand.story.new_tokens(draw(st.integers(1, max(1, most // 4))) * page)
        chains.append(chain)
    for _ in range(2):  # a selective policy copies what is used again
        for each in chains:
            hand.serve(each)
    for _ in range(draw(st.integers(1, 2))):
        table.do(Settle())
        table.do(Evict(page))  # its last node
        for _ in range(draw(st.integers(1, 2))):
            cut = draw(st.integers(1, len(chain) // page)) * page
            hand.open(chain[:cut] + hand.story.new_tokens(draw(st.integers(1, page + 1))))
        if draw(st.booleans()):
            hand.batch()
        for name in list(hand.story.live):
            done = hand.complete(name)
            if name in hand.story.live:
                table.do(Finish(name) if done else Abort(name))


def dropped_copies(draw: Draw, table: Table) -> None:
    """Copies are dropped while their pages are on the device, held, or gone; then all is asked for again."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    for _ in range(draw(st.integers(1, 3))):
        tokens = hand.story.new_tokens(draw(st.integers(1, max(1, most // 3))) * page)
        for _ in range(2):  # a selective policy copies what is used again
            hand.serve(tokens + hand.story.new_tokens(draw(st.integers(1, page + 1))))
    for _ in range(draw(st.integers(1, 3))):
        table.do(Settle())
        if draw(st.booleans()):
            table.do(Evict(draw(st.integers(1, most)) * page))
        if hand.story.past and draw(st.sampled_from((False, True))):
            hand.open(draw(st.sampled_from(hand.story.past[-6:])))
        table.do(Evict(draw(st.integers(1, most)) * page, "host"))
        hand.serve(prompt(draw, hand.story, ("repeat", "fork", "fresh")))
        for name in list(hand.story.live):
            done = draw(st.booleans()) and hand.complete(name)
            if name in hand.story.live:
                table.do(Finish(name) if done else Abort(name))
    hand.close_all()


def asked_while_held(draw: Draw, table: Table) -> None:
    """Copies of whole chains, or of their first part, are asked for while requests hold them, and again afterwards."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    chains = []
    for _ in range(draw(st.integers(1, 2))):
        trunk = hand.story.new_tokens(draw(st.integers(1, max(1, most // 4))) * page)
        for tail in (1, 1, page + 1):  # a selective policy copies what is used again
            tokens = trunk + hand.story.new_tokens(tail)
            hand.serve(tokens)
        chains.append(tokens)
    for _ in range(draw(st.integers(1, 2))):
        table.do(Settle())
        if draw(st.sampled_from((False, False, True))):  # what comes back is on both tiers
            table.do(Evict(most * page))
            hand.serve(chains[0])
        for _ in range(draw(st.integers(1, 2))):
            hand.open(draw(st.sampled_from(chains)))
        table.do(Evict(2 * most * page, "host"))
        for name in draw(st.permutations(list(hand.story.live))):
            done = draw(st.sampled_from((False, False, True))) and hand.complete(name)
            table.do(Finish(name) if done else Abort(name))
        table.do(Settle())
        table.do(Evict(2 * most * page, "host"))


def emptied(draw: Draw, table: Table) -> None:
    """Prompts leave the device and come back, some in part or only until an abort; then both tiers are emptied."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    for _ in range(draw(st.integers(1, 2))):
        trunk = hand.story.new_tokens(draw(st.integers(1, max(1, most // 2))) * page)
        for _ in range(1 + (table.config.host_policy == "write_through_selective")):
            hand.serve(trunk + hand.story.new_tokens(1))
        for _ in range(draw(st.integers(1, 2))):
            table.do(Settle())
            table.do(Evict(most * page))
            cut = draw(st.integers(1, len(trunk) // page)) * page
            name = hand.open(trunk[:cut] + hand.story.new_tokens(draw(st.integers(1, page))))
            if name is not None:
                done = draw(st.sampled_from((True, True, False))) and hand.complete(name)
                table.do(Finish(name) if done else Abort(name))
    for tier in ("device", "host"):
        table.do(Settle())
        table.do(Evict(2 * most * page, tier))


def in_flight_splits(draw: Draw, table: Table) -> None:
    """Prompts are cached and split while their copies are in flight; then everything settles and comes back."""
    hand = Hand(draw, table)
    page = table.config.page_size
    trunks = []
    for _ in range(draw(st.integers(1, 3))):
        pages = draw(st.integers(2, max(2, min(4, pool_pages(table.config) - 1))))
        trunk = hand.story.new_tokens(pages * page)
        trunks.append(trunk)
        fork = trunk[: draw(st.integers(1, pages - 1)) * page] + hand.story.new_tokens(page + 1)
        if draw(st.booleans()):
            hand.serve(trunk[:page] + hand.story.new_tokens(1))  # both hit it, so they have the same owners
        how = draw(st.sampled_from(("held", "served", "batch", "batch")))
        if how == "held":  # the fork's lock splits what has just been computed
            name = hand.open(trunk)
            if name is not None and hand.complete(name):
                hand.serve(fork)
                table.do(Finish(name))
            elif name is not None:
                table.do(Abort(name))
        elif how == "served":
            hand.serve(trunk)
            hand.serve(fork)
        else:  # in one batch: the second insert splits what the first one has just planned to copy
            names = [name for name in (hand.open(trunk), hand.open(fork)) if name is not None]
            hand.batch()
            for name in names:
                done = hand.complete(name) and draw(st.booleans())
                if name in hand.story.live:
                    table.do(Finish(name) if done else Abort(name))
    table.do(Settle())
    table.do(Evict(pool_pages(table.config) * page))
    for trunk in trunks:
        hand.serve(trunk + hand.story.new_tokens(1))


def crowded_host(draw: Draw, table: Table) -> None:
    """Prompts of one page and of several, on all owners evenly or on one, more than the host holds; some need room."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    trunk = hand.story.new_tokens(draw(st.integers(1, max(1, table.config.shards))) * page)
    for _ in range(max(3, table.steps_max // 3)):
        pages = draw(st.sampled_from((1, 1, 2, max(1, most // 2))))
        tokens = hand.story.new_tokens(pages * page)
        how = draw(st.sampled_from(("fresh", "deeper", "beside")))
        if how == "deeper" and hand.story.past:
            tokens = draw(st.sampled_from(hand.story.past[-4:])) + tokens[:page]
        elif how == "beside":  # all these begin on the same owner
            tokens = trunk + tokens[:page]
        for _ in range(1 + (table.config.host_policy == "write_through_selective")):
            hand.serve(tokens + hand.story.new_tokens(draw(st.integers(0, 1))))
        if draw(st.booleans()):
            table.do(Settle())
        if draw(st.sampled_from((False, False, True))):
            table.do(Evict(draw(st.integers(1, most)) * page))


def one_too_large(draw: Draw, table: Table) -> None:
    """Short prompts have their copies; then comes one that the host cannot hold beside what is locked there."""
    hand = Hand(draw, table)
    page = table.config.page_size
    most = max(1, min(pool_pages(table.config), table.config.context_tokens // page))
    for _ in range(draw(st.integers(1, 2))):
        few = draw(st.integers(1, 3))
        for _ in range(few):
            tokens = hand.story.new_tokens(page)
            for _ in range(1 + 2 * (table.config.host_policy == "write_through_selective")):
                hand.serve(tokens)
                table.do(Settle())
        tokens = hand.story.new_tokens(max(1, most - draw(st.integers(0, few))) * page)
        for _ in range(1 + 2 * (table.config.host_policy == "write_through_selective")):
            hand.serve(tokens)


def by_turns(draw: Draw, table: Table) -> None:
    """Prompts that do not fit the device together are served again and again: each takes the place of another."""
    hand = Hand(draw, table)
    page = table.config.page_size
    most = max(1, min(pool_pages(table.config), table.config.context_tokens // page))
    prompts = [
        hand.story.new_tokens(draw(st.integers(max(1, most // 3), -(-most * 2 // 3))) * page + 1) for _ in range(3)
    ]
    for _ in range(draw(st.integers(2, 3))):
        for tokens in draw(st.permutations(prompts)):
            for _ in range(1 + (table.config.host_policy == "write_through_selective")):
                hand.serve(tokens)
        if draw(st.booleans()):
            table.do(Settle())
    hand.close_all()


def hits_together(draw: Draw, table: Table) -> None:
    """Several requests hit the same pages of the host and are admitted in one batch."""
    hand = Hand(draw, table)
    page = table.config.page_size
    trunk = hand.story.new_tokens(draw(st.integers(1, max(1, pool_pages(table.config) // 2))) * page)
    for _ in range(draw(st.integers(1, 2))):
        for end in (page, len(trunk), len(trunk)):  # a node or two; a selective policy copies what is used again
            hand.serve(trunk[:end] + hand.story.new_tokens(1))
        table.do(Settle())
        table.do(Evict(draw(st.sampled_from((pool_pages(table.config), 1))) * page))
        for _ in range(draw(st.integers(2, 3))):
            cut = len(trunk) - draw(st.sampled_from((0, 0, page))) % len(trunk)
            hand.open(trunk[:cut] + hand.story.new_tokens(draw(st.integers(1, page))))
        hand.batch()
        for name in list(hand.story.live):
            done = hand.complete(name)
            if name in hand.story.live:
                table.do(Finish(name) if done else Abort(name))
    hand.close_all()


def late_computer(draw: Draw, table: Table) -> None:
    """What one request is about to bring back from the host, another one computes: it missed it when it was opened."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    for _ in range(draw(st.integers(1, 2))):
        trunk = hand.story.new_tokens(draw(st.integers(1, max(1, most // 3))) * page)
        late = hand.open(trunk + hand.story.new_tokens(draw(st.integers(1, page))))
        for _ in range(1 + (table.config.host_policy == "write_through_selective")):
            hand.serve(trunk + hand.story.new_tokens(1))
        table.do(Settle())
        table.do(Evict(most * page))
        for _ in range(draw(st.integers(1, 2))):
            cut = draw(st.integers(1, len(trunk) // page)) * page
            hand.open(trunk[:cut] + hand.story.new_tokens(draw(st.integers(1, page))))
        if late is not None:
            hand.extend(late, whole=draw(st.booleans()))
        for name in draw(st.permutations(list(hand.story.live))):
            done = hand.complete(name)
            if name in hand.story.live:
                table.do(Finish(name) if done else Abort(name))
    hand.close_all()


def used_again(draw: Draw, table: Table) -> None:
    """Prompts that share their first pages with none, one or more others."""
    hand = Hand(draw, table)
    page = table.config.page_size
    for _ in range(draw(st.integers(1, 2))):
        trunk = hand.story.new_tokens(draw(st.integers(1, 3)) * page)
        for _ in range(draw(st.integers(1, 4))):
            hand.serve(trunk + hand.story.new_tokens(draw(st.integers(1, 2)) * page))
        table.do(Settle())

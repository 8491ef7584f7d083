"""The plans of the cases about admission: what makes one owner class tight, and what asks for all that is left."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.types import Abort, Finish, Ok, Replies, Reserve, Settle, Together
from suites.machine import MIXED, Hand
from suites.prompts import pool_pages, prompt

CROWD = {**MIXED, "serve": 1, "finish": 2, "open": 6, "evict": 0, "flush": 0, "restart": 0}


def same_next_class(draw: Draw, table: Table) -> None:
    """One batch of requests that hit the same pages, so that all want their next page of the same owner."""
    hand = Hand(draw, table)
    page = table.config.page_size
    trunk = hand.story.new_tokens(draw(st.integers(1, 2)) * page)
    hand.serve(trunk + hand.story.new_tokens(1))
    for _ in range(draw(st.integers(2, 5))):
        hand.open(trunk + hand.story.new_tokens(draw(st.integers(1, 2)) * page))
    for _ in range(draw(st.integers(1, 3))):
        hand.batch()
    for name in list(hand.story.live):
        hand.complete(name)


def shared_prefixes(draw: Draw, table: Table) -> None:
    """A few prefixes are cached, then batches of requests come that have one of them and a page of their own.

    In some plans the prefixes are as long as they may be, and those of a batch begin with the same owner.
    """
    hand = Hand(draw, table)
    config, page = table.config, table.config.page_size
    room = max(1, config.context_tokens // page - 1)
    full = draw(st.booleans())
    lengths = st.just(room) if full else st.one_of(st.integers(1, room), st.just(room))
    alike: dict[int | None, list[tuple[int, ...]]] = {}  # by the owner that they end with
    for _ in range(config.shards + 1 if full else draw(st.sampled_from((1, 1, 2)))):
        tokens = hand.story.new_tokens(draw(lengths) * page)
        name = hand.open(tokens + hand.story.new_tokens(1))
        if name is not None and hand.complete(name):
            owner = table.watch.owner_of_last_page(name)
            alike.setdefault(owner if full else None, []).append(tokens)
            table.do(Finish(name))
    for _ in range(draw(st.integers(1, 3)) if alike else 0):
        trunks = max(alike.values(), key=len)
        chunks = config.chunk_tokens // page
        for at in range(draw(st.integers(min(2, chunks), min(8, chunks)))):
            trunk = trunks[at % len(trunks)] if full else draw(st.sampled_from(trunks))
            hand.open(trunk + hand.story.new_tokens(draw(st.integers(1, page))))
        ops = [op for name in hand.story.live if (op := hand.chunk(name, config.chunk_tokens, whole=True))]
        if ops:
            table.do(Together(tuple(ops)))
        for name in list(hand.story.live):
            table.do(Abort(name))


def tight_class(draw: Draw, table: Table) -> None:
    """Short chains are held on one starved owner class and finished elsewhere, then long prompts ask for the rest."""
    hand = Hand(draw, table)
    config, page = table.config, table.config.page_size
    classes = config.shards if config.layout == "sharded" else 1
    starved = draw(st.integers(0, classes - 1))
    rounds = draw(st.integers(1, config.pages_per_rank))
    for _ in range(min(rounds * classes, 4 * table.steps_max)):
        name = hand.open(hand.story.new_tokens(page * draw(st.sampled_from((1, 1, 1, 2)))))
        if name is None or not hand.complete(name):
            break
        if table.watch.owner_of_last_page(name) != starved:
            table.do(Finish(name))
    for _ in range(draw(st.integers(1, 3))):
        pages = draw(st.integers(1, pool_pages(config)))
        long = hand.open(prompt(draw, hand.story, ("fresh", "fork"), pages))
        if long is not None:
            hand.extend(long)
        if draw(st.booleans()) and hand.story.live:
            hand.move_finish()
        hand.move_batch()
        if long is not None and long in hand.story.live and hand.story.live[long].admitted:
            hand.complete(long)


def roots_held(draw: Draw, table: Table) -> None:
    """Each cached prompt's first pages are held, the rest can go; then one asks for what all owners have together."""
    hand = Hand(draw, table)
    config, page = table.config, table.config.page_size
    held = 0
    for _ in range(draw(st.integers(1, config.pages_per_rank))):
        tokens = hand.story.new_tokens(config.shards * page * draw(st.sampled_from((1, 1, 2))))
        if not hand.serve(tokens):
            break
        roots = draw(st.sampled_from((1, 1, 1, 2)))
        if hand.open(tokens[: page * roots] + hand.story.new_tokens(1)) is not None:
            held += roots
    asked_down(hand, (), pool_pages(config) - held, draw(st.sampled_from((0, 0, 1))))
    for name in [name for name, its in hand.story.live.items() if its.admitted]:
        hand.complete(name)


def locks_on_promised(draw: Draw, table: Table) -> None:
    """The pool is full of cache, a long prompt is admitted on what can be evicted, then newcomers lock just that."""
    hand = Hand(draw, table)
    pages, page = pool_pages(table.config), table.config.page_size
    cached = [
        hand.story.new_tokens(draw(st.integers(1, max(1, pages // 2))) * page) for _ in range(draw(st.integers(1, 3)))
    ]
    for tokens in cached:
        hand.serve(tokens)
    long = hand.open(hand.story.new_tokens(draw(st.integers(2, pages)) * page))
    if long is None or not hand.extend(long):
        return
    for tokens in cached:
        newcomer = hand.open(tokens + hand.story.new_tokens(draw(st.integers(1, page))))
        if newcomer is not None and draw(st.booleans()):
            hand.extend(newcomer)
    hand.complete(long)


def promised_apart(draw: Draw, table: Table) -> None:
    """A long prompt is admitted to nearly all that is free; then many want a page of one owner, free but promised."""
    hand = Hand(draw, table)
    config, page = table.config, table.config.page_size
    owners = config.shards if config.layout == "sharded" else 1
    trunk = hand.story.new_tokens(draw(st.integers(1, owners)) * page)
    if not hand.serve(trunk):
        return
    left = pool_pages(config) - len(trunk) // page
    long = hand.open(hand.story.new_tokens(max(2, left - draw(st.integers(1, owners))) * page))
    if long is None or not hand.extend(long):
        return
    for _ in range(draw(st.integers(1, owners + 1))):
        newcomer = hand.open(trunk + hand.story.new_tokens(draw(st.integers(1, page))))
        if newcomer is not None:
            hand.extend(newcomer)
    hand.complete(long)


def alone(draw: Draw, table: Table) -> None:
    """Requests come and go, some halfway; everything ends, and prompts ask for up to the whole pool, one at a time."""
    hand = Hand(draw, table)
    for _ in range(draw(st.sampled_from((0, 0, 2, table.steps_max // 2)))):
        getattr(hand, "move_" + draw(st.sampled_from(("serve", "open", "extend", "batch", "abort", "finish"))))()
    for name in list(hand.story.live):
        table.do(Abort(name))
    hand.serve(prompt(draw, hand.story))
    hand.serve(hand.story.new_tokens(min(table.config.chunk_tokens, table.config.context_tokens)))  # in one chunk
    whole = min(pool_pages(table.config), table.config.context_tokens // table.config.page_size)
    for pages in (whole, max(1, whole - 1)):
        hand.serve(hand.story.new_tokens(pages * table.config.page_size))


def asked_down(hand: Hand, shared: tuple[int, ...], pages: int, less: int) -> None:
    """A prompt of so many pages behind these tokens, then a page shorter until its first page is granted, then less."""
    page = hand.story.config.page_size
    granted = 0
    for count in range(pages, 0, -1):
        if granted and count > max(1, granted - less):
            continue
        name = hand.open(shared + hand.story.new_tokens(count * page))
        if name is None:
            continue
        if isinstance(hand.table.do(hand.extend_op(name, hand.story.live[name], page)), Ok):
            if granted or not less:
                return
            granted = count
        hand.table.do(Abort(name))


def asked_at_once(hand: Hand, shared: tuple[int, ...], requests: int) -> None:
    """So many prompts behind these tokens, a first page of each in one batch, then of fewer until that is granted."""
    page = hand.story.config.page_size
    for _ in range(requests):
        hand.open(shared + hand.story.new_tokens(page * hand.draw(st.sampled_from((1, 1, 2)))))
    ops = [hand.extend_op(name, its, min(page, its.left)) for name, its in hand.story.live.items() if its.left]
    for few in range(len(ops), 1, -1):
        reply = hand.table.do(Together(tuple(ops[:few])))
        if isinstance(reply, Replies) and all(isinstance(its, Ok) for its in reply.replies):
            return


def to_the_brim(draw: Draw, table: Table) -> None:
    """One owner is held and the others' pages are cached; then all that is granted is taken, to the last page."""
    hand = Hand(draw, table)
    config, page, most = table.config, table.config.page_size, pool_pages(table.config)
    owners = config.shards if config.layout == "sharded" else 1
    trunk = hand.story.new_tokens(draw(st.integers(1, owners)) * page)
    hand.serve(trunk)
    starved, cached = draw(st.sampled_from((*range(owners), None))), list[tuple[int, ...]]()
    ends = draw(st.sampled_from(((False,), (False, True, False))))
    for _ in range(draw(st.integers(0, min(most, 12)))):
        own = hand.story.new_tokens(draw(st.sampled_from((1, 1, 1, 2))) * page)
        tokens = trunk + own if draw(st.booleans()) else own
        name = hand.open(tokens)
        if name is None or not hand.complete(name):
            continue
        owner = table.watch.owner_of_last_page(name)
        if (None not in (owner, starved) and owner != starved) or draw(st.sampled_from(ends)):
            table.do(Finish(name))
            cached.append(tokens)
    for _ in range(draw(st.integers(1, 3))):
        how = draw(st.sampled_from(("fork", "fresh", "batch")))
        if how == "batch":
            asked_at_once(hand, trunk, config.pages_per_rank + 1)
        else:
            live = sum(-(-its.left // page) for its in hand.story.live.values())
            less = draw(st.sampled_from((0, 1, 0, 1, most // 2)))
            asked_down(hand, trunk if how == "fork" else (), max(1, most - live), less)
        for tokens in cached[: draw(st.integers(0, 3))]:  # a newcomer's lock takes what could be evicted
            hand.open(tokens + hand.story.new_tokens(1))
    for name in draw(st.permutations(list(hand.story.live))):
        hand.complete(name)


def beyond_the_context(draw: Draw, table: Table) -> None:
    """Prompts as long as the context and longer, up to the pool; who is let in for a first chunk asks for the rest."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    least = min(most, table.config.context_tokens // page)
    for _ in range(draw(st.integers(1, 3))):
        hand.serve(hand.story.new_tokens(draw(st.integers(least, most)) * page))


def ended_while_sent(draw: Draw, table: Table) -> None:
    """Requests end halfway, on their way to a room; then all that is granted is taken, to the last page."""
    hand = Hand(draw, table)
    page, most = table.config.page_size, pool_pages(table.config)
    for room in range(1, 1 + draw(st.integers(1, 3))):
        name = hand.open(hand.story.new_tokens(draw(st.integers(2, max(2, most // 2))) * page))
        if name is None:
            continue
        table.do(Reserve(room, len(hand.story.live[name].tokens)))
        table.do(Settle())
        if isinstance(table.do(hand.extend_op(name, hand.story.live[name], page)), Ok):
            hand.send(name, room)
        table.do(Abort(name) if draw(st.booleans()) else Finish(name))
        if draw(st.booleans()):
            table.do(Settle())
    table.do(Settle())
    for less in (draw(st.sampled_from((most // 2, 1, 0))), 0):
        asked_down(hand, (), most, less)
    for name in draw(st.permutations(list(hand.story.live))):
        hand.complete(name)

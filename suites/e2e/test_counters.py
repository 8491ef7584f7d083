"""Counters: they only grow, and they add up to what answers tell and to what an unsharded pair would move."""

from __future__ import annotations

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Generate, Settle
from suites.claim import expect, require
from suites.e2e.alike import answered
from suites.e2e.claim import Step, case, running
from suites.e2e.hand import Hand
from suites.e2e.story import grown, ranks, stays

register_cpu_ci(est_time=30, stage="servers")


def of_all_lengths(draw: Draw, table: Table) -> None:
    """One page first, which tells what a page weighs; then prompts of all lengths, alone, together, and cached."""
    hand = Hand(draw, table)
    page, shards = hand.config.page_size, hand.config.shards
    lengths = [page, 1, page + 1, shards * page, (shards + 1) * page + 1, hand.long(), 3 * page - 1]
    prompts = [hand.fresh(min(count, hand.long())) for count in lengths]
    for prompt in prompts:
        hand.ask(prompt, max_new_tokens=2)
        hand.settle()
    hand.together([hand.request(prompt, max_new_tokens=2) for prompt in prompts[3:]])
    hand.settle()
    hand.ask(hand.fork(prompts[4], page + 1, page), max_new_tokens=2)
    hand.settle()


@case(
    "counters.only_grow",
    invariants=("I21",),
    needs=("op.settle", "op.together", "snapshot.counters"),
    seen={"answered": 8, "grew": 8},
    plan=of_all_lengths,
)
def test_only_grow(step: Step) -> None:
    """No counter ever falls, on any rank.

    Counters that start over with each request or take back what an aborted one had.
    """
    for old, new in zip(step.before.ranks, step.after.ranks, strict=True) if step.before and step.after else ():
        for name, value in (old.counters or {}).items():
            if name.endswith("_total"):
                now = (new.counters or {}).get(name, 0.0)
                require(now >= value, f"{name} of rank {new.rank} = {now:g}", f"at least {value:g}", "it is a counter")
                step.story.seen["grew"] += now > value


@case(
    "counters.cached_tokens_add_up",
    invariants=("I21",),
    needs=("op.settle", "op.together", "snapshot.counters", "promise.counts_cached_totals", "promise.counts_cached"),
    seen={"hit": 3, "cold": 5, "added up": 5},
    plan=of_all_lengths,
)
def test_cached_tokens_add_up(step: Step) -> None:
    """The counters of cached tokens are the sums of what the answers said, on every rank.

    Hits that are counted by each rank or at each chunk, or not when they come from the host (sglang#11900, vllm#28585).
    """
    if not isinstance(step.op, Settle) or step.story.given_up:
        return
    splits = step.story.promises("splits_cached")
    for tier in ("device", "host") if splits else ("",):
        said, where = float(step.story.told[tier]), f" on the {tier}" if tier else ""
        name = f"cached_tokens_{tier}_total" if tier else "cached_tokens_total"
        for rank, counted in enumerate(grown(step.first, step.after, name)):
            what = f"tokens that rank {rank} counts as cached{where}"
            expect(counted, said, what, f"the answers of the session tell of {said:g}")
    step.story.seen["added up"] += 1


@case(
    "counters.sent_bytes_add_up",
    invariants=("I15", "I16"),
    needs=("op.settle", "op.together", "snapshot.counters", "promise.counts_sent_bytes"),
    seen={"answered": 8, "weighed": 5},
    plan=of_all_lengths,
    configs=running(pair=True),
)
def test_sent_bytes_add_up(step: Step) -> None:
    """All prefill ranks together send each page of a prompt once, each rank whole pages and no more than its share.

    Pages that each rank sends, a page without a sender, positions filtered before they were paired, a tail page sent in
    part or twice (sglang#28718, sglang#5588).
    """
    asked = [(op, answered(op, reply)) for op, reply in step.parts() if isinstance(op, Generate) and stays(op)]
    if not asked:
        return
    page, story = step.story.config.page_size, step.story
    sent = grown(step.before, step.after, "kv_transfer_bytes_total")
    pages = sum(-(-len(op.tokens) // page) for op, _ in asked)
    size = story.page_bytes = story.page_bytes or sum(sent)  # the first prompt of a plan is one page
    require(size > 0, "0 bytes sent of the first page", "more", "decode has answered, so it has the page")
    what = f"bytes that all prefill ranks sent of {pages} pages"
    expect(sum(sent), pages * size, what, f"one page alone was {size:g} bytes")
    expect([each % size for each in sent], [0.0] * len(sent), "bytes sent past whole pages, by rank", "pages are sent")
    if len(asked) == 1:
        spread = (max(sent) - min(sent)) / size
        if story.config.layout == "sharded":
            require(spread <= 1, f"bytes sent by rank {sent}", "one page apart at most", "pages go to ranks in turn")
    story.seen["weighed"] += 1


def capacity(draw: Draw, table: Table) -> None:
    """A prompt that no rank could hold alone, where the context has room for one."""
    hand = Hand(draw, table)
    hand.ask(hand.fresh(hand.config.page_size + 1))
    own = hand.service.rank_tokens_max or 0
    beyond = own + hand.config.page_size + 1
    if own and beyond + 80 < min(hand.config.context_tokens, hand.service.tokens_max or 0):
        hand.both(hand.fresh(beyond), max_new_tokens=2)


@case(
    "capacity.ranks_add_up",
    invariants=("I22",),
    needs=("snapshot.counters",),
    seen={"capacity told": 1},
    plan=capacity,
    configs=running(sharded=True),
)
def test_ranks_add_up(step: Step) -> None:
    """A sharded worker holds as many tokens as its ranks have room for together, and says so on each of them.

    A capacity that stays that of one rank, so that sharding buys nothing; one that is wide in one place and not in
    another, so that a prompt is admitted that does not fit, or refused that does (dynamo#13653).
    """
    service, shards = step.story.service, step.story.config.shards
    for op, reply in step.parts():
        if isinstance(op, Generate):
            answered(op, reply)
    if service.tokens_max is None or service.rank_tokens_max is None:
        return
    wide = shards * service.rank_tokens_max
    expect(service.tokens_max, wide, "tokens of the worker", f"{shards} ranks hold {service.rank_tokens_max} each")
    told = [(rank.counters or {}).get("max_total_num_tokens") for rank in ranks(step.after)]
    expect(
        [each for each in told if each is not None and each != wide], [], f"capacity by rank {told}", f"it is {wide}"
    )
    step.story.seen["capacity told"] += 1

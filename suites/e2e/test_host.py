"""The host tier: what left the device comes back to the right ranks, and changes no answer."""

from __future__ import annotations

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Generate
from suites.claim import expect, require
from suites.e2e.alike import all_alike, answered
from suites.e2e.claim import Step, case, running
from suites.e2e.hand import NEW_TOKENS, Hand, only_if
from suites.e2e.story import grown, key_of, ranks, stays

register_cpu_ci(est_time=120, stage="servers")

DEVICE_TOKENS_MAX = 1 << 16  # filling it must not take minutes
FLOOD = 1.05  # of the device
TOKENS_BACK = "load_back_tokens_total"  # not every server counts them
ACCEPTED_PART = 0.95  # of what a draft brought cold, as batches may change a tie


def left_device(hand: Hand, new_tokens: int = NEW_TOKENS, *, drafts: bool = False) -> None:
    """Prompts cold, from the device, and, after others have filled the device, from the host.

    `drafts`: it is about drafts, so some must have been accepted when all was computed.
    """
    device = hand.service.tokens_max or 0
    page, config = hand.config.page_size, hand.config
    prompts = [hand.fresh((2 * config.shards + 1) * page + 3), hand.fresh(page + 1), hand.fresh(hand.long(0.6))]
    flood = int(device * FLOOD)
    host = config.host_pages_per_rank * page * config.shards
    only_if(host >= flood + sum(map(len, prompts)), f"the host holds {host} tokens, the case needs room for {flood}")
    for prompt in prompts:
        hand.ask(prompt, max_new_tokens=new_tokens)
        hand.ask(prompt, max_new_tokens=new_tokens)
    only_if(not drafts or hand.story.seen["accepted a draft"], "no draft of this model was accepted, cold or cached")
    hand.settle()
    hand.flood(flood)
    hand.settle()
    for prompt in prompts:
        hand.ask(prompt, max_new_tokens=new_tokens)
    hand.settle()
    hand.ask(prompts[0], max_new_tokens=new_tokens)


def through_host(draw: Draw, table: Table) -> None:
    """The same as a plan."""
    left_device(Hand(draw, table))


@case(
    "host.answers_as_computed",
    invariants=("I12", "I13", "I19"),
    needs=("op.settle", "promise.scores", "promise.splits_cached", "promise.keeps_copies", "promise.copies_all"),
    seen={"host hit": 3, "hit": 6, "cold": 3, "compared": 7},
    plan=through_host,
    configs=running(host=True, tokens_max=DEVICE_TOKENS_MAX),
)
def test_answers_as_computed(step: Step) -> None:
    """A prompt that left the device is served from the host: all its whole pages, and the answer that was computed.

    A copy that ends after the page was given away, pages brought back to another owner's slots, index rows that stay
    behind, a hit on the host that is computed anew (sglang#36738, vllm#46278).
    """
    all_alike(step)
    for op, value in step.answers():
        if op.arm or (op.salt, op.tokens) not in step.story.served or value.cached_tokens is None:
            continue
        whole = (len(op.tokens) - 1) // step.story.config.page_size * step.story.config.page_size
        why = "its copies are on the host, which has room for all"
        expect(value.cached_tokens, whole, f"cached tokens of request {op.request} with {len(op.tokens)}", why)


@case(
    "host.ranks_carry_their_share",
    invariants=("I15", "I22"),
    needs=(
        *("op.settle", "snapshot.counters", "promise.counts_host_bytes", "promise.splits_cached"),
        *("promise.keeps_copies", "promise.copies_all"),
    ),
    seen={"host hit": 3, "brought back": 3, "copied": 3},
    plan=through_host,
    configs=running(host=True, sharded=True, tokens_max=DEVICE_TOKENS_MAX),
)
def test_ranks_carry_their_share(step: Step) -> None:
    """What is copied to the host and back is each page once, by the rank that owns it.

    Every rank copies all pages, or none but the first does; a rank's share counted by requests and not by pages.
    """
    story = step.story
    page = story.config.page_size
    tokens = sum(value.cached_host or 0 for op, value in step.answers() if not op.arm)
    back = grown(step.before, step.after, "load_back_bytes_total")
    if tokens:
        _shares(back, tokens // page, "brought back", step)
        spread = (max(back) - min(back)) / page_bytes(step)
        require(
            spread <= 1, f"bytes brought back by ranks {back}", "one page apart at most", "pages go to ranks in turn"
        )
        if any(TOKENS_BACK in (rank.counters or {}) for rank in ranks(step.after)):
            told = grown(step.before, step.after, TOKENS_BACK)
            what = f"{TOKENS_BACK} of ranks grew by {told}"
            require(set(told) == {float(tokens)}, what, f"{tokens} each", "the answers tell of so many")
        story.seen["brought back"] += 1
    elif not any(isinstance(op, Generate) for op, _ in step.parts()):
        expect(sum(back), 0, "bytes brought back", "no request came")
    copied = grown(step.before, step.after, "hicache_backup_tokens_total")
    expect(
        len(set(copied)), 1, f"different numbers of tokens copied to the host by ranks: {copied}", "they count alike"
    )
    if copied[0]:
        out = grown(step.before, step.after, "hicache_backup_bytes_total")
        _shares(out, int(copied[0]) // page, "copied to the host", step)
        story.seen["copied"] += 1


def _shares(moved: list[float], pages: int, what: str, step: Step) -> None:
    """Bytes of all ranks are those of so many pages, and each rank's are whole pages."""
    size = page_bytes(step)
    if not size:
        return
    expect(sum(moved), pages * size, f"bytes {what} by all ranks", f"they are {pages} pages of {size:g} bytes")
    expect([each % size for each in moved], [0.0] * len(moved), f"bytes {what} past whole pages, by rank", "of pages")


def page_bytes(step: Step) -> float:
    """Bytes of one page on the host, by what the whole session has copied there; 0 while nothing was."""
    tokens = sum(grown(step.first, step.after, "hicache_backup_tokens_total")[:1])
    size = sum(grown(step.first, step.after, "hicache_backup_bytes_total"))
    return size / tokens * step.story.config.page_size if tokens else 0.0


def drafts_through_host(draw: Draw, table: Table) -> None:
    """The same with longer answers."""
    left_device(Hand(draw, table), 2 * NEW_TOKENS, drafts=True)


@case(
    "host.draft_accepts_alike",
    invariants=("I12", "I20"),
    needs=(
        *("op.settle", "promise.counts_drafts", "promise.splits_cached"),
        *("promise.keeps_copies", "promise.copies_all"),
    ),
    seen={"host hit": 3, "accepted a draft": 1},
    plan=drafts_through_host,
    configs=running(host=True, draft=True, tokens_max=DEVICE_TOKENS_MAX),
)
def test_draft_accepts_alike(step: Step) -> None:
    """A draft is accepted as often after a hit on device or host as when all was computed.

    Draft rows that a tier or a gather leaves behind change no answer, as the target verifies them: only the draft gets
    worse (sglang#32176, sglang#10846).
    """
    for op, reply in step.parts():
        if not isinstance(op, Generate) or op.arm or not stays(op):
            continue
        value = answered(op, reply)
        known = step.story.references.get(key_of(op))
        if known is None or value.verify_calls is None or known[1].verify_calls is None:
            continue
        if value.tokens == known[1].tokens:
            what = f"passes that verified a draft for request {op.request}, {value.cached_host} tokens from the host"
            most = known[1].verify_calls / ACCEPTED_PART
            seen, why = (
                f"{what} = {value.verify_calls}",
                f"request {known[0].request} took so many when computed",
            )
            require(value.verify_calls <= most, seen, f"at most {most:.1f}", why)

"""Hit arithmetic: what is reported as cached, kept and computed adds up."""

from __future__ import annotations

from harness.register import register_cpu_ci
from harness.types import Extend, Extended, Finish, Finished, Ok, Open, Opened
from suites.claim import Step, case, expect, require
from suites.configs import ROOMY, Bounds, configs
from suites.invariants.test_reads import looks_alike, race_plan, warm_plan
from suites.machine import MIXED, either, machine
from suites.story import cached_entries, prefix_entries

register_cpu_ci(est_time=20, stage="cases")


@case(
    "hits.whole_pages_below_the_prompt",
    invariants=("I21", "I03"),
    needs=(),
    seen={"hit": 3, "exact pages": 1, "tail": 1, "tiny": 1},
    plan=machine({**MIXED, "serve": 8}, kinds=("repeat", "fork", "fresh")),
)
def test_whole_pages_below_the_prompt(step: Step) -> None:
    """Cached tokens are whole pages and at most all but one token of the prompt.

    A hit counted for the whole prompt, a partial page that matches, matched tokens added up over retries (sglang#11900,
    LMCache#5249).
    """
    for op, reply in step.parts():
        if isinstance(op, Open) and isinstance(reply, Ok) and isinstance(reply.value, Opened):
            cached, most = reply.value.cached, len(op.tokens) - 1
            require(
                0 <= cached <= most,
                f"{cached} cached tokens of request {op.request}",
                f"0 to {most}",
                "one token is always computed",
            )
            expect(
                cached % step.config.page_size, 0, f"{cached} cached tokens modulo page size", "only whole pages match"
            )


def hits_were_computed(step: Step) -> None:
    """No request hits more of its prompt than was computed since the cache was dropped."""
    for op, reply in step.parts():
        if isinstance(op, Open) and isinstance(reply, Ok) and isinstance(reply.value, Opened):
            most = step.story.oracle.computed(op.tokens)
            require(
                reply.value.cached <= most,
                f"{reply.value.cached} cached tokens of request {op.request}",
                f"at most {most}",
                "no request computed more of this prefix since the cache was dropped",
            )


@case(
    "hits.only_what_was_computed",
    invariants=("I21",),
    needs=(),
    seen={"hit": 3, "cold": 3},
    plan=either(looks_alike, machine(), looks_alike),
)
def test_only_what_was_computed(step: Step) -> None:
    """A prompt hits at most the longest whole-page prefix that some request computed; disjoint prompts never hit.

    Hits on random data, keys that ignore a part of the prompt, prefixes published before they are computed (vllm#25787,
    sglang#8901).
    """
    hits_were_computed(step)


def repeats_hit(step: Step) -> None:
    """The repeat of a finished prompt hits what was kept of it."""
    for op, reply in step.parts():
        if not (isinstance(op, Open) and isinstance(reply, Ok) and isinstance(reply.value, Opened)):
            continue
        kept = step.story.finished.get(op.tokens)
        if kept is None:
            continue
        page = step.config.page_size
        least = min(kept, (len(op.tokens) - 1) // page * page)
        require(
            reply.value.cached >= least,
            f"{reply.value.cached} cached tokens of request {op.request}",
            f"at least {least}",
            f"the same prompt finished with {kept} tokens kept and nothing was evicted since",
        )


@case(
    "hits.repeat_hits_what_was_kept",
    invariants=("I21",),
    needs=("promise.keeps_finished", "snapshot.nodes"),
    seen={"hit": 3, "exact pages": 1, "tail": 1},
    plan=warm_plan,
    configs=configs(Bounds(scratch_contexts=ROOMY)),
)
def test_repeat_hits_what_was_kept(step: Step) -> None:
    """The repeat of a finished prompt hits all its whole pages but for the last token, while nothing was evicted.

    Inserts that come late, lose the last page, or are keyed so that they never match again (TensorRT-LLM#15655,
    sglang#10846).
    """
    repeats_hit(step)


@case(
    "hits.kept_is_what_was_computed",
    invariants=("I21", "I03"),
    needs=("promise.keeps_finished",),
    seen={"finished": 3, "tail": 1, "exact pages": 1},
    plan=machine({**MIXED, "serve": 8}),
)
def test_kept_is_what_was_computed(step: Step) -> None:
    """A finished request keeps all its computed whole pages, unless another chain holds its first page.

    A suffix that is dropped on finish, a tail page that is kept as if it were whole (sglang#10637).
    """
    page = step.config.page_size
    for op, reply in step.parts():
        if not (isinstance(op, Finish) and isinstance(reply, Ok) and isinstance(reply.value, Finished)):
            continue
        request = step.story.live[op.request]
        whole, kept = request.computed // page * page, reply.value.kept
        rival = sum(tokens[:page] == request.tokens[:page] for tokens in step.story.past) > 1
        less = rival and (request.cached == 0 or step.story.is_sent(op.request))  # a transfer reads its duplicates
        require(
            kept <= whole and kept % page == 0 and (kept == whole or less),
            f"{kept} tokens kept of request {op.request}",
            f"{whole} tokens" if not rival else f"whole pages, at most {whole} tokens",
            f"{request.computed} tokens are computed at {page} tokens per page",
        )


@case(
    "hits.kept_is_in_the_cache",
    invariants=("I21", "I13"),
    needs=("snapshot.nodes",),
    seen={"finished": 3, "raced": 1, "tail": 1},
    plan=either(race_plan, machine({**MIXED, "serve": 8, "race": 4})),
    configs=configs(Bounds(scratch_contexts=ROOMY)),
)
def test_kept_is_in_the_cache(step: Step) -> None:
    """What a finish tells as kept is in the cache at that moment, in one tier or the other.

    Pages told as kept that the cache has declined or dropped: who routes by it sends prompts where nothing is.
    """
    page = step.config.page_size
    for op, reply in step.parts():
        if not (isinstance(op, Finish) and isinstance(reply, Ok) and isinstance(reply.value, Finished)):
            continue
        tokens, kept = step.story.live[op.request].tokens, reply.value.kept
        told = {state for _, state in prefix_entries(tokens, tuple(range(kept // page)), page)}
        for rank in step.after.ranks:
            has = {state for tier in ("device", "host") for _, state in cached_entries(rank, tier)}
            require(
                told <= has,
                f"{kept} tokens told as kept of request {op.request}",
                f"{len(told & has) * page} tokens",
                f"so many whole pages of it are in the cache of rank {rank.rank}",
            )


@case(
    "hits.chunks_add_up",
    invariants=("I21", "I24"),
    needs=(),
    seen={"continued": 3, "hit": 1, "batch": 1},
    plan=machine(),
)
def test_chunks_add_up(step: Step) -> None:
    """Each chunk begins where the last one or the cached prefix ended and covers the tokens that were asked for.

    Progress that is lost between chunks: prefix indices reset each round, a page sent or computed twice
    (sglang-jax#1386).
    """
    for op, reply in step.parts():
        if isinstance(op, Extend) and isinstance(reply, Ok) and isinstance(reply.value, Extended):
            start = step.story.live[op.request].computed
            expect(
                (reply.value.start, reply.value.end),
                (start, start + op.count),
                f"[start, end) of the chunk of request {op.request}",
                f"{start} tokens were computed before",
            )

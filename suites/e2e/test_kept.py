"""What is in the cache, for whom and how long: at every length, under the pressure of other prompts, apart by salt."""

from __future__ import annotations

from harness.case import Draw, Table
from harness.register import register_cpu_ci
from harness.types import Generate
from suites.claim import require
from suites.e2e.alike import all_alike, answered
from suites.e2e.claim import Step, case
from suites.e2e.hand import Hand, only_if
from suites.e2e.story import Tokens
from suites.e2e.test_cache import stays_judged

register_cpu_ci(est_time=30, stage="servers")

SPAN_MIN = 12  # tokens: around a page that is shorter so many lengths are asked all the same
POOL_TOKENS_MAX = 1 << 14  # a larger one takes long to fill
POOL_PART = 1.5  # of it, so much is asked for
PROMPTS_MIN = 8


def lengths(draw: Draw, table: Table) -> None:
    """Each length twice, one right behind the other; then conversations that grow by less than a page."""
    hand = Hand(draw, table)
    page, chunk = max(hand.config.page_size, 1), hand.config.chunk_tokens
    span = max(2 * page + 2, SPAN_MIN)
    near = {at * page + off for at in (1, 2) for off in (-2, -1, 0, 1, 2)} if hand.small and page > 1 else set()
    counts = near | {1, 2} if near else set(range(1, span + 1))
    for count in sorted(counts | {chunk - 1, chunk, chunk + 1, hand.long(2.5)}):
        if 0 < count <= hand.long():
            prompt = hand.fresh(count)
            hand.ask(prompt, max_new_tokens=1)
            hand.ask(prompt, max_new_tokens=1)
    turns = hand.fresh(page + 1)
    for _ in range(3 if hand.small else 8):
        value = hand.ask(turns, max_new_tokens=3)
        turns += (value.tokens if value is not None and value.tokens else ()) + hand.fresh(page // 3 + 1)


@case(
    "cache.every_length_hits",
    invariants=("I21",),
    needs=("promise.counts_cached", "promise.keeps_last"),
    seen={"hit": 8, "cold": 8, "tail": 8},
    plan=lengths,
)
def test_every_length_hits(step: Step) -> None:
    """The repeat of the last prompt has all whole pages before its last token in the cache, whatever its length.

    A length at the end of a page or of a chunk that misses or is hit in full, tokens of the answer that are counted as
    the prompt's, a hit that is told as longer than what was ever computed (vllm#25787, TensorRT-LLM#15655).
    """
    all_alike(step)
    for op, reply in step.parts():
        if not stays_judged(op):
            continue
        value, page = answered(op, reply), step.story.config.page_size
        if value.cached_tokens is None:
            continue
        _, most = step.story.cached_bounds(op)
        repeats = bool(step.story.served) and step.story.served[-1] == (op.salt, op.tokens)
        least = (len(op.tokens) - 1) // page * page if repeats else 0
        why = "all whole pages without the last token were computed just before" if repeats else "no more is shared"
        _between(op, value.cached_tokens, (least, most), why)


def pressed(draw: Draw, table: Table) -> None:
    """Prompts for more than the pool, half of them with a common start; then again, last ones first, and together."""
    hand = Hand(draw, table)
    room = hand.service.tokens_max
    only_if(room is not None, "the server does not tell how many tokens its pool holds")
    pool = room or 0
    only_if(pool <= POOL_TOKENS_MAX, f"a pool of {pool} tokens; at most {POOL_TOKENS_MAX} are filled")
    most = max(2, min(hand.config.context_tokens - 80, pool // PROMPTS_MIN))
    page = hand.config.page_size
    shared = hand.fresh(max(1, most // 3 // page * page))
    prompts: list[Tokens] = []
    while sum(map(len, prompts)) < pool * POOL_PART:
        count = most - hand.random.randrange(max(1, min(page, most // 4)))
        prompts.append(hand.fork(shared, len(shared), count - len(shared)) if len(prompts) % 2 else hand.fresh(count))
    for _ in range(1 if hand.small else 2):
        for prompt in prompts:
            hand.both(prompt, max_new_tokens=2)
        for prompt in reversed(prompts):
            hand.ask(prompt, max_new_tokens=2)
        some = hand.random.sample(prompts, 4)
        hand.together([hand.request(prompt, max_new_tokens=2) for prompt in (*some, hand.fresh(page + 1))])
        hand.random.shuffle(prompts)


@case(
    "cache.answers_under_pressure",
    invariants=("I02", "I05", "I19"),
    needs=("op.together", "promise.scores", "promise.counts_cached"),
    seen={"evicted": 3, "hit": 3, "cold": 5, "compared": 10, "together": 1},
    plan=pressed,
)
def test_answers_under_pressure(step: Step) -> None:
    """Prompts for more than the pool holds are answered as alone: those that are cached, and those that were evicted.

    A page that is found after it went to another prompt, the end of a prefix evicted under its beginning or the other
    way round, a batch that needs the pages which it evicts (sglang#36738, vllm#46278).
    """
    all_alike(step)
    for op, value in step.answers():
        if stays_judged(op) and value.cached_tokens is not None and len(list(step.parts())) == 1:
            _, most = step.story.cached_bounds(op)
            _between(op, value.cached_tokens, (0, most), "no more than that was ever computed")


def salted(draw: Draw, table: Table) -> None:
    """The same prompts with no salt, with one, with another that begins like it, and again; forks, and all at once."""
    hand = Hand(draw, table)
    page = hand.config.page_size
    salts = ("", "blue", "blue1") if hand.small else ("", "blue", "blue1", "Blue", "1")
    prompts = [hand.fresh(count) for count in (3 * page + 1, page + 2)]
    for prompt in prompts:
        if hand.story.promises("control"):
            hand.ask(prompt, arm="control")
        for salt in (*salts, *reversed(salts)):
            hand.ask(prompt, salt=salt)
    for salt in salts[1:]:
        hand.ask(hand.fork(prompts[0], 2 * page, page), salt=salt)
    prompt = hand.fresh(2 * page + 1)
    for _ in range(2):
        hand.together([hand.request(prompt, salt=salt) for salt in salts])
    hand.ask(prompt, salt="green")


@case(
    "cache.salts_apart",
    invariants=("I05", "I21"),
    needs=("op.together", "promise.salts", "promise.scores", "promise.counts_cached", "promise.keeps_finished"),
    seen={"with another salt": 6, "hit": 6, "cold": 6, "compared": 10, "together": 2},
    plan=salted,
)
def test_salts_apart(step: Step) -> None:
    """A prompt is a full hit for those with its salt and none for others, and its answer is the same for all.

    A salt that only the router knows, or that decides at the first page alone; one that is compared in part; one that
    is new for each request, so that nobody hits (vllm#53495).
    """
    all_alike(step)
    for op, reply in step.parts():
        if not stays_judged(op):
            continue
        value = answered(op, reply)
        if value.cached_tokens is not None:
            least, most = step.story.cached_bounds(op)
            salt = f" and salt {op.salt!r}" if op.salt else " and no salt"
            _between(op, value.cached_tokens, (least, most), "so much of it was asked with the same salt", salt)


def _between(op: Generate, cached: int, bounds: tuple[int, int], why: str, more: str = "") -> None:
    least, most = bounds
    seen = f"{cached} cached tokens of request {op.request} with {len(op.tokens)}{more}"
    require(least <= cached <= most, seen, f"{least} to {most}" if least < most else f"{most}", why)

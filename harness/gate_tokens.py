"""`kvshard gate tokens`: the same tokens scored by two servers, and how far their log probabilities are apart.

Each prompt is asked three times: for its greedy answer, for the scores of the continuation behind the prompt, which
then may come from the cache, and for the scores of all tokens. The baseline is asked all of it twice.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.gate_prompts import Encoded, Prompt, Tokens, encoded, read
from harness.gate_run import EXIT_OF, write_json
from harness.gate_servers import Server, opened
from harness.gate_tasks import Wanted, load
from harness.gate_tokens_table import Parted, TokensResult, sentence, shown
from harness.render import console_for
from harness.stats_gate import POINTS, Outcome
from harness.stats_tokens import BITWISE, Limits, Row, judge_tokens
from harness.types import Generated
from harness.usage import UserError

FAILED_AT_FIRST, FAILED_IN_A_ROW = 3, 8  # prompts: then a server is gone, and each further one may take all its time


RESTORED_MIN = 50.0  # percent of the prompts that have to come from the host, unless --cached-min says more


class Answers(NamedTuple):
    """What one server says of one prompt."""

    written: Generated
    cached: Generated | None
    computed: Generated


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    prompts = _prompts(args)
    with (
        opened(args.baseline, "--baseline", args.timeout, args.concurrency) as baseline,
        opened(args.engine, "--engine", args.timeout, args.concurrency) as engine,
    ):
        limits = _limits(args, (baseline, engine))
        result = compared(encoded(prompts, baseline.client), baseline, engine, limits, args)
    if args.out is not None:
        write_json(args.out, msgspec.to_builtins(result))
    write_json(args.json, msgspec.to_builtins(result))
    console_for(sys.stdout).print(shown(result))
    return dict(EXIT_OF)[result.outcome]


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    if (args.prompts is None) == (args.task is None):
        raise UserError("gate tokens: expected one of --prompts FILE.jsonl and --task TASK, to know what to ask")
    if args.prompts is not None:
        return read(Path(args.prompts), args.limit)
    task = load(Wanted(task=args.task, data=args.data, limit=args.limit))
    return [Prompt(item.key, item.prompt) for item in task.items]


def _limits(args: argparse.Namespace, servers: Sequence[Server]) -> Limits:
    """What the command line says, else what rounding explains in the type that the servers compute in."""
    if args.bitwise:
        if args.tolerance is not None or args.far is not None:
            raise UserError("--bitwise wants equality: leave out --tolerance and --far")
        return BITWISE._replace(alpha=args.alpha)
    told = [server.manifest.service for server in servers if server.manifest.service is not None]
    near = args.tolerance if args.tolerance is not None else max(each.logprob_near for each in told)
    far = args.far if args.far is not None else max([near, *(each.logprob_far for each in told)])
    if far < near:
        raise UserError(f"--far {far:g} is less than the tolerance {near:g}; expected as much or more")
    return Limits(near, far, args.share_max / POINTS, args.alpha)


def compared(
    prompts: Sequence[Encoded], baseline: Server, engine: Server, limits: Limits, args: argparse.Namespace
) -> TokensResult:
    """Asks both servers and judges. Raises `UserError` when a server is gone."""
    rows: list[Row] = []
    failed: dict[str, str] = {}
    parted: list[Parted] = []
    parted_again: list[Parted] = []
    hits: list[bool | None] = []
    in_a_row = 0
    # what is to be on the host is evicted once, after all prompts were asked
    for part in _parts(prompts, len(prompts) if args.restored else args.concurrency):
        if in_a_row >= max(FAILED_IN_A_ROW, args.concurrency):
            failed |= {prompt.name: f"not asked, since {in_a_row} in a row had failed" for prompt in part}
            continue
        for prompt, found in zip(part, _asked(part, baseline, engine, args), strict=True):
            if isinstance(found, str):
                failed[prompt.name], in_a_row = found, in_a_row + 1
                if in_a_row >= FAILED_AT_FIRST and not rows:
                    raise UserError(f"the first {in_a_row} prompts failed, so no more are asked; the last one: {found}")
                continue
            in_a_row = 0
            whole, (first, again, other) = found
            rows += _rows(prompt, whole, first, again, other)
            parted += _parted(prompt.name, first.written, other.written)
            parted_again += _parted(prompt.name, first.written, again.written)
            told = None
            if other.cached is not None:
                told = other.cached.cached_host if args.restored else other.cached.cached_tokens
            hits.append(None if told is None else told > 0)
    judged = judge_tokens(rows, limits, baseline.page) if any(row.tokens for row in rows) else None
    result = TokensResult(
        outcome=Outcome.INVALID,
        said="",
        engine=args.engine,
        baseline=args.baseline,
        prompts=len(prompts),
        failed=failed,
        limits=limits._asdict(),
        page=baseline.page,
        page_is_told=baseline.tells_page,
        greedy=args.greedy or args.bitwise,
        restored=args.restored,
        parted=tuple(parted),
        parted_again=tuple(parted_again),
        hits=None if None in hits or not hits else sum(map(bool, hits)),
        judged=judged,
    )
    least = RESTORED_MIN if args.restored and not args.cached_min else args.cached_min
    return concluded(result, args.unjudged_max / POINTS, least / POINTS)


def _parts(prompts: Sequence[Encoded], size: int) -> Iterator[Sequence[Encoded]]:
    for at in range(0, len(prompts), size):
        yield prompts[at : at + size]


Found = tuple[Tokens, tuple[Answers, Answers, Answers]]


def _asked(part: Sequence[Encoded], baseline: Server, engine: Server, args: argparse.Namespace) -> list[Found | str]:
    """For each prompt: all its tokens, and the answers of baseline, baseline again and engine; or why there are none.

    The baseline's answer is the continuation of a prompt that has none.
    """
    new: int = args.tokens
    own = baseline.ask([baseline.op(each.tokens, new, -1) for each in part])
    gone = [answer for answer in own if isinstance(answer, str)]
    if len(gone) == len(part):
        return [f"baseline: {answer}" for answer in gone]
    written = [own, engine.ask([engine.op(each.tokens, new, -1) for each in part])]
    if args.restored:
        engine.press(args.pressure)
    wholes: list[Tokens | str] = []
    for prompt, answer in zip(part, written[0], strict=True):
        if isinstance(answer, str):
            wholes.append(f"baseline: {answer}")
        elif prompt.continuation:
            wholes.append((*prompt.tokens, *prompt.continuation))
        else:
            wholes.append((*prompt.tokens, *(answer.tokens or ())))
    arms = [_scored(part, wholes, server, found) for server, found in zip((baseline, engine), written, strict=True)]
    second = baseline.ask([baseline.op(each.tokens, new, -1) for each in part])
    again = _scored(part, wholes, baseline, second)
    results: list[Found | str] = []
    for whole, first, repeat, other in zip(wholes, arms[0], again, arms[1], strict=True):
        if isinstance(whole, str):
            results.append(whole)
        elif isinstance(first, str) or isinstance(repeat, str):
            results.append(f"baseline: {first if isinstance(first, str) else repeat}")
        elif isinstance(other, str):
            results.append(f"engine: {other}")
        else:
            results.append((whole, (first, repeat, other)))
    return results


def _scored(
    part: Sequence[Encoded], wholes: Sequence[Tokens | str], server: Server, written: Sequence[Generated | str]
) -> list[Answers | str]:
    """What one server says of a part's prompts; only those that have an answer are asked on."""
    good = {
        at: whole
        for at, (whole, answer) in enumerate(zip(wholes, written, strict=True))
        if not isinstance(whole, str) and not isinstance(answer, str)
    }
    behind = [at for at, whole in good.items() if server.scores_from and len(whole) > len(part[at].tokens)]
    asked = server.ask([server.op(good[at], 1, len(part[at].tokens)) for at in behind])
    cached = dict(zip(behind, asked, strict=True))
    computed = dict(zip(good, server.ask([server.op(whole, 1, 0) for whole in good.values()]), strict=True))
    results: list[Answers | str] = []
    for at, answer in enumerate(written):
        scores, all_scores = cached.get(at), computed.get(at)
        if isinstance(answer, str):
            results.append(answer)
        elif all_scores is None or isinstance(all_scores, str):
            results.append(all_scores or "not asked")
        elif isinstance(scores, str):
            results.append(scores)
        else:
            wrong = _lacks(all_scores, len(wholes[at])) or (
                "" if scores is None else _lacks(scores, len(wholes[at]) - len(part[at].tokens))
            )
            results.append(wrong or Answers(answer, scores, all_scores))
    return results


def _lacks(answer: Generated, count: int) -> str:
    told = 0 if answer.input_logprobs is None else len(answer.input_logprobs)
    return "" if told == count else f"told {told} log probabilities of {count} tokens that were to be scored"


def _rows(prompt: Encoded, whole: Tokens, first: Answers, again: Answers, other: Answers) -> Iterator[Row]:
    """The values of an item; a token that a server tells nothing of, as the first one, is left out in all arms."""
    behind = len(prompt.tokens)
    for way, start, tokens in (("computed", 0, whole), ("cached", behind, whole[behind:])):
        answers = [getattr(each, way) for each in (first, other, again)]
        if None in answers:
            continue
        values = [each.input_logprobs for each in answers]
        skip = next((at for at, each in enumerate(zip(*values, strict=True)) if None not in each), len(tokens))
        arms = [tuple(math.nan if value is None else float(value) for value in each[skip:]) for each in values]
        yield Row(prompt.name, way, start + skip, tokens[skip:], *arms)
    count = min(_common(first.written, each.written) for each in (other, again))
    scores = [(each.written.logprobs or ())[:count] for each in (first, other, again)]
    if all(len(each) == count for each in scores) and count:
        yield Row(prompt.name, "written", behind, (first.written.tokens or ())[:count], *scores)


def _common(one: Generated, other: Generated) -> int:
    pairs = zip(one.tokens or (), other.tokens or (), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens or ()), len(other.tokens or ())))


def _parted(item: str, one: Generated, other: Generated) -> list[Parted]:
    """Greedy answers by tokens, or by characters where a server tells no tokens."""
    told = one.tokens is not None and other.tokens is not None
    a, b = (one.tokens, other.tokens) if told else (one.text or "", other.text or "")
    if a == b or a is None or b is None:
        return []
    at = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return [Parted(item=item, at=at, baseline=a[at] if at < len(a) else None, candidate=b[at] if at < len(b) else None)]


def concluded(result: TokensResult, failed_max: float, cached_min: float) -> TokensResult:
    """With verdict and sentence."""
    outcome, said = _verdict(result, failed_max, cached_min)
    return msgspec.structs.replace(result, outcome=outcome, said=said)


def _verdict(result: TokensResult, failed_max: float, cached_min: float) -> tuple[Outcome, str]:
    judged = result.judged
    if len(result.failed) > failed_max * result.prompts:
        item, why = next(iter(result.failed.items()))
        return Outcome.INVALID, (
            f"{len(result.failed):,} of {result.prompts:,} prompts failed; at most {POINTS * failed_max:g} % may, so "
            f"nothing is said about distances. The first one, {item}: {why}"
        )
    if judged is None:
        return Outcome.INVALID, "No token was scored by both servers, so nothing is said about distances."
    asked = result.prompts - len(result.failed)
    if cached_min and (result.hits is None or result.hits < cached_min * asked):
        tier = "host" if result.restored else "cache"
        had = "the engine does not tell what it had cached" if result.hits is None else f"{result.hits:,} had it"
        return Outcome.INVALID, (
            f"The {tier} was not used: of {asked:,} prompts at least {POINTS * cached_min:g} % were to be read from "
            f"the engine's {tier}, {had}."
        )
    outcome = judged.outcome
    items, own = {each.item for each in result.parted}, {each.item for each in result.parted_again}
    if result.greedy and items and outcome is not Outcome.FAIL:
        # the baseline's own greedy tokens are not the same twice: then they are no measure
        outcome = Outcome.FAIL if items - own and not own else Outcome.INCONCLUSIVE
    return outcome, sentence(result, judged, outcome)

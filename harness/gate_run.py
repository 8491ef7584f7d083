"""What `kvshard gate` does once its command line is read; needs the extra `gate`."""

from __future__ import annotations

import argparse
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from harness import gate_plot, gate_table
from harness.gate_drafts import Drafts, drafts
from harness.record import write_text
from harness.render import console_for
from harness.samples import Samples, State, read
from harness.samples_pairs import CutOff, InvalidRun, Matched, matched, require_valid, runs
from harness.stats import Pairs, calibrate, mcnemar_p, pairs_of
from harness.stats_family import holm
from harness.stats_gate import POINTS, GateResult, Outcome, Terms, judge_pairs, judge_repeats, judge_score
from harness.stats_power import detectable_loss, plan, repeats_needed
from harness.stats_repeats import repeats_of
from harness.stats_simulate import Setting, simulate
from harness.usage import UserError

EXIT_OF = ((Outcome.PASS, 0), (Outcome.FAIL, 1), (Outcome.INVALID, 2), (Outcome.INCONCLUSIVE, 3))
FLIP_RATES = (0.0, 0.01, 0.034, 0.05)  # none, and what servers that are not deterministic were seen to have


def compare(args: argparse.Namespace) -> int:
    """Judges a candidate against a baseline, or against a score."""
    terms = Terms(margin=args.margin / POINTS, alpha=args.alpha, power=args.power)
    if (args.candidate is None) == (args.reference is None):
        raise UserError("compare: expected a baseline A and a candidate B, or a candidate A and --reference PERCENT")
    try:
        result, pairs, seen = _against_score(args, terms) if args.candidate is None else _against_arm(args, terms)
    except InvalidRun as error:
        write_json(args.json, {"outcome": Outcome.INVALID, "said": str(error)})
        raise
    told = None if seen is None else seen._asdict()
    write_json(args.json, {**msgspec.to_builtins(result), **_left_out(pairs), "drafts": told})
    console = console_for(sys.stdout)
    console.print(gate_table.gate(result, pairs))
    if seen is not None:
        console.print(Text(f"drafts: {seen.told}"))
    if pairs is not None and pairs.repeats_max == 1:
        p_cut = mcnemar_p(pairs.truncated_lost, pairs.truncated_gained)
        if p_cut <= terms.alpha:
            console.print(
                f"note: {pairs.truncated_lost:,} answers are cut off in the candidate alone (p = {p_cut:.2g}): read "
                "them, a model that sees a wrong cache often does not stop"
            )
    return dict(EXIT_OF)[result.outcome]


def _left_out(pairs: Matched | None) -> dict[str, Any]:
    """What was not judged."""
    if pairs is None:
        return {}
    names = ("dropped", "only_baseline", "only_candidate", "truncated_lost", "truncated_gained", "unjudged")
    told: dict[str, Any] = msgspec.to_builtins(pairs)
    return {name: told[name] for name in names}


def _against_arm(args: argparse.Namespace, terms: Terms) -> tuple[GateResult, Matched, Drafts | None]:
    arms = read(args.baseline, args.filter), read(args.candidate, args.filter)
    result, pairs = judge_runs(*arms, terms, args.unjudged_max / POINTS, common_only=args.common_only)
    return result, pairs, drafts(*arms)


def judge_runs(
    baseline: Samples, candidate: Samples, terms: Terms, share_max: float, *, common_only: bool = False
) -> tuple[GateResult, Matched]:
    """Raises `InvalidRun` when too many requests failed, or too many answers were cut off and no loss is shown.

    What sees a wrong cache often does not stop: a loss among the answers that ended must not hide behind the others.
    """
    try:
        pairs = matched(baseline, candidate, common_only=common_only, share_max=share_max)
    except CutOff:
        pairs = matched(baseline, candidate, common_only=common_only, share_max=share_max, cut_off_max=1.0)
        result = judge(pairs, terms)
        if result.outcome is not Outcome.FAIL:
            raise
        told = " and ".join(f"{each.truncated:,} of {each.samples:,}" for each in pairs.unjudged)
        return msgspec.structs.replace(result, said=f"{result.said} Cut off and left out: {told} answers."), pairs
    return judge(pairs, terms), pairs


def judge(pairs: Matched, terms: Terms) -> GateResult:
    """With the tests that fit the repeats; repeats that are copies of each other count as one answer."""
    if pairs.repeats_max > 1:
        repeats = repeats_of(pairs.right_baseline, pairs.repeats, pairs.right_candidate, pairs.repeats)
        if not repeats.are_copies:
            return judge_repeats(repeats, terms)
    return judge_pairs(pairs_of(pairs.right_baseline, pairs.right_candidate), terms)


def _against_score(args: argparse.Namespace, terms: Terms) -> tuple[GateResult, None, None]:
    arm = read(args.baseline, args.filter)
    require_valid(arm, args.unjudged_max / POINTS)
    judged = [sample for sample in arm.all if sample.state is State.ANSWERED]
    if len(judged) > len(arm.answers):
        raise UserError(
            f"{arm.name}: repeats against a score alone are not judged; keep the baseline's samples and pair them"
        )
    if not judged:
        raise UserError(f"{arm.name}: no item was answered")
    right = sum(sample.correct for sample in judged)
    return judge_score(right, len(judged), args.reference / POINTS, args.reference_n, terms), None, None


def make_plan(args: argparse.Namespace) -> int:
    """Items and repeats that a loss takes."""
    rates = FLIP_RATES if args.flip_rate is None else (args.flip_rate / POINTS,)
    accuracy = args.accuracy / POINTS
    found = [plan(args.loss / POINTS, rate, args.alpha, args.power, accuracy) for rate in rates]
    console = console_for(sys.stdout)
    console.print(gate_table.plans(found))
    repeats: dict[str, int | None] = {}
    if args.items is not None:
        for rate in rates:
            repeats[f"{rate:g}"] = number = repeats_needed(args.items, args.loss / POINTS, rate, args.alpha, args.power)
            told = f"{number:,} repeats" if number else "no number of repeats"
            console.print(
                f"{args.items:,} items at {POINTS * rate:g} % flips: {told}, for a loss spread over all items"
            )
    rows = [{**each._asdict(), "items": each.items} for each in found]
    write_json(args.json, {"plans": rows, "repeats": repeats})
    return 0


def calibrate_runs(args: argparse.Namespace) -> int:
    """The flip rate of one engine, from its runs."""
    items, answers = runs([read(path, args.filter) for path in args.runs], args.unjudged_max / POINTS)
    found = calibrate(answers)
    pairs = [pairs_of(one, other) for one, other in combinations(answers, 2)]
    smallest = min(holm([p for each in pairs for p in _both_ways(each)]))
    least = detectable_loss(found.n, found.flip_rate, 0.05)
    flipped = [item for item, column in zip(items, zip(*answers, strict=True), strict=True) if len(set(column)) > 1]
    console_for(sys.stdout).print(gate_table.calibration(found, least, smallest))
    points = None if least is None else POINTS * least
    told = {**found._asdict(), "detectable_points": points, "p_smallest_adjusted": smallest, "flipped": flipped}
    write_json(args.json, told)
    return 0


def _both_ways(pairs: Pairs) -> tuple[float, float]:
    return mcnemar_p(pairs.lost, pairs.gained), mcnemar_p(pairs.gained, pairs.lost)


def explain(args: argparse.Namespace) -> int:
    """The items on which the arms differ, with both answers."""
    arms = read(args.baseline, args.filter), read(args.candidate, args.filter)
    matched(*arms, common_only=args.common_only, share_max=1.0)  # an error when the items differ
    flips = _flips(*arms)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = ["what", "item", "repeat", "baseline", "candidate"]
    if any(each["about"] for each in flips):
        heads.insert(2, "about")
    for head in heads:
        table.add_column(head, overflow="fold")
    for each in flips[: args.top]:
        table.add_row(*(str(each[head]) for head in heads))
    console = console_for(sys.stdout)
    counts = ", ".join(
        f"{sum(each['what'] == what for each in flips):,} {what}" for what in ("lost", "gained", "not judged")
    )
    console.print(Text(f"{len(flips):,} answers differ: {counts}"))
    console.print(table)
    if len(flips) > args.top:
        console.print(Text(f"{len(flips) - args.top:,} more: --top {len(flips)}, or --json FILE"))
    write_json(args.json, {"flips": flips})
    return 0


def _flips(baseline: Samples, candidate: Samples) -> list[dict[str, Any]]:
    """Losses first, then gains, then answers that one arm or both have not given."""
    flips = []
    for item, repeats in baseline.answers.items():
        for repeat, one in repeats.items():
            other = candidate.answers.get(item, {}).get(repeat)
            if other is None or (one.state is other.state is State.ANSWERED and one.correct == other.correct):
                continue
            judged = one.state is other.state is State.ANSWERED
            what = ("lost" if one.correct else "gained") if judged else "not judged"
            told = {"what": what, "item": item, "about": one.about or other.about, "repeat": repeat}
            for name, sample in (("baseline", one), ("candidate", other)):
                told[name] = (
                    sample.answer if sample.state is State.ANSWERED else f"[{sample.state}] {sample.error or ''}"
                )
            flips.append(told)
    order = ("lost", "gained", "not judged")
    return sorted(flips, key=lambda each: order.index(str(each["what"])))


def simulate_gates(args: argparse.Namespace) -> int:
    """Operating characteristics."""
    setting = Setting(
        items=tuple(args.items),
        flip_rates=tuple(rate / POINTS for rate in args.flip_rates),
        runs=args.runs,
        seed=args.seed,
        accuracy=args.accuracy / POINTS,
        slack=args.slack / POINTS,
        margin=None if args.margin is None else args.margin / POINTS,
        alpha=args.alpha,
        power=args.power,
    )
    if args.plot is not None:
        gate_plot.require_plot()
    cells = list(simulate(setting))
    write_json(args.json, {"setting": msgspec.to_builtins(setting), "cells": msgspec.to_builtins(cells)})
    if args.plot is not None:
        gate_plot.save(setting, cells, args.plot)
    if args.markdown:
        sys.stdout.write(gate_table.simulation_markdown(setting, cells))
    else:
        console_for(sys.stdout).print(gate_table.simulation(setting, cells))
    return 0


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """The result for a program. Raises `UserError`."""
    if path is not None:
        write_text(path, msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n")

"""`kvshard gate arms`: one task on two conditions at a time, judged item by item, each condition proven to have held.

replicated  another server that is not sharded, both cold
plain       a server that is no P/D pair, both cold
warm        the same items again, from the device
restored    the same items again, from the host, once other prompts have filled the device
load        one request at a time against many, both cold
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness.gate_conditions import Evidence, Place, Run, evaluate, flush, place, press
from harness.gate_drafts import drafts, judge_drafts
from harness.gate_family import Member, as_json, exit_code, judged, shown
from harness.gate_run import judge_runs, write_json
from harness.gate_tasks import Task, Wanted, load
from harness.render import console_for
from harness.samples import write
from harness.samples_pairs import InvalidRun
from harness.stats_gate import POINTS, Terms
from harness.usage import UserError


class Arm(NamedTuple):
    """A comparison that was run; `why` is not empty when its condition did not hold."""

    name: str
    baseline: Run
    candidate: Run
    evidence: str
    why: str = ""


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    if not (args.replicated or args.plain or args.warm or args.restored or args.load):
        raise UserError("gate arms: no arm; expected one or more of --replicated, --plain, --warm, --restored, --load")
    engine = place(args.engine, args.model, args.timeout, args.workers or (), is_chat=args.chat)
    others = {
        name: place(url, None, args.timeout, is_chat=args.chat)
        for name, url in (("replicated", args.replicated), ("plain", args.plain))
        if url is not None
    }
    task = load(
        Wanted(
            args.task, args.data, args.shots_data, args.shots, args.limit, args.filter, args.max_tokens, temperature=0.0
        )
    )
    return compared(task, engine, others, args)


def compared(task: Task, engine: Place, others: dict[str, Place], args: argparse.Namespace) -> int:
    """Runs all arms of a task that is loaded; returns the exit code. Raises `UserError`."""
    terms = Terms(margin=args.margin / POINTS, alpha=args.alpha)
    members = []
    for arm in arms(task, engine, others, args):
        if args.out is not None:
            for name, each in (("baseline", arm.baseline), ("candidate", arm.candidate)):
                samples = each.samples.all
                write(Path(args.out) / f"{arm.name}-{name}.jsonl", samples)
        members += _members(arm, terms, args)
        sys.stderr.write(f"{arm.name}: {members[-1].said}\n")
    found = judged(members, args.alpha)
    write_json(args.json, {"task": task.name, "engine": engine.url, **as_json(found, args.alpha)})
    console_for(sys.stdout).print(shown(found, "arm"))
    return exit_code(found)


def arms(task: Task, engine: Place, others: dict[str, Place], args: argparse.Namespace) -> Iterator[Arm]:
    """Each arm once its runs are done; the engine's cold run is that of all arms that need one."""
    cold = _cold(task, engine, "cold", args.concurrency)
    for name, other in others.items():
        yield Arm(name, _cold(task, other, name, args.concurrency), cold, _both_cold(cold, other))
    if args.warm:
        again = evaluate(task, engine, "warm", args.concurrency)
        yield _hit("warm", cold, again, "device", engine, args.hits_min / POINTS)
    if args.restored:
        tokens = press(engine, args.pressure, args.concurrency)
        again = evaluate(task, engine, "restored", args.concurrency)
        arm = _hit("restored", cold, again, "host", engine, args.hits_min / POINTS)
        yield arm._replace(evidence=f"{arm.evidence}, after {tokens:,} tokens of other prompts")
    if args.load:
        yield _loaded(_cold(task, engine, "alone", 1), _cold(task, engine, "load", args.load), args.load)


def _cold(task: Task, where: Place, name: str, concurrency: int) -> Run:
    flush(where)
    return evaluate(task, where, name, concurrency, is_watched=name == "load")


def _both_cold(cold: Run, other: Place) -> str:
    return f"both caches were dropped; {cold.seen.items:,} items; the other server is {other.url}"


def _hit(name: str, cold: Run, again: Run, tier: str, where: Place, least: float) -> Arm:
    """An arm whose second run has to come from a tier."""
    seen, is_host = again.seen, tier == "host"
    items, tokens = (seen.host, seen.host_tokens) if is_host else (seen.device, seen.device_tokens)
    counted = "not counted" if tokens is None else f"{tokens:,.0f} tokens by the counters"
    evidence = f"{items:,} of {seen.items:,} items had a page from the {tier}, {counted}"
    if is_host and seen.restored is not None and _tells(seen):
        evidence += f", {seen.restored:.0%} of the tokens that were not on the device"
    # a server behind a router may tell nothing of its cache: then a page for each such item has to be in the counters
    enough = items >= least * seen.items or (not _tells(seen) and (tokens or 0) >= least * seen.items * where.page)
    enough = enough or (is_host and _tells(seen) and (seen.restored or 0) >= least)
    why = (
        ""
        if enough
        else f"The {tier} tier was not used: {evidence}; at least {POINTS * least:g} % of the items are to have one."
    )
    return Arm(name, cold, again, evidence, why)


def _tells(seen: Evidence) -> bool:
    return seen.device + seen.host > 0


def _loaded(alone: Run, load: Run, wanted: int) -> Arm:
    seen = load.seen
    server = "how many ran at once was not seen" if seen.running_max is None else f"{seen.running_max:,} ran at once"
    evidence = f"{alone.seen.in_flight_max:,} and {seen.in_flight_max:,} requests in flight; {server}"
    reached = seen.in_flight_max >= wanted and seen.running_max != 1
    why = "" if reached else f"The load was not reached: {evidence}; {wanted:,} at once were to be, with enough items."
    return Arm("load", alone, load, evidence, why)


def _members(arm: Arm, terms: Terms, args: argparse.Namespace) -> list[Member]:
    """What the arm's answers say and, where that is asked for, what its drafts say."""
    if arm.why:
        return [Member(name=arm.name, said=arm.why, evidence=arm.evidence)]
    seen = drafts(arm.baseline.samples, arm.candidate.samples)
    evidence = arm.evidence if seen is None else f"{arm.evidence}; {seen.told}"
    try:
        result, _ = judge_runs(arm.baseline.samples, arm.candidate.samples, terms, args.unjudged_max / POINTS)
    except InvalidRun as error:
        return [Member(name=arm.name, said=str(error), evidence=evidence)]
    members = [Member(name=arm.name, said=result.said, evidence=evidence, result=result)]
    if args.draft_margin is None:
        return members
    name = f"{arm.name} drafts"
    if seen is None:
        said = "No item that both runs answered alike has an accept length in both: do both engines draft?"
        return [*members, Member(name=name, said=said)]
    result = judge_drafts(seen, Terms(margin=args.draft_margin / POINTS, alpha=terms.alpha))
    return [*members, Member(name=name, said=result.said, result=result)]

"""`kvshard gate sequential`: runs of a candidate one after another, each one new evidence with its own error rate."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.gate_run import EXIT_OF, write_json
from harness.gate_table import STYLES
from harness.render import console_for
from harness.samples import Samples, read
from harness.samples_pairs import InvalidRun, runs
from harness.stats_gate import POINTS, Outcome
from harness.stats_looks import Look, alpha_of, looks
from harness.usage import UserError


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    paths = [args.baseline, *args.candidates]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UserError(f"{twice}: is given twice; expected runs that differ: a copy is no new evidence")
    files = [read(path, args.filter) for path in paths]
    several = next((each.name for each in files if len(each.all) > len(each.answers)), None)
    if several is not None:
        raise UserError(f"{several}: has repeats; expected one answer for each item: `gate compare` judges repeats")
    try:
        items, answers = runs(files, args.unjudged_max / POINTS)
    except InvalidRun as error:
        write_json(args.json, {"outcome": Outcome.INVALID, "said": str(error)})
        raise
    order = sorted(range(len(items)), key=lambda at: hashlib.sha256(f"{args.seed}:{items[at]}".encode()).digest())
    baseline, *candidates = ([answer[at] for at in order] for answer in answers)
    found = looks(baseline, candidates, args.margin / POINTS, args.alpha, args.flip_rate / POINTS)
    said = sentence(found, len(candidates), args.margin, args.alpha)
    told = {"outcome": found[-1].outcome, "said": said, "alpha": args.alpha, "margin_points": args.margin}
    write_json(args.json, {**told, "runs": len(candidates), "looks": msgspec.to_builtins(found)})
    console_for(sys.stdout).print(shown(found, files[1:], said))
    return dict(EXIT_OF)[found[-1].outcome]


def sentence(found: Sequence[Look], given: int, margin: float, alpha: float) -> str:
    """The verdict as a person would say it."""
    last = found[-1]
    points = f"{POINTS * (last.candidate - last.baseline):+.2f} points"
    evidence = (
        f"after {last.items:,} of {last.n:,} items of its first run"
        if last.runs == 1
        else f"by {last.runs} runs of {last.n:,} items together"
    )
    rate = f"tested at {last.alpha:g} of {alpha:g}"
    if last.outcome is Outcome.INCONCLUSIVE:
        more = f"a further run would be tested at {alpha_of(last.runs + 1, alpha):g}"
        return f"Neither a loss nor the absence of one of {margin:g} points is shown {evidence} ({points}); {more}."
    what = "is worse" if last.outcome is Outcome.FAIL else f"is not {margin:g} points worse"
    unused = given - last.runs
    rest = f" {unused} later run{'s' * (unused > 1)} cannot change that and did not enter." if unused else ""
    return f"The candidate {what}: shown {evidence}, {rate} ({points}).{rest}"


def shown(found: Sequence[Look], candidates: Sequence[Samples], said: str) -> RenderableType:
    """A row for each look."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("look", "with", "items", "baseline %", "candidate %", "p loss", "p margin", "alpha", "verdict"):
        table.add_column(head, justify="right" if head not in {"with", "verdict"} else "left")
    for each, file in zip(found, candidates, strict=False):
        shares = (f"{POINTS * each.baseline:.2f}", f"{POINTS * each.candidate:.2f}")
        ps = (f"{each.p_loss:.2g}", f"{each.p_noninferior:.2g}", f"{each.alpha:g}")
        table.add_row(str(each.runs), file.name, f"{each.items:,} of {each.n:,}", *shares, *ps, each.outcome)
    for file in candidates[len(found) :]:
        table.add_row("-", file.name, *("",) * 6, "not looked at")
    outcome = found[-1].outcome
    return Group(Text(f"{outcome}: {said}", style=dict(STYLES)[outcome]), table)

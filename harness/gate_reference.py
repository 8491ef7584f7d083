"""Recorded results of engines that were right, and a new run judged against the one that fits it.

A reference is of an engine, a model with its revision, and a task with filter and examples. With the per-item file of
its run a new one is judged pair by pair, else against the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec

from harness.gate_conditions import Place, evaluate
from harness.gate_drafts import drafts
from harness.gate_run import judge_runs
from harness.gate_tasks import Task, Wanted, load
from harness.samples import Samples, State, read
from harness.samples_pairs import InvalidRun, require_valid
from harness.stats_gate import POINTS, GateResult, Outcome, Terms, judge_score
from harness.usage import UserError, toml_of

MARGIN_POINTS, ALPHA, UNJUDGED_MAX = 2.0, 0.05, 0.01
EXPECTED = "expected [[reference]] tables, see docs/gates.md"
HOW_TO = """record one on an engine that is right:

  kvshard gate run --engine {engine_url} --task TASK --out {folder}/NAME.jsonl

and add what it came to to {path}:

  [[reference]]
  engine = "{engine}"
  model = "{model}"
  revision = "WHAT TELLS THESE WEIGHTS FROM OTHERS"
  task = "TASK"
  filter = "FILTER"
  shots = 0
  date = {today}
  n = ITEMS
  score = PERCENT
  samples = "NAME.jsonl"
"""


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine scored; `samples`, `data` and a task's file are relative to the folder of the references."""

    engine: str  # as /v1/models says who owns the model
    model: str  # as /v1/models has it
    revision: str  # of the weights: not told by servers, so it is for who reads
    task: str
    filter: str
    shots: int
    date: date
    n: int
    score: float  # percent
    limit: int | None = None  # the first items only
    max_tokens: int | None = None
    data: str | None = None
    samples: str | None = None
    margin: float = MARGIN_POINTS  # points
    note: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run; `evidence` is what it rests on, line by line."""

    outcome: Outcome
    said: str
    evidence: tuple[str, ...]
    result: GateResult | None = None


def references(path: Path) -> list[Reference]:
    """Those of a file. Raises `UserError`."""
    try:
        return msgspec.convert(toml_of(path, EXPECTED).get("reference", []), list[Reference])
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}; {EXPECTED}") from error


def fitting(found: Sequence[Reference], engine: str, model: str, tasks: Sequence[str] = ()) -> list[Reference]:
    """Those of this engine and model, and of one of these tasks if there are any."""
    return [
        each
        for each in found
        if each.engine == engine
        and (model == each.model or model.endswith(f"/{each.model}"))  # a server may name a model by its folder
        and (not tasks or each.task in tasks)
    ]


def missing(path: Path, engine: str, url: str, model: str, tasks: Sequence[str] = ()) -> str:
    """What to do where none fits."""
    what = f" and task {', '.join(tasks)}" if tasks else ""
    told = {"engine": engine, "engine_url": url, "model": model, "path": path, "folder": path.parent}
    how = HOW_TO.format(**told, today=f"{date.today():%Y-%m-%d}")  # noqa: DTZ011  # the day where it is recorded
    return f"{path}: no reference of engine {engine!r} with model {model!r}{what}; {how}"


def judged(reference: Reference, folder: Path, where: Place, concurrency: int) -> Verdict:
    """Runs the task and judges it. Raises `UserError` when task, file or server cannot be used."""
    task = load(
        Wanted(
            task=str(folder / reference.task) if reference.task.endswith((".yaml", ".yml")) else reference.task,
            data=folder / reference.data if reference.data else None,
            shots=reference.shots or None,
            limit=reference.limit,
            filter=reference.filter,
            max_tokens=reference.max_tokens,
        )
    )
    return judged_task(task, reference, folder, where, concurrency)


def judged_task(task: Task, reference: Reference, folder: Path, where: Place, concurrency: int) -> Verdict:
    """The same with a task that is loaded."""
    if len(task.items) != reference.n or task.shots != reference.shots:
        raise UserError(
            f"reference of {reference.task}: {reference.n} items with {reference.shots} shots; the task has "
            f"{len(task.items)} with {task.shots}: are data and limit those of the reference?"
        )
    run = evaluate(task, where, "candidate", concurrency)
    terms = Terms(margin=reference.margin / POINTS, alpha=ALPHA)
    kept = None if reference.samples is None else read(folder / reference.samples)
    evidence = _evidence(reference, kept, run.samples)
    try:
        if kept is not None:
            result, _ = judge_runs(kept, run.samples, terms, UNJUDGED_MAX)
        else:
            require_valid(run.samples, UNJUDGED_MAX)
            result = _scored(run.samples, reference, terms)
    except InvalidRun as error:
        return Verdict(outcome=Outcome.INVALID, said=str(error), evidence=evidence)
    return Verdict(outcome=result.outcome, said=result.said, evidence=evidence, result=result)


def _scored(candidate: Samples, reference: Reference, terms: Terms) -> GateResult:
    answered = [sample for sample in candidate.all if sample.state is State.ANSWERED]
    right = sum(sample.correct for sample in answered)
    return judge_score(right, len(answered), reference.score / POINTS, reference.n, terms)


def _evidence(reference: Reference, kept: Samples | None, candidate: Samples) -> tuple[str, ...]:
    kind = "item by item" if reference.samples else "by its score alone"
    told = f"{reference.engine} with {reference.model} ({reference.revision}), {reference.date}"
    errors = [sample.error for sample in candidate.all if sample.error is not None]
    states = f"{len(errors):,} failed, {candidate.count(State.TRUNCATED):,} cut off of {len(candidate.all):,}"
    lines = [
        f"reference: {told}: {reference.score:.2f} % of {reference.n:,}, compared {kind}",
        f"task: {reference.task}, filter {reference.filter}, {reference.shots} shots",
        f"margin: {reference.margin:g} points at alpha {ALPHA:g}",
        f"requests: {states}" + (f"; the last error: {errors[-1]}" if errors else ""),
    ]
    seen = None if kept is None else drafts(kept, candidate)
    return (*lines, f"drafts: {seen.told}") if seen is not None else tuple(lines)

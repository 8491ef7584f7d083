"""The table of trials of accuracy gates: a fault in servers, how a gate looks at them, and what it has to say.

    topology = "fixtures/topologies/p2d2_small.toml"
    task = "fixtures/tasks/recall.yaml"                # of lm-eval, for documents of {context, page, prompt, answer}
    asked = ["--engine", "{url:router}"]               # words of `kvshard gate arms` for all trials
    power = 0.99                                       # that `kvshard gate plan` is asked for
    contexts = 24                                      # pages of a context; every question is about one of them

    [sweep]                                            # of `python -m ci.gate_sweep`: the same look at many faults
    workers = ["prefill", "decode"]
    arm = ["--restored", "--replicated", "{url:control}"]
    loss = 40

    [[trial]]
    name = "kept by every rank"
    fault = "pool.every-rank-persists"                 # without one nothing is planted
    workers = ["prefill"]                              # that it is planted in
    arm = ["--replicated", "{url:control}"]            # words of `kvshard gate arms` for this one
    loss = 30                                          # points that `kvshard gate plan` is asked for: it says n
    margin = 5                                         # points (default: those of `loss`)
    unrelated = 89                                     # percent of the items that the fault does not reach (default 0)
    drafts = true                                      # the accept lengths are judged, and all answers have to pass
    expected = "fail"                                  # what every run has to say: fail, pass or inconclusive

The plan is for a flip rate of 0: the reference gives the same answers each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from harness.launch.topology import Topology, read
from harness.stats_power import plan
from harness.usage import UserError, nearest, toml_of

KEYS = ("topology", "task", "asked", "power", "contexts", "trial", "sweep")
ALPHA, ACCURACY, POINTS = 0.05, 0.94, 100  # of `kvshard gate plan` and `gate arms`

Points = Annotated[float, msgspec.Meta(gt=0, lt=POINTS)]
Words = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gate on servers with one fault, or with none."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    arm: Words
    loss: Points
    expected: Literal["fail", "pass", "inconclusive"]
    fault: str = ""
    workers: tuple[str, ...] = ()
    margin: Points | None = None
    unrelated: Annotated[float, msgspec.Meta(ge=0, lt=POINTS)] = 0.0
    drafts: bool = False

    @property
    def its_margin(self) -> float:
        """Points."""
        return self.loss if self.margin is None else self.margin

    @property
    def words(self) -> Words:
        """Of `kvshard gate arms`, for what the trial judges."""
        margin = f"{self.its_margin:g}"
        return (*self.arm, "--margin", margin, *(("--draft-margin", margin) if self.drafts else ()))


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How each fault of a library is looked at once."""

    workers: Words
    arm: Words
    loss: Points

    def trial(self, fault: str) -> Trial:
        """With this fault; drafts are judged beside the answers."""
        return Trial(
            name=fault, fault=fault, workers=self.workers, arm=self.arm, loss=self.loss, drafts=True, expected="pass"
        )


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a file."""

    topology: str
    task: str
    asked: Words
    power: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    contexts: Annotated[int, msgspec.Meta(ge=2)]
    trial: Annotated[tuple[Trial, ...], msgspec.Meta(min_length=1)]
    sweep: Sweep | None = None

    def items(self, trial: Trial) -> int:
        """The n that `kvshard gate plan --loss LOSS --flip-rate 0` asks for, for both promises. Raises `UserError`."""
        items = plan(trial.loss / POINTS, 0.0, ALPHA, self.power, ACCURACY).items
        if items is None:
            raise UserError(f"trial {trial.name!r}: no number of items shows {trial.loss:g} points")
        return items


def table(path: Path, faults: Collection[str]) -> Table:
    """The table of a file; `faults` are the ids that there are. Raises `UserError`."""
    try:
        found = msgspec.convert(toml_of(path, f"expected a table of trials, see {__name__}"), Table)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}; expected {', '.join(KEYS)}, see {__name__}") from error
    for problem in _problems(found, faults):
        raise UserError(f"{path}: {problem}")
    return found


def _problems(found: Table, faults: Collection[str]) -> Iterator[str]:
    names = [trial.name for trial in found.trial]
    there = [worker.name for worker in read(Path(found.topology)).workers]
    for trial in found.trial:
        place = f"trial {trial.name!r}"
        if names.count(trial.name) > 1:
            yield f"{place} is there {names.count(trial.name)} times; give each a name of its own"
        if trial.fault and trial.fault not in faults:
            yield f"{place}: fault {trial.fault!r} is in no library{nearest(trial.fault, faults)}"
        if bool(trial.fault) != bool(trial.workers):
            yield f"{place}: expected `fault` and `workers`, or neither where nothing is planted"
    sweep = [] if found.sweep is None else [found.sweep.trial("sweep")]
    for trial in (*found.trial, *sweep):
        for name in trial.workers:
            if name not in there:
                yield f"trial {trial.name!r}: worker {name!r}; expected one of the topology: {', '.join(there)}"


def chosen(found: Table, only: Sequence[str]) -> list[Trial]:
    """The trials with these names, in the order of the table; all when none is named. Raises `UserError`."""
    names = [trial.name for trial in found.trial]
    for name in only:
        if name not in names:
            raise UserError(f"--only {name!r}: not in the table{nearest(name, names)} There is: {', '.join(names)}")
    return [trial for trial in found.trial if not only or trial.name in only]


def topology(found: Table, trial: Trial) -> Topology:
    """The topology with the trial's fault planted. Raises `TopologyError`."""
    whole = read(Path(found.topology))
    planted = {"KVSHARD_FAULT": trial.fault} if trial.fault else {}
    workers = tuple(
        replace(worker, env={**worker.env, **planted}) if worker.name in trial.workers else worker
        for worker in whole.workers
    )
    return replace(whole, workers=workers)

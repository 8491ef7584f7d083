"""Hunts one planted fault with the cases of a suite, asks whether a variant passes them all, or a canary none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from harness import play
from harness.adapter import Engine, Session
from harness.canary import CANARIES, Canary
from harness.case import Case
from harness.connect import close, connect
from harness.fault import Fault, Variant, planted
from harness.fault_files import LIBRARY, library
from harness.hunted import Hunted, Outcome
from harness.known import known_failures
from harness.places import places
from harness.result import CaseResult
from harness.suite import SUITES, all_cases
from harness.trace import Trace, replay
from harness.trial import BUDGETS, Budget, Trial
from harness.types import Config, Manifest, Verdict
from harness.unit_tests import ROOT, first_failure

MIDDLE = 4  # of a small budget, between it and a full one
UNTOUCHED = "nothing that it changes was run"


@dataclass(frozen=True, slots=True)
class Hunt:
    """A job: one fault or variant, one seed. With `whole` every case is tried, and nothing is shrunk."""

    id: str
    seed: int
    engine: str
    budget: str
    faults: str = LIBRARY
    suite: str = SUITES[0]
    whole: bool = False
    shrinks: bool = True

    @property
    def most(self) -> Budget:
        """The most that is spent on a case."""
        budget = BUDGETS[self.budget]
        return budget if self.shrinks and not self.whole else replace(budget, shrink_seconds=0.0)


@dataclass(frozen=True, slots=True)
class Promising:
    """An engine that does not keep some promises of its manifest, and says so."""

    engine: Engine
    drops: Sequence[str]

    def describe(self) -> Manifest:
        """The manifest without them."""
        manifest = self.engine.describe()
        return msgspec.structs.replace(
            manifest, promises=tuple(each for each in manifest.promises if each not in self.drops)
        )

    def open(self, config: Config) -> Session:
        """A session."""
        return self.engine.open(config)


def hunted(hunt: Hunt) -> Hunted:
    """The job done, in this process."""
    known = library(hunt.faults, checked=False)  # its parent has checked all
    cases = all_cases((hunt.suite,))
    if hunt.id in CANARIES:
        return _shown(CANARIES[hunt.id], hunt, cases)
    if hunt.id in known.variants:
        return _asked(known.variants[hunt.id], hunt, cases)
    fault = known.faults[hunt.id]
    return _tested(fault, hunt) if fault.tests else _hunted(fault, hunt, cases)


def is_named(fault: Fault, made: Case) -> bool:
    """Whether the fault names the beginning of the case's id."""
    return any(made.id.startswith(each) for each in fault.breaks)


def is_expected(fault: Fault, made: Case) -> bool:
    """Whether the fault names an invariant of the case, or the case."""
    return is_named(fault, made) or any(each in made.invariants for each in fault.breaks)


def rounds(fault: Fault, cases: Sequence[Case], budget: Budget) -> Iterator[tuple[Case, Budget]]:
    """What is tried, in order: the cases that the fault names, on a small budget, then a full one, then the others.

    Named by id comes before named by invariant. A small budget is what is spent on the others, and in shrinking.
    """
    small = replace(BUDGETS["smoke"], shrink_seconds=budget.shrink_seconds)
    large = budget.examples > small.examples
    full = budget if large else replace(BUDGETS["commit"], shrink_seconds=budget.shrink_seconds)
    expected = sorted(filter(partial(is_expected, fault), cases), key=partial(is_named, fault), reverse=True)
    others = [made for made in cases if made not in expected]
    if not large:
        plan = [(expected, small), (expected, full), (others, small)]
    else:  # the one that sees it must not wait until all before it have spent all
        middle = replace(small, examples=MIDDLE * small.examples)
        plan = [(expected, small), (expected, middle), (expected, full), (others, small), (others, full)]
    for group, each in plan:
        yield from ((made, each) for made in group)


@dataclass(slots=True)
class _Trials:
    """Tries cases, and remembers what came of them."""

    engine: Engine
    hunt: Hunt
    errors: list[str] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    failed_at: float | None = None  # of the case tried last
    trace: Trace | None = None  # its counterexample

    def result(self, made: Case, budget: Budget) -> CaseResult:
        """One case."""
        trial = Trial(made, self.engine, self.hunt.engine, budget, self.hunt.seed)
        result, self.trace = trial.run()
        if result.verdict is Verdict.FAIL:  # what the engine is known to fail without a fault, too, kills none
            result = known_failures(self.engine.describe()).judged(result, made, self.engine)
        self.tried.add(made.id)
        self.failed_at = trial.failed_at
        if result.verdict is Verdict.ERROR:
            self.errors.append(f"{made.id}: {result.why}")
        return result


def _hunted(fault: Fault, hunt: Hunt, cases: Sequence[Case]) -> Hunted:
    started = time.perf_counter()
    with planted(fault.changes) as reached:
        engine = connect(hunt.engine)
        trials, killers, first, evidence = _Trials(engine, hunt), list[str](), None, None
        for made, each in [(made, hunt.most) for made in cases] if hunt.whole else rounds(fault, cases, hunt.most):
            result = trials.result(made, each)
            if result.verdict is not Verdict.FAIL or result.failure is None or trials.failed_at is None:
                continue
            killers.append(made.id)
            if first is None:
                evidence = (made, trials.trace)
                seconds, shrunk = trials.failed_at - started, time.perf_counter() - trials.failed_at
                first = Hunted(
                    id=hunt.id,
                    seed=hunt.seed,
                    outcome=Outcome.KILLED,
                    case=made.id,
                    claim=result.failure.claim,
                    seen=result.failure.seen,
                    config=result.failure.config,
                    ops=result.failure.ops,
                    raised=result.failure.claim == play.ANSWERS,
                    expected=is_expected(fault, made),
                    seconds=round(seconds, 3),
                    shrink_seconds=round(shrunk, 3) if hunt.most.shrink_seconds else None,
                )
            if not hunt.whole:
                break
        close(engine)
    told = first or Hunted(id=hunt.id, seed=hunt.seed, outcome=Outcome.SURVIVED)
    told = msgspec.structs.replace(told, cases=len(trials.tried), reached=reached.times, killers=tuple(killers))
    if not reached.times:
        wrong = f"{told.case} fails although nothing that it changes was run" if first else ""
        outcome = Outcome.ERROR if wrong else Outcome.IDLE
        return msgspec.structs.replace(told, outcome=outcome, why=wrong or UNTOUCHED)
    if evidence is not None and fails_anyway(*evidence, hunt.engine):
        return msgspec.structs.replace(told, outcome=Outcome.ERROR, why=f"{told.case} fails without the fault as well")
    if first is None and trials.errors:
        return msgspec.structs.replace(told, outcome=Outcome.ERROR, why=trials.errors[0])
    if first is None:
        return msgspec.structs.replace(
            told, why=f"none of {told.cases} cases fails, what it changes was run {told.reached} times"
        )
    return told


def fails_anyway(made: Case, trace: Trace | None, address: str) -> bool:
    """Whether the ops of a counterexample fail an engine as it is, too: the case is wrong then, and proves nothing.

    Where the chunks of a request begin elsewhere in its prompt on that engine, the ops do not fit it.
    """
    if trace is None:
        return False
    engine = connect(address)
    try:
        play_, violation = replay(made, engine, trace.header.config, [step.op for step in trace.steps])
    except Exception:  # noqa: BLE001 - ops that do not fit an engine may confuse a watch
        return False
    finally:
        close(engine)
    begun = places(play_.ops, [*play_.replies, None])
    told = places([step.op for step in trace.steps], [step.reply for step in trace.steps])
    return violation is not None and begun == told[: len(begun)]


def _tested(fault: Fault, hunt: Hunt) -> Hunted:
    """What no op can reach: whether a unit test of the project finds it."""
    started = time.perf_counter()
    missing = [test for test in fault.tests if not (ROOT / test.partition("::")[0]).is_file()]
    with planted(fault.changes) as reached:
        status, failed = (4, "") if missing else first_failure(fault.tests)
    outcome = {0: Outcome.SURVIVED, 1: Outcome.KILLED}.get(status, Outcome.ERROR)
    wrong = f"pytest ended with {status}" + (f": there is no {', '.join(missing)}" if missing else "")
    if outcome is Outcome.KILLED and not reached.times:
        outcome, wrong = Outcome.ERROR, f"{failed} fails although nothing that it changes was run"
    if outcome is Outcome.SURVIVED and not reached.times:
        outcome = Outcome.IDLE
    return Hunted(
        id=hunt.id,
        seed=hunt.seed,
        outcome=outcome,
        why={Outcome.SURVIVED: "its unit tests pass", Outcome.ERROR: wrong, Outcome.IDLE: UNTOUCHED}.get(outcome, ""),
        case=failed,
        expected=bool(failed),
        seconds=round(time.perf_counter() - started, 3),
        cases=len(fault.tests),
        reached=reached.times,
    )


def _asked(variant: Variant, hunt: Hunt, cases: Sequence[Case]) -> Hunted:
    """Whether every case passes a variant, or is skipped for a promise that the variant drops."""
    started = time.perf_counter()
    with planted(variant.changes) as reached:
        engine = connect(hunt.engine)
        trials, bad = _Trials(Promising(engine, variant.drops), hunt), list[CaseResult]()
        for made in cases:
            result = trials.result(made, hunt.most)
            dropped = result.verdict is Verdict.SKIP and any(f"promise.{each}" in result.why for each in variant.drops)
            if result.verdict is not Verdict.PASS and not dropped:
                bad.append(result)
        close(engine)
    outcome = Outcome.REFUSED if bad else Outcome.PASSED if reached.times or not variant.changes else Outcome.IDLE
    first = bad[0] if bad else None
    failure = first.failure if first else None
    return Hunted(
        id=hunt.id,
        seed=hunt.seed,
        outcome=outcome,
        why=f"{first.case}: {first.verdict}, {first.why}" if first else UNTOUCHED if outcome is Outcome.IDLE else "",
        case=first.case if first else "",
        claim=failure.claim if failure else "",
        seen=failure.seen if failure else "",
        config=failure.config if failure else "",
        ops=failure.ops if failure else (),
        seconds=round(time.perf_counter() - started, 3),
        cases=len(trials.tried),
        reached=reached.times,
        killers=tuple(result.case for result in bad),
    )


def _shown(canary: Canary, hunt: Hunt, cases: Sequence[Case]) -> Hunted:
    """Whether no case passes a canary; where not all can see it, whether one does not. Skipped ones have no say."""
    started, budget = time.perf_counter(), replace(BUDGETS["smoke"], shrink_seconds=0.0)
    engine = connect(hunt.engine)
    trials, seeing, blind = _Trials(canary.engine(engine), hunt), list[str](), list[str]()
    for made in cases:
        verdict = trials.result(made, budget).verdict
        if verdict is not Verdict.SKIP:
            (blind if verdict is Verdict.PASS else seeing).append(made.id)
        if seeing and not canary.all_see:
            break
    close(engine)
    unseen = not seeing or (canary.all_see and blind)
    return Hunted(
        id=hunt.id,
        seed=hunt.seed,
        outcome=Outcome.SURVIVED if unseen else Outcome.KILLED,
        why=(f"passes {', '.join(blind)}" if blind else "every case is skipped") if unseen else "",
        case=seeing[0] if seeing else "",
        seconds=round(time.perf_counter() - started, 3),
        cases=len(trials.tried),
        reached=1,
        killers=tuple(seeing),
    )

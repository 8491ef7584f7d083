"""Runs one case against one engine: Hypothesis draws and shrinks, the play judges, and what was seen is counted."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, FlakyStrategyDefinition

from harness.adapter import Engine
from harness.case import Case, ClaimError, Violation, vacuous
from harness.places import places
from harness.play import Play, lacks, raised
from harness.repeatable import without_source_constants
from harness.result import CaseResult, Failure, Progress
from harness.trace import FORMAT, Trace, TraceFooter, TraceHeader, TraceStep, replay, told
from harness.types import AnyOp, AnyReply, Config, Manifest, Verdict


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is spent on one case."""

    name: str
    examples: int
    steps_max: int  # ops of one example
    shrink_seconds: float


BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "smoke": Budget("smoke", examples=5, steps_max=10, shrink_seconds=6.0),
        "commit": Budget("commit", examples=72, steps_max=20, shrink_seconds=15.0),
        "night": Budget("night", examples=3000, steps_max=40, shrink_seconds=90.0),
    }
)


# A small budget goes on in rounds while it has not seen what a case must have seen; a large one has had its chance.
ROUNDS_MAX = 30
ROUNDS_EXAMPLES_MAX = 150
RUNS_FROM = 12  # ops of a counterexample, of which dropping one by one takes too long
STARTS_MAX = 20  # of a search that Hypothesis ended, with another seed each
# Examples of one run of Hypothesis. After its health checks, ten examples, five of six are mutants: copies of the one
# before with a part repeated elsewhere, and of ops most of them say the same again.
FRESH = 10


class NoConfig(Exception):  # noqa: N818  # a reason to skip, not an error
    """The engine's axes hold no config that the case can run on; the message says which axis."""


class _Stop(BaseException):
    """Leaves Hypothesis at once: it lets BaseException through and shrinks everything else."""


@dataclass(slots=True)
class _Found:
    """One counterexample as it was met."""

    config: Config
    ops: list[AnyOp]
    replies: list[AnyReply]
    violation: Violation

    @property
    def size(self) -> tuple[int, int]:
        return len(self.ops), sum(len(told(op)) for op in self.ops)

    def same_kind(self, violation: Violation | None) -> bool:
        return violation is not None and violation.claim == self.violation.claim


@dataclass(slots=True)
class Trial:
    """One case on one engine at one budget. `seed` makes it repeatable; `on_progress` is told of every example."""

    made: Case
    engine: Engine
    address: str
    budget: Budget
    seed: int
    on_progress: Callable[[Progress], None] | None = None
    examples: int = 0
    ops: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    best: _Found | None = None
    failed_at: float | None = None  # time.perf_counter() of the first counterexample

    @property
    def examples_max(self) -> int:
        """Examples to draw; shrinking comes on top."""
        return max(1, round(self.budget.examples * self.made.examples))

    def run(self) -> tuple[CaseResult, Trace | None]:
        """Judges the case. Exceptions of the harness or of `open` become an `error` verdict, never an exception."""
        started = time.perf_counter()
        try:
            manifest = self.engine.describe()
            lacking = lacks(self.made, manifest)
            if lacking:
                raise NoConfig(f"{manifest.name} does not claim {', '.join(lacking)}")
            configs = self.made.configs(manifest.axes)
            for round_ in range(ROUNDS_MAX):
                self._search(configs, round_)
                spent = self.examples >= ROUNDS_EXAMPLES_MAX
                if spent or self.best is not None or not vacuous(self.made, self.seen, manifest.axes):
                    break
        except NoConfig as reason:
            return self._result(Verdict.SKIP, started, str(reason)), None
        except Exception as exception:  # noqa: BLE001  # whatever it is, it is told as a verdict
            return self._result(Verdict.ERROR, started, raised(exception)), None
        if self.best is not None:
            return self._failed(self._trimmed(self.best), manifest, started)
        reasons = vacuous(self.made, self.seen, manifest.axes) or ([] if self.ops else ["no op was applied"])
        verdict = Verdict.UNKNOWN if reasons else Verdict.PASS
        return self._result(verdict, started, "; ".join(reasons)), None

    def _search(self, configs: st.SearchStrategy[Config], round_: int) -> None:
        """Draws examples until the budget is spent or a counterexample is as short as Hypothesis gets it.

        In runs of `FRESH` examples, each from a seed of its own. Where time has a say in an engine's answers, as on a
        real network, the same draws may lead on to other draws. Hypothesis ends a run when it sees that.
        """
        end, flaky = self.examples + self.examples_max, 0
        for start in range(self.examples_max + STARTS_MAX):
            again, before = f":{start}" if start else "", self.examples
            asked = min(FRESH, end - before)
            try:
                self._search_from(f"{self.seed}:{self.made.id}:{round_}{again}", asked, configs)
            except FlakyStrategyDefinition:
                flaky += 1
                if flaky == STARTS_MAX:
                    raise
            else:
                if self.examples - before < asked:  # that is all there is to draw
                    return
            if self.best is not None or self.examples >= end:
                return

    def _search_from(self, seed_text: str, examples: int, configs: st.SearchStrategy[Config]) -> None:
        def example(data: st.DataObject) -> None:
            if self.failed_at is not None and time.perf_counter() - self.failed_at > self.budget.shrink_seconds:
                raise _Stop
            self._example(data, configs)

        run = given(st.data())(example)
        run = seed(zlib.crc32(seed_text.encode()))(run)
        run = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=Verbosity.quiet,
        )(run)
        try:
            with without_source_constants():
                run()
        except _Stop as stop:
            if isinstance(stop.__cause__, Exception):
                raise stop.__cause__ from None
        except (Violation, Flaky):
            if self.best is None:
                raise

    def _example(self, data: st.DataObject, configs: st.SearchStrategy[Config]) -> None:
        self.examples += 1
        if self.on_progress is not None:
            shrinking = self.failed_at is not None
            self.on_progress(
                Progress(case=self.made.id, examples=self.examples, examples_max=self.examples_max, shrinking=shrinking)
            )
        config = data.draw(configs)
        try:
            play = Play(self.made, self.engine, config, self.budget.steps_max)
        except Violation as violation:
            self._keep(_Found(config, [], [], violation))
            raise
        except Exception as exception:
            raise _Stop from exception
        try:
            self.made.plan(data.draw, play)
        except Violation as violation:
            self._keep(_Found(config, list(play.ops), list(play.replies), violation))
            raise
        except Exception as exception:  # the plan's own: nothing to shrink
            raise _Stop from exception
        finally:
            self.ops += len(play.ops)
            play.close()
        self.seen.update(play.watch.seen)

    def _keep(self, found: _Found) -> None:
        if self.failed_at is None:
            self.failed_at = time.perf_counter()
        if self.best is None or found.size <= self.best.size:
            self.best = found

    def _trimmed(self, found: _Found) -> _Found:
        """Drops ops that the violation does not need, which shrinking by draws cannot take apart; long runs first.

        What is left must begin where it began before: an op carries the rows of its place in the prompt.
        """
        deadline = time.perf_counter() + self.budget.shrink_seconds / 2
        count = len(found.ops) // 2 if len(found.ops) > RUNS_FROM else 1
        while count and time.perf_counter() < deadline:
            at = len(found.ops) - count
            while at >= 0 and time.perf_counter() < deadline:
                found = self._without(found, at, count)
                at = min(at, len(found.ops)) - count
            count //= 2
        return found

    def _without(self, found: _Found, at: int, count: int) -> _Found:
        """A counterexample without `count` of its ops, or itself when that shows something else."""
        shorter = found.ops[:at] + found.ops[at + count :]
        try:
            play, violation = replay(self.made, self.engine, found.config, shorter)
        except Exception:  # noqa: BLE001  # a list of ops that no plan draws may confuse a watch: not shorter, then
            return found
        begun = places(play.ops, [*play.replies, None])
        kept = places(found.ops, [*found.replies, None])
        kept = kept[:at] + kept[at + count :]
        if violation is not None and found.same_kind(violation) and begun == kept[: len(begun)]:
            return _Found(found.config, list(play.ops), list(play.replies), violation)
        return found

    def _failed(self, found: _Found, manifest: Manifest, started: float) -> tuple[CaseResult, Trace]:
        violation = found.violation
        claim = violation.claim or self.made.claim
        verdict = Verdict.ERROR if isinstance(violation, ClaimError) else Verdict.FAIL
        header = TraceHeader(
            kvshard_trace=FORMAT,
            case=self.made.id,
            module=self.made.module,
            engine=self.address,
            engine_name=manifest.name,
            engine_version=manifest.version,
            config=found.config,
            seed=self.seed,
        )
        replies: list[AnyReply | None] = [*found.replies, *[None] * (len(found.ops) - len(found.replies))]
        steps = tuple(TraceStep(op=op, reply=reply) for op, reply in zip(found.ops, replies, strict=True))
        footer = TraceFooter(
            steps=len(steps), claim=claim, seen=violation.seen, expected=violation.expected, why=violation.why
        )
        failure = Failure(
            claim=claim,
            seen=violation.seen,
            expected=violation.expected,
            why=violation.why,
            config=config_line(found.config),
            ops=tuple(told(op) for op in found.ops),
            replay="",
        )
        return self._result(verdict, started, violation.seen, failure), Trace(header=header, steps=steps, footer=footer)

    def _result(self, verdict: Verdict, started: float, why: str = "", failure: Failure | None = None) -> CaseResult:
        return CaseResult(
            case=self.made.id,
            verdict=verdict,
            why=why,
            examples=self.examples,
            ops=self.ops,
            seconds=round(time.perf_counter() - started, 3),
            seen=dict(sorted(self.seen.items())),
            failure=failure,
        )


def config_line(config: Config) -> str:
    """A config on one line, such as `sharded N=2 ps=4 pages/rank=8 ...`; a tier or a worker only where there is one."""
    host = f" host_pages/rank={config.host_pages_per_rank} {config.host_policy}" if config.host_pages_per_rank else ""
    decode = f" decode_pages={config.decode_pages}" if config.decode_pages else ""
    return (
        f"{config.layout} N={config.shards} ps={config.page_size} pages/rank={config.pages_per_rank} "
        f"layers={config.layers} components={','.join(config.components)} chunk={config.chunk_tokens} "
        f"context={config.context_tokens} scratch_contexts={config.scratch_contexts}{host}{decode}"
    )

"""A trial turns an engine's behaviour into the right verdict, and repeats itself from its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.adapter import Engine, EngineFault
from harness.case import CASE_ATTRIBUTE, Case, ClaimError, Draw, Table, Violation, cases_in, vacuous
from harness.places import places
from harness.play import Play
from harness.plugin import BUDGETS as NAMES
from harness.plugin import CASE_ATTRIBUTE as NAME
from harness.result import CaseResult, Progress, exit_code
from harness.trace import Trace
from harness.trial import BUDGETS, Trial, config_line
from harness.types import (
    AnyOp,
    AnyReply,
    Axes,
    Config,
    Done,
    Evicted,
    Extend,
    Flush,
    Ok,
    Open,
    Opened,
    Refused,
    Replies,
    Settle,
    Together,
    Unknown,
    Unsupported,
    Verdict,
)
from tests import miniature, sample_cases
from tests.miniature import Miniature, MiniatureSession

register_cpu_ci(est_time=15, stage="commit")

READS, FREE, NEVER, LOCATE = cases_in([sample_cases])
SMOKE = BUDGETS["smoke"]


def trial(made: Case, engine: Engine, seed: int = 1) -> tuple[CaseResult, Trace | None]:
    return Trial(made, engine, "py:here", BUDGETS["smoke"], seed).run()


@pytest.mark.parametrize(
    ("made", "make", "verdict", "code", "why"),
    [
        (READS, miniature.correct, Verdict.PASS, 0, ""),
        (FREE, miniature.correct, Verdict.PASS, 0, ""),
        (READS, miniature.wrong, Verdict.FAIL, 1, "1 distinct rows"),
        (READS, miniature.raises, Verdict.FAIL, 1, "RuntimeError: finish is broken at "),
        (READS, miniature.refuses, Verdict.ERROR, 3, "unsupported: not built yet"),
        (FREE, miniature.hides, Verdict.ERROR, 3, "free of rank 0 is None"),
        (NEVER, miniature.correct, Verdict.UNKNOWN, 2, "saw 0 times 'restored', needs 1"),
        (LOCATE, miniature.correct, Verdict.SKIP, 2, "miniature does not claim op.locate"),
        (READS, miniature.modest, Verdict.SKIP, 2, "modest does not claim op.open, op.extend, op.finish"),
    ],
)
def test_verdicts(made: Case, make: Callable[[], Miniature], verdict: Verdict, code: int, why: str) -> None:
    """Right, wrong, raising, claiming too much, vacuous and unclaimed each have their verdict and exit code."""
    result, trace = trial(made, make())

    assert result.verdict == verdict
    assert result.why.startswith(why)
    assert exit_code([result]) == code
    assert (trace is not None) == (result.failure is not None) == (verdict in (Verdict.FAIL, Verdict.ERROR))


def test_a_counterexample_is_as_short_as_it_gets() -> None:
    """Opening and computing one prompt is enough to see the wrong rows, and the trace holds exactly these ops."""
    result, trace = trial(READS, miniature.wrong())

    assert result.failure is not None
    assert trace is not None
    assert result.failure.ops == ("open r0 tokens 7,7,7 (3)", "extend r0 by 3")
    assert trace.footer.claim == READS.claim == result.failure.claim
    assert [step.reply is not None for step in trace.steps] == [True, True]
    assert (trace.header.case, trace.header.module, trace.header.engine) == (READS.id, "tests.sample_cases", "py:here")


def test_an_op_that_got_no_reply_is_in_the_trace() -> None:
    """The last op of a trace is the one that raised; its reply is None."""
    _, trace = trial(READS, miniature.raises())

    assert trace is not None
    assert trace.steps[-1].reply is None
    assert all(step.reply is not None for step in trace.steps[:-1])


def test_the_seed_repeats_a_trial() -> None:
    """One seed gives one run, another seed another."""
    runs = [trial(READS, miniature.correct(), seed)[0] for seed in (1, 1, 2)]

    assert (runs[0].seen, runs[0].ops) == (runs[1].seen, runs[1].ops)
    assert (runs[0].seen, runs[0].ops) != (runs[2].seen, runs[2].ops)


def test_progress_is_told_for_every_example() -> None:
    """Progress counts up to the budget's examples of this case."""
    told: list[Progress] = []
    made = replace(READS, examples=0.5)

    result, _ = Trial(made, miniature.correct(), "py:here", BUDGETS["smoke"], 1, told.append).run()

    most = round(BUDGETS["smoke"].examples * 0.5)
    assert [progress.examples for progress in told] == list(range(1, result.examples + 1))
    assert {progress.examples_max for progress in told} == {most}


class Closing(MiniatureSession):
    """Counts sessions that are open."""

    alive = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        type(self).alive += 1

    def close(self) -> None:
        type(self).alive -= 1


class Unseen(Closing):
    """Cannot be looked at."""

    alive = 0

    def snapshot(self) -> None:  # type: ignore[override]  # wrong on purpose
        raise OSError("no snapshot")


def test_every_session_is_closed() -> None:
    """Sessions are closed after every example, also when the session cannot even be looked at."""
    passed, _ = trial(FREE, Miniature(Closing))
    broken, _ = trial(FREE, Miniature(Unseen))

    assert (passed.verdict, Closing.alive) == (Verdict.PASS, 0)
    assert (broken.verdict, Unseen.alive) == (Verdict.ERROR, 0)
    assert "no snapshot" in broken.why


class Faulty(MiniatureSession):
    """Is caught in a fault of its own."""

    def apply(self, op: AnyOp) -> AnyReply:
        raise EngineFault("Ranks issue the same collectives.", "rank 1 has none")


def test_a_fault_breaks_its_own_claim() -> None:
    """A fault that the engine reports of itself is a failure of the claim that it names."""
    result, _ = trial(READS, Miniature(Faulty))

    assert result.failure is not None
    assert (result.verdict, result.failure.claim) == (Verdict.FAIL, "Ranks issue the same collectives.")


def test_an_engine_that_does_not_open_is_an_error() -> None:
    """An exception of `open` or `describe` is an error of the engine, never a skip."""

    class Shut(Miniature):
        def open(self, config: Config) -> MiniatureSession:
            raise MemoryError("too small")

    result, trace = trial(READS, Shut())

    assert (result.verdict, trace) == (Verdict.ERROR, None)
    assert "too small" in result.why


def test_a_watch_that_is_confused_by_a_shorter_list_is_no_end() -> None:
    """While a counterexample is trimmed, an exception of the watch means only that this list is not shorter."""

    class Confused(sample_cases.SampleWatch):
        def after(self, op: AnyOp, reply: AnyReply, *states: object) -> None:
            if not self.seen and type(op).__name__ != "Open":
                raise KeyError(op)
            super().after(op, reply, None, None)

    made = replace(READS, watch=lambda config, manifest: Confused(lambda op, reply, after: _judge(op, reply)))
    result, _ = trial(made, miniature.wrong())

    assert result.verdict == Verdict.FAIL


def test_a_trimmed_list_begins_where_it_began() -> None:
    """An op stays in a counterexample if without it a later one would begin elsewhere than its rows belong."""

    class Late(sample_cases.SampleWatch):
        def after(self, op: AnyOp, reply: AnyReply, *states: object) -> None:
            super().after(op, reply, None, None)
            if isinstance(op, Extend) and self.seen["extended"] and self.seen["opened"] > 1:
                raise Violation("enough", "more", "it is a test")

    made = replace(READS, watch=lambda config, manifest: Late(lambda op, reply, after: None))
    result, trace = trial(made, miniature.correct())

    assert Verdict.FAIL == result.verdict
    assert trace is not None
    tokens = {step.op.request: step.op.tokens for step in trace.steps if isinstance(step.op, Open)}
    begun = places([step.op for step in trace.steps], [step.reply for step in trace.steps])
    for step, place in zip(trace.steps, begun, strict=True):
        if isinstance(step.op, Extend):
            assert ((0, len(tokens[step.op.request]) - step.op.count),) == place


def test_a_plan_that_raises_is_an_error_at_once() -> None:
    """A plan's own exception is no counterexample: it is told after one example, never shrunk."""

    def plan(draw: Draw, table: Table) -> None:
        raise LookupError("nothing to draw from")

    result, trace = trial(replace(READS, plan=plan), miniature.correct())

    assert (Verdict.ERROR, 1, None) == (result.verdict, result.examples, trace)
    assert "nothing to draw from" in result.why


@pytest.mark.parametrize("every", [2, 3, 5])
def test_an_engine_whose_answers_time_decides_is_judged_all_the_same(every: int) -> None:
    """Where the same draws do not lead to the same answers, all examples are drawn and judged."""
    numbers = count()

    def moody(draw: Draw, table: Table) -> None:
        if next(numbers) % every == 0:  # as if an op had been refused this time
            draw(st.integers(0, 1))
        draw(st.integers(0, 3))
        READS.plan(draw, table)

    result, _ = Trial(replace(READS, plan=moody), miniature.correct(), "py:here", replace(SMOKE, examples=40), 1).run()
    broken, _ = Trial(replace(READS, plan=moody), miniature.wrong(), "py:here", replace(SMOKE, examples=40), 1).run()

    assert (result.verdict, result.examples >= 40) == (Verdict.PASS, True)
    assert broken.verdict == Verdict.FAIL


def test_a_long_search_draws_anew() -> None:
    """Few examples of a long search are the one before with a part of it repeated."""
    drawn: list[tuple[int, ...]] = []

    def plan(draw: Draw, table: Table) -> None:
        drawn.append(tuple(draw(st.integers(0, 999)) for _ in range(6)))
        READS.plan(draw, table)

    result, _ = Trial(replace(READS, plan=plan), miniature.correct(), "py:here", replace(SMOKE, examples=100), 1).run()
    shared = [len({*one} & {*other}) for one, other in pairwise(drawn)]

    assert 100 == result.examples == len(drawn)
    assert sum(each >= 3 for each in shared) <= 10


def test_a_search_ends_when_all_was_drawn() -> None:
    """Where there is little to draw the search does not begin again."""
    drawn: list[bool] = []

    def plan(draw: Draw, table: Table) -> None:
        drawn.append(draw(st.booleans()))
        table.do(Open("r1", (1,)))

    def one(axes: Axes) -> st.SearchStrategy[Config]:
        return st.just(Config(components=("kv",), layers=1))

    made = replace(READS, plan=plan, configs=one, seen={})
    result, _ = Trial(made, miniature.correct(), "py:here", replace(SMOKE, examples=100), 1).run()

    assert [False, True] == sorted(drawn)
    assert 2 == result.examples


def _judge(op: AnyOp, reply: AnyReply) -> None:
    reads_check = READS.watch(Config(), miniature.MANIFEST)
    reads_check.after(op, reply, None, None)


def test_a_play_judges_every_op() -> None:
    """Ops and replies are kept in order; the watch has seen each."""
    play = Play(READS, miniature.correct(), Config())
    play.do(Settle())
    play.close()

    assert [len(play.ops), len(play.replies), play.watch.seen["other"]] == [1, 1, 1]


def test_the_plugin_knows_what_it_does_not_import() -> None:
    """The names that the light plugin repeats are those of the modules that it does not import."""
    assert tuple(BUDGETS) == NAMES
    assert CASE_ATTRIBUTE == NAME


class _Answers(MiniatureSession):
    """Answers every op with one reply."""

    reply: AnyReply = Ok(Done())

    def apply(self, op: AnyOp) -> AnyReply:
        return self.reply


@pytest.mark.parametrize(
    ("op", "reply", "seen"),
    [
        (Open("a", (1,)), Ok(Done()), "Done in reply to open"),
        (Extend("a", 1, {}), Ok(Opened(0)), "Opened in reply to extend"),
        (Together((Settle(),)), Ok(Done()), "Done in reply to together"),
        (Together((Settle(), Settle())), Replies((Ok(Done()),)), "1 replies to 2 ops"),
        (Together((Settle(), Open("a", (1,)))), Replies((Ok(Done()), Ok(Done()))), "Done in reply to open"),
        (Settle(), Unsupported("no"), "unsupported: no"),
    ],
)
def test_a_value_that_is_not_the_ops_is_an_error_of_the_adapter(op: AnyOp, reply: AnyReply, seen: str) -> None:
    """Every op has its own value, and a Together one reply each; anything else breaks the adapter's claims."""
    engine = miniature.correct()
    play = Play(READS, engine, Config(components=("kv",), layers=1))
    session = _Answers.__new__(_Answers)
    session.reply = reply
    play._session = session
    with pytest.raises(ClaimError) as caught:
        play.do(op)
    assert caught.value.seen == seen


@pytest.mark.parametrize("reply", [Refused("full"), Unknown("late"), Ok(Evicted(4))])
def test_definite_and_indefinite_refusals_are_replies(reply: AnyReply) -> None:
    """A refusal, an unknown outcome and the op's own value are accepted as they are."""
    play = Play(READS, miniature.correct(), Config(components=("kv",), layers=1))
    session = _Answers.__new__(_Answers)
    session.reply = reply
    play._session = session
    assert play.do(Flush()) == reply


@pytest.mark.parametrize(("examples", "rounds"), [(40, 4), (150, 1)])
def test_only_a_small_budget_goes_on_for_what_it_did_not_see(examples: int, rounds: int) -> None:
    """A run that is vacuous so far goes on until some 150 examples; a large budget does not multiply."""
    budget = replace(BUDGETS["smoke"], examples=examples)
    run = Trial(NEVER, miniature.correct(), "py:here", budget, 1)
    result, _ = run.run()

    assert result.verdict == Verdict.UNKNOWN
    assert rounds * run.examples_max <= result.examples < (rounds + 1) * run.examples_max


@pytest.mark.parametrize(("shards", "expected"), [((1,), []), ((1, 2), ["saw 0 times 'empty owner', needs 1"])])
def test_what_only_groups_can_show_is_asked_of_groups_only(shards: tuple[int, ...], expected: list[str]) -> None:
    """An event that needs several ranks is no condition for an engine that has one."""
    made = replace(NEVER, seen={}, seen_in_groups={"empty owner": 1})
    assert expected == vacuous(made, {}, Axes(shards=shards, page_sizes=(2,)))


def test_a_config_tells_what_there_is() -> None:
    """The line of a config names the host tier with its policy, and the decode worker, only where there is one."""
    plain = config_line(Config())
    both = config_line(Config(host_pages_per_rank=3, host_policy="write_back", decode_pages=5))
    assert f"{plain} host_pages/rank=3 write_back decode_pages=5" == both

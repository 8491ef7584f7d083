"""A hunt says of a fault, a variant or a canary what became of it, and never that it is found when nothing was run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ci.register import register_cpu_ci
from harness.case import cases_in
from harness.hunt import Hunt, Promising, hunted, is_expected, rounds
from harness.hunted import Hunted, Outcome
from harness.known import Known, KnownFailures
from harness.play import ANSWERS
from harness.trial import BUDGETS
from tests import miniature, sample_cases
from tests.hunt_faults import fault

register_cpu_ci(est_time=10, stage="commit")

ROOT = Path(__file__).parent.parent
ENGINE = "py:tests.miniature:correct"  # by name: then its module is the one that is changed
FREE, READS, MISUSE = (f"sample.{name}" for name in ("free_pages_are_counted", "reads_what_was_written", "misuse"))
CASES = [FREE, READS, MISUSE]


def hunt(name: str, **others: Any) -> Hunted:
    asked = Hunt(name, 5, ENGINE, "smoke", "tests.hunt_faults", "tests.hunt_cases")
    return hunted(replace(asked, **others))


def test_a_killed_fault() -> None:
    """The case that its `breaks` begins is tried first; claim, ops and config of the shortest list are told."""
    found = hunt("killed.reads_first")

    assert (Outcome.KILLED, "", READS, True) == (found.outcome, found.why, found.case, found.expected)
    assert ("open r0 tokens 7,7,7 (3)", "extend r0 by 3") == found.ops
    assert ("A chunk reads distinct rows for distinct tokens.", "1 distinct rows") == (found.claim, found.seen)
    assert "ps=2" in found.config
    assert (1, (READS,), False) == (found.cases, found.killers, found.raised)
    assert found.reached >= 2
    assert 0 < found.seconds < 60
    assert (found.shrink_seconds or 0) > 0


def test_what_an_engine_is_known_to_fail_kills_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A listed failure says nothing of the fault: it survives unless it is seen in another way."""
    told = "A chunk reads distinct rows for distinct tokens."
    for seen, outcome in (("1 distinct rows", Outcome.SURVIVED), ("another way", Outcome.KILLED)):
        entry = Known(
            case=READS, versions=("1",), claim=told, seen=seen, reason="so it is", finding="p.md", trace="t.jsonl"
        )
        listed = KnownFailures(tmp_path / "known.toml", (entry,))
        monkeypatch.setattr("harness.hunt.known_failures", lambda _, listed=listed: listed)

        assert outcome == hunt("killed.reads_first").outcome


def test_a_fault_that_no_one_expects() -> None:
    """Another case than those that it names may kill it; this is told, and so is an engine that raises."""
    frees, raises = hunt("killed.frees_often"), hunt("killed.raises")

    assert (FREE, False, False) == (frees.case, frees.expected, frees.raised)
    assert (Outcome.KILLED, ANSWERS, True, True) == (raises.outcome, raises.claim, raises.expected, raises.raised)
    assert raises.seen.startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("name", "outcome", "why", "ran"),
    [
        ("survives.keeps_none", Outcome.SURVIVED, "none of 3 cases fails, what it changes was run ", True),
        ("idle.evicts", Outcome.IDLE, "nothing that it changes was run", False),
        ("error.takes_none", Outcome.ERROR, f"{FREE}: unsupported: no", True),
    ],
)
def test_what_is_not_killed(name: str, outcome: Outcome, why: str, ran: bool) -> None:  # noqa: FBT001  # a value
    """A fault that lives although it was run, one that was not run, and one that is an error everywhere, differ."""
    found = hunt(name)

    assert (outcome, 3, ran) == (found.outcome, found.cases, found.reached > 0)
    assert found.why.startswith(why)
    assert ("", (), ()) == (found.case, found.ops, found.killers)


def test_a_failure_without_the_fault_is_an_error() -> None:
    """A case that fails although nothing that was changed was run, does not see the fault."""
    found = hunt("idle.evicts", engine="py:tests.miniature:wrong")

    assert (Outcome.ERROR, 0) == (found.outcome, found.reached)
    assert f"{READS} fails although nothing that it changes was run" == found.why


def test_a_failure_with_and_without_the_fault_is_an_error() -> None:
    """A counterexample that fails the engine as it is, too, says that the case is wrong, never that the fault is."""
    found = hunt("survives.keeps_none", engine="py:tests.miniature:wrong")

    assert found.reached > 0
    assert (Outcome.ERROR, f"{READS} fails without the fault as well") == (found.outcome, found.why)


def test_the_whole_suite() -> None:
    """With `whole` every case is tried once, all that fail are told, and nothing is shrunk by draws."""
    one, all_ = hunt("killed.reads_first", whole=True), hunt("killed.raises", whole=True)

    assert ((READS,), 3, READS) == (one.killers, one.cases, one.case)
    assert (tuple(CASES), 3, FREE) == (all_.killers, all_.cases, all_.case)
    assert 3 == hunt("survives.keeps_none", whole=True).cases


def test_a_counterexample_that_nobody_shrank() -> None:
    """Without shrinking the same case kills at the same place, and what it shows is told as longer than need be."""
    shrunk, found = hunt("killed.raises"), hunt("killed.raises", shrinks=False)

    assert (shrunk.outcome, shrunk.case, shrunk.claim) == (found.outcome, found.case, found.claim)
    assert None is found.shrink_seconds
    assert len(found.ops) > len(shrunk.ops)


def test_the_seed_repeats_a_hunt() -> None:
    """The same seed comes to the same; the engine is right again after each."""
    right = miniature.MiniatureSession.do_finish.__code__

    first, again, other = (hunt("survives.keeps_none", seed=seed) for seed in (5, 5, 6))

    assert first == again
    assert first.reached != other.reached
    assert miniature.MiniatureSession.do_finish.__code__ is right


def test_the_order_of_what_is_tried() -> None:
    """First what the fault names, on a small and a full budget; a small budget is what is spent on the others."""
    reads, free, never, locate = cases_in([sample_cases])
    by_id, by_invariant = fault("a", breaks=("sample.never", "sample.f")), fault("b", breaks=("I01",))
    smoke, commit = BUDGETS["smoke"], BUDGETS["commit"]

    def order(budget: str, breaks: tuple[str, ...] = ("sample.never", "sample.f")) -> list[tuple[str, int]]:
        tried = rounds(fault("a", breaks=breaks), [reads, free, never, locate], BUDGETS[budget])
        return [(made.id.removeprefix("sample.")[:4], each.examples) for made, each in tried]

    small, large = smoke.examples, commit.examples
    named = [(name, count) for count in (small, large) for name in ("free", "neve")]
    assert [*named, ("read", small), ("need", small)] == order("smoke")
    groups = [["free", "neve"]] * 3 + [["read", "need"]] * 2
    counts = [small, 4 * small, large, small, large]
    expected = [(name, count) for group, count in zip(groups, counts, strict=True) for name in group]
    assert expected == order("commit")
    assert [8, 12] == [len(order("commit", ())), len(order("commit", ("I01",)))]
    assert {commit.shrink_seconds} == {each.shrink_seconds for _, each in rounds(by_id, [reads], commit)}
    assert [False, True, True, False] == [is_expected(by_id, made) for made in (reads, free, never, locate)]
    assert all(is_expected(by_invariant, made) for made in (reads, free, never, locate))


def test_variants() -> None:
    """A right variant passes every case; what a case fails is refused with its counterexample; idle is neither."""
    passes, refused, idle = (hunt(name) for name in ("passes.last_page_first", "refused.reads_first", "idle.aborts"))

    assert (Outcome.PASSED, "", 3) == (passes.outcome, passes.why, passes.cases)
    assert (Outcome.REFUSED, f"{READS}: fail, 1 distinct rows", (READS,)) == (
        refused.outcome,
        refused.why,
        refused.killers,
    )
    assert (READS, 2, 3) == (refused.case, len(refused.ops), refused.cases)
    assert (Outcome.IDLE, "nothing that it changes was run") == (idle.outcome, idle.why)


def test_a_variant_may_drop_a_promise() -> None:
    """A case is skipped without harm for a promise that the variant drops, and for nothing else."""
    dropped = hunt("passes.misuse")
    other = hunt("passes.last_page_first", suite="tests.sample_cases")
    manifest = Promising(miniature.correct(), ["refuses_misuse"]).describe()

    assert (Outcome.PASSED, 3) == (dropped.outcome, dropped.cases)
    assert ("deterministic",) == manifest.promises
    assert (Outcome.REFUSED, "sample.never_met: unknown, saw 0 times 'restored', needs 1") == (other.outcome, other.why)
    assert ("sample.never_met", "sample.needs_locate") == other.killers


BLIND = """
from harness.capabilities import CAPABILITIES
from tests.sample_cases import SERVES, sample

@sample("sample.{name}", needs={needs}, seen={{}})
def test_blind(op, reply, after):
    \"\"\"Nothing is wrong.

    Nobody looks.
    \"\"\"
"""


def test_canaries() -> None:
    """Cases that look see each canary; those that are skipped have no say."""
    for name in ("canary.liar", "canary.garbled", "canary.hollow"):
        for suite in ("tests.hunt_cases", "tests.sample_cases"):
            found = hunt(name, suite=suite)
            assert (Outcome.KILLED, "") == (found.outcome, found.why)
            assert found.case == found.killers[0]
    assert tuple(CASES) == hunt("canary.liar").killers


@pytest.mark.parametrize(
    ("canary", "needs", "outcome", "why"),
    [
        ("canary.liar", "SERVES", Outcome.KILLED, ""),
        ("canary.hollow", "SERVES", Outcome.SURVIVED, "passes sample.looks_away"),
        ("canary.garbled", "SERVES", Outcome.SURVIVED, "passes sample.looks_away"),
        ("canary.liar", '("op.locate",)', Outcome.SURVIVED, "every case is skipped"),
    ],
)
def test_a_blind_suite_lets_canaries_live(tmp_path: Path, canary: str, needs: str, outcome: Outcome, why: str) -> None:
    """A suite that looks at nothing, and one that runs nothing, do not see what is wrong."""
    suite = tmp_path / f"blind_{canary[7:]}_{len(needs)}.py"
    suite.write_text(BLIND.format(name="looks_away", needs=needs))

    found = hunt(canary, suite=str(suite))

    assert (outcome, why) == (found.outcome, found.why)


@pytest.mark.slow
def test_unit_tests_find_what_no_op_reaches(tmp_path: Path) -> None:
    """Unit tests that fail kill; that pass, or do not run it, or are not there, or fail without it, do not."""
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_that_fails():\n    assert False\n")
    faults = tmp_path / "unit.py"
    faults.write_text(
        "from dataclasses import replace\nfrom tests.hunt_faults import UNIT\n"
        f"FAULTS = (*UNIT, replace(UNIT[0], id='unit.fails', tests=({str(failing)!r},)))\n"
    )
    code = (
        "import msgspec, os, sys; from harness.hunt import Hunt, hunted; out = os.dup(1); os.dup2(2, 1)\n"
        "for name in sys.argv[2:]:\n"
        f"    told = hunted(Hunt(name, 1, {ENGINE!r}, 'smoke', sys.argv[1], 'tests.hunt_cases'))\n"
        "    os.write(out, msgspec.json.encode(told) + b'\\n')\n"
    )
    names = [f"unit.{end}" for end in ("killed", "survives", "idle", "missing", "fails")]

    done = subprocess.run(
        [sys.executable, "-c", code, str(faults), *names], cwd=ROOT, capture_output=True, text=True, check=False
    )

    found = {each.id: each for each in (msgspec.convert(json.loads(line), Hunted) for line in done.stdout.splitlines())}
    assert names == [*found], done.stderr
    outcomes = [Outcome.KILLED, Outcome.SURVIVED, Outcome.IDLE, Outcome.ERROR, Outcome.ERROR]
    assert outcomes == [found[name].outcome for name in names]
    test = "tests/test_trial.py::test_a_counterexample_is_as_short_as_it_gets"
    assert (test, True, "") == (found["unit.killed"].case, found["unit.killed"].expected, found["unit.killed"].why)
    assert "its unit tests pass" == found["unit.survives"].why
    assert "nothing that it changes was run" == found["unit.idle"].why
    assert "pytest ended with 4: there is no tests/test_none.py" == found["unit.missing"].why
    assert found["unit.fails"].why.endswith("test_that_fails fails although nothing that it changes was run")

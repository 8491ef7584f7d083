"""What the pages on known failures of sglang suggest: with it in the real code, the trace and the case hold."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.adapter import Engine
from harness.adapters.sglang_install import installed, parts
from harness.case import Case, Violation
from harness.connect import close, connect
from harness.fault import Edit, Reached, planted
from harness.known import FOLDER, Known, known_failures
from harness.suite import all_cases, case_by_id
from harness.trace import read, replay
from harness.trial import BUDGETS, Trial
from harness.types import Verdict

register_cpu_ci(est_time=25, stage="commit", runner="ubuntu-sglang")

pytestmark = [
    pytest.mark.slow,  # sglang takes many seconds to import
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
TRIED = "0.5.23"
ROOT = Path(__file__).parent.parent
FIXES: dict[str, dict[str, Any]] = {
    fix["id"]: fix for fix in tomllib.loads((ROOT / "fixtures" / "fixes" / "sglang.toml").read_text())["fix"]
}
MENDED = [(name, case) for name, fix in FIXES.items() for case in fix["cases"]]
SEED = 3


ADDRESS = "sglang"


@pytest.fixture(params=MENDED, ids=" of ".join)
def mended(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A fix, and a case that it mends."""
    made: tuple[str, str] = request.param
    return made


@pytest.fixture
def fix(mended: tuple[str, str]) -> dict[str, Any]:
    return FIXES[mended[0]]


@pytest.fixture
def engine(fix: dict[str, Any]) -> Iterator[Engine]:
    """The engine that the fix was tried on."""
    if installed() != TRIED:
        pytest.skip(f"sglang {installed()} is installed; the fixes are edits of {TRIED}")
    parts()  # no module of sglang can be named before
    made = connect(fix.get("engine", ADDRESS))
    yield made
    close(made)


@pytest.fixture
def entry(mended: tuple[str, str], engine: Engine) -> Known:
    """What the fix is of."""
    return known_failures(engine.describe()).entries[mended[1]]


@pytest.fixture
def made(mended: tuple[str, str]) -> Case:
    return case_by_id(mended[1], all_cases())


@contextmanager
def fixed(fix: dict[str, Any]) -> Iterator[Reached]:
    with planted([Edit(**edit) for edit in fix["edits"]]) as reached:
        yield reached


def replayed(made: Case, engine: Engine, entry: Known) -> Violation | None:
    trace = read(FOLDER / entry.trace)
    _, violation = replay(made, engine, trace.header.config, [step.op for step in trace.steps])
    return violation


def test_the_trace_needs_the_fix(made: Case, engine: Engine, entry: Known, fix: dict[str, Any]) -> None:
    """The trace fails on the released code, and not where the fix is in place."""
    released = replayed(made, engine, entry)
    with fixed(fix) as reached:
        repaired = replayed(made, engine, entry)
    assert released is not None
    assert (entry.claim, None) == (released.claim or made.claim, repaired)
    assert reached.times > 0


def test_the_case_holds_with_the_fix(made: Case, engine: Engine, fix: dict[str, Any]) -> None:
    """With the fix the case passes, and it has met all that it must meet."""
    with fixed(fix):
        result, _ = Trial(made, engine, ADDRESS, BUDGETS["smoke"], SEED).run()
    assert (Verdict.PASS, "") == (result.verdict, result.why)


def test_every_known_failure_has_a_fix_that_was_tried() -> None:
    """No entry without one, and its page says so."""
    known = known_failures(connect(ADDRESS).describe()).entries
    assert {case for _, case in MENDED} == set(known)
    for entry in known.values():
        assert "fixtures/fixes/sglang.toml" in (FOLDER / entry.finding).read_text()

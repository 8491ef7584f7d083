"""An engine is as accurate as the reference that was recorded of it."""

from __future__ import annotations

import pytest

from harness.gate_reference import judged
from harness.register import register_cpu_ci
from harness.stats_gate import Outcome
from harness.usage import UserError
from suites.accuracy.conftest import Sought

register_cpu_ci(est_time=900, stage="accuracy", gate=True)


def test_as_accurate_as_its_reference(sought: Sought, request: pytest.FixtureRequest) -> None:
    """A new run of the task is not worse by the margin; what is not shown is a failure too, and says which."""
    if sought.reference is None or sought.where is None:
        pytest.fail(f"no verdict: {sought.why}", pytrace=False)
    folder = request.config.getoption("kvshard_references").parent
    try:
        verdict = judged(sought.reference, folder, sought.where, request.config.getoption("kvshard_concurrency"))
    except UserError as error:
        pytest.fail(f"no verdict: {error}", pytrace=False)
    told = "\n".join((f"{verdict.outcome}: {verdict.said}", *verdict.evidence))
    if verdict.outcome is not Outcome.PASS:
        pytest.fail(told, pytrace=False)

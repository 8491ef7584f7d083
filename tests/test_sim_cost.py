from __future__ import annotations

import pytest
import torch

from ci.register import register_cpu_ci
from harness.sim.cost import WAYS, Bench, main, measure
from harness.sim.schedule import named

register_cpu_ci(est_time=10, stage="commit")


def test_table() -> None:
    """Every way has its row: microseconds per operation, and times plain torch, which is 1 for plain torch."""
    rows = measure(16, 8, 1)
    assert ["plain torch", "dispatch mode that passes on", *(way.name for way in WAYS)] == [name for name, *_ in rows]
    assert 1 == rows[0][2]
    assert all(microseconds > 0 and times > 0 for _, microseconds, times in rows)


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a table per size."""
    assert 0 == main(["1"])
    assert 2 == capsys.readouterr().out.count("adversary, lazy")


def test_program_is_well_ordered() -> None:
    """What is measured is a right program: no schedule changes its result."""
    expected = Bench(16, 8).program(None)
    assert not expected.isnan().any()
    for schedule in (None, *named(2).values()):
        assert torch.equal(expected, Bench(16, 8).run(schedule, order=True))

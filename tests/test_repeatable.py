"""One seed draws the same, whatever else a process has imported."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.repeatable import without_source_constants

register_cpu_ci(est_time=10, stage="commit")


def drawn() -> list[int]:
    """What one seed draws from a wide range, in which constants of source files stand out."""
    numbers: list[int] = []

    def draw(number: int) -> None:
        numbers.append(number)

    quiet = list(HealthCheck)
    run = given(st.integers(10**6, 10**9))(draw)
    settings(max_examples=300, database=None, phases=(Phase.generate,), suppress_health_check=quiet)(seed(1)(run))()
    return numbers


def test_the_seed_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers in a module that is imported between two runs are not drawn, though Hypothesis would like to."""
    with without_source_constants():
        before = drawn()
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # Hypothesis overlooks what lies in a folder of tests, as tmp_path does
        (Path(folder) / "module_with_numbers.py").write_text(f"NUMBERS = {list(range(10**7, 10**7 + 99))}\n")
        monkeypatch.syspath_prepend(folder)
        numbers = set(importlib.import_module("module_with_numbers").NUMBERS)
        with without_source_constants():
            after = drawn()
        tempted = drawn()

    assert before == after
    assert numbers & set(tempted)
    assert not numbers & set(after)

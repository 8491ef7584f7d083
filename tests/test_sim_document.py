"""docs/simulated_devices.md shows a program and what the simulation says about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.sim.race import Race

register_cpu_ci(est_time=10, stage="commit")

PAGE = (Path(__file__).parent.parent / "docs" / "simulated_devices.md").read_text()
EXAMPLE, STORY = re.findall(r"```(?:python)?\n(import torch\n.*?|race: .*?)```", PAGE, re.DOTALL)


def run(source: str) -> None:
    exec(compile(source, "example.py", "exec"), {})  # noqa: S102 - the page's own program


def test_worked_race() -> None:
    """The page's program has the race that the page prints."""
    with pytest.raises(Race) as caught:
        run(EXAMPLE)
    assert STORY.rstrip() == str(caught.value)


def test_worked_race_put_right() -> None:
    """With the wait that the page names the program is clean."""
    run(EXAMPLE.replace("        if layer == 0:\n            copies", "        copies"))


def test_picture() -> None:
    """The page shows a picture that is there."""
    (name,) = re.findall(r"!\[[^]]+\]\((\S+)\)", PAGE)
    assert (Path(__file__).parent.parent / "docs" / name).read_text().startswith("<svg")

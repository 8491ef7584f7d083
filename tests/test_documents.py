"""What the documents say is what the project does."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.adapters.ref import RefEngine
from harness.capacity_cli import main
from harness.case import Case, Violation
from harness.connect import close, connect
from harness.markdown import invariants
from harness.suite import all_cases, case_by_id
from harness.trace import read, replay, told

register_cpu_ci(est_time=10, stage="commit")

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TRACES = sorted((ROOT / "fixtures" / "traces").glob("*.jsonl"))
DATA = "mooncake_conversation_trace.jsonl"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return all_cases()


def test_invariants_page_is_generated(cases: list[Case]) -> None:
    """docs/invariants.md is what `kvshard describe --markdown` prints."""
    assert invariants(cases) == (ROOT / "docs" / "invariants.md").read_text()


def test_every_invariant_of_one_tier_has_a_case(cases: list[Case]) -> None:
    """I01 to I09, I19 and I21 to I24 are each judged by at least one case."""
    judged = {invariant for made in cases for invariant in made.invariants}
    wanted = [f"I{number:02}" for number in [*range(1, 10), 19, 21, 22, 23, 24]]
    assert [name for name in wanted if name not in judged] == []


def test_readme_counterexample_is_the_trace_in_fixtures(cases: list[Case]) -> None:
    """The example of README.md shows claim, ops and values of the trace that is kept."""
    trace = read(ROOT / "fixtures" / "traces" / "leaked_page.jsonl")
    lines = [f"claim     {trace.footer.claim}", f"seen      {trace.footer.seen}", f"expected  {trace.footer.expected}"]
    lines += [f"          because {trace.footer.why}"]
    lines += [f"          {number}. {told(step.op)}" for number, step in enumerate(trace.steps, 1)]
    assert [line for line in lines if line not in README] == []
    assert case_by_id(trace.header.case, cases).claim == trace.footer.claim


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_kept_traces_show_nothing_on_the_reference(path: Path, cases: list[Case]) -> None:
    """What once showed a fault is right on the reference."""
    trace = read(path)
    engine = connect("ref")
    try:
        made = case_by_id(trace.header.case, cases)
        _, violation = replay(made, engine, trace.header.config, [step.op for step in trace.steps])
    finally:
        close(engine)
    shown: Violation | None = violation
    assert shown is None


def test_readme_commands_are_those_of_the_table() -> None:
    """README's two set-up commands begin with a fresh environment and name what they run."""
    commands = re.findall(r"^python3 -m venv \.venv && (.*)$", README, re.MULTILINE)
    assert [command.rsplit(" && ", 1)[1] for command in commands] == [
        ".venv/bin/kvshard run ref --budget smoke",
        ".venv/bin/pytest -n 2",
    ]


def test_readme_capacity_figures(tmp_path: Path) -> None:
    """The 32 GiB row of README and its bound are what the command reports on the real trace."""
    folder = os.environ.get("KVSHARD_DATA")
    if not folder or not (Path(folder) / DATA).is_file():
        pytest.skip(f"KVSHARD_DATA names no folder with {DATA}: README's capacity figures are not checked")
    report = tmp_path / "report.json"
    assert main([str(Path(folder) / DATA), "--memory-per-rank", "32GiB", "--json", str(report), "--jobs", "2"]) == 0
    data = json.loads(report.read_text())
    rates = " | ".join(f"{100 * row['replay']['hit_rate']:.1f} %" for row in data["rows"])
    assert f"| 32 | {rates} |" in README
    bound = 100 * data["bound"]["hit_tokens"] / data["input_tokens"]
    assert f"An infinite cache would hit {bound:.1f} %." in README
    assert f"{data['requests']:,} requests" in README


def test_the_reference_has_the_projects_version() -> None:
    """The manifest of the reference tells the version of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert RefEngine().describe().version == project["version"]

"""The library of faults is whole and up to date."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ci.register import register_cpu_ci
from harness.fault import Edit
from harness.fault_files import library

register_cpu_ci(est_time=15, stage="commit")

ROOT = Path(__file__).parent.parent
FAULTS_MIN, VARIANTS_MIN = 90, 8


def test_every_fault_can_be_planted() -> None:
    """Every text that a fault or a variant replaces is in its function once; there are enough of both."""
    known = library()
    assert len(known.faults) >= FAULTS_MIN
    assert len(known.variants) > VARIANTS_MIN


def test_every_fault_names_what_should_catch_it() -> None:
    """A fault breaks invariants, or cases, that there are; it is modelled on a bug or on nothing but the code."""
    invariants = {f"I{number:02}" for number in range(1, 28)}
    likes = re.compile(r"(B\d\d|facts \d+(\.\d+)?(-\w+)?|systematic)([,;] .*)?")
    for fault in library().faults.values():
        named = set(fault.breaks) - invariants
        assert fault.breaks, fault.id
        assert [] == [each for each in named if "." not in each and not fault.tests], fault.id
        assert likes.fullmatch(fault.like), (fault.id, fault.like)


def calls(path: Path, names: set[str]) -> list[str]:
    """The lines of a file that call a method with one of these names."""
    text = path.read_text()
    nodes = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    at = {node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr in names}
    return [text.splitlines()[line - 1].strip() for line in sorted(at)]


def test_every_wait_and_filter_of_the_reference_has_a_fault() -> None:
    """A wait, an event, an owner filter or a minimum over the ranks that is added needs a fault that drops it."""
    names = {"wait_stream", "wait_event", "record", "synchronize", "query", "page_owner", "minimum"}
    allowed = {
        "self._device_module.synchronize()",  # of PrefixGather.settle, which is for tests
        "flags = self.group.minimum([int(reason is None) for reason in reasons])",  # all ranks decide alike
        "if not self._group.minimum([int(not why)])[0]:",  # of a send: tested by misfits of replicated ranks
        "ready.record(self._device_module.current_stream())",  # its query has one
    }
    edits = [
        (change.target.partition(":")[0], change.old)
        for fault in library().faults.values()
        for change in fault.changes
        if isinstance(change, Edit)
    ]
    missing = [
        (path.name, line)
        for path in sorted((ROOT / "kvshard_ref").glob("*.py"))
        if path.name not in {"device.py", "placement.py", "plan.py", "model.py"}  # a model calls its queries "query"
        for line in calls(path, names)
        if line not in allowed
        and not any(
            module == f"kvshard_ref.{path.stem}" and (line in old or old.strip() in line) for module, old in edits
        )
    ]
    assert [] == missing

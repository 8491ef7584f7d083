"""The table of deletions is up to date, and a deletion is really found."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ci import deletions

ROOT = Path(__file__).parent.parent
KINDS = {"wait", "event", "lock", "pin", "acknowledgement", "owner filter", "hold", "identity"}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "ci/deletions.py", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_every_text_is_in_its_file_once() -> None:
    """Each deletion of the table can be made, has its own name, a kind, and a place to look first."""
    table = deletions.table()
    assert len({each.id for each in table}) == len(table) > 40
    assert {each.kind for each in table} == KINDS
    assert [] == [each.id for each in table if not each.look and not each.tests]
    assert [] == [each.id for each in table if each.old == each.new]


def calls(path: Path, names: set[str]) -> list[str]:
    """The lines of a file that call a method with one of these names."""
    text = path.read_text()
    nodes = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    at = {node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr in names}
    return [text.splitlines()[line - 1] for line in sorted(at)]


def test_every_wait_and_filter_of_the_reference_is_in_the_table() -> None:
    """A wait, an event, an owner filter or a minimum over the ranks that is added must come into the table as well."""
    names = {"wait_stream", "wait_event", "record", "synchronize", "query", "page_owner", "minimum"}
    allowed = {
        "        self._device_module.synchronize()",  # of PrefixGather.settle, which is for tests
        "        flags = self.group.minimum([int(reason is None) for reason in reasons])",  # all ranks decide alike
        "        if not self._group.minimum([int(not why)])[0]:",  # of a send: tested by misfits of replicated ranks
        "        ready.record(self._device_module.current_stream())",  # its query is in the table
    }
    covered = [(each.file, each.old) for each in deletions.table()]
    missing = [
        (path.name, line)
        for path in sorted((ROOT / "kvshard_ref").glob("*.py"))
        if path.name not in {"device.py", "placement.py", "plan.py"}
        for line in calls(path, names)
        if line not in allowed
        and not any(path.name == file and (line.strip() in old or old.strip() in line) for file, old in covered)
    ]
    assert [] == missing


@pytest.mark.parametrize("name", ["attention-waits-for-gather", "send-waits-for-rows"])
def test_a_deletion_is_found(name: str) -> None:
    """Without these waits the happens-before check fails, in few ops; of the second only as no look at rows waits."""
    done = command(name)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (name, "order") == (found["id"], found["how"])
    assert found["ops"] <= 8
    assert "not ordered after write" in found["seen"]


def test_an_unknown_deletion_is_a_usage_error() -> None:
    """The error names the deletions that there are."""
    done = command("nothing")
    assert done.returncode == 2
    assert "no deletion nothing" in done.stderr
    assert "attention-waits-for-gather" in done.stderr


def test_a_stale_table_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that the reference no longer has is told with its name and its file."""
    row = {"id": "gone", "kind": "wait", "file": "gather.py", "old": "no such text", "new": "", "look": []}
    (tmp_path / "deletions.json").write_text(json.dumps([row]))
    monkeypatch.setattr(deletions, "TABLE", tmp_path / "deletions.json")
    with pytest.raises(SystemExit, match=r"deletion gone: its text is 0 times in kvshard_ref/gather\.py"):
        deletions.table()

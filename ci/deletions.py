"""Deletes what orders or protects the reference, one line or two at a time, in a copy of it: the suites must find each.

Waits, events, locks, pins, acknowledgements, owner filters, holds::

    python ci/deletions.py [ID ...] [--jobs 2] [--markdown docs/deletions.md]

The table is fixtures/deletions.json: file, the text that goes, the text that comes in its place, and where to look
first. A text that is not there exactly once is an error, so the table cannot go stale in silence. Exit code 1 when a
deletion survives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "fixtures" / "deletions.json"
SECONDS_MAX = 900.0


class Deletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line or two of the reference that go."""

    id: str
    kind: str  # wait, event, lock, pin, acknowledgement, owner filter, hold
    file: str
    old: str
    new: str
    look: tuple[str, ...]  # "engine case-pattern", tried first
    tests: tuple[str, ...] = ()  # unit tests that find what no op of the contract can reach


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a deletion."""

    id: str
    how: str  # engine or test that found it; empty when it survived
    case: str = ""
    ops: int = 0
    seconds: float = 0.0
    seen: str = ""


def table() -> list[Deletion]:
    """All deletions. Raises SystemExit when a text is not in its file exactly once."""
    found = []
    for deletion in msgspec.json.decode(TABLE.read_bytes(), type=list[Deletion]):
        text = (ROOT / "kvshard_ref" / deletion.file).read_text(encoding="utf-8")
        if text.count(deletion.old) != 1:
            raise SystemExit(
                f"deletion {deletion.id}: its text is {text.count(deletion.old)} times in kvshard_ref/{deletion.file}, "
                f"expected once; bring {TABLE.name} up to date:\n{deletion.old}"
            )
        found.append(deletion)
    return found


def try_out(deletion: Deletion) -> Found:
    """Runs the suites, and then the unit tests, against a copy of the reference without the text."""
    with tempfile.TemporaryDirectory(prefix="kvshard-deletion-") as name:
        copy = Path(name) / "kvshard_ref"
        shutil.copytree(ROOT / "kvshard_ref", copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / deletion.file
        file.write_text(file.read_text(encoding="utf-8").replace(deletion.old, deletion.new), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([name, str(ROOT)]), "PYTHONDONTWRITEBYTECODE": "1"}
        if deletion.tests:
            return _by_tests(deletion, environment, Path(name))
        command = [sys.executable, "-P", str(ROOT / "ci" / "first_failure.py"), name, *deletion.look]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, cwd=name
        )
    if done.returncode or not done.stdout:
        raise SystemExit(f"deletion {deletion.id}: {done.stderr[-2000:]}")
    return Found(id=deletion.id, **json.loads(done.stdout.splitlines()[-1]))


def _by_tests(deletion: Deletion, environment: dict[str, str], copy: Path) -> Found:
    where = [sys.executable, "-P", "-c", "import kvshard_ref; print(kvshard_ref.__file__)"]
    found = subprocess.run(where, env=environment, capture_output=True, text=True, check=True, cwd=copy).stdout
    if not found.startswith(str(copy)):
        raise SystemExit(f"deletion {deletion.id}: kvshard_ref comes from {found.strip()}, expected {copy}")
    for test in deletion.tests:
        options = ["-q", "-x", "-p", "no:cacheprovider", "-o", f"pythonpath={copy} {ROOT}", "--rootdir", str(ROOT)]
        command = [sys.executable, "-P", "-m", "pytest", *options, str(ROOT / test)]
        started = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=copy)
        if done.returncode == 1:
            failed = next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
            name = failed.split(" - ")[0].split("::")[-1]
            return Found(deletion.id, "unit test", name, seconds=round(time.perf_counter() - started, 1))
        if done.returncode:
            raise SystemExit(f"deletion {deletion.id}: {test}\n{done.stdout[-2000:]}")
    return Found(deletion.id, "")


def page(deletions: Sequence[Deletion], results: Sequence[Found]) -> str:
    """The table as Markdown."""
    lines = [
        "# What each wait is there for",
        "",
        "Every wait, event, lock, pin, acknowledgement, owner filter and hold of the reference, deleted one at a time",
        "in a copy of it. `python ci/deletions.py --markdown docs/deletions.md` tries them all and writes this page.",
        "*Found by*: `rows` is the plain reference (`ref`), `order` the happens-before check, `adversary` reordered",
        "work.",
        "*ops* is the length of the counterexample, *s* the time to it with the start of the process.",
        "",
        "| deleted | kind | file | found by | case or test | ops | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for deletion, found in zip(deletions, results, strict=True):
        how = found.how or "**survived**"
        lines.append(
            f"| {deletion.id} | {deletion.kind} | {deletion.file} | {how} | {found.case} | {found.ops or ''} "
            f"| {found.seconds:.1f} |"
        )
    killed = sum(bool(found.how) for found in results)
    return "\n".join([*lines, "", f"{killed} of {len(results)} found.", ""])


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Delete what orders or protects the reference, and see it found.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="deletions to try (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    asked = parser.parse_args(arguments)
    deletions = [deletion for deletion in table() if not asked.ids or deletion.id in asked.ids]
    unknown = sorted(set(asked.ids) - {deletion.id for deletion in deletions})
    if unknown:
        parser.error(f"no deletion {', '.join(unknown)}; expected some of {', '.join(each.id for each in table())}")
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = []
        for found in pool.map(try_out, deletions):
            results.append(found)
            print(json.dumps(asdict(found)), flush=True)
    if asked.markdown:
        asked.markdown.write_text(page(deletions, results), encoding="utf-8")
    return int(any(not found.how for found in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

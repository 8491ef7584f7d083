"""`python FILE [CLASS[.METHOD] ..] [-f]` for a registered test file that has no `__main__` guard of its own.

Runners that know nothing of pytest start files in this way, and one that only imported would exit with 0. The marker of
the file calls `run` when it finds itself in such a process. The last line tells what ran; the exit code is 1 for a
failure and for a file that ran nothing, 3 for wrong usage.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ci.attempt import LAUNCHER
from ci.registry import Registration, registrations
from ci.result import PASSING, judge, read_events
from harness.usage import UserError

EXIT_FAILED = 1
EXIT_USAGE = 3
STACKS_SECONDS = 86_400  # when the stacks of a file that hangs are shown; who started it has a limit of its own


def run(file: Path, arguments: Sequence[str]) -> int | None:
    """Runs the tests of the file; returns the exit code, or None when the guard of the file is to run them."""
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    try:
        made = registrations(file)
        if any(found.is_script for found in made):
            return None
        names, options = _read(file, arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    targets = [f"{file}::{name.replace('.', '::')}" for name in names] or [str(file)]
    floor = 1 if names else min((found.min_tests for found in made), default=1)
    return _judged(file, [*targets, *options], made, floor)


def _read(file: Path, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names within the file, and the options of pytest. Raises `UserError` for an option that there is not."""
    options = [word for word in arguments if word.startswith("-")]
    unknown = [word for word in options if word not in {"-f", "--failfast"}]
    if unknown:
        step = "use python -m pytest for more"
        raise UserError(f"{file}: unknown option {unknown[0]}; expected CLASS or CLASS.METHOD, or -f; {step}")
    return [word for word in arguments if word not in options], ["-x"] if options else []


def _judged(file: Path, words: Sequence[str], made: Sequence[Registration], floor: int) -> int:
    """Runs pytest in a process of its own, as `kvshard ci run` does, and says what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        where = [str(events), str(Path.cwd()), str(STACKS_SECONDS)]
        code = subprocess.run([sys.executable, str(LAUNCHER), "pytest", *where, *words], check=False).returncode
        told = read_events(events)
    gate = any(found.gate for found in made)
    verdict, reason = judge(told, code, is_script=False, gate=gate, min_tests=floor)
    counts = f"{told.counts.passed} passed, {told.counts.failed} failed, {told.counts.skipped} skipped"
    print(f"{verdict}: {file}: {told.counts.executed} tests ran: {counts}{f'; {reason}' if reason else ''}", flush=True)
    return 0 if verdict in PASSING else EXIT_FAILED

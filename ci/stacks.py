"""What processes that hang are doing: their Python stacks, by py-spy where it is installed."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

PROCESSES_MAX = 16
ONE_SECONDS = 20.0  # py-spy reads the symbols of what a process has loaded
ALL_SECONDS = 90.0


def dump(processes: Sequence[psutil.Process], target: Path) -> None:
    """Writes a paragraph for each process: what it is, and its stacks. Never fails; what is not known is told."""
    tool = _py_spy()
    deadline = time.monotonic() + ALL_SECONDS
    lines = [] if tool else ["py-spy is not installed: the log alone has stacks, those of the file's own process", ""]
    for process in processes[:PROCESSES_MAX]:
        lines.append(_described(process))
        if tool:
            lines.append(_stacks(tool, process.pid, min(ONE_SECONDS, deadline - time.monotonic())))
        lines.append("")
    if len(processes) > PROCESSES_MAX:
        lines.append(f"and {len(processes) - PROCESSES_MAX} more processes")
    with contextlib.suppress(OSError):
        target.write_text("\n".join(lines), encoding="utf-8", errors="replace")


def _py_spy() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"  # of this environment, which need not be on PATH
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _described(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            parent, state, command = process.ppid(), process.status(), shlex.join(process.cmdline())
    except psutil.Error as error:
        return f"process {process.pid}: {error}"
    return f"process {process.pid}, started by {parent}, {state}: {command}"


def _stacks(tool: str, pid: int, seconds: float) -> str:
    if seconds <= 0:
        return "no time was left for its stacks"
    try:
        ended = subprocess.run(
            [tool, "dump", "--pid", str(pid)],
            capture_output=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stacks: {error}"
    if ended.returncode:
        return f"no stacks, no Python or no right to look: {ended.stderr.decode(errors='replace').strip()}"
    return ended.stdout.decode(errors="replace").strip()

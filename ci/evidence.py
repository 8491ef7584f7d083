"""What is left of a file that failed, in one folder: enough to see why without the machine, and small.

evidence.json   verdict, attempts, how to run it again, environment, packages, GPUs, what did not fit
*.log           what each failed attempt printed, the end of it where it is long
*.stacks        what the processes of an attempt that ran out of time were doing
*.gpus          what each GPU held then, and for whom
traces/         counterexamples that were written meanwhile
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ci.nvml import gpu_state
from ci.plan import Entry
from ci.redact import SECRET_NAME, Redactor
from ci.result import PASSING, Attempt, FileResult
from harness.provenance import ENVIRONMENT

RUN_BYTES_MAX = 200 << 20  # of all folders of a run
FOLDER_BYTES_MAX = 20 << 20
FILE_BYTES_MAX = 4 << 20  # of a longer one the end is kept
TRACES = "kvshard-traces"  # where the commands of this project write them, unless they are told another place
NODES_MAX = 5  # tests that a command names

# Variables that are shown. Everything else stays on the machine.
SHOWN = frozenset({*ENVIRONMENT, "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "TMPDIR", "VIRTUAL_ENV"})
SHOWN_PREFIXES = (
    "CUDA_",
    "GLOO_",
    "KVSHARD_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PYTHON",
    "PYTORCH_",
    "TORCH_",
    "UCX_",
)
SHOWN_OF_ACTIONS = re.compile(r"GITHUB_(JOB|REF|REPOSITORY|RUN_ATTEMPT|RUN_ID|SHA|WORKFLOW)|RUNNER_(ARCH|NAME|OS)")
NEEDED = re.compile(r"CUDA_VISIBLE_DEVICES|KVSHARD_\w+|OMP_NUM_THREADS|PYTEST_ADDOPTS|PYTHONPATH")  # to run it again


@dataclass
class Bundles:
    """The folders of one run, below `folder`; together they have a size, and no secret of `environment` gets in."""

    folder: Path
    root: Path
    environment: Mapping[str, str]  # that the files ran with
    left: int = RUN_BYTES_MAX
    redactor: Redactor = field(init=False)

    def __post_init__(self) -> None:
        self.redactor = Redactor(self.environment)

    def collect(self, entry: Entry, result: FileResult, since: float) -> Path:
        """The folder of a file that has failed; `since` is when it was started, in seconds since 1970."""
        place = self.folder / re.sub(r"[^A-Za-z0-9._-]+", ".", entry.target)
        place.mkdir(parents=True, exist_ok=True)
        room = _Room(place, min(self.left, FOLDER_BYTES_MAX), self.redactor)
        about = {
            **msgspec.to_builtins(result),
            "replay": replay(entry, result, self.environment),
            **machine(self.environment),
        }
        for made in (made for made in result.attempts if made.verdict not in PASSING):
            for path in _written(made):
                room.add(path, path.name)
        for path in self._traces(since):
            room.add(path, f"traces/{path.name}")
        room.write("evidence.json", json.dumps({**about, "left_out": room.left_out}, indent=2).encode())
        self.left -= room.used
        return place

    def without_secrets(self, made: Attempt) -> Attempt:
        """The attempt, of which all else is made that is told of a file."""
        text = self.redactor.text
        failed, skips = tuple(map(text, made.failed)), {text(reason): count for reason, count in made.skips.items()}
        return msgspec.structs.replace(made, reason=text(made.reason), failed=failed, skips=skips)

    def _traces(self, since: float) -> Iterable[Path]:
        folder = self.root / TRACES
        found = [path for path in folder.glob("**/*") if path.is_file() and not path.is_symlink()]
        return sorted(path for path in found if path.stat().st_mtime >= since)


class _Room:
    """A folder that takes so many bytes."""

    def __init__(self, place: Path, most: int, redactor: Redactor) -> None:
        self._place, self._most, self._redactor = place, most, redactor
        self.used = 0
        self.left_out: list[str] = []

    def add(self, path: Path, name: str) -> None:
        """A copy of a file, of a long one the end; without its secrets."""
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - FILE_BYTES_MAX))
                data = self._redactor.data(file.read())
        except OSError as error:
            self.left_out.append(f"{name}: {error.strerror}")
            return
        if self.used + len(data) > self._most:
            self.left_out.append(f"{name}: {size} bytes, and there was no room")
            return
        if size > FILE_BYTES_MAX:
            self.left_out.append(f"{name}: the first {size - FILE_BYTES_MAX} of {size} bytes")
        self._put(name, data)

    def write(self, name: str, data: bytes) -> None:
        """A file that is always there."""
        self._put(name, self._redactor.data(data))

    def _put(self, name: str, data: bytes) -> None:
        target = self._place / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)
        self.used += len(data)


def _written(made: Attempt) -> Iterable[Path]:
    """What an attempt has written beside the tests' own files."""
    log = Path(made.log)
    return [path for path in (log, log.with_suffix(".stacks"), log.with_suffix(".gpus")) if path.exists()]


def replay(entry: Entry, result: FileResult, environment: Mapping[str, str]) -> str:
    """A shell command that runs what failed once more, from the root of the repository at the same commit."""
    names = sorted(name for name in shown(environment) if NEEDED.fullmatch(name))
    variables = [f"{name}={environment[name]}" for name in names]
    failed = [test for test in result.attempts[-1].failed if test.startswith(f"{entry.file}::")]
    if entry.registration.is_script:
        command = ["python", entry.file, *(entry.arguments or ("-f",))]
    else:
        command = ["python", "-m", "pytest", *(failed if 0 < len(failed) <= NODES_MAX else [entry.target])]
    return shlex.join(["env", *variables, *command] if variables else command)


def machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """Where it ran."""
    found = {f"{made.name}=={made.version}" for made in importlib.metadata.distributions() if made.name}
    return {
        "python": f"{platform.python_version()} {sys.executable}",
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "environment": shown(environment),
        "packages": sorted(found, key=str.lower),
        "gpus": gpu_state(),
    }


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be seen, by name."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if (name in SHOWN or name.startswith(SHOWN_PREFIXES) or SHOWN_OF_ACTIONS.fullmatch(name))
        and not SECRET_NAME.search(name)
    }

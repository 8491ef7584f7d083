"""The table of runners: what a registration's `runner` stands for. `ci/runners.toml`, or another file of that form.

The handler of comments reads it too, so it needs nothing but the standard library.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ci.registry import Problem, Registration, Registry
from harness.usage import UserError, nearest

DEFAULT_FILE = Path(__file__).parent / "runners.toml"
MATRIX_MAX = 256  # jobs of one matrix of GitHub Actions

# Labels and the script end up in workflow files and shell steps.
_LABEL = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_SCRIPT = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)+[\w-]+\.sh", re.ASCII)
_GPU_BACKENDS_NOT = ("cpu",)

_SECONDS, _COUNT, _TEXT = ((int, float), "a number of seconds"), ((int,), "a whole number"), ((str,), "a string")
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "labels": ((list,), "a list of strings"),
        "gpu": _TEXT,
        "gpus": _COUNT,
        "install": _TEXT,
        "file_seconds": _SECONDS,
        "job_seconds": _SECONDS,
        "max_parts": _COUNT,
    }
)


class RunnersError(UserError):
    """A table of runners that cannot work."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One kind of machine, and its limits."""

    name: str
    labels: tuple[str, ...]
    gpu: str | None = None  # the type
    gpus: int = 0
    install: str | None = None  # a script, relative to the repository
    file_seconds: float = 1200.0
    job_seconds: float = 1200.0
    max_parts: int = 64


class Runners(Mapping[str, Runner]):
    """The runners by name."""

    def __init__(self, source: Path, runners: Mapping[str, Runner]) -> None:
        self.source = source
        self._runners = dict(runners)

    def __getitem__(self, name: str) -> Runner:
        return self._runners[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runners)

    def __len__(self) -> int:
        return len(self._runners)

    def named(self, name: str) -> Runner:
        """The runner of that name. Raises `RunnersError`."""
        if name not in self._runners:
            known = ", ".join(self._runners)
            raise RunnersError(f"no runner {name!r}{nearest(name, self._runners)} {self.source} has: {known}")
        return self._runners[name]


def read(file: Path = DEFAULT_FILE) -> Runners:
    """The table of a file. Raises `RunnersError`."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunnersError(f"{file}: {error}; expected a TOML table of runners; correct it") from error
    unknown = set(table) - {"defaults", "runner"}
    runners = table.get("runner")
    if unknown or not isinstance(runners, dict) or not runners:
        told = f"has {', '.join(sorted(unknown))}" if unknown else "has no [runner.NAME]"
        raise RunnersError(f"{file}: {told}; expected [defaults] and [runner.NAME] tables; see ci/runners.toml")
    return Runners(file, {name: _runner(file, name, table.get("defaults", {}), keys) for name, keys in runners.items()})


def _runner(file: Path, name: str, defaults: Any, keys: Any) -> Runner:
    if not (isinstance(defaults, Mapping) and isinstance(keys, Mapping)):
        raise RunnersError(f"{file}: runner {name!r}: no table; expected [defaults] and [runner.NAME] tables")
    given = {**defaults, **keys}
    for key, value in {"labels": None, **given}.items():
        kind, expected = _KINDS.get(key, ((), f"one of {', '.join(_KINDS)}"))
        if isinstance(value, bool) or not isinstance(value, kind):
            raise RunnersError(f"{file}: runner {name!r}: {key} = {value!r}; expected {expected}; correct it")
    labels = given["labels"]
    if not all(isinstance(label, str) for label in labels):
        raise RunnersError(f"{file}: runner {name!r}: labels = {labels!r}; expected strings; correct it")
    made = Runner(**{**given, "name": name, "labels": tuple(labels)})
    checks = (
        (bool(made.labels), "labels", made.labels, "at least one"),
        (all(map(_LABEL.fullmatch, (name, *made.labels))), "labels", made.labels, "letters, digits, '.', '_' and '-'"),
        (made.install is None or _SCRIPT.fullmatch(made.install), "install", made.install, "FOLDER/NAME.sh"),
        (made.gpus >= 0 and (made.gpus > 0) == (made.gpu is not None), "gpus", made.gpus, "a number with a type `gpu`"),
        (0 < made.file_seconds <= made.job_seconds, "file_seconds", made.file_seconds, "above 0, at most job_seconds"),
        (0 < made.max_parts <= MATRIX_MAX, "max_parts", made.max_parts, f"1 to {MATRIX_MAX}"),
    )
    for is_right, key, value, expected in checks:
        if not is_right:
            raise RunnersError(f"{file}: runner {name!r}: {key} = {value!r}; expected {expected}; correct it")
    return made


def problems(registry: Registry, runners: Runners) -> Iterator[Problem]:
    """Registrations that their runner cannot take: it is unknown, too short, or of the other kind."""
    for made in registry.registrations:
        runner = runners.get(made.runner)
        if runner is None:
            near = nearest(made.runner, runners).removeprefix("; ").rstrip(".")
            step = near or f"choose one, or add it to {runners.source.name}"
            yield _problem(made, f"runner {made.runner!r}", f"one of {', '.join(runners)}", step)
            continue
        if made.est_time > runner.file_seconds:
            value, limit = f"est_time {made.est_time:g} s", f"at most {runner.file_seconds:g} s on {runner.name}"
            yield _problem(made, value, limit, "split the file")
        if (made.backend in _GPU_BACKENDS_NOT) == (runner.gpus > 0):
            value = f"a {made.backend} registration on {runner.name} with {runner.gpus} GPUs"
            step = f"use {'register_gpu_ci' if runner.gpus else 'register_cpu_ci'}, or another runner"
            yield _problem(made, value, "a runner of its kind", step)


def _problem(made: Registration, value: str, expected: str, step: str) -> Problem:
    return Problem(made.path, made.line, value, expected, step)

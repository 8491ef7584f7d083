"""What a test file says about itself, as values: a registration, and what can be wrong with one."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.usage import UserError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file: where, what was found, what was expected, and the next step."""

    path: Path
    line: int
    value: str
    expected: str
    step: str

    def __str__(self) -> str:
        return f"{self.path.as_posix()}:{self.line}: {self.value}; expected {self.expected}; {self.step}"


class RegistrationError(UserError):
    """A file's registrations cannot be used; `problems` has one entry for each mistake."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True)
class Disabled:
    """Why a file does not run. `issue` and `until` are None for sglang's bare string only, which never expires."""

    reason: str
    issue: str | None = None
    until: dt.date | None = None

    def __str__(self) -> str:
        return self.reason + (f" ({self.issue}, until {self.until})" if self.issue else "")

    def is_expired(self, today: dt.date) -> bool:
        """Whether it counts no more: from the day `until` on."""
        return self.until is not None and today >= self.until


@dataclass(frozen=True)
class Registration:
    """A file on one runner."""

    path: Path
    backend: str  # gpu, cpu, or one of SGLANG_BACKENDS
    stage: str
    runner: str
    est_time: float  # seconds
    nightly: bool
    disabled: Disabled | None
    line: int
    gate: bool = False  # an accuracy gate: never retried
    min_tests: int = 1  # fewer executed tests are a failure
    is_script: bool = False  # has a `__main__` guard that calls something, so `python FILE` runs its tests
    suite: str = ""  # sglang's name of (stage, runner)

    def is_enabled(self, today: dt.date) -> bool:
        """Whether it runs: it is not disabled, or was only until a day that has come."""
        return self.disabled is None or self.disabled.is_expired(today)

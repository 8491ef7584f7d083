"""How far a run is: which cases run, which have ended, and how long the rest may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.record import counts
from harness.result import CaseResult, Progress


@dataclass(slots=True)
class Standing:
    """Is told of every progress and result. Work is counted in examples; a case that told nothing counts as average."""

    examples_each: int  # of an average case, until cases tell theirs
    total: int | None = None  # cases; None until they are collected
    running: dict[str, Progress] = field(default_factory=dict)
    results: list[CaseResult] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    _examples_max: dict[str, int] = field(default_factory=dict)
    _started: float | None = None

    def progress(self, progress: Progress) -> None:
        """A case tells how far it is."""
        if self._started is None:
            self._started = self.clock()
        self.running[progress.case] = progress
        self._examples_max[progress.case] = progress.examples_max

    def ended(self, result: CaseResult) -> None:
        """A case has its verdict."""
        self.running.pop(result.case, None)
        self.results.append(result)

    def counts(self) -> dict[str, int]:
        """Ended cases per verdict."""
        return counts(self.results)

    def fraction(self) -> float:
        """Done work of all work, between 0 and 1."""
        if not self.total:
            return 0.0
        known = self._examples_max
        average = sum(known.values()) / len(known) if known else self.examples_each
        ended = sum(known.get(result.case, average) for result in list(self.results))
        running = sum(min(progress.examples, progress.examples_max) for progress in list(self.running.values()))
        expected = sum(known.values()) + average * max(0, self.total - len(known))
        return min(1.0, (ended + running) / max(expected, 1.0))

    def seconds_left(self) -> float | None:
        """An estimate from the work done so far; None before there is any."""
        done = self.fraction()
        if self._started is None or done <= 0.0:
            return None
        return (self.clock() - self._started) * (1.0 - done) / done

"""The flake ledger: tests that failed and passed on the same commit, one JSON line each, so that none is forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ci.result import FileResult, Verdict


class Flake(msgspec.Struct, frozen=True, kw_only=True):
    """A test, or a whole file where no test is known, and how its attempts ended."""

    test: str
    file: str
    commit: str | None
    outcomes: tuple[str, ...]
    stage: str
    runner: str
    started: str


def flakes(result: FileResult) -> Iterator[Flake]:
    """The flakes of a file; none unless its verdict is `flaky`."""
    if result.verdict is not Verdict.FLAKY:
        return
    failed: Sequence[str] = sorted({test for attempt in result.attempts for test in attempt.failed})
    for test in failed or [result.file]:
        outcomes = [
            str(attempt.verdict) if not failed else "fail" if test in attempt.failed else "pass"
            for attempt in result.attempts
        ]
        yield Flake(
            test=test,
            file=result.file,
            commit=result.commit,
            outcomes=tuple(outcomes),
            stage=result.stage,
            runner=result.runner,
            started=result.started,
        )

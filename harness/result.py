"""What one case came to: the line that a record keeps and that every report is derived from."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from harness.types import Verdict


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A counterexample: the five things a reader needs, and the trace file when one was written."""

    claim: str
    seen: str
    expected: str
    why: str
    config: str
    ops: tuple[str, ...]  # the shortest list found, one line each
    replay: str  # the command
    trace: str | None = None


class CaseResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One case judged. `why` says in one sentence what made a verdict other than pass."""

    case: str
    verdict: Verdict
    why: str = ""
    examples: int = 0
    ops: int = 0  # applied in all examples
    seconds: float = 0.0
    seen: dict[str, int] = {}
    failure: Failure | None = None


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A running case; `examples_max` is the budget's number. Shrinking runs beyond it."""

    case: str
    examples: int
    examples_max: int
    shrinking: bool = False


def message(failure: Failure) -> str:
    """The five parts of a failure as text."""
    lines = [
        f"claim     {failure.claim}",
        f"seen      {failure.seen}",
        f"expected  {failure.expected}",
        f"          because {failure.why}",
    ]
    lines += [f"ops       {len(failure.ops)} on {failure.config}"]
    lines += [f"          {number}. {line}" for number, line in enumerate(failure.ops, 1)]
    lines += [f"replay    {failure.replay}"]
    return "\n".join(lines)


def exit_code(results: Iterable[CaseResult]) -> int:
    """0 pass or known, 1 fail, 2 nothing proven, 3 harness or engine error.

    A counterexample outweighs an error, an error outweighs what is unknown.
    """
    verdicts = {result.verdict for result in results}
    if Verdict.FAIL in verdicts:
        return 1
    if Verdict.ERROR in verdicts:
        return 3
    return 2 if Verdict.UNKNOWN in verdicts or not verdicts & {Verdict.PASS, Verdict.KNOWN} else 0

"""Known failures of an engine: cases that it fails for a reason that is written down, each with a trace that must fail.

A file `fixtures/known/<engine>.toml` holds `[[known]]` tables. A case that fails as its entry says is `known` and does
not fail a run; once the entry's trace does not fail any more, the run does, until the entry is removed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness import here
from harness.adapter import ConfigError, Engine
from harness.case import Case
from harness.result import CaseResult
from harness.trace import TraceError, read, replay
from harness.types import Manifest, Verdict
from harness.usage import UserError

FOLDER = Path(__file__).parent.parent / "fixtures" / "known"


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One case that one engine fails."""

    case: str
    versions: tuple[str, ...]  # of the engine; others are judged as if it were not listed
    claim: str  # that is broken, as the failure tells it
    seen: str  # a part of what the failure tells
    reason: str  # one sentence
    finding: str  # a page, from the folder of the file
    trace: str  # a counterexample, from the folder of the file


class KnownFailures:
    """The entries of one file that apply to one engine."""

    def __init__(self, path: Path, entries: Sequence[Known]) -> None:
        self.path = path
        self.entries = {entry.case: entry for entry in entries}

    def judged(self, result: CaseResult, made: Case, engine: Engine) -> CaseResult:
        """The result, or what it comes to when its case is listed: `known`, or an error when the entry is outdated."""
        entry = self.entries.get(made.id)
        if entry is None or result.verdict in (Verdict.SKIP, Verdict.ERROR):
            return result
        if result.verdict is Verdict.FAIL:
            as_known = result.failure is not None and is_as_told(entry, result.failure.claim, result.failure.seen)
            why = f"{entry.reason} See {self._page(entry)}"
            return msgspec.structs.replace(result, verdict=Verdict.KNOWN, why=why) if as_known else result
        trace = read(self.path.parent / entry.trace)
        try:
            _, violation = replay(made, engine, trace.header.config, [step.op for step in trace.steps])
        except ConfigError:  # the address narrows the engine to other configs: the entry is not about those
            return result
        if violation is not None and is_as_told(entry, violation.claim or made.claim, violation.seen):
            why = f"not met in this run, but its trace still fails: {entry.reason} See {self._page(entry)}"
            return msgspec.structs.replace(result, verdict=Verdict.KNOWN, why=why)
        now = "it fails in another way now" if violation is not None else "fixed"
        why = f"{now}: {self.path.parent / entry.trace} does not show it any more; remove the entry from {self.path}"
        return msgspec.structs.replace(result, verdict=Verdict.ERROR, why=why)

    def _page(self, entry: Known) -> str:
        return here.short((self.path.parent / entry.finding).resolve())


def is_as_told(entry: Known, claim: str, seen: str) -> bool:
    """Whether a failure is the one that an entry tells of."""
    return claim == entry.claim and entry.seen in seen


def known_failures(manifest: Manifest, path: Path | None = None) -> KnownFailures:
    """What is listed for an engine, in `path` or the project's own file for its name. Raises `UserError`."""
    chosen = path or FOLDER / f"{manifest.name}.toml"
    if path is None and not chosen.is_file():
        return KnownFailures(chosen, ())
    try:
        listed = msgspec.convert(tomllib.loads(chosen.read_text()), dict[str, list[Known]])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{chosen}: {error}; expected [[known]] tables with {', '.join(FIELDS)}") from error
    if set(listed) - {"known"}:
        raise UserError(f"{chosen}: tables {', '.join(sorted(listed))}; expected only [[known]]")
    entries = [entry for entry in listed.get("known", []) if manifest.version in entry.versions]
    for entry in entries:
        try:
            trace = read(chosen.parent / entry.trace)
        except TraceError as error:
            raise UserError(f"{chosen}, case {entry.case}: {error}") from error
        if trace.header.case != entry.case:
            raise UserError(f"{chosen}, case {entry.case}: its trace is of {trace.header.case}; expected the same case")
        if not (chosen.parent / entry.finding).is_file():
            raise UserError(f"{chosen}, case {entry.case}: no page {entry.finding}; expected one that explains it")
    return KnownFailures(chosen, entries)


FIELDS = Known.__struct_fields__

"""A run's record: one JSONL file that says everything, from which every report is derived.

    line 1          header   where the run comes from and what was asked
    lines 2..n-1    one result per case
    line n          footer   what it came to; a file without it is not a record

A record names the engine and never how it was reached.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from harness.result import CaseResult
from harness.types import Verdict
from harness.usage import UserError

FORMAT = 1
WRITTEN = "a file written by `kvshard run --record`"
T = TypeVar("T")


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a run comes from and what was asked of it."""

    kvshard_record: int = FORMAT
    kvshard: str  # version
    engine: str
    engine_version: str
    engine_options: dict[str, str]
    budget: str
    seed: int
    seed_origin: str
    commit: str | None  # of the git checkout that the run was started in
    versions: dict[str, str]
    options: dict[str, str]  # every other option
    environment: dict[str, str]  # every variable read that is set
    started: str  # ISO 8601, UTC


class Footer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run came to."""

    counts: dict[str, int]  # verdict -> cases, every verdict named
    seconds: float
    exit_code: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    header: Header
    results: tuple[CaseResult, ...]
    footer: Footer


class RecordError(UserError):
    """A file is not a record of a run; the message names file, line and reason."""


class WrongFormat(RecordError):  # noqa: N818  # the reason is the name
    """The first line is no header of this format."""


class MalformedLine(RecordError):  # noqa: N818  # named after what is wrong with the file
    """A line is neither a result nor what stands in its place."""


class DuplicateCase(RecordError):  # noqa: N818  # named after what is wrong with the file
    """A case has two results."""


class MissingFooter(RecordError):  # noqa: N818  # named after what is wrong with the file
    """The run did not end."""


class WrongFooter(RecordError):  # noqa: N818  # named after what is wrong with the file
    """The footer counts something else than the file holds."""


class _Format(msgspec.Struct):
    kvshard_record: int


def counts(results: Sequence[CaseResult]) -> dict[str, int]:
    """Cases per verdict, every verdict named."""
    found = Counter(result.verdict for result in results)
    return {str(verdict): found[verdict] for verdict in Verdict}


def write(path: Path, record: Record) -> None:
    """Writes a record. Raises `RecordError`."""
    write_lines(path, [record.header, *record.results, record.footer])


def write_lines(path: Path, lines: Sequence[msgspec.Struct]) -> None:
    """Writes structs, one a line, in one piece: a reader sees all of it or nothing. Raises `RecordError`."""
    write_text(path, "".join(msgspec.json.encode(line).decode() + "\n" for line in lines))


def write_text(path: Path, text: str) -> None:
    """Writes a file in one piece. Raises `RecordError`."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from error
        raise


def read(path: Path) -> Record:
    """Reads a record. Raises a `RecordError` that names file, line and reason."""
    return of_lines(path, lines_of(path))


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file. Raises `RecordError`."""
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}; expected {WRITTEN}") from error


def of_lines(path: Path, lines: Sequence[bytes], first: int = 1) -> Record:
    """The record that these lines of a file hold, which begin at line `first`. Raises `RecordError`."""
    header = _header(path, lines[0] if lines else b"", first)
    footer = _footer(path, lines, first)
    results = [decoded(path, number, line, CaseResult) for number, line in enumerate(lines[1:-1], first + 1)]
    seen: dict[str, int] = {}
    for number, result in enumerate(results, first + 1):
        if result.case in seen:
            raise DuplicateCase(f"{path}:{number}: {result.case!r} has a result on line {seen[result.case]} already")
        seen[result.case] = number
    if footer.counts != counts(results):
        last = first + len(lines) - 1
        raise WrongFooter(f"{path}:{last}: the footer counts {footer.counts}, the file holds {counts(results)}")
    return Record(header=header, results=tuple(results), footer=footer)


def _header(path: Path, line: bytes, number: int) -> Header:
    try:
        found = msgspec.json.decode(line, type=_Format).kvshard_record
    except msgspec.MsgspecError as error:
        raise WrongFormat(f"{path}:{number}: no header of a record: {error}; expected {WRITTEN}") from error
    if found != FORMAT:
        raise WrongFormat(f"{path}:{number}: record format {found}; this version reads {FORMAT}")
    return decoded(path, number, line, Header)


def _footer(path: Path, lines: Sequence[bytes], first: int) -> Footer:
    try:
        if len(lines) > 1:
            return msgspec.json.decode(lines[-1], type=Footer)
    except msgspec.MsgspecError:
        pass
    last = first + len(lines) - 1
    raise MissingFooter(f"{path}:{last}: the last line is no footer, so the run did not end; run it again")


def decoded(path: Path, number: int, line: bytes, kind: type[T]) -> T:
    """One line of a file as a struct. Raises `RecordError`."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise MalformedLine(f"{path}:{number}: {error}; expected a {kind.__name__}") from error

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
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}; expected {WRITTEN}") from error
    header = _header(path, lines[0] if lines else b"")
    footer = _footer(path, lines)
    results = [_decoded(path, number, line, CaseResult) for number, line in enumerate(lines[1:-1], 2)]
    first: dict[str, int] = {}
    for number, result in enumerate(results, 2):
        if result.case in first:
            raise DuplicateCase(f"{path}:{number}: {result.case!r} has a result on line {first[result.case]} already")
        first[result.case] = number
    if footer.counts != counts(results):
        raise WrongFooter(f"{path}:{len(lines)}: the footer counts {footer.counts}, the file holds {counts(results)}")
    return Record(header=header, results=tuple(results), footer=footer)


def _header(path: Path, line: bytes) -> Header:
    try:
        found = msgspec.json.decode(line, type=_Format).kvshard_record
    except msgspec.MsgspecError as error:
        raise WrongFormat(f"{path}:1: no header of a record: {error}; expected {WRITTEN}") from error
    if found != FORMAT:
        raise WrongFormat(f"{path}:1: record format {found}; this version reads {FORMAT}")
    return _decoded(path, 1, line, Header)


def _footer(path: Path, lines: Sequence[bytes]) -> Footer:
    try:
        if len(lines) > 1:
            return msgspec.json.decode(lines[-1], type=Footer)
    except msgspec.MsgspecError:
        pass
    raise MissingFooter(f"{path}:{len(lines)}: the last line is no footer, so the run did not end; run it again")


def _decoded(path: Path, number: int, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise MalformedLine(f"{path}:{number}: {error}; expected a {kind.__name__}") from error

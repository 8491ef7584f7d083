"""Engines beside each other: the records of one suite, one a column, in one file.

    line 1            what was asked of all, and the columns: how many cases each has, or why it has no record
    then, in turn     the record of every column that has one, see harness/record.py
    last line         footer; a file without it is no matrix

A column is named after its engine, unless it was given a name. An engine that could not be connected has told none, so
its address stands there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from harness import record
from harness.record import Header, Record, RecordError
from harness.result import CaseResult

FORMAT = 1
SEVERITY = (0, 2, 3, 1, 130, 143)  # exit codes of runs, the worst one last; see harness.result.exit_code


class MatrixError(RecordError):
    """Records that do not stand beside each other, or a file that is no matrix; the message says which and why."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the records of a matrix have in common, else a row would compare different things."""

    kvshard: str  # version: another one may have other cases
    suite: str
    keyword: str
    budget: str


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its record, and why there is none or not all of it."""

    engine: str  # with its options, or the name it was given
    record: Record | None
    exit_code: int
    why: str = ""
    is_named: bool = False

    @property
    def title(self) -> str:
        """The engine with its version."""
        if self.record is None:
            return self.engine
        header = self.record.header
        told = f"{header.engine} {header.engine_version}"
        return f"{self.engine} ({told})" if self.is_named else " ".join([told, *_options(header)])

    @property
    def results(self) -> Mapping[str, CaseResult]:
        """By case."""
        return {result.case: result for result in self.record.results} if self.record is not None else {}


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Some engines and what they were asked."""

    asked: Asked
    columns: tuple[Column, ...]

    @property
    def cases(self) -> Sequence[str]:
        """The cases that any engine has a result of, in order."""
        return sorted({case for column in self.columns for case in column.results})

    @property
    def exit_code(self) -> int:
        """The worst of all columns."""
        return worst(column.exit_code for column in self.columns)


class _Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A column in the first line of a file."""

    engine: str
    cases: int | None  # None: no record
    exit_code: int
    why: str
    is_named: bool = False


class MatrixHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first line of a file."""

    kvshard_matrix: int = FORMAT
    asked: Asked
    columns: tuple[_Listed, ...]


class MatrixFooter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The last line of a file."""

    columns: int
    exit_code: int


class _Kind(msgspec.Struct):
    kvshard_matrix: int | None = None


def worst(codes: Iterable[int]) -> int:
    """The exit code that outweighs the others."""
    return max(codes, key=lambda code: SEVERITY.index(code) if code in SEVERITY else len(SEVERITY))


def asked_in(header: Header) -> Asked:
    """What a run was asked, as far as it must be the same in all columns."""
    options = header.options
    return Asked(
        kvshard=header.kvshard,
        suite=options.get("suite", ""),
        keyword=options.get("keyword", ""),
        budget=header.budget,
    )


def column_of(found: Record, exit_code: int | None = None, why: str = "") -> Column:
    """The column of a run."""
    code = found.footer.exit_code if exit_code is None else exit_code
    engine = " ".join([found.header.engine, *_options(found.header)])
    return Column(engine=engine, record=found, exit_code=code, why=why)


def _options(header: Header) -> list[str]:
    return [f"{name}={value}" for name, value in header.engine_options.items()]


def write(path: Path, matrix: Matrix) -> None:
    """Writes a matrix in one piece. Raises `RecordError`."""
    listed = tuple(
        _Listed(
            engine=column.engine,
            cases=None if column.record is None else len(column.record.results),
            exit_code=column.exit_code,
            why=column.why,
            is_named=column.is_named,
        )
        for column in matrix.columns
    )
    lines: list[msgspec.Struct] = [MatrixHeader(asked=matrix.asked, columns=listed)]
    for column in matrix.columns:
        if column.record is not None:
            lines += [column.record.header, *column.record.results, column.record.footer]
    lines.append(MatrixFooter(columns=len(listed), exit_code=matrix.exit_code))
    record.write_lines(path, lines)


def read(path: Path) -> Matrix:
    """What a file holds: a matrix, or a record, which is one column. Raises a `RecordError` that names the line."""
    lines = record.lines_of(path)
    try:
        found = msgspec.json.decode(lines[0] if lines else b"", type=_Kind).kvshard_matrix
    except msgspec.MsgspecError:
        found = None
    if found is None:
        one = record.of_lines(path, lines)
        return Matrix(asked=asked_in(one.header), columns=(column_of(one),))
    if found != FORMAT:
        raise MatrixError(f"{path}:1: matrix format {found}; this version reads {FORMAT}")
    header = record.decoded(path, 1, lines[0], MatrixHeader)
    columns, at = [], 1
    for listed in header.columns:
        one_or_none = None
        if listed.cases is not None:
            one_or_none = record.of_lines(path, lines[at : at + listed.cases + 2], at + 1)
            at += listed.cases + 2
        code, is_named = listed.exit_code, listed.is_named
        columns.append(
            Column(engine=listed.engine, record=one_or_none, exit_code=code, why=listed.why, is_named=is_named)
        )
    try:
        footer = msgspec.json.decode(lines[at] if len(lines) == at + 1 else b"", type=MatrixFooter)
    except msgspec.MsgspecError:
        footer = None
    if footer is None or footer.columns != len(columns):
        raise MatrixError(f"{path}:{len(lines)}: no footer after {len(columns)} columns, so the run did not end")
    return Matrix(asked=header.asked, columns=tuple(columns))


def beside(files: Sequence[str | Path]) -> Matrix:
    """The columns of all files, each a path or NAME=path. Raises `RecordError` unless they were asked alike.

    Choices of cases may differ; then each column with one says so. No two columns have the same title.
    """
    found = [_named(file) for file in files]
    if not found:
        raise MatrixError("no record is given; expected at least one")
    (first_path, first), *others = found
    for path, each in others:
        for name in ("kvshard", "suite", "budget"):
            one, other = getattr(first.asked, name), getattr(each.asked, name)
            if one != other:
                raise MatrixError(
                    f"{first_path} has {name} {one!r}, {path} has {name} {other!r}; only runs of the same suite at the "
                    "same budget stand beside each other"
                )
    is_mixed = len({each.asked.keyword for _, each in found}) > 1
    origin: dict[str, Path] = {}
    columns: list[Column] = []
    for path, each in found:
        told = f"only the cases of -k {each.asked.keyword!r}" if is_mixed and each.asked.keyword else ""
        for column in each.columns:
            if column.title in origin:
                raise MatrixError(
                    f"{column.title!r} is in {origin[column.title]} and in {path}; expected each engine once, or "
                    "NAME=FILE to tell them apart"
                )
            origin[column.title] = path
            columns.append(replace(column, why="; ".join(filter(None, (column.why, told)))))
    return Matrix(asked=replace(first.asked, keyword="") if is_mixed else first.asked, columns=tuple(columns))


def _named(file: str | Path) -> tuple[Path, Matrix]:
    """A file that was given as a path or as NAME=path, and what it holds. Raises `RecordError`."""
    name, mark, rest = str(file).partition("=")
    if not mark or Path(file).exists():
        return Path(file), read(Path(file))
    path = Path(rest)
    found = read(path)
    if not name or len(found.columns) != 1:
        raise MatrixError(f"{file}: {len(found.columns)} engines; expected NAME=FILE with a name and a file of one")
    return path, replace(found, columns=(replace(found.columns[0], engine=name, is_named=True),))

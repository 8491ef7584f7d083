"""What is written of a matrix: the same kinds of files as of a run of one engine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from msgspec.structs import replace

from harness import junit, matrix, matrix_page, matrix_table, record
from harness.matrix import Column, Matrix
from harness.record import Footer, Header, Record
from harness.result import CaseResult
from harness.types import Verdict
from harness.usage import UserError

CONNECT = "connect"  # stands for the cases of an engine that has no record


class Files(NamedTuple):
    """Where to write what; None for what is not asked."""

    record: Path | None = None
    junit: Path | None = None
    markdown: Path | None = None
    html: Path | None = None


def check(files: Files) -> None:
    """Raises `UserError` where no file can be written; for before the work. Missing folders are made by `write`."""
    for name, path in zip(files._fields, files, strict=True):
        if path is not None:
            there = next(folder for folder in path.absolute().parents if folder.exists())
            if path.is_dir() or not there.is_dir():
                raise UserError(f"--{name} {path}: expected a file; {path if path.is_dir() else there} is in the way")


def write(found: Matrix, files: Files) -> None:
    """Writes all that is asked. Raises `RecordError`."""
    if files.record is not None:
        matrix.write(files.record, found)
    if files.junit is not None:
        root = suites(found)
        ET.indent(root)
        record.write_text(files.junit, f"<?xml version='1.0' encoding='utf-8'?>\n{ET.tostring(root, 'unicode')}\n")
    if files.markdown is not None:
        record.write_text(files.markdown, matrix_table.markdown(found))
    if files.html is not None:
        record.write_text(files.html, matrix_page.page(found))


def suites(found: Matrix) -> ET.Element:
    """JUnit's `testsuites` with a suite for each engine."""
    root = ET.Element("testsuites")
    for column in found.columns:
        root.extend(junit.tree(_named(found, column)))
    return root


def _named(found: Matrix, column: Column) -> Record:
    """A record with the options in the engine's name, since JUnit tells suites apart by name alone."""
    if column.record is not None:
        return replace(column.record, header=replace(column.record.header, engine=column.engine))
    results = (CaseResult(case=CONNECT, verdict=Verdict.ERROR, why=column.why),)
    header = Header(
        kvshard=found.asked.kvshard,
        engine=column.engine,
        engine_version="",
        engine_options={},
        budget=found.asked.budget,
        seed=0,
        seed_origin="",
        commit=None,
        versions={},
        options={},
        environment={},
        started="",
    )
    footer = Footer(counts=record.counts(results), seconds=0.0, exit_code=column.exit_code)
    return Record(header=header, results=results, footer=footer)

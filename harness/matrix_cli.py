"""`kvshard matrix`: engines beside each other, from the records of runs that were made apart.

A RECORD is what `kvshard run --record` wrote, of one engine or of several. All must be of the same suite and budget;
engines may live in different environments. NAME=RECORD names the column, where one engine was run in several ways.
Exit codes: those of `kvshard run`, the worst of all engines.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness import matrix_reports, matrix_table, render
from harness.matrix import beside
from harness.matrix_reports import Files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard matrix`."""
    add = parser.add_argument
    add("records", nargs="+", metavar="RECORD", help="a file that `kvshard run --record` wrote, or NAME=FILE")
    add("--record", type=Path, metavar="FILE", help="write all of them as one record (JSONL)")
    add("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    add("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    add("--html", type=Path, metavar="FILE", help="write the table as a page for a browser")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    files = Files(args.record, args.junit, args.markdown, args.html)
    matrix_reports.check(files)
    found = beside(args.records)
    console = render.console_for(sys.stdout)
    console.print(matrix_table.failures(found), crop=False)
    console.print(matrix_table.terminal(found), crop=False)
    matrix_reports.write(found, files)
    return found.exit_code

"""`kvshard list`: the engines that have a name, and the cases; with --engine, which of them it can run."""

from __future__ import annotations

import argparse
import sys

from rich.table import Table
from rich.text import Text

from harness import render
from harness.case import Case, select
from harness.connect import close, connect, engines, manifest_of
from harness.play import lacks
from harness.suite import SUITES, all_cases
from harness.trial import NoConfig
from harness.types import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard list`."""
    parser.add_argument("--engine", metavar="ADDRESS", help="say for each case whether this engine can run it")
    parser.add_argument(
        "--suite", default=SUITES[0], metavar="SUITE", help=f"package, file or folder (default {SUITES[0]})"
    )
    parser.add_argument("-k", dest="keyword", metavar="TEXT", help="only cases whose id contains this text")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    cases = select(all_cases((args.suite,)), args.keyword)
    console = render.console_for(sys.stdout)
    if args.engine is None:
        console.print(_engines())
        console.print()
        console.print(_cases(cases, None))
        return 0
    engine = connect(args.engine)
    try:
        manifest = manifest_of(engine, args.engine)
    finally:
        close(engine)
    console.print(_cases(cases, manifest))
    can = sum(why_not(made, manifest) is None for made in cases)
    console.print(f"{manifest.name} {manifest.version} can run {can} of {len(cases)} cases")
    return 0


def why_not(made: Case, manifest: Manifest) -> str | None:
    """Why an engine cannot run a case; None when it can."""
    lacking = lacks(made, manifest)
    if lacking:
        return f"lacks {', '.join(lacking)}"
    try:
        made.configs(manifest.axes)
    except NoConfig as reason:
        return str(reason)
    return None


def _engines() -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("engine")
    table.add_column("from")
    for name, origin in engines():
        table.add_row(Text(name), Text(origin))
    return table


def _cases(cases: list[Case], manifest: Manifest | None) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("case", overflow="fold")
    if manifest is not None:
        table.add_column("runs", no_wrap=True)
    table.add_column("claim" if manifest is None else "what is lacking", overflow="fold")
    for made in cases:
        if manifest is None:
            table.add_row(Text(made.id), Text(made.claim))
            continue
        reason = why_not(made, manifest)
        table.add_row(Text(made.id), "no" if reason else "yes", Text(reason or ""), style="dim" if reason else None)
    return table

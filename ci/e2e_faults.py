"""Faults planted in real servers, seen over HTTP only: `python -m ci.e2e_faults` brings up a topology for each.

The table suites/selfcheck/servers.toml says which fault goes into which worker, and whether the e2e suite is expected
to catch it. Each is judged by the cases named there, on servers of its own, then by all others until one fails. Those
that cannot be seen share one set of servers, and get one each if anything is seen there.
`--record` keeps each result as it comes; what the file has already is not run again.

Exit codes: 0 all is as expected, 1 one survived that should be caught, or was caught though it is listed as one that
cannot be seen, 2 one was not exercised, 3 wrong usage or an error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ci.e2e_faults_page import page
from ci.e2e_faults_table import Entry, Table, chosen, table
from ci.e2e_faults_trial import WANTED, Fate, Outcome, fates
from harness.case import Case
from harness.fault_files import LIBRARY, library
from harness.record import decoded, write_text
from harness.suite import all_cases
from harness.usage import UserError

TABLE = Path("suites/selfcheck/servers.toml")
SUITE = "e2e"
EXIT_USAGE = 3
EXIT_INTERRUPTED = 130


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser("python -m ci.e2e_faults", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--table", type=Path, default=TABLE, metavar="FILE", help=f"the table of faults (default {TABLE})")
    add("--only", action="append", default=[], metavar="ID", help="only this fault; may be given several times")
    add("--seed", type=int, default=1, metavar="INT", help="of the cases (default 1)")
    add("--log-dir", type=Path, default=Path("kvshard-logs"), metavar="DIR", help="logs of the workers, by fault")
    add("--record", type=Path, metavar="FILE", help="keep results (JSONL); what it has is not run again")
    add("--markdown", type=Path, metavar="FILE", help="write the table with the results as Markdown")
    return parser


def code(entries: Sequence[Entry], told: Iterable[Fate]) -> int:
    """The exit code; see the module."""
    outcomes = {each.id: each.outcome for each in told}
    amiss = {(entry.expected, outcomes[entry.id]) for entry in entries if outcomes[entry.id] != WANTED[entry.expected]}
    if any(outcome is Outcome.CAUGHT or (pair == "caught" and outcome is Outcome.HIDDEN) for pair, outcome in amiss):
        return 1
    if any(outcome is Outcome.ERROR for _, outcome in amiss):
        return 3
    return 2 if amiss else 0


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    for option, path in (("--record", args.record), ("--markdown", args.markdown)):
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise UserError(f"{option} {path}: expected a file in a folder that exists")
    known = library(os.environ.get("KVSHARD_FAULT_LIBRARY", LIBRARY), checked=False).faults  # as the ranks do
    cases = all_cases((SUITE,))
    found = table(args.table, known, {made.id for made in cases})
    entries = chosen(found, args.only)
    ended = {each.id: each for each in _kept(args.record)}
    _tell([entry for entry in entries if entry.id in ended], ended)
    for group in groups([entry for entry in entries if entry.id not in ended]):
        for its in _tried(found, group, cases, args):
            ended[its.id] = its
            _keep(args.record, its)
        _tell(group, ended)
    told = [ended[entry.id] for entry in entries]
    if args.markdown is not None:
        words = [f"--only {name}" for name in args.only] + ([f"--seed {args.seed}"] if args.seed != 1 else [])
        does = {entry.id: known[entry.id].does for entry in entries}
        write_text(args.markdown, page(found, entries, told, does, words, datetime.now(UTC).date().isoformat()))
    return code(entries, told)


def groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Each that should be caught alone; all that should not be seen at once, as every case runs on them."""
    hidden = [entry for entry in entries if entry.expected == "hidden"]
    return [*([entry] for entry in entries if entry.expected == "caught"), *([hidden] if hidden else [])]


def _tried(found: Table, group: Sequence[Entry], cases: Sequence[Case], args: argparse.Namespace) -> list[Fate]:
    """What became of a group; one after the other unless all of it is hidden."""
    told = fates(found, group, cases, args.log_dir / group[0].id, args.seed)
    if len(group) > 1 and any(its.outcome is not Outcome.HIDDEN for its in told):
        for entry, its in zip(group, told, strict=True):
            sys.stderr.write(f"at once, now one by one: {line(entry, its)}\n")
        return [its for entry in group for its in _tried(found, [entry], cases, args)]
    return told


def _tell(entries: Iterable[Entry], ended: Mapping[str, Fate]) -> None:
    for entry in entries:
        sys.stdout.write(line(entry, ended[entry.id]) + "\n")
    sys.stdout.flush()


def line(entry: Entry, its: Fate) -> str:
    """What became of one fault, on one line."""
    mark = "" if its.outcome is WANTED[entry.expected] else f"  EXPECTED {WANTED[entry.expected].upper()}"
    by = f"{', '.join(its.cases)}: {its.seen}" if its.cases else f"{its.passed} cases passed"
    by += f"; {its.why}" if its.why else ""
    return f"{its.outcome:13} {entry.id} in {' and '.join(entry.workers)}  {its.seconds:.0f} s  {by}{mark}"


def _keep(path: Path | None, its: Fate) -> None:
    if path is not None:
        with path.open("ab") as record:
            record.write(msgspec.json.encode(its) + b"\n")


def _kept(path: Path | None) -> list[Fate]:
    if path is None or not path.exists():
        return []
    return [decoded(path, number, text, Fate) for number, text in enumerate(path.read_bytes().splitlines(), 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    args = arguments().parse_args(argv)
    try:
        return run(args)
    except UserError as error:
        sys.stderr.write(f"e2e_faults: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("e2e_faults: interrupted\n")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

"""Which planted faults change answers of real servers: `python -m ci.gate_sweep` plants each of the library once.

The table suites/selfcheck/gates.toml says in `[sweep]` into which workers and what `kvshard gate arms` compares. One
run finds candidates for trials (`python -m ci.gate_trials`), which run a gate 20 times; it proves no fault harmless.
Faults of waits are left out, as copies on a CPU are never late, and those that no request reaches.

`--record` keeps each fault as it comes; what the file has already is not asked again.

Exit codes: 0 all were asked, 1 one that changes answers has no trial in the table, 3 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ci.gate_sweep_page import page
from ci.gate_sweep_result import Judged, Swept
from ci.gate_trials import EXIT_INTERRUPTED, EXIT_UNEXPECTED, EXIT_USAGE, TABLE, times_run, tried
from ci.gate_trials_table import Sweep, Table, table
from harness.fault import Fault
from harness.fault_files import LIBRARY, library
from harness.launch.processes import LaunchError
from harness.record import decoded, write_text
from harness.usage import UserError, nearest


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser("python -m ci.gate_sweep", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--table", type=Path, default=TABLE, metavar="FILE", help=f"the table with [sweep] (default {TABLE})")
    add("--only", action="append", default=[], metavar="ID", help="only this fault; may be given several times")
    add("--seed", type=int, default=1, metavar="INT", help="of the items (default 1)")
    add("--log-dir", type=Path, default=Path("kvshard-logs"), metavar="DIR", help="logs of workers and gates, by fault")
    add("--record", type=Path, metavar="FILE", help="keep results (JSONL); what it has is not asked again")
    add("--markdown", type=Path, metavar="FILE", help="write the page with all results")
    return parser


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    known = library(os.environ.get("KVSHARD_FAULT_LIBRARY", LIBRARY), checked=False).faults  # as the ranks do
    found = table(args.table, known)
    if found.sweep is None:
        raise UserError(f"{args.table}: no [sweep]; expected workers, arm and loss, see ci.gate_trials_table")
    ended = {each.fault: each for each in _kept(args.record) if each.seed == args.seed}
    told = []
    for fault in chosen(known, args.only):
        its = ended.get(fault.id) or asked(found, found.sweep, fault, args)
        if fault.id not in ended:
            _keep(args.record, its)
            sys.stdout.write(f"{its.line}\n")
            sys.stdout.flush()
        told.append(its)
    text = page(found, found.sweep, told, known)
    if args.markdown is not None:
        write_text(args.markdown, text)
    with_trials = {trial.fault for trial in found.trial}
    lacks = [each.fault for each in told if each.outcome == "answers" and each.fault not in with_trials]
    for name in lacks:
        sys.stdout.write(f"{name} changes answers and has no trial in {args.table}\n")
    return EXIT_UNEXPECTED if lacks else 0


def chosen(known: Mapping[str, Fault], only: Sequence[str]) -> list[Fault]:
    """The faults that are asked, in the order of the library. Raises `UserError`."""
    for name in only:
        if name not in known:
            raise UserError(f"--only {name!r}: in no library{nearest(name, known)}")
    return [each for each in known.values() if each.id in only or (not only and reachable(each))]


def reachable(fault: Fault) -> bool:
    """Whether servers on a CPU may show it: not a wait, and not what only a unit test reaches."""
    return "device=" not in fault.engine and not fault.tests


def asked(found: Table, sweep: Sweep, fault: Fault, args: argparse.Namespace) -> Swept:
    """Servers of its own, one run of all arms, and what became of both."""
    trial, folder = sweep.trial(fault.id), args.log_dir / fault.id
    written, started, said = folder / "gate-1.json", time.monotonic(), ""
    written.unlink(missing_ok=True)  # of a run before
    try:
        for its in tried(found, trial, [1], args.seed, folder):
            said = "" if written.exists() else its.said
    except LaunchError as error:
        said = str(error).splitlines()[0]
    members = tuple(judged(json.loads(written.read_text()))) if written.exists() else ()
    runs = times_run(folder, trial)
    seconds = round(time.monotonic() - started, 1)
    return Swept(fault=fault.id, seed=args.seed, runs=runs, members=members, said=said, seconds=seconds)


def judged(result: Mapping[str, Any]) -> Iterator[Judged]:
    """What each comparison of the arms came to."""
    for member in result["members"]:
        numbers = member["result"]
        if numbers is None:
            yield Judged(name=member["name"], said=member["said"])
        else:
            yield Judged(name=member["name"], n=numbers["n"], lost=numbers["lost"], gained=numbers["gained"])


def _keep(path: Path | None, its: Swept) -> None:
    if path is not None:
        with path.open("ab") as record:
            record.write(msgspec.json.encode(its) + b"\n")


def _kept(path: Path | None) -> list[Swept]:
    if path is None or not path.exists():
        return []
    return [decoded(path, number, text, Swept) for number, text in enumerate(path.read_bytes().splitlines(), 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    try:
        return run(arguments().parse_args(argv))
    except UserError as error:
        sys.stderr.write(f"gate_sweep: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("gate_sweep: interrupted\n")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

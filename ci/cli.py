"""`kvshard ci`: tests registered to runners, planned into parts, run one process per file.

  ci plan     which files run in which part of a stage on a runner
  ci run      run one part
  ci rerun    run the command lines that a comment asked for
  ci lint     what is wrong with the registrations

docs/ci.md explains them. Exit codes are told by --help of each command; 3 is always wrong usage or unusable input.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ci import summary
from ci.leases import Lease, lease
from ci.lint import lint
from ci.nvml import NvmlProbe
from ci.plan import Plan, plan, read_timings
from ci.registry import Registry, scan
from ci.rerun import rerun_plan
from ci.run import EXIT_FAILED, Options, part_of, run_part
from ci.runners import DEFAULT_FILE, read
from harness.launch.gpus import VARIABLE
from harness.launch.processes import LaunchError
from harness.provenance import commit
from harness.usage import UserError

EXIT_DONE = 0
COMMENT = "ci.comment_cli"  # handles comments of pull requests; not every installation has it
FOLDERS = ("tests", "suites")
JOBS_MAX = 64
_PART = re.compile(r"([1-9]\d{0,3})/([1-9]\d{0,3})")
_CODES_PLAN = "exit codes: 0 done, 3 no plan (no such stage or runner, a file over the limit, a wrong registration)"
_CODES_LINT = "exit codes: 0 nothing found, 1 problems, 3 wrong usage"
_CODES_RUN = (
    "exit codes: 0 every file passed (some perhaps on a retry), 1 a file failed, ran out of time or ran nothing, "
    "2 there was no file to run, 3 no plan, no lease or wrong usage; 130 interrupted"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard ci`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, function: Callable[[argparse.Namespace], int], text: str, codes: str, *, scans: bool = True
    ) -> Callable[..., Any]:
        made = commands.add_parser(name, help=text, description=text, epilog=codes, allow_abbrev=False)
        made.set_defaults(function=function)
        made.add_argument("--root", type=Path, default=Path(), help="the repository (default: the working directory)")
        made.add_argument("--runners", type=Path, default=DEFAULT_FILE, metavar="FILE", help="the table of runners")
        if not scans:
            return made.add_argument
        folders = f"folders or files below the root (default: those of {', '.join(FOLDERS)} that exist)"
        made.add_argument("--folder", action="append", dest="folders", metavar="PATH", help=folders)
        today = "the day on which `disabled` may have expired; give shards the same (default: today, UTC)"
        made.add_argument("--today", type=_date, default=dt.datetime.now(dt.UTC).date(), metavar="DATE", help=today)
        return made.add_argument

    add = command("plan", _plan, "which files run in which part of a stage on a runner", _CODES_PLAN)
    add("--stage", required=True, action="append", dest="stages", help="of the registrations; may be repeated")
    add("--runner", action="append", dest="names", help="of the table of runners; may be repeated")
    add("--gpu", action="store_true", help="instead of --runner: all runners with GPUs that a file of the stage is on")
    _planned(add)
    add("--parts", type=int, metavar="N", help="so many parts (default: as few as the runner's job limit allows)")
    add("--json", action="store_true", help="the whole plan as JSON")
    add("--matrix", action="store_true", help="one line of JSON for the strategy.matrix of a workflow")
    _run_arguments(command("run", _run, "run one part of the plan of a stage on a runner", _CODES_RUN))
    text = "run the command lines that a comment asked for"
    _rerun_arguments(command("rerun", _rerun, text, _CODES_RUN, scans=False))
    add = command("lint", _lint, "what is wrong with the registrations", _CODES_LINT)
    add("--require", action="store_true", help="every test_*.py must be registered")
    timings = "estimates that are three times too high or low are problems; the files are those of `ci plan --timings`"
    add("--timings", type=Path, action="append", default=[], metavar="FILE", help=timings)
    if importlib.util.find_spec(COMMENT) is not None:
        module = importlib.import_module(COMMENT)
        text = "answer a comment of a pull request"
        raw = argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(
            "comment", help=text, description=module.__doc__, formatter_class=raw, allow_abbrev=False
        )
        module.add_arguments(made)
        made.set_defaults(function=module.run)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    try:
        code: int = args.function(args)
    except LaunchError as error:
        raise UserError(str(error)) from error
    return code


def _planned(add: Callable[..., Any]) -> None:
    add("--nightly", action="store_true", help="nightly files too")
    timings = "recorded times instead of estimates: results of `ci run`, or JSON {runner: {file: seconds}}"
    add("--timings", type=Path, action="append", default=[], metavar="FILE", help=timings)


def _run_arguments(add: Callable[..., Any]) -> None:
    add("--stage", required=True, help="of the registrations")
    add("--runner", required=True, help="of the table of runners")
    _planned(add)
    add("--part", type=_part, default=(1, 1), metavar="I/N", help="part I of N (default 1/1)")
    add("--digest", help="of the plan that this part must belong to, as `ci plan` tells it")
    add("--continue", action="store_true", dest="keep_going", help="go on after a file that fails")
    retries = "run a file that fails again, up to N times (default 0); never a gate"
    add("--retries", type=int, default=0, choices=range(4), metavar="N", help=retries)
    add("--jobs", type=_count, default=1, metavar="N", help="so many processes at a time (default 1; not with GPUs)")
    together = "files without a __main__ guard share processes of about S seconds (default 0: each has its own)"
    add("--together", type=float, default=0.0, metavar="S", help=together)
    _executed(add)


def _rerun_arguments(add: Callable[..., Any]) -> None:
    add("--labels", required=True, metavar="JSON", help="of the runner, a list")
    add("--commands", required=True, metavar="JSON", help="a list of lists of arguments")
    add("--install", action="store_true", help="print the install script of the runner, if it has one, and end")
    _executed(add)


def _executed(add: Callable[..., Any]) -> None:
    grace = "a file may take half as long again as estimated, and at least S seconds longer (default 120)"
    add("--grace", type=float, default=120.0, metavar="S", help=grace)
    add("--out", type=Path, default=Path("out/ci"), metavar="DIR", help="results, flakes, logs (default out/ci)")
    add("--no-lease", action="store_true", help="take the GPUs that are visible, without locks")
    add("--lease-folder", type=Path, metavar="DIR", help="of the locks (default: one of this machine, below TMPDIR)")
    wait = "how long to wait for GPUs, and for their memory to be free (default 600)"
    add("--lease-wait", type=float, default=600.0, metavar="S", help=wait)


def _plan(args: argparse.Namespace) -> int:
    plans = _plans(args)
    if args.matrix:
        print(json.dumps({"include": [job for made in plans for job in made.matrix()["include"]]}))
    elif args.json:
        print(json.dumps(plans[0].as_json() if len(plans) == 1 else [made.as_json() for made in plans], indent=2))
    else:
        for made in plans:
            _show(made)
    return EXIT_DONE


def _plans(args: argparse.Namespace) -> list[Plan]:
    """One for each stage and runner that is asked for. Raises `UserError`."""
    if args.gpu == (args.names is not None):
        raise UserError("one of --runner and --gpu is required; see kvshard ci plan --help")
    table, registry = read(args.runners), _scanned(args)
    if not args.gpu:
        return [_made(args, registry, stage, name, args.parts) for stage in args.stages for name in args.names]
    on = {(made.stage, made.runner) for made in registry.checked().registrations}
    wanted = [(stage, name) for stage in args.stages for name in table if table[name].gpus and (stage, name) in on]
    missing = set(args.stages) - {stage for stage, _ in wanted}
    if missing:
        step = "register one, or look at --stage"
        raise UserError(f"no file of stage {', '.join(missing)} is on a runner with GPUs; expected one; {step}")
    return [_made(args, registry, stage, name, args.parts) for stage, name in wanted]


def _show(made: Plan) -> None:
    for number, (part, load) in enumerate(zip(made.parts, made.loads(), strict=True), 1):
        print(f"part {number}/{len(made.parts)}: {load:.0f} s, {len(part)} files")
        for entry in part:
            print(f"  {entry.seconds:8.1f} s  {entry.file}")
    for text in summary.absent(made.left_out()):
        print(text)
    print(f"plan {made.digest()} of {made.stage} on {made.runner.name}: {len(made.parts)} parts")


def _run(args: argparse.Namespace) -> int:
    number, parts = args.part
    made = _made(args, _scanned(args), args.stage, args.runner, parts)
    if args.digest is not None and args.digest != made.digest():
        step = "give the same tree, --timings, --today and --nightly to all parts"
        raise UserError(f"this is plan {made.digest()}; expected {args.digest}; {step}")
    if made.parts:
        part_of(made, number)  # refused before GPUs are waited for
    if made.runner.gpus and (args.jobs > 1 or args.together):
        raise UserError(
            f"--jobs and --together on {made.runner.name}; expected one process at a time on GPUs; leave out"
        )
    return _carried_out(args, made, number)


def _rerun(args: argparse.Namespace) -> int:
    made = rerun_plan(args.commands, args.labels, args.root, read(args.runners))
    if args.install:
        print(made.runner.install or "")
        return EXIT_DONE
    return _carried_out(argparse.Namespace(**vars(args), retries=0, keep_going=True, jobs=1, together=0.0), made, 1)


def _carried_out(args: argparse.Namespace, made: Plan, number: int) -> int:
    """Runs a part on GPUs of its own, where the runner has some."""
    environment: dict[str, str] = {}
    with contextlib.ExitStack() as held:
        taken = _leased(args, made, held) if made.parts else None
        if taken is not None:
            environment[VARIABLE] = ",".join(taken.gpus)
        options = Options(
            root=args.root,
            out=args.out,
            retries=args.retries,
            keep_going=args.keep_going,
            jobs=args.jobs,
            together_seconds=args.together,
            grace_seconds=args.grace,
            commit=commit(args.root),
            environment=environment,
            actions=os.environ,
            say=lambda text: print(text, flush=True),
            before_file=(lambda: None) if taken is None else (lambda: taken.wait_idle(args.lease_wait)),
        )
        return run_part(made, number, options)


def _leased(args: argparse.Namespace, made: Plan, held: contextlib.ExitStack) -> Lease | None:
    """The GPUs of the runner, for all files of the part; at the end their memory is waited for."""
    if not made.runner.gpus or args.no_lease:
        return None
    note = f"kvshard ci, stage {made.stage} on {made.runner.name}"
    wait = args.lease_wait
    taken = lease(made.runner.gpus, NvmlProbe(os.environ), note, wait_seconds=wait, folder=args.lease_folder, say=print)
    held.enter_context(taken)
    held.enter_context(_released(taken, wait))
    return taken


@contextlib.contextmanager
def _released(taken: Lease, seconds: float) -> Iterator[None]:
    """Waits for their memory before they are given back."""
    yield
    taken.wait_idle(seconds)


def _lint(args: argparse.Namespace) -> int:
    registry = _scanned(args, whole=True)
    table = read(args.runners)
    timings = {name: read_timings(args.timings, name) for name in table}
    found = lint(registry, table, args.today, require=args.require, timings=timings)
    for problem in found:
        print(problem)
    count = len(registry.registrations)
    print(f"{len(found)} problems, {count} registrations in {registry.files} files")
    return EXIT_FAILED if found else EXIT_DONE


def _made(args: argparse.Namespace, registry: Registry, stage: str, name: str, parts: int | None) -> Plan:
    runner = read(args.runners).named(name)
    timings = read_timings(args.timings, runner.name)
    return plan(registry, stage, runner, nightly=args.nightly, timings=timings, parts=parts, today=args.today)


def _scanned(args: argparse.Namespace, *, whole: bool = False) -> Registry:
    folders = args.folders or [folder for folder in FOLDERS if (args.root / folder).is_dir()]
    if not folders:
        raise UserError(f"{args.root} has none of {', '.join(FOLDERS)}; expected a folder of tests; give --folder")
    return scan(args.root, folders, whole=whole)


def _part(text: str) -> tuple[int, int]:
    found = _PART.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N, such as 2/3")
    return int(found[1]), int(found[2])


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= JOBS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 to {JOBS_MAX}")
    return int(text)


def _date(text: str) -> dt.date:
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a date such as 2027-01-31") from None

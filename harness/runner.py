"""`kvshard run`: a thin wrapper over pytest that shows cases instead of tests.

Several engines are judged in turn, by the same cases with the same seed, and end in one table. An engine that cannot be
connected is a column that says why, with code 3; the others still run. An interrupted run keeps what was done.

Exit codes: 0 all proven, 1 a counterexample, 2 something or all of it not proven, 3 wrong usage or an error of harness
or engine, 130 interrupted, 143 terminated. Of several engines the worst: an end from outside, then 1, 3, 2, 0.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, NoReturn

import pytest
from _pytest.mark.expression import Expression  # what -k means; a wrong one would end in the workers, without a word
from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from harness import junit, markdown, matrix_reports, matrix_table, provenance, render
from harness.connect import is_server
from harness.judge import RUN, Run, header
from harness.matrix import Asked, Column, Matrix, asked_in, column_of
from harness.plugin import plugin_arguments
from harness.result import CaseResult
from harness.standing import Standing
from harness.suite import SUITES, located, named
from harness.tally import CRASH_WHEN, PROGRESS_WHEN, RESULTS, progress_in
from harness.trial import BUDGETS
from harness.types import Verdict
from harness.usage import UserError

EXIT_NOTHING = 2
EXIT_ERROR = 3
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
ENDED = MappingProxyType({EXIT_INTERRUPTED: "interrupted", EXIT_TERMINATED: "terminated"})
JOBS_MAX = 4
KILL_SECONDS = 2.0  # a worker may take this long to end after Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard run`."""
    add = parser.add_argument
    several = "address, such as ref?shards=4, py:module:factory or http://host:port; several are judged in turn"
    add("engines", nargs="+", metavar="ENGINE", help=several)
    add("--budget", choices=tuple(BUDGETS), default="commit", help="how much is spent on a case (default commit)")
    add("-k", dest="keyword", default="", metavar="PATTERN", help="only matching cases, such as 'radix and not lock'")
    add("--jobs", type=int, metavar="N", help=f"worker processes (default: cores, at most {JOBS_MAX}); 0: this process")
    add("--seed", type=int, metavar="INT", help="repeats a run (default: the commit in CI, else random)")
    told = f"package, file or folder, or several with commas (default {SUITES[0]})"
    add("--suite", default=SUITES[0], metavar="SUITE", help=told)
    add("--known", type=Path, metavar="FILE", help="known failures (default: the project's for this engine)")
    add("--record", type=Path, metavar="FILE", help="write the record of the run (JSONL)")
    add("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    add("--markdown", type=Path, metavar="FILE", help="write a summary for a pull request")
    add("--html", type=Path, metavar="FILE", help="write the table of cases and engines as a page for a browser")
    traces = Path("kvshard-traces")
    add("--traces", type=Path, default=traces, metavar="DIR", help=f"for counterexamples (default ./{traces})")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    servers = [address for address in args.engines if is_server(address)]
    if servers and (args.jobs or 1) > 1:
        raise UserError(f"--jobs {args.jobs} with {servers[0]}: a server has one cache, so cases go in turn")
    jobs = (0 if servers else default_jobs()) if args.jobs is None else args.jobs
    if jobs < 0:
        raise UserError(f"--jobs {jobs}: expected at least 1, or 0 for this process")
    try:
        Expression.compile(args.keyword or "all")
    except Exception as error:  # whatever pytest raises
        raise UserError(f"-k {args.keyword!r}: {error}") from error
    matrix_reports.check(matrix_reports.Files(args.record, args.junit, args.markdown, args.html))
    twice = next((address for address in args.engines if args.engines.count(address) > 1), None)
    if twice is not None:
        raise UserError(f"engine {twice} is named twice; expected each once")
    if len(args.engines) > 1 and args.known is not None:
        raise UserError(f"--known {args.known} with {len(args.engines)} engines; such a file is about one engine")
    suites = [named(suite) for suite in args.suite.split(",")]
    for suite in suites:
        located(suite)
    args.suite = ",".join(suites)
    # pytest captures what engines print; what is shown here goes past it.
    with os.fdopen(os.dup(1), "w", errors="replace") as out:
        console = render.console_for(out)
        with _terminated_as_interrupted() as terminated:
            if len(args.engines) > 1:
                return _in_turn(args, jobs, console, terminated)
            judged = _judged(args, args.engines[0], jobs, console)
        return _concluded(args, judged, terminated=terminated.is_set())


class Judged(NamedTuple):
    """What pytest came to with one engine."""

    show: Show
    status: int
    errors: str  # what went to stderr

    @property
    def interrupted(self) -> bool:
        """Whether it was ended from outside."""
        ran = self.show.run
        return self.status == pytest.ExitCode.INTERRUPTED or (ran is not None and ran.tally.interrupted)


def _judged(args: argparse.Namespace, engine: str, jobs: int, console: Console) -> Judged:
    """Runs the cases on one engine."""
    show = Show(console, BUDGETS[args.budget].examples)
    errors = io.StringIO()
    with redirect_stderr(errors):
        try:
            status = pytest.main(pytest_arguments(args, engine, jobs), plugins=[show])
        finally:
            show.stop()
    return Judged(show, int(status), errors.getvalue())


def pytest_arguments(args: argparse.Namespace, engine: str, jobs: int) -> list[str]:
    """What pytest is asked: only the suite, our plugin and xdist, so that the project around it has no say."""
    words = ["--pyargs", *args.suite.split(","), "--engine", engine, "--budget", args.budget, "--kvshard-live"]
    words += ["-k", args.keyword] if args.keyword else []
    words += ["--kvshard-traces", str(args.traces)]
    words += ["--kvshard-seed", str(args.seed)] if args.seed is not None else []
    words += ["--kvshard-known", str(args.known)] if args.known is not None else []
    if args.record is not None and len(args.engines) == 1:
        words += ["--kvshard-record", str(args.record)]
    words += ["-c", os.devnull, "--rootdir", str(Path.cwd()), "--disable-plugin-autoload", *plugin_arguments()]
    words += ["-p", "no:terminal", "-p", "no:cacheprovider", "--noconftest", "--continue-on-collection-errors"]
    return [*words, "-p", "xdist", "-n", str(jobs), "--dist", "worksteal"] if jobs else words


def default_jobs() -> int:
    """The cores that this process may use, at most `JOBS_MAX`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(JOBS_MAX, usable)


class Show:
    """A pytest plugin of the reporting process: the opening block, then cases as they run and end."""

    def __init__(self, console: Console, examples_each: int) -> None:
        self.console = console
        self.run: Run | None = None
        self._standing = Standing(examples_each)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console,
                get_renderable=lambda: render.live(self._standing, console.height),
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """The engine is connected: this is where a run begins to show."""
        self.run = session.config.stash[RUN]
        self.run.tally.on_result = self._ended
        self.console.print(render.opening(header(session.config)))
        self.console.print()
        if self._live is not None:
            self._live.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: the number of cases."""
        self._standing.total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """With xdist: the number of cases."""
        self._standing.total = len(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_newgateway(self, gateway: Any) -> None:
        """Remembers the process of a worker, to end it on Ctrl-C; xdist hands it out nowhere else."""
        self._workers.append(gateway._io.popen)  # noqa: SLF001 - execnet shows its process nowhere else

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Progress; results come by way of the tally. A test of the suite that is no case must not fail unseen."""
        when = str(report.when)
        if when == PROGRESS_WHEN:
            self._standing.progress(progress_in(report))
        elif report.failed and when != CRASH_WHEN and not hasattr(report, RESULTS) and self.run is not None:
            self.run.tally.fault(report.nodeid, report.longreprtext)

    def pytest_keyboard_interrupt(self) -> None:
        """Workers stop now; what does not is killed."""
        for worker in self._workers:
            worker.send_signal(signal.SIGINT)
        killer = threading.Timer(KILL_SECONDS, self._kill)
        killer.daemon = True
        killer.start()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def stop(self) -> None:
        """Takes the live table away."""
        if self._live is not None:
            self._live.stop()

    def _ended(self, result: CaseResult) -> None:
        self._standing.ended(result)
        if self._live is None:
            self.console.print(render.plain_line(result), soft_wrap=True)


@contextmanager
def _terminated_as_interrupted() -> Iterator[threading.Event]:
    """SIGTERM ends a run as Ctrl-C does: nothing half-written stays, no process either. The event tells them apart."""
    terminated = threading.Event()

    def handler(_number: int, _frame: FrameType | None) -> NoReturn:
        terminated.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _concluded(args: argparse.Namespace, judged: Judged, *, terminated: bool) -> int:
    """Shows and writes what the run of one engine came to; its exit code."""
    show, status, errors = judged
    if status == pytest.ExitCode.USAGE_ERROR:
        raise UserError(errors.strip().removeprefix("ERROR: "))
    console, ran = show.console, show.run
    if terminated or judged.interrupted:
        if ran is not None and ran.record is not None and ran.record.results:
            console.print(render.final(ran.record, console.width), crop=False)
        code = EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
        console.print(ENDED[code])
        return code
    if ran is None or ran.record is None:
        raise UserError(errors.strip() or f"pytest ended with {status} before the run began")
    if ran.record.results:
        console.print(render.final(ran.record, console.width), crop=False)
    if errors.strip():
        console.print(errors.strip())
    if ran.record_problem is not None:
        raise UserError(ran.record_problem)
    if args.junit is not None:
        junit.write(args.junit, ran.record)
    if args.markdown is not None:
        markdown.write(args.markdown, ran.record)
    if args.html is not None:
        alone = Matrix(asked=asked_in(ran.record.header), columns=(column_of(ran.record),))
        matrix_reports.write(alone, matrix_reports.Files(html=args.html))
    if not ran.record.results:
        console.print(f"no case of {args.suite} " + (f"matches {args.keyword!r}" if args.keyword else "was found"))
    return _code(ran, status)


def _code(ran: Run, status: int) -> int:
    """The code of the results, unless pytest met something that no result tells of."""
    told = {result.verdict for result in ran.tally.results} - {Verdict.PASS, Verdict.SKIP, Verdict.KNOWN}
    expected = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
    if status not in expected or (status == pytest.ExitCode.TESTS_FAILED and not told):
        return EXIT_ERROR
    return ran.tally.exit_code()


def _in_turn(args: argparse.Namespace, jobs: int, console: Console, terminated: threading.Event) -> int:
    """Judges several engines; shows and writes the table. What is ended from outside stays as far as it was done."""
    if args.seed is None:
        args.seed, origin = provenance.default_seed(provenance.commit(), in_ci=provenance.in_ci())
        console.print(f"seed {args.seed} ({origin}) for all engines")
    columns: list[Column] = []
    folder = args.traces
    for number, engine in enumerate(args.engines, 1):
        console.print(Rule(Text(f"{number} of {len(args.engines)}  {engine}"), align="left"))
        args.traces = folder / f"{number}-{re.sub(r'[^A-Za-z0-9.-]+', '_', engine)}"  # else some would share a name
        try:
            columns.append(_column(args, engine, _judged(args, engine, jobs, console), console))
        except KeyboardInterrupt:  # before pytest was there to take it
            columns.append(_not_begun(engine))
        if columns[-1].exit_code == EXIT_INTERRUPTED:
            break
    columns += [_not_begun(engine) for engine in args.engines[len(columns) :]]
    if terminated.is_set():
        codes = {EXIT_INTERRUPTED: EXIT_TERMINATED}
        columns = [replace(column, exit_code=codes.get(column.exit_code, column.exit_code)) for column in columns]
    found = Matrix(asked=_asked(args, columns), columns=tuple(columns))
    console.print(Rule())
    console.print(matrix_table.terminal(found), crop=False)
    matrix_reports.write(found, matrix_reports.Files(args.record, args.junit, args.markdown, args.html))
    if found.exit_code in ENDED:
        console.print(ENDED[found.exit_code])
    return found.exit_code


def _column(args: argparse.Namespace, engine: str, judged: Judged, console: Console) -> Column:
    """What one of several engines came to; shows what the table has no room for."""
    show, status, errors = judged
    ran, told = show.run, errors.strip().removeprefix("ERROR: ").removeprefix(f"{engine}: ")
    if ran is None or ran.record is None:
        if judged.interrupted:
            return _not_begun(engine)
        why = told or f"pytest ended with {status} before the run began"
        console.print(f"not connected: {why}", soft_wrap=True)
        return Column(engine=engine, record=None, exit_code=EXIT_ERROR, why=f"not connected: {why}")
    if ran.record.results:
        console.print(render.final(ran.record, console.width), crop=False)
    if told:
        console.print(told)
    options = {**ran.record.header.options, "record": str(args.record or "")}
    done = replace(ran.record, header=replace(ran.record.header, options=options))
    if judged.interrupted:
        return column_of(done, EXIT_INTERRUPTED, f"interrupted after {len(done.results)} cases")
    why = "" if done.results else "no case matches" if args.keyword else "no case was found"
    return column_of(done, _code(ran, status), why)


def _not_begun(engine: str) -> Column:
    return Column(engine=engine, record=None, exit_code=EXIT_INTERRUPTED, why="not begun")


def _asked(args: argparse.Namespace, columns: Sequence[Column]) -> Asked:
    """What all engines were asked, also where none could be connected."""
    records = [column.record for column in columns if column.record is not None]
    if records:
        return asked_in(records[0].header)
    version = provenance.kvshard_version()
    return Asked(kvshard=version, suite=args.suite, keyword=args.keyword, budget=args.budget)

"""`kvshard run`: a thin wrapper over pytest that shows cases instead of tests.

Exit codes: 0 all proven, 1 a counterexample, 2 something or all of it not proven, 3 wrong usage or an error of harness
or engine, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
from _pytest.mark.expression import Expression  # what -k means; a wrong one would end in the workers, without a word
from rich.console import Console
from rich.live import Live

from harness import junit, markdown, render
from harness.judge import RUN, Run, header
from harness.plugin import plugin_arguments
from harness.result import CaseResult
from harness.standing import Standing
from harness.suite import SUITES, located
from harness.tally import CRASH_WHEN, PROGRESS_WHEN, RESULTS, progress_in
from harness.trial import BUDGETS
from harness.types import Verdict
from harness.usage import UserError

EXIT_NOTHING = 2
EXIT_ERROR = 3
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
JOBS_MAX = 4
KILL_SECONDS = 2.0  # a worker may take this long to end after Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard run`."""
    add = parser.add_argument
    add("engine", metavar="ENGINE", help="address, such as ref, ref?shards=4 or py:module:factory")
    add("--budget", choices=tuple(BUDGETS), default="commit", help="how much is spent on a case (default commit)")
    add("-k", dest="keyword", default="", metavar="PATTERN", help="only matching cases, such as 'radix and not lock'")
    add("--jobs", type=int, metavar="N", help=f"worker processes (default: cores, at most {JOBS_MAX}); 0: this process")
    add("--seed", type=int, metavar="INT", help="repeats a run (default: the commit in CI, else random)")
    add("--suite", default=SUITES[0], metavar="SUITE", help=f"package, file or folder (default {SUITES[0]})")
    add("--known", type=Path, metavar="FILE", help="known failures (default: the project's for this engine)")
    add("--record", type=Path, metavar="FILE", help="write the record of the run (JSONL)")
    add("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    add("--markdown", type=Path, metavar="FILE", help="write a summary for a pull request")
    traces = Path("kvshard-traces")
    add("--traces", type=Path, default=traces, metavar="DIR", help=f"for counterexamples (default ./{traces})")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    jobs = default_jobs() if args.jobs is None else args.jobs
    if jobs < 0:
        raise UserError(f"--jobs {jobs}: expected at least 1, or 0 for this process")
    try:
        Expression.compile(args.keyword or "all")
    except Exception as error:  # whatever pytest raises
        raise UserError(f"-k {args.keyword!r}: {error}") from error
    for option, path in (("--record", args.record), ("--junit", args.junit), ("--markdown", args.markdown)):
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise UserError(f"{option} {path}: expected a file in a folder that exists")
    located(args.suite)
    # pytest captures what engines print; what is shown here goes past it.
    with os.fdopen(os.dup(1), "w", errors="replace") as out:
        show = Show(render.console_for(out), BUDGETS[args.budget].examples)
        errors = io.StringIO()
        with _terminated_as_interrupted() as terminated, redirect_stderr(errors):
            try:
                status = pytest.main(pytest_arguments(args, jobs), plugins=[show])
            finally:
                show.stop()
        return _concluded(args, show, int(status), errors.getvalue(), terminated=terminated.is_set())


def pytest_arguments(args: argparse.Namespace, jobs: int) -> list[str]:
    """What pytest is asked: only the suite, our plugin and xdist, so that the project around it has no say."""
    words = ["--pyargs", args.suite, "--engine", args.engine, "--budget", args.budget, "--kvshard-live"]
    words += ["-k", args.keyword] if args.keyword else []
    words += ["--kvshard-traces", str(args.traces)]
    words += ["--kvshard-seed", str(args.seed)] if args.seed is not None else []
    words += ["--kvshard-known", str(args.known)] if args.known is not None else []
    words += ["--kvshard-record", str(args.record)] if args.record is not None else []
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


def _concluded(args: argparse.Namespace, show: Show, status: int, errors: str, *, terminated: bool) -> int:
    """Shows and writes what the run came to; its exit code."""
    if status == pytest.ExitCode.USAGE_ERROR:
        raise UserError(errors.strip().removeprefix("ERROR: "))
    console, ran = show.console, show.run
    if terminated or (ran is not None and ran.tally.interrupted) or status == pytest.ExitCode.INTERRUPTED:
        if ran is not None and ran.record is not None and ran.record.results:
            console.print(render.final(ran.record, console.width), crop=False)
        console.print("terminated" if terminated else "interrupted")
        return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
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

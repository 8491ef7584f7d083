"""`python counted.py pytest|direct EVENTS ROOT SECONDS FILE [ARGUMENT ..]`: runs a test file and tells what it ran.

Further files may be among the arguments of pytest; the beginning and end of each is told.

A script of its own that needs nothing but the standard library: it runs in the environment of the tests. EVENTS gets a
JSON line for each test as soon as it has ended, so a killed run is told too. `direct` runs FILE as `python FILE` would;
SECONDS is when the stacks of all threads are shown, just before the file is killed.
"""

from __future__ import annotations

import collections
import faulthandler
import functools
import json
import os
import runpy
import sys
import time
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WHY_CHARACTERS = 300
ENDED_CODES = (0, 1, 5)  # of pytest: passed, failed, no tests


class Events:
    """The file that is told what happens; each line is one write, so that nothing of it is lost or mixed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._owner = os.getpid()

    def tell(self, outcome: str, test: str, why: str = "", **more: float) -> None:
        """One event. A child that was forked tells nothing: what it runs is not this file's test."""
        if os.getpid() == self._owner:
            line = json.dumps({"outcome": outcome, "test": test, "why": why[:WHY_CHARACTERS], **more})
            os.write(self._file, f"{line}\n".encode())


class Counter:
    """A pytest plugin that tells the outcome of each test."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._file, self._since = "", 0.0
        self._is_cut = False

    def pytest_deselected(self, items: Sequence[Any]) -> None:
        """Tests that were collected and are not to run."""
        for file, count in collections.Counter(item.nodeid.partition("::")[0] for item in items).items():
            self._events.tell("deselected", file, count=count)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins; with the first one of a file the file before it is done."""
        if (file := nodeid.partition("::")[0]) != self._file:
            self._done()
            self._file, self._since = file, time.monotonic()
            self._events.tell("begun", file)

    def pytest_keyboard_interrupt(self) -> None:
        """The session is cut short, by `pytest.exit` too, which may ask for exit code 0."""
        self._is_cut = True
        self._events.tell("cut", "")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """The last file is done, unless pytest was interrupted."""
        if exitstatus in ENDED_CODES and not self._is_cut:
            self._done()

    def _done(self) -> None:
        if self._file:
            self._events.tell("done", self._file, seconds=round(time.monotonic() - self._since, 3))

    def pytest_collectreport(self, report: Any) -> None:
        """A file or class that cannot be collected, or is skipped as a whole."""
        if report.outcome != "passed":
            outcome = "failed" if report.failed else "skipped"
            self._events.tell(outcome, f"collection of {report.nodeid}", _reason(report))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A phase of a test: its call, or a setup or teardown that did not pass."""
        if report.outcome == "rerun":
            self._events.tell("rerun", report.nodeid, _reason(report))
        elif report.failed:
            self._events.tell("failed", report.nodeid, _reason(report))
        elif report.skipped:
            expected = getattr(report, "wasxfail", None)
            is_run = expected is not None and "[NOTRUN]" not in expected
            self._events.tell("xfailed" if is_run else "skipped", report.nodeid, expected or _reason(report))
        elif report.when == "call":
            self._events.tell("passed", report.nodeid)


def _reason(report: Any) -> str:
    """The last line of what pytest says."""
    found = report.longrepr
    if isinstance(found, tuple):  # of a skip: file, line, reason
        return str(found[2]).removeprefix("Skipped: ")
    crash = getattr(found, "reprcrash", None)
    return str(getattr(crash, "message", found)).strip()


def watch_unittest(events: Events) -> None:
    """Tells the outcomes that unittest's results are given; this process runs nothing but the file."""
    told = {"addSuccess": "passed", "addError": "failed", "addFailure": "failed", "addSkip": "skipped"}
    told |= {"addExpectedFailure": "xfailed", "addUnexpectedSuccess": "failed"}
    for name, outcome in told.items():
        setattr(unittest.TestResult, name, _telling(getattr(unittest.TestResult, name), events, outcome))
    unittest.TestResult.addSubTest = _telling(unittest.TestResult.addSubTest, events, "")  # type: ignore[method-assign]  # on purpose


def _telling(method: Callable[..., None], events: Events, outcome: str) -> Callable[..., None]:
    @functools.wraps(method)
    def told(self: unittest.TestResult, test: Any, *rest: Any) -> None:
        if outcome:
            why = rest[0] if outcome == "skipped" and rest else ""
            why = repr(rest[0][1]) if outcome == "failed" and rest else str(why)
            events.tell(outcome, test.id(), why)
        elif len(rest) > 1 and rest[1] is not None:  # of a subtest only a failure is told
            events.tell("failed", test.id(), repr(rest[1][1]))
        method(self, test, *rest)

    return told


def run_pytest(events: Events, file: str, arguments: Sequence[str]) -> int:
    """`python -m pytest FILE`."""
    import pytest  # noqa: PLC0415  # a file that is run directly may live in an environment without it

    sys.path[0] = str(Path.cwd())
    return int(pytest.main([file, *arguments], plugins=[Counter(events)]))


def run_direct(events: Events, file: str, arguments: Sequence[str]) -> int:
    """`python FILE`: its `__main__` guard runs unittest or pytest."""
    watch_unittest(events)
    if b"pytest" in Path(file).read_bytes():
        watch_pytest(events)
    sys.argv = [file, *arguments]
    sys.path[0] = str(Path(file).resolve().parent)
    runpy.run_path(file, run_name="__main__")
    return 0


def watch_pytest(events: Events) -> None:
    """Every `pytest.main` of this process gets the plugin."""
    import pytest  # noqa: PLC0415  # as above

    original = pytest.main

    def main(args: Any = None, plugins: Sequence[Any] | None = None) -> Any:
        return original(args, [*(plugins or ()), Counter(events)])

    pytest.main = main


def main(arguments: list[str]) -> int:
    """Runs the file; the exit code is that of pytest or of the file."""
    way, path, root, seconds, file, *rest = arguments
    stderr = os.fdopen(os.dup(2), "w")  # pytest's capture takes the other one
    faulthandler.dump_traceback_later(float(seconds), file=stderr)
    events = Events(Path(path))
    os.chdir(root)
    try:
        return (run_pytest if way == "pytest" else run_direct)(events, file, rest)
    finally:  # not where os._exit ends the process in the middle of the file
        events.tell("left", "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

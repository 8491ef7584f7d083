"""What comes back from a pytest run: the results of cases, and what went wrong around them.

A report of an item that runs cases carries `kvshard_results`, JSON texts, so that it crosses process borders. A report
with `when="progress"` carries `kvshard_progress`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from harness.result import CaseResult, Progress, exit_code
from harness.types import Verdict

RESULTS = "kvshard_results"
PROGRESS = "kvshard_progress"
PROGRESS_WHEN = "progress"
CRASH_WHEN = "???"  # xdist's word in the report of an item whose worker died


class Tally:
    """A plugin of the process that reports: keeps one result per case, the last one, and errors by item or file."""

    def __init__(self) -> None:
        self.interrupted = False
        self.on_result: Callable[[CaseResult], None] | None = None  # told of every result as it comes in
        self._results: dict[str, CaseResult] = {}
        self._case_of_item: dict[str, str] = {}  # known once an item has told its progress

    @property
    def results(self) -> Sequence[CaseResult]:
        """In the order in which they came in."""
        return tuple(self._results.values())

    def exit_code(self) -> int:
        """See `harness.result.exit_code`; 130 when the run was interrupted."""
        return 130 if self.interrupted else exit_code(self.results)

    def add(self, result: CaseResult) -> None:
        """Takes a result; it replaces an earlier one of the same case."""
        self._results.pop(result.case, None)
        self._results[result.case] = result
        if self.on_result is not None:
            self.on_result(result)

    def fault(self, where: str, why: str) -> None:
        """An error that no case tells of itself: a file that cannot be imported, a worker that died."""
        self.add(CaseResult(case=self._case_of_item.get(where, where), verdict=Verdict.ERROR, why=why))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes what a report carries."""
        when = str(report.when)
        if when == PROGRESS_WHEN:
            self._case_of_item[report.nodeid] = progress_in(report).case
        elif when == CRASH_WHEN:
            self.fault(report.nodeid, "the process died while this case ran (crash, kill or out of memory)")
        elif results := results_in(report):
            for result in results:
                self.add(result)
        elif report.failed and hasattr(report, RESULTS):
            where = report.nodeid if when != "teardown" else f"{report.nodeid} (teardown)"
            self.fault(where, report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected is an error."""
        if report.failed:
            self.fault(report.nodeid or "collection", report.longreprtext)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C; not what pytest itself raises to stop early."""
        self.interrupted = not isinstance(excinfo.value, pytest.Session.Interrupted)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """An error of pytest, of a plugin or of this project."""
        self.fault("pytest", " ".join(excinfo.exconly().split()))


def results_in(report: pytest.TestReport) -> list[CaseResult]:
    """The results that a report carries."""
    return [msgspec.json.decode(text, type=CaseResult) for text in getattr(report, RESULTS, ())]


def progress_in(report: pytest.TestReport) -> Progress:
    """The progress that a report with `when="progress"` carries."""
    return msgspec.json.decode(getattr(report, PROGRESS), type=Progress)

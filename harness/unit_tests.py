"""Unit tests of the project run inside this process, on code that was changed here: which one fails first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


class _First:
    """A plugin of pytest that remembers the first test or file that failed."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest."""
        self._told(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Called by pytest."""
        self._told(report)

    def _told(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def first_failure(tests: Sequence[str], *options: str) -> tuple[int, str]:
    """The exit code of pytest and the id of the first failure, empty without one. `tests` are paths below ROOT."""
    first = _First()
    words = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported here already
    code = pytest.main([*words, *options, *(str(ROOT / test) for test in tests)], plugins=[first])
    return int(code), first.failed

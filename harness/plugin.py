"""The pytest plugin: `pytest --engine ADDRESS --pyargs suites.invariants` judges an engine with every tool of pytest.

Installed, it is loaded into every pytest run of the environment, so it imports nothing and does nothing until an engine
is named; then `harness.judge` is the plugin that works.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

BUDGETS = ("smoke", "commit", "night")  # of harness.trial, which is slow to import
CASE_ATTRIBUTE = "__kvshard_case__"  # of harness.case, for the same reason
ENGINE = "KVSHARD_ENGINE"
SUITES = Path(__file__).parent.parent / "suites"
PROGRESS_WHEN = "progress"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of a run."""
    group = parser.getgroup("kvshard", "kvshard: is a sharded KV cache right")
    group.addoption(
        "--engine",
        metavar="ADDRESS",
        help=f"the engine to judge: ref, ref?shards=4, py:module:factory, .. (default for files of suites/: {ENGINE})",
    )
    group.addoption("--budget", choices=BUDGETS, default="commit", help="how much is spent on a case (default commit)")
    group.addoption(
        "--kvshard-seed",
        metavar="INT",
        type=int,
        help="repeats a run; the default is the commit in CI, else random",
    )
    group.addoption("--kvshard-known", metavar="FILE", type=Path, help="cases that this engine is known to fail")
    group.addoption("--kvshard-record", metavar="FILE", type=Path, help="write the record of the run (JSONL)")
    group.addoption(
        "--kvshard-traces",
        metavar="DIR",
        type=Path,
        default=Path("kvshard-traces"),
        help="where counterexamples are written (default ./kvshard-traces)",
    )
    group.addoption(
        "--kvshard-live", action="store_true", help="tell the progress of running cases; `kvshard run` sets it"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Brings in what judges, once there is an engine to judge."""
    if config.getoption("engine") is None and config.args and all(map(_is_suite, config.args)):
        config.option.engine = os.environ.get(ENGINE)
    if config.getoption("engine") is None:
        config.pluginmanager.register(_WithoutEngine(), "kvshard-without-engine")
    else:
        config.pluginmanager.register(importlib.import_module("harness.judge"), "kvshard-judge")


def _is_suite(argument: str) -> bool:
    """Whether it names files of suites/, which runners of CI start without options."""
    return Path(argument.partition("::")[0]).resolve().is_relative_to(SUITES)


def pytest_itemcollected(item: pytest.Item) -> None:
    """`-k` finds a case by its id."""
    made = getattr(getattr(item, "obj", None), CASE_ATTRIBUTE, None)
    if made is not None:
        item.extra_keyword_matches.add(made.id)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Progress is no outcome: pytest shows and counts nothing."""
    return ("", "", "") if str(report.when) == PROGRESS_WHEN else None


class _WithoutEngine:
    """Answers tests that judge an engine when none is named."""

    @pytest.fixture
    def kvshard_run(self) -> Callable[[object], None]:
        """Fails: there is no engine to judge."""
        pytest.fail(f"this test judges an engine: say which, with --engine ref or {ENGINE}=ref", pytrace=False)


def plugin_arguments() -> list[str]:
    """What makes pytest load this plugin, and load it once, whether the package is installed or a clone."""
    installed = any(entry.value == __name__ for entry in entry_points(group="pytest11"))
    return ["-p", "kvshard" if installed else __name__]

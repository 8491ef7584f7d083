"""The pytest plugin of a run that judges an engine: connects, runs cases, turns verdicts into outcomes, records.

Under xdist every process connects to the engine by itself, and results travel inside of test reports; see
`harness.tally`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

from harness import connect, here, provenance, record, tally, trace
from harness.adapter import Engine
from harness.case import Case
from harness.known import known_failures
from harness.result import CaseResult, Progress, message
from harness.suite import root_of
from harness.trial import BUDGETS, Trial
from harness.types import Manifest, Verdict
from harness.usage import UserError

PROGRESS_SECONDS = 0.25  # between two reports of progress
ORPHAN_SECONDS = 2.0  # a worker without a parent may take this long to end by itself


@dataclass(slots=True)
class Run:
    """What this process knows of the run."""

    address: str
    seed: int
    seed_origin: str
    commit: str | None = None
    engine: Engine | None = None  # connected ahead of the fixture
    manifest: Manifest | None = None
    record: record.Record | None = None  # once the session has ended
    record_problem: str | None = None
    tally: tally.Tally = field(default_factory=tally.Tally)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))


RUN = pytest.StashKey[Run]()
RESULTS = pytest.StashKey[list[CaseResult]]()


def pytest_configure(config: pytest.Config) -> None:
    """Fixes seed and commit in the controlling process, which tells the workers."""
    address: str = config.getoption("engine")
    told: dict[str, Any] | None = getattr(config, "workerinput", None)
    if config.getoption("kvshard_live") and "HYPOTHESIS_STORAGE_DIRECTORY" not in os.environ:
        set_hypothesis_home_dir(Path(os.devnull) / "hypothesis")  # its caches would litter the working directory
    if told is not None:
        config.stash[RUN] = Run(address, told["kvshard_seed"], "given")
        if config.getoption("kvshard_live"):
            _end_with_parent()
        return
    commit = provenance.commit()
    seed, origin = config.getoption("kvshard_seed"), "given"
    if seed is None:
        seed, origin = provenance.default_seed(commit, in_ci=provenance.in_ci())
    run = config.stash[RUN] = Run(address, seed, origin, commit)
    config.pluginmanager.register(run.tally, "kvshard-tally")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers use the controller's seed."""
    node.workerinput["kvshard_seed"] = node.config.stash[RUN].seed


def pytest_sessionstart(session: pytest.Session) -> None:
    """Connects in the controlling process, so that a wrong address is one line and not an error per case."""
    config = session.config
    run = config.stash[RUN]
    if hasattr(config, "workerinput") or config.getoption("collectonly", False):
        return
    try:
        engine = connect.connect(run.address)
        run.manifest = connect.manifest_of(engine, run.address)
        known_failures(run.manifest, config.getoption("kvshard_known"))  # a wrong file is told here
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    if config.getoption("dist", "no") == "no":
        run.engine = engine
    else:
        connect.close(engine)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Engine, budget and seed."""
    run = config.stash[RUN]
    if run.manifest is None:
        return []
    engine = f"{run.manifest.name} {run.manifest.version}"
    return [f"kvshard: engine {engine}, budget {config.getoption('budget')}, seed {run.seed} ({run.seed_origin})"]


@pytest.fixture(scope="session")
def kvshard_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine behind `--engine`, connected once per process."""
    run = request.config.stash[RUN]
    try:
        engine = run.engine or connect.connect(run.address)
    except UserError as error:
        pytest.fail(str(error), pytrace=False)
    run.engine = None  # the fixture ends it
    yield engine
    connect.close(engine)


@pytest.fixture
def kvshard_run(request: pytest.FixtureRequest, kvshard_engine: Engine) -> Callable[[Case], None]:
    """Judges one case against the engine; its verdict becomes the outcome of the test."""
    config = request.config
    run = config.stash[RUN]
    item: pytest.Item = request.node
    budget = BUDGETS[config.getoption("budget")]
    listed = known_failures(kvshard_engine.describe(), config.getoption("kvshard_known"))
    forward = _Forward(item) if config.getoption("kvshard_live") else None

    def judge(made: Case) -> None:
        result, found = Trial(made, kvshard_engine, run.address, budget, run.seed, forward).run()
        result = listed.judged(result, made, kvshard_engine)
        if found is not None:
            result = _kept(result, found, config.getoption("kvshard_traces"), made)
        item.stash.setdefault(RESULTS, []).append(result)
        _conclude(result)

    return judge


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts the results of an item's cases into the report of its call."""
    report = yield
    if "kvshard_run" in getattr(item, "fixturenames", ()):
        results = item.stash.get(RESULTS, []) if report.when == "call" else []
        setattr(report, tally.RESULTS, [msgspec.json.encode(result).decode() for result in results])
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the record of a run that came to its end."""
    config = session.config
    run = config.stash[RUN]
    if run.manifest is None or hasattr(config, "workerinput"):
        return
    run.record = _recorded(config)
    path: Path | None = config.getoption("kvshard_record")
    if path is None:
        return
    if run.tally.interrupted:
        run.record_problem = f"{path}: not written, because the run was interrupted"
        return
    try:
        record.write(path, run.record)
    except record.RecordError as error:
        run.record_problem = str(error)
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends an engine that no test asked for."""
    engine = config.stash[RUN].engine
    if engine is not None:
        connect.close(engine)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says why there is no record."""
    problem = config.stash[RUN].record_problem
    if problem is not None:
        terminalreporter.write_line(f"kvshard: {problem}", red=True)


def header(config: pytest.Config) -> record.Header:
    """The header of the run's record; known once the engine is connected."""
    run = config.stash[RUN]
    if run.manifest is None:
        raise ValueError("no engine is connected, so there is no run to describe")
    return record.Header(
        kvshard=provenance.kvshard_version(),
        engine=run.manifest.name,
        engine_version=run.manifest.version,
        engine_options=connect.parse(run.address).options,
        budget=config.getoption("budget"),
        seed=run.seed,
        seed_origin=run.seed_origin,
        commit=run.commit,
        versions=provenance.versions(),
        options=_options(config),
        environment=provenance.environment(),
        started=run.started.isoformat(timespec="seconds"),
    )


def _recorded(config: pytest.Config) -> record.Record:
    """The record of a run whose session has ended."""
    run = config.stash[RUN]
    results = tuple(sorted(run.tally.results, key=lambda result: result.case))
    seconds = (datetime.now(UTC) - run.started).total_seconds()
    footer = record.Footer(counts=record.counts(results), seconds=round(seconds, 3), exit_code=run.tally.exit_code())
    return record.Record(header=header(config), results=results, footer=footer)


def _options(config: pytest.Config) -> dict[str, str]:
    """What the run was asked, apart from the address and what the header has a field for."""
    wanted = {
        "suite": shlex.join(str(arg) for arg in config.args),
        "keyword": config.getoption("keyword", ""),
        "jobs": config.getoption("numprocesses", None) or 1,
        "traces": config.getoption("kvshard_traces"),
        "record": config.getoption("kvshard_record") or "",
    }
    return {name: str(value) for name, value in wanted.items()}


def _kept(result: CaseResult, found: trace.Trace, folder: Path, made: Case) -> CaseResult:
    """Writes the trace of a counterexample; the failure then says where it is and how it is replayed."""
    if result.failure is None:
        return result
    engine = re.sub(r"[^A-Za-z0-9.-]+", "_", found.header.engine_name)
    path = folder / f"{engine}-{found.header.case}-{found.header.seed}.jsonl"
    try:
        trace.write(path, found)
    except OSError as error:
        failure = msgspec.structs.replace(result.failure, replay=f"none: {path} cannot be written: {error.strerror}")
    else:
        failure = msgspec.structs.replace(result.failure, trace=str(path), replay=_replay_command(path, made))
    return msgspec.structs.replace(result, failure=failure)


def _replay_command(path: Path, made: Case) -> str:
    """The command that replays a trace; it says where the case is written unless its module is found anyway."""
    words = ["kvshard", "replay", here.short(path)]
    installed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    file = getattr(sys.modules.get(made.module), "__file__", None)
    if file is not None and root_of(Path(file)) not in {Path.cwd(), root_of(Path(__file__)), *installed}:
        words += ["--suite", here.short(Path(file))]
    return shlex.join(words)


def _conclude(result: CaseResult) -> None:
    """The verdict as pytest's outcome: only a pass passes."""
    if result.verdict is Verdict.PASS:
        return
    if result.verdict is Verdict.SKIP:
        pytest.skip(result.why)
    if result.verdict is Verdict.KNOWN:
        pytest.xfail(result.why)
    if result.failure is None:
        pytest.fail(f"{result.verdict}: {result.why}", pytrace=False)
    pytest.fail(message(result.failure), pytrace=False)


class _Forward:
    """Sends progress as an interim report of the running item: under xdist, reports are what reaches the controller."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._last = -PROGRESS_SECONDS

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last < PROGRESS_SECONDS:
            return
        self._last = now
        report = pytest.TestReport(
            nodeid=self._item.nodeid,
            location=self._item.location,
            keywords={},
            outcome=tally.PROGRESS_WHEN,  # type: ignore[arg-type]  # none of pytest's: it is no outcome
            longrepr=None,
            when=tally.PROGRESS_WHEN,  # type: ignore[arg-type]  # and no phase
        )
        setattr(report, tally.PROGRESS, msgspec.json.encode(progress).decode())
        self._item.config.hook.pytest_runtest_logreport(report=report)


def _end_with_parent() -> None:
    """A worker ends soon after its parent, and takes one Ctrl-C: terminal and controller may both send it."""

    def once(_number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    signal.signal(signal.SIGINT, once)
    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()

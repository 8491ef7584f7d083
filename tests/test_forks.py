"""Jobs in processes: each gives its result or how it died, so many at a time, and none outlives who asked for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.forks import Died, each
from tests import fork_jobs

register_cpu_ci(est_time=20, stage="commit")

ROOT = Path(__file__).parent.parent


def done(jobs: list[Any], work: Callable[[Any], Any], **others: Any) -> list[tuple[Any, Any]]:
    return [*each(jobs, work, **{"workers": 2, "seconds_max": 60.0, **others})]


def test_results_come_in_the_order_of_ending() -> None:
    """A short job that starts later ends before a long one, each in a process of its own."""
    ended = done([0.8, 0.0, 0.1], fork_jobs.after)

    assert [0.0, 0.1, 0.8] == [job for job, _ in ended]
    assert [job for job, _ in ended] == [result[0] for _, result in ended]
    assert 4 == len({os.getpid(), *(result[1] for _, result in ended)})


@pytest.mark.parametrize("result", [None, [], 0, {"a": (1, 2)}, "x" * 1_000_000])
def test_any_result_is_one(result: object) -> None:
    """What is nothing, and what is large, comes as it is."""
    assert [(result, result)] == done([result], fork_jobs.echo)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("prints", "prints"),
        ("raises", Died("ValueError: no such luck")),
        ("odd", Died("Odd: 1 2")),
        ("leaves", Died("its process ended with 7")),
        ("exits", Died("its process ended with 5")),
    ],
)
def test_how_a_job_ends_is_told(how: str, expected: object, capfd: pytest.CaptureFixture[str]) -> None:
    """An exception is told with its text on one line, a process that leaves with its code; others go on, unseen."""
    ended = dict(done([how, "fine"], fork_jobs.ending))

    assert {how: expected, "fine": "fine"} == ended
    assert ("", "") == capfd.readouterr()


@pytest.mark.parametrize(("how", "part"), [("cannot be sent", "pickle"), ("cannot be made again", "TypeError: Odd")])
def test_a_result_that_does_not_arrive_is_told(how: str, part: str) -> None:
    """What cannot be pickled, or not be made again from that, is no result."""
    ended = dict(done([how, "fine"], fork_jobs.ending))

    assert "fine" == ended["fine"]
    assert isinstance(ended[how], Died)
    assert part in ended[how].why


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def started(path: Path) -> list[int]:
    """The processes that `fork_jobs.starting` wrote down."""
    until(path.exists)
    return [int(word) for word in path.read_text().split()]


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_job_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    """It dies, what it started as well, and the jobs behind it still run."""
    jobs = [str(tmp_path / "pids"), str(tmp_path / "none" / "pids")]

    ended = dict(done(jobs, fork_jobs.starting, workers=1, seconds_max=2.0))

    assert Died("it took longer than it may") == ended[jobs[0]]
    assert ended[jobs[1]].why.startswith("FileNotFoundError")
    until(lambda: not any(alive(pid) for pid in started(tmp_path / "pids")))


def test_who_stops_asking_leaves_nobody(tmp_path: Path) -> None:
    """An iteration that is left, for whatever reason, ends all that run."""
    paths = [tmp_path / "a", tmp_path / "b"]
    jobs = each(["quick", *map(str, paths)], first_echo_then_start, workers=3, seconds_max=60)
    assert ("quick", None) == next(jobs)
    pids = [pid for path in paths for pid in started(path)]
    assert all(alive(pid) for pid in pids)

    jobs.close()  # type: ignore[attr-defined]  # it is a generator

    until(lambda: not any(alive(pid) for pid in pids))


def first_echo_then_start(job: str) -> None:
    if job != "quick":
        fork_jobs.starting(job)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_outlives_the_one_who_asked(tmp_path: Path, number: signal.Signals) -> None:
    """However the process ends that wants the results, its jobs and what they started end with it."""
    code = (
        "from harness.forks import each; from tests import fork_jobs; "
        f"list(each([{str(tmp_path / 'pids')!r}], fork_jobs.starting, workers=1, seconds_max=60))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE) as asking:
        try:
            pids = started(tmp_path / "pids")
            asking.send_signal(number)
            asking.communicate(timeout=30)
        finally:
            asking.kill()

    until(lambda: not any(alive(pid) for pid in pids))


def test_no_more_run_than_workers(tmp_path: Path) -> None:
    """Two workers run two jobs at a time, never three; `on_start` is told of each job when it starts, in order."""
    jobs = [str(tmp_path / str(number)) for number in range(6)]
    told: list[str] = []

    results = each(jobs, fork_jobs.spanned, workers=2, seconds_max=60, on_start=told.append)
    behind = [len(told) for _ in results]

    assert jobs == told
    assert all(count <= ended + 2 for ended, count in enumerate(behind))
    spans = [tuple(map(float, Path(job).read_text().split())) for job in jobs]
    assert 2 >= max(sum(began <= at < ended for began, ended in spans) for at, _ in spans)


def test_jobs_are_drawn_as_they_are_needed() -> None:
    """Jobs may come from an iterator, even one without end; no job at all is no result."""

    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield (number := number + 1)

    results = each(endless(), fork_jobs.echo, workers=2, seconds_max=60)

    assert {1, 2, 3} >= {next(results)[0] for _ in range(2)}
    assert [] == done([], fork_jobs.echo)

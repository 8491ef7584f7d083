"""Jobs in processes of their own, some at a time: what one does, or how it ends, touches no other.

Each is forked from a server that has imported what they need and runs no thread, so that a start costs next to nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, Generic, TypeVar

Job = TypeVar("Job")
KILL_SECONDS = 5.0  # a process may take this long to end after its result


@dataclass(frozen=True, slots=True)
class Died:
    """A job that gave no result."""

    why: str


@dataclass(slots=True)
class _Running(Generic[Job]):
    job: Job
    process: ForkServerProcess
    results: Connection
    deadline: float


def each(
    jobs: Iterable[Job],
    work: Callable[[Job], Any],
    *,
    workers: int,
    seconds_max: float,
    preload: Sequence[str] = (),
    on_start: Callable[[Job], None] = lambda _: None,
) -> Iterator[tuple[Job, Any]]:
    """(job, what `work` returned or `Died`) in the order in which they end. `work` is found by name in the process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    waiting, running = iter(jobs), list[_Running[Job]]()
    try:
        while True:
            for job in islice(waiting, workers - len(running)):
                on_start(job)
                running.append(_started(context, job, work, seconds_max))
            if not running:
                return
            ended, running = _ended(running)
            yield from ended
    finally:
        for each_ in running:
            _killed(each_.process)


def _started(context: Any, job: Job, work: Callable[[Job], Any], seconds_max: float) -> _Running[Job]:
    results, own = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(own, work, job), daemon=True)
    process.start()
    own.close()
    return _Running(job, process, results, time.monotonic() + seconds_max)


def _ended(running: list[_Running[Job]]) -> tuple[list[tuple[Job, Any]], list[_Running[Job]]]:
    """Waits for one or more to end; those, and the others."""
    first = min(one.deadline for one in running)
    ready = wait([one.results for one in running], max(0.0, first - time.monotonic()))
    ended, left = list[tuple[Job, Any]](), list[_Running[Job]]()
    for one in running:
        if one.results in ready:
            ended.append((one.job, _result(one)))
        elif time.monotonic() >= one.deadline:
            _killed(one.process)
            one.results.close()
            ended.append((one.job, Died("it took longer than it may")))
        else:
            left.append(one)
    return ended, left


def _result(one: _Running[Job]) -> Any:
    told = list[Any]()
    try:
        told.append(one.results.recv())
    except (EOFError, OSError):  # nothing was sent, or a part
        pass
    except Exception as error:  # noqa: BLE001 - a result that cannot be made again here
        told.append(Died(_text(error)))
    one.process.join(KILL_SECONDS)
    _killed(one.process)
    one.results.close()
    return told[0] if told else Died(f"its process ended with {one.process.exitcode}")


def _killed(process: ForkServerProcess) -> None:
    """Ends a process, and those that it started."""
    if process.pid is not None:
        with suppress(ProcessLookupError):  # none of them is left, or it has no group of its own yet
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _run(results: Connection, work: Callable[[Job], Any], job: Job) -> None:
    """In the process of a job: what the work prints is nobody's business, what it raises is its result."""
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which ends this and what it starts
    Thread(target=_ended_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    try:
        told = work(job)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells it
        told = Died(_text(error))
    try:
        results.send(told)
    except Exception as error:  # noqa: BLE001 - a result that cannot be sent
        results.send(Died(_text(error)))
    results.close()


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _ended_with(parent: BaseProcess | None) -> None:
    """In the process of a job: a parent that is gone, however it ended, takes the job and what it started with it."""
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

"""Files that share a process, and several processes at a time, so that many short files take less long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from ci.plan import Entry

Done = TypeVar("Done")


def batches(entries: Sequence[Entry], seconds: float) -> list[tuple[Entry, ...]]:
    """The files in order, those together whose expected times add up to at most so much.

    A script, a gate and a file with arguments of its own are alone; so is every file with 0 seconds.
    """
    found: list[list[Entry]] = []
    loads: list[float] = []
    for entry in entries:
        is_alone = entry.registration.is_script or entry.is_gate or entry.arguments or entry.node
        room = (at for at, load in enumerate(loads) if load + entry.seconds <= seconds)
        at = None if is_alone else next(room, None)
        if at is None:
            found.append([entry])
            loads.append(float("inf") if is_alone else entry.seconds)
        else:
            found[at].append(entry)
            loads[at] += entry.seconds
    return list(map(tuple, found))


def each(
    units: Sequence[tuple[Entry, ...]], work: Callable[[int], Done], jobs: int, stop: Callable[[], None]
) -> Generator[Done]:
    """What `work` makes of each unit, by number, as soon as it is there; `jobs` at a time.

    Nothing new is started once nobody asks any more. Whatever still runs then is ended by `stop`, and waited for.
    """
    if jobs == 1:  # in this thread, which an interrupt reaches
        yield from map(work, range(len(units)))
        return
    waiting, running = deque(range(len(units))), set[Future[Done]]()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.add(pool.submit(work, waiting.popleft()))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            stop()

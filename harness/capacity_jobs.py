"""The grid of layouts and memories, replayed here or in several processes that never outlive this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from harness.capacity import CapacityError, IndexEngine, Row, Sizing, replay
from harness.traffic import Request


@dataclass(frozen=True, slots=True)
class Task:
    """What every cell of the grid shares."""

    requests: Sequence[Request]
    sizing: Sizing
    in_flight: int
    engine: IndexEngine

    def replay(self, row: Row, advance: Callable[[int], None]) -> Row:
        """One cell."""
        return replay(row, self.requests, self.sizing, self.in_flight, self.engine, advance)


def replay_grid(task: Task, rows: Sequence[Row], jobs: int, advance: Callable[[int], None]) -> list[Row]:
    """`rows` with their replays, in the same order. advance(n): n more requests are done, summed over all rows.

    CapacityError: a worker process ended without a result. Whatever happens, no process is left when this returns.
    """
    if jobs == 1:
        return [task.replay(row, advance) for row in rows]
    done = list(rows)
    waiting = [place for place, row in enumerate(rows) if not row.note]
    running: dict[Connection, tuple[int, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                place = waiting.pop(0)
                pipe, process = _start(task, rows[place])
                running[pipe] = (place, process)
            for pipe in [pipe for pipe in wait(list(running)) if isinstance(pipe, Connection)]:
                place, process = running[pipe]
                message = _receive(pipe, process, rows[place])
                if isinstance(message, int):
                    advance(message)
                else:
                    done[place] = message
                    del running[pipe]
                    _end(process, pipe)
    finally:
        for pipe, (_, process) in running.items():
            process.kill()
            _end(process, pipe)
    return done


def _start(task: Task, row: Row) -> tuple[Connection, SpawnProcess]:
    # spawned, not forked: a fork would hold the other workers' pipe ends, and their death would go unseen
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, task, row), daemon=True)
    with _interrupts_held():
        process.start()
    sender.close()
    return receiver, process


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, which reaches the whole terminal group: this one ends them.

    A signal mask is inherited from the first instruction on; one that comes meanwhile is delivered here afterwards.
    """
    resource_tracker.ensure_running()  # its own start would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(pipe: Connection, process: SpawnProcess, row: Row) -> int | Row:
    try:
        message: int | Row = pipe.recv()
    except EOFError:
        process.join()
        raise CapacityError(
            f"the process that replays {row.layout} at {row.memory_bytes} bytes per rank ended early "
            f"(exit code {process.exitcode}; its error is above, -9 is often too little memory); try --jobs 1"
        ) from None
    return message


def _end(process: SpawnProcess, pipe: Connection) -> None:
    process.join()
    process.close()
    pipe.close()


def _work(pipe: Connection, task: Task, row: Row) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    pipe.send(task.replay(row, pipe.send))


def _die_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)

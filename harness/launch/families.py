"""All processes of a worker, and their end: those of its session, its descendants, and whatever carries its mark.

A process group alone misses a child that has called setsid; the tree of parents misses one whose own parent has ended;
the mark, a variable of the environment, misses one that started with a clean environment. Together they miss little.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import psutil

MARK = "KVSHARD_UP"  # variable: DEPLOYMENT:WORKER
KILL_SECONDS = 10.0  # SIGKILL is not refused, but the kernel takes its time to end what holds a GPU
LOOK_SECONDS = 0.02
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError)


class Leader(NamedTuple):
    """The first process of a worker, which leads its session; the start time tells it from a later one of that id."""

    pid: int
    started: float


def leader_of(pid: int) -> Leader:
    """The process as it is now."""
    return Leader(pid, psutil.Process(pid).create_time())


def family(leader: Leader | None, mark: str) -> list[psutil.Process]:
    """The living processes of the worker with that leader and mark, or, with no leader, of all that carry the mark."""
    everyone = {process.pid: process for process in psutil.process_iter() if process.pid != os.getpid()}
    session = leader.pid if leader is not None and not _is_reused(leader, everyone) else None
    found = {pid for pid, process in everyone.items() if pid == session or _belongs(process, session, mark)}
    parents: dict[int, int] = {}
    for pid, process in everyone.items():
        with contextlib.suppress(*_GONE):
            parents[pid] = process.ppid()
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        found |= children
        grown = bool(children)
    return [everyone[pid] for pid in sorted(found) if is_alive(everyone[pid])]


def newest_child(pid: int) -> psutil.Process | None:
    """Of the children that the process has now, the one that started last."""
    try:
        children = [child for child in psutil.Process(pid).children() if is_alive(child)]
        return max(children, key=lambda child: (child.create_time(), child.pid), default=None)
    except _GONE:
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except _GONE:
        return False


def end(leader: Leader | None, mark: str, stop_seconds: float, reap: Callable[[], object]) -> list[psutil.Process]:
    """Ends a family: SIGTERM, after `stop_seconds` SIGKILL (0: at once). Returns what is still there, usually nothing.

    `reap` takes the exit codes of the caller's own children, which are zombies until then.
    """
    members = family(leader, mark)  # before the first signal: then the tree of parents is still whole
    if stop_seconds > 0:
        _send(members, leader, signal.SIGTERM)
        _wait(members, stop_seconds, reap)
    deadline = time.monotonic() + KILL_SECONDS
    left = _still(members, leader, mark)
    while left and time.monotonic() < deadline:
        _send(left, leader, signal.SIGKILL)
        _wait(left, 1.0, reap)
        left = _still(left, leader, mark)  # some may have been started in between
    reap()
    return left


def _still(members: Iterable[psutil.Process], leader: Leader | None, mark: str) -> list[psutil.Process]:
    found = {process.pid: process for process in (*members, *family(leader, mark)) if is_alive(process)}
    return list(found.values())


def _is_reused(leader: Leader, everyone: dict[int, psutil.Process]) -> bool:
    """Whether its id belongs to another process by now; a session's id is not given away while it has members."""
    process = everyone.get(leader.pid)
    try:
        return process is not None and abs(process.create_time() - leader.started) > 1.0
    except _GONE:
        return False


def _belongs(process: psutil.Process, session: int | None, mark: str) -> bool:
    try:
        if session is not None and os.getsid(process.pid) == session:
            return True
        found = process.environ().get(MARK, "")
    except _GONE:  # ended, or another user's
        return False
    return found == mark or found.startswith(f"{mark}:")


def _send(members: Iterable[psutil.Process], leader: Leader | None, number: signal.Signals) -> None:
    """To the group first, which nobody can leave meanwhile, then to each member outside it."""
    members = list(members)
    group = None
    for process in members:
        with contextlib.suppress(*_GONE):
            if leader is not None and os.getpgid(process.pid) == leader.pid:
                group = leader.pid
    if group is not None:
        with contextlib.suppress(*_GONE):
            os.killpg(group, number)
    for process in members:
        with contextlib.suppress(*_GONE):
            if group is None or os.getpgid(process.pid) != group:
                process.send_signal(number)


def _wait(members: Iterable[psutil.Process], seconds: float, reap: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    members = list(members)
    while time.monotonic() < deadline:
        reap()
        members = [process for process in members if is_alive(process)]
        if not members:
            return
        time.sleep(LOOK_SECONDS)

"""GPU leases: one locked file for each physical GPU, taken all or none, given back by the kernel when the holder dies.

Who waits holds nothing but its place at the head of the queue, so there is no deadlock, and a request for many GPUs is
not overtaken for ever by requests for one. A container sees the locks of others only if it shares the folder with them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from harness.usage import UserError

LOOK_SECONDS = 0.05
IDLE_BYTES = 2 << 30  # what a driver and its daemons may hold on an idle GPU
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_HOLDER_BYTES = 4096


class LeaseError(UserError):
    """GPUs could not be leased, or are not idle."""


class Probe(Protocol):
    """How much memory is in use on a GPU; NVML, or a fake in a test."""

    def gpus(self) -> Sequence[str]:
        """The ids of the physical GPUs that this process may use, in an order that all processes share."""
        ...

    def used_bytes(self, gpu: str) -> int:
        """Memory in use on it, by any process."""
        ...


class Lease:
    """GPUs that nobody else has a lease on, until it is closed or this process ends."""

    def __init__(self, locks: dict[str, int], probe: Probe) -> None:
        self._locks = locks
        self._probe = probe

    @property
    def gpus(self) -> tuple[str, ...]:
        """Their ids."""
        return tuple(self._locks)

    def wait_idle(self, seconds: float, idle_bytes: int = IDLE_BYTES) -> None:
        """Waits until each has at most `idle_bytes` in use. Raises `LeaseError` after `seconds`."""
        deadline = time.monotonic() + seconds
        while busy := {gpu: used for gpu in self.gpus if (used := self._probe.used_bytes(gpu)) > idle_bytes}:
            if time.monotonic() >= deadline:
                told = ", ".join(f"{gpu} has {used / 2**30:.1f} GiB in use" for gpu, used in busy.items())
                limit = f"at most {idle_bytes / 2**30:.1f} GiB after {seconds:g} s"
                raise LeaseError(f"{told}; expected {limit}; end what holds it (see `nvidia-smi`)")
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Gives them back; a second call does nothing."""
        while self._locks:
            _, lock = self._locks.popitem()
            os.ftruncate(lock, 0)
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing would do, but for a child that has forked and not yet exec'd
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def shared_folder() -> Path:
    """The folder of locks of this machine, for all its users; made when it is missing. Raises `LeaseError`."""
    folder = Path(tempfile.gettempdir()) / "kvshard-gpus"
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o1777)  # whatever the umask is
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise LeaseError(f"{folder} is no folder; expected one for lock files; remove it, or set TMPDIR")
    return folder


def lease(
    count: int,
    probe: Probe,
    note: str,
    *,
    wait_seconds: float,
    folder: Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Lease:
    """So many GPUs, the first that are free in the probe's order. `note` is what others are told who wait for them.

    Raises `LeaseError` when there are not so many, or not within `wait_seconds`; the message names the holders.
    """
    place, gpus = shared_folder() if folder is None else folder, list(probe.gpus())
    if not 1 <= count <= len(gpus):
        there = f"this process sees {', '.join(gpus)}" if gpus else "this process sees no GPU"
        raise LeaseError(f"{count} GPUs asked for; {there}; expected 1 to {len(gpus)}; use another runner")
    deadline = time.monotonic() + wait_seconds
    has_told = False
    with contextlib.ExitStack() as queue:
        head: int | None = None  # the lock of the head of the queue
        while True:
            if head is None and (head := _try_lock(place / "queue.lock")) is not None:
                queue.callback(os.close, head)
            if head is not None and (locks := _try_all(place, gpus, count)) is not None:
                _sign(locks, note)
                return Lease(locks, probe)
            if time.monotonic() >= deadline or not has_told:
                told = (
                    f"{count} of {len(gpus)} GPUs are not free: {'; '.join(holders(place, gpus)) or 'others wait too'}"
                )
                if time.monotonic() >= deadline:
                    raise LeaseError(
                        f"{told}; expected them within {wait_seconds:g} s; end a holder, or wait for longer"
                    )
                say(f"waiting for {told}")
                has_told = True
            time.sleep(LOOK_SECONDS)


def holders(folder: Path, gpus: Sequence[str]) -> list[str]:
    """Who holds which of the GPUs, as its holder has signed."""
    found = []
    for gpu in gpus:
        lock = _try_lock(_file_of(folder, gpu))
        if lock is not None:
            os.close(lock)
            continue
        try:
            signed = json.loads(_file_of(folder, gpu).read_text(encoding="utf-8"))
            found.append(f"{gpu} by pid {signed['pid']} since {signed['since']} ({signed['note']})")
        except (OSError, ValueError, KeyError, TypeError):  # it has not signed yet
            found.append(f"{gpu} by a process that has just taken it")
    return found


def _try_all(folder: Path, gpus: Sequence[str], count: int) -> dict[str, int] | None:
    """Locks on the first `count` that are free, or on none."""
    with contextlib.ExitStack() as undo:
        locks: dict[str, int] = {}
        for gpu in gpus:
            lock = _try_lock(_file_of(folder, gpu))
            if lock is not None:
                undo.callback(os.close, lock)
                locks[gpu] = lock
            if len(locks) == count:
                undo.pop_all()
                return locks
    return None


def _try_lock(file: Path) -> int | None:
    """The descriptor of the locked file, or None when another has it. Children do not inherit it."""
    lock = _opened(file)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _opened(file: Path) -> int:
    """The file, made when it is missing. It is never deleted: another may have opened it just before."""
    try:
        # Without O_CREAT, with which Linux may refuse the file of another user in a folder like /tmp.
        return os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        made = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):  # another user has just made it
            os.fchmod(made, 0o666)  # whatever the umask is
        return made
    except OSError as error:
        raise LeaseError(
            f"{file}: {error.strerror}; expected a lock file of one's own or for all; remove it"
        ) from error


def _sign(locks: dict[str, int], note: str) -> None:
    """Tells who holds them."""
    signed = {"pid": os.getpid(), "since": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), "note": note[:200]}
    for lock in locks.values():
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(signed).encode()[:_HOLDER_BYTES], 0)


def _file_of(folder: Path, gpu: str) -> Path:
    return folder / f"{_UNSAFE.sub('_', gpu)}.lock"


def visible(all_gpus: Sequence[str], listed: str | None) -> Iterator[str]:
    """The ids of those that CUDA_VISIBLE_DEVICES leaves: indices, ids or beginnings of ids.

    Like CUDA, up to the first entry that names none.
    """
    if listed is None:
        yield from all_gpus
        return
    for word in (part.strip() for part in listed.split(",")):
        matching = [gpu for gpu in all_gpus if word and gpu.startswith(word)]
        if word.isdecimal() and int(word) < len(all_gpus):
            yield all_gpus[int(word)]
        elif len(matching) == 1:
            yield matching[0]
        else:
            return

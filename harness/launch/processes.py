"""One worker's process, which leads a session of its own and writes into a log of its own; and the guardian of all.

The guardian ends the workers when this process dies of a signal that it cannot handle. PR_SET_PDEATHSIG would not do:
it reaches the child alone, none of its children, and fires when the *thread* that started the child ends.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from harness.launch.families import MARK, Leader, end, leader_of

LOGS_KEPT = 3  # older logs of one name, as NAME.log.1 and on
TAIL_LINES = 30
STARTED_AGAIN = b"-- started again --\n"  # a line of a log, between what two processes of one worker have written
_TAIL_BYTES = 1 << 16
_ROOT = Path(__file__).parent.parent.parent  # of the package `harness`, which the guardian imports


class LaunchError(RuntimeError):
    """A worker did not start, did not become ready, or ended; the message shows the end of its log."""


class Process:
    """A running worker. `again`: it goes on with the log of the process before it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], mark: str, log: Path, *, again: bool = False
    ) -> None:
        self.log = log
        self.mark = mark
        if not again:
            rotate(log)
        # A title that setproctitle writes would cover the environment that /proc shows, and the mark with it.
        marked = {**os.environ, "SPT_NOENV": "1", **environment, MARK: mark}
        with log.open("ab" if again else "wb") as out:
            if again:
                out.write(STARTED_AGAIN)
                out.flush()
            try:
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=marked,
                    start_new_session=True,
                )
            except OSError as error:
                what = f"{shlex.join(command)} cannot be started: {error.strerror}"
                raise LaunchError(f"{what}; expected a program; check the path of {command[0]!r}") from error
        self.leader: Leader = leader_of(self._popen.pid)  # there at least as a zombie: nobody has asked for its code

    @property
    def pid(self) -> int:
        """Its id, which is also that of its session and group."""
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """The exit code, minus the number of the signal that ended it, or None while it runs."""
        return self._popen.poll()

    def end(self, stop_seconds: float) -> list[psutil.Process]:
        """Ends it with all its descendants; SIGKILL at once when `stop_seconds` is 0. Returns what is left."""
        left = end(self.leader, self.mark, stop_seconds, self._popen.poll)
        if not left:
            self._popen.wait()  # it is dead, and stays a zombie until somebody asks
        return left


class Guardian:
    """A helper process that ends all workers of a mark once this process is gone; see `harness.launch.guard`."""

    def __init__(self, mark: str, log: Path) -> None:
        places = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        rotate(log)
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "harness.launch.guard", mark, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**environment, "PYTHONPATH": os.pathsep.join(places)},
                start_new_session=True,  # the terminal's signals are not for it
                bufsize=0,
            )
        # Only this process may hold the write end: a worker that inherited it would keep the guardian waiting.
        os.set_inheritable(self._pipe(), False)
        assert self._popen.stdout is not None  # noqa: S101  # it was opened as a pipe
        with self._popen.stdout as answer:
            is_watching = answer.readline() != b""  # before that a signal could end it
        if not is_watching:
            self.dismiss()
            raise LaunchError(f"the guardian did not start, so nothing was; see {log}")

    @property
    def pid(self) -> int:
        """Its id."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it still watches."""
        return self._popen.poll() is None

    def watch(self, process: Process, stop_seconds: float) -> None:
        """This worker has started."""
        self._tell(f"watch {process.leader.pid} {process.leader.started!r} {stop_seconds!r} {process.mark}")

    def forget(self, process: Process) -> None:
        """This worker has ended, and its id may be given to another process."""
        self._tell(f"forget {process.leader.pid}")

    def dismiss(self) -> None:
        """All are down: it ends."""
        self._tell("done")
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._popen.wait()

    def _pipe(self) -> int:
        assert self._popen.stdin is not None  # noqa: S101  # it was opened as a pipe
        return self._popen.stdin.fileno()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died, which `alive` tells
            os.write(self._pipe(), f"{line}\n".encode())


def told(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def rotate(log: Path) -> None:
    """Moves an older log of that name out of the way; the oldest goes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for number in reversed(range(LOGS_KEPT)):
        older = log.with_name(f"{log.name}.{number}") if number else log
        with contextlib.suppress(FileNotFoundError):
            older.replace(log.with_name(f"{log.name}.{number + 1}"))


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return f"(no log: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:])

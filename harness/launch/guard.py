"""`python -m harness.launch.guard MARK PARENT`: ends the workers of a deployment once its process is gone.

Standard input says which workers there are; its end, or that of the parent, without the line `done` is the alarm.
A line on standard output says that it watches.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence

from harness.launch.families import Leader, end

EXEC_SECONDS = 0.2
_READ_BYTES = 1 << 16


def main(arguments: list[str]) -> int:
    """Watches until told that all is down, or ends what is left."""
    mark, parent = arguments[0], int(arguments[1])
    # Ended by whoever cleans up after the parent, it could not clean up itself; it ends on its own in any case.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    os.write(sys.stdout.fileno(), b"watching\n")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the parent listens no more; what follows is for the log
    text = heard(parent)
    if not is_done(text):
        end_all(mark, text)
    return 0


def is_done(text: str) -> bool:
    """Whether the parent said that all is down."""
    return "done" in text.split("\n")


def heard(parent: int) -> str:
    """All that the parent said until it said `done` or was gone."""
    pipe, text = sys.stdin.fileno(), b""
    os.set_blocking(pipe, False)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        selector.register(pipe, selectors.EVENT_READ)
        # The pipe's end is late where the parent has forked without exec: such a child holds the write end too.
        with contextlib.suppress(OSError):  # an old kernel, or the parent is gone already
            handle = os.pidfd_open(parent)
            opened.callback(os.close, handle)
            selector.register(handle, selectors.EVENT_READ)
        gone = False
        while not gone and not is_done(text.decode()):
            gone = os.getppid() != parent  # asked before the read, so that nothing said by then is missed
            if not gone:
                selector.select()
            with contextlib.suppress(BlockingIOError):
                data = os.read(pipe, _READ_BYTES)
                gone = gone or not data
                text += data
    return text.decode()


def end_all(mark: str, text: str) -> None:
    """Ends every worker of the lines `watch PID STARTED STOP_SECONDS MARK` and `forget PID`, last started first."""
    workers: dict[int, tuple[Leader, float, str]] = {}
    for line in text.splitlines():
        verb, pid, *values = line.split()
        workers.pop(int(pid), None)
        if verb == "watch":
            workers[int(pid)] = (Leader(int(pid), float(values[0])), float(values[1]), values[2])
    for leader, seconds, own in reversed(workers.values()):
        say(f"ending {own}", end(leader, own, seconds, int))
    # A worker that was started in the instant before the parent's end is known by its mark alone, once it has exec'd.
    time.sleep(EXEC_SECONDS)
    say("ending the rest", end(None, mark, 1.0, int))


def say(what: str, left: Sequence[object]) -> None:
    """One line for the log."""
    sys.stdout.write(f"{what}: {'done' if not left else f'still there: {left}'}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

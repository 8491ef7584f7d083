"""What the tests of processes have done in them: found by name there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


class Odd(Exception):  # noqa: N818  # it is odd, not wrong
    """Can be sent, and not be received."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first}\n{second}")


def echo(job: object) -> object:
    return job


def after(seconds: float) -> tuple[float, int]:
    time.sleep(seconds)
    return seconds, os.getpid()


def ending(how: str) -> object:
    """Ends as it is told."""
    if how == "raises":
        raise ValueError("no\n  such luck")
    if how == "odd":
        raise Odd(1, 2)
    if how == "leaves":
        os._exit(7)
    if how == "exits":
        sys.exit(5)
    if how == "cannot be sent":
        return lambda: how
    if how == "cannot be made again":
        return Odd(1, 2)
    sys.stdout.write("printed")
    sys.stderr.write("and more")
    return how


def starting(path: str) -> None:
    """Starts a process that sleeps, writes its own id and that one's, and waits for it."""
    part = Path(f"{path}.part")
    part.touch()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        part.write_text(f"{os.getpid()} {child.pid}")
        part.rename(path)


def spanned(path: str) -> str:
    """Writes when it began and ended."""
    began = time.monotonic()
    time.sleep(0.15)
    Path(path).write_text(f"{began} {time.monotonic()}")
    return path

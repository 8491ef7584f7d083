"""`kvshard tell LOG_DIR VERB WORKER`: ends or restarts a worker of a `kvshard up .. -- COMMAND` that runs.

kill        SIGKILL to the worker and all that it has started; the others go on
kill-rank   SIGKILL to the newest child of the worker's process: where each rank is one, the last rank
restart     ends it where it runs, starts it again at the same ports, and waits until it is ready

A worker that was ended so does not end the whole. LOG_DIR is {log_dir} in the COMMAND.

Exit codes: 0 done, 1 it could not be done, 2 an argument that makes no sense, or nothing runs there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.launch.control import VERBS, ControlError, tell

EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard tell`."""
    add = parser.add_argument
    add("log_dir", type=Path, metavar="LOG_DIR", help="where the `kvshard up` writes its logs")
    add("verb", choices=VERBS, metavar="VERB", help=", ".join(VERBS))
    add("worker", metavar="WORKER", help="its name in the topology file")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    try:
        tell(args.log_dir, args.verb, args.worker)
    except ControlError as error:
        sys.stderr.write(f"kvshard tell: {error}\n")
        return EXIT_FAILED
    return 0

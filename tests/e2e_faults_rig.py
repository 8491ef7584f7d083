"""A P/D pair without a model as one process: `python -m tests.e2e_faults_rig DECODE PREFILL CONTROL`, three ports.

KVSHARD_FAULT plants one of `FAULTS` in the pair, which tells in its log what a rank of the reference tells.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from tests.fake_server import Server
from tests.fake_worker import Worker, World

# id in the library -> what the pair does, and how often it says that it has run it
FAULTS = {
    "host.restore-without-draft": ("loses draft rows on the host", 3),
    "gather.restore-unawaited": ("", 3),
    "host.only-rank-0-backs-up": ("", 0),
    "host.draft-index-stays": ("loses draft rows on the host", 0),
}

DIES = "host.every-rank-copies-all"  # before it serves


def main(ports: list[int]) -> None:
    """Until SIGTERM."""
    name = os.environ.get("KVSHARD_FAULT", "")
    if name == DIES:
        sys.exit("ended at once")
    does, runs = FAULTS.get(name, ("", 0))
    world = World(frozenset({does}))
    for port, role, its in zip(ports, ("decode", "prefill", "null"), (world, world, World()), strict=True):
        Server(port, Worker(its, role))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    if name:
        sys.stderr.write(f"fault {name} is planted\n")
    while not ended.wait(0.05):
        pass
    if name:
        sys.stderr.write(f"fault {name} was run {runs} times{'' if runs else ': not exercised'}\n")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])

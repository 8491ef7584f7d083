"""The program of one rank of the reference's server, started by its face: `python -m harness.serve_rank`.

KVSHARD_FAULT plants faults by id, with commas between, so that suites can be tried on a server; they are looked up in
KVSHARD_FAULT_LIBRARY.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack

from harness.adapters.ref_server_rank import serve_rank
from harness.fault import Reached, planted
from harness.fault_files import LIBRARY, library


def main() -> None:
    """Serves, with the faults that are asked for. A fault that does not exist ends the process with code 2."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; a rank ends when its face does
    names = [name for name in os.environ.get("KVSHARD_FAULT", "").split(",") if name]
    with ExitStack() as stack:
        if names:
            known = library(os.environ.get("KVSHARD_FAULT_LIBRARY", LIBRARY), checked=False)
            for name in names:
                if name not in known.faults:
                    sys.stderr.write(f"KVSHARD_FAULT: no fault {name!r}, expected one of {', '.join(known.faults)}\n")
                    raise SystemExit(2)
                reached = stack.enter_context(planted(known.faults[name].changes))
                sys.stderr.write(f"fault {name} is planted\n")
                stack.callback(tell, name, reached)
        serve_rank()


def tell(name: str, reached: Reached) -> None:
    """What was never run has shown nothing, whatever a suite says."""
    sys.stderr.write(f"fault {name} was run {reached.times} times{'' if reached.times else ': not exercised'}\n")


if __name__ == "__main__":
    main()

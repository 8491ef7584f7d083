"""A server without a model that finds facts: `python -m tests.gate_trials_rig PORT`.

KVSHARD_FAULT makes it forget what comes from the host, or draft badly after it, and it tells in its log what a rank of
the reference tells.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from tests import gate_arms_rig
from tests.gate_arms_rig import Face, Known, Server

FAULT, NEVER_RUN, DIES = "host.restore-without-index", "host.only-rank-0-backs-up", "host.every-rank-copies-all"
OF_DRAFTS = "host.restore-without-draft"


class Finding(Known):
    """Answers `\\n?abc=` with what stands behind `abc=`."""

    def __init__(self, fault: str) -> None:
        super().__init__(*(["drafts badly from the host"] if fault == OF_DRAFTS else []))
        self.fault, self.runs = fault, 0

    def answer(self, prompt: str, tier: str) -> str:
        context, is_fact, asked = prompt.rpartition("\n?")
        if not is_fact:
            return "seven"
        spoils = tier == "host" and self.fault in (FAULT, OF_DRAFTS)
        self.runs += spoils
        if spoils and self.fault == FAULT:
            return "?"
        return context.partition(asked)[2].partition(";")[0]


def main(port: int) -> None:
    """Until SIGTERM."""
    known = Finding(os.environ.get("KVSHARD_FAULT", ""))
    if known.fault == DIES:
        sys.exit("ended at once")
    gate_arms_rig.HOST_TOKENS = 65_536  # all of it: only the device evicts
    server = Server(("127.0.0.1", port), type("FindingFace", (Face,), {"known": known}))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    while not ended.wait(0.05):
        pass
    if known.fault:
        sys.stderr.write(f"fault {known.fault} was run {known.runs} times\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))

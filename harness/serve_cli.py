"""`kvshard serve`: the reference as a server in sglang's dialect: one worker, with all its ranks.

A plain worker computes and answers; a prefill worker sends what it computes to a decode worker. Flags have sglang's
names. Exit codes: 0 after a signal, 1 when a rank has ended, 2 for flags that cannot work.
"""

from __future__ import annotations

import argparse
import asyncio

from harness.adapters import ref_server

add_arguments = ref_server.add_arguments


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    return asyncio.run(ref_server.serve(ref_server.settings_from(args)))

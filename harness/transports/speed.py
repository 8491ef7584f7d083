"""Speed of the transports between two processes of this machine: python -m harness.transports.speed [NAME ...]."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.transports.host import PeerHost, RemoteError, missing

NAMES = ("tcp", "nixl", "mooncake")
PAGE_BYTES = 1 << 16
SMALL_WRITES = 200


def measure(kind: str, mib: int, repeats: int) -> str:
    """One line: median time of a write of `mib` MiB in one block, in pages of 64 KiB, and of one page."""
    pages = mib * (1 << 20) // PAGE_BYTES
    whole: list[list[Any]] = [["kv.0", 0, 0, pages]]
    scattered: list[list[Any]] = [["kv.0", page, pages - 1 - page, 1] for page in range(pages)]
    with tempfile.TemporaryDirectory() as folder, PeerHost(kind, Path(folder)) as host:
        prefill, decode = host.start("P"), host.start("D")
        for peer in (prefill, decode):
            peer.call("register", regions={"kv.0": [pages, PAGE_BYTES]})
        stamp = prefill.call("fill", region="kv.0", seed=1)
        prefill.call("connect", peer="D")
        cells = []
        small: list[list[Any]] = [["kv.0", 0, 0, 1]]
        for blocks, count in ((scattered, repeats), (whole, repeats), (small, SMALL_WRITES)):
            prefill.call("time_writes", peer="D", blocks=blocks, repeats=1)  # the first one makes connections
            seconds = statistics.median(prefill.call("time_writes", peer="D", blocks=blocks, repeats=count))
            size = sum(block[-1] for block in blocks) * PAGE_BYTES
            rate = size / seconds / 1e9
            cells.append(f"{len(blocks):5} blocks {size >> 10:6} KiB {seconds * 1e3:8.2f} ms {rate:5.2f} GB/s")
        if prefill.call("wait", ticket=prefill.call("write", peer="D", blocks=whole)) != "done":
            raise RuntimeError(f"{kind}: the last write is not done; run the tests of the transports")
        if decode.call("digest", region="kv.0") != stamp:
            raise RuntimeError(f"{kind}: what arrived is not what was sent; run the tests of the transports")
    return f"{kind:9}" + "  |  ".join(cells)


def main(arguments: list[str]) -> int:
    """Print a line for each transport; 1 when a named one is not here."""
    parser = argparse.ArgumentParser(prog="python -m harness.transports.speed", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without any")
    parser.add_argument("--mib", type=int, default=64, help="size of the large writes")
    parser.add_argument("--repeats", type=int, default=7, help="large writes of each form; the median is printed")
    options = parser.parse_args(arguments)
    wrong = sorted({*options.names} - {*NAMES})
    if wrong:
        parser.error(f"no transport {', '.join(wrong)}, expected of {', '.join(NAMES)}")
    failed = 0
    for kind in options.names or NAMES:
        try:
            line = missing(kind) or measure(kind, options.mib, options.repeats)
        except RemoteError as error:
            line, failed = f"{kind:9}{error}", failed + bool(options.names)
        sys.stdout.write(line + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

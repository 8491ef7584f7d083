"""What the reference adds to the raw operations under it: `python -m harness.adapters.ref_bench`.

    gather   the prefix gather beside an all_gather of the same bytes, and how much of it a layer's compute hides
    host     backup and restore of the host tier beside copies to and from pinned memory
    send     pages into another GPU's pool beside a copy between the two GPUs

Each is measured in turn with its raw operation by the same processes, one for each GPU; then fresh rows are moved and
compared bit by bit. Without GPUs it runs on CPUs over Gloo with a few KB: that shows that it works and no speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it in __all__

from harness.adapters.bench.figure import AnyFinding, Check, Figure, Overlap, merged
from harness.adapters.bench.rank import Report
from harness.adapters.bench.shape import CPU, GPU, Shape

PARTS = ("gather", "host", "send")
WANTED = 0.9
"""Ratio to the raw operation that the reference aims at."""
SECONDS_MAX = 540.0
MEANINGLESS = "CPU tensors of a few KB: the figures mean nothing, only that everything ran and arrived"


class RankFailedError(Exception):
    """A rank ended without a report."""


def reports_of(ranks: int, backend: str, parts: Sequence[str], shape: Shape) -> list[Report]:
    """Run all ranks, one process each. Raises RankFailedError, with no process left."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = [str(ranks), backend, str(store.port), ",".join(parts), msgspec.json.encode(shape).decode()]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "harness.adapters.bench.rank"]
    with ExitStack() as stack:
        # files, as a pipe holds less than a long report
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        children = [
            subprocess.Popen([*program, str(rank), *common], stdout=output, env=environment)
            for rank, output in enumerate(outputs)
        ]
        stack.callback(end, children)
        deadline = time.monotonic() + SECONDS_MAX
        while any(child.poll() is None for child in children):
            check(children)
            if time.monotonic() > deadline:
                raise RankFailedError(f"no report within {SECONDS_MAX:.0f} s; measure less with --repeats or --layers")
            time.sleep(0.05)
        check(children)
        for output in outputs:
            output.seek(0)
        return [msgspec.json.decode(output.read(), type=Report) for output in outputs]


def end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave no process."""
    for child in children:
        child.kill()
        child.wait()


def check(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Raises RankFailedError."""
    for rank, child in enumerate(children):
        if child.returncode:
            raise RankFailedError(f"rank {rank} ended with code {child.returncode}; its output says why")


def findings_of(reports: Sequence[Report]) -> list[AnyFinding]:
    """Of all ranks together, by name, in the order of rank 0, which takes part in everything."""
    found: dict[tuple[type, str], list[AnyFinding]] = {}
    for report in reports:
        for finding in report.findings:
            found.setdefault((type(finding), finding.name), []).append(finding)
    return [merged(each) for each in found.values()]


def table(findings: Sequence[AnyFinding]) -> list[str]:
    """Lines for a terminal: GB/s of the median repeat and, in brackets, of the slowest and the fastest."""
    head = f"{'':46} {'GB/s':>28} {'raw GB/s':>28} {'ratio':>6}"
    lines = [head]
    for finding in findings:
        if isinstance(finding, Figure):
            cells = [f"{middle:8.2f} [{low:.2f}, {high:.2f}]" for low, middle, high in finding.rates()]
            note = "" if finding.ratio >= WANTED else f"  below {WANTED}"
            lines.append(f"{finding.name:46} {cells[0]:>28} {cells[1]:>28} {finding.ratio:6.3f}{note}")
        elif isinstance(finding, Overlap):
            parts = {"gather": finding.gather, "layers": finding.compute, "together": finding.together}
            each = ", ".join(f"{name} {statistics.median(taken) * 1e3:.2f} ms" for name, taken in parts.items())
            lines.append(f"{finding.name:46} hidden {finding.hidden:.2f}  ({each})")
        elif isinstance(finding, Check):
            lines.append(f"{finding.name:46} {'bit-identical' if finding.equal else 'WRONG ROWS'}")
        else:
            lines.append(f"{finding.name:46} not measured: {finding.why}")
    return lines


def record(path: Path, head: dict[str, object], findings: Sequence[AnyFinding]) -> None:
    """Write a line of JSON for the run and one for each finding."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (head, *findings)))


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with code 2 and the next step when something does not fit."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(
        prog="python -m harness.adapters.ref_bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--group", choices=("nccl", "gloo"), default="nccl" if gpus else "gloo", help="nccl: on GPUs")
    parser.add_argument("--ranks", type=int, default=gpus or 2, help="processes, one for each GPU")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part; again for another one")
    parser.add_argument("--prefix-tokens", type=int, help="size of the prefix")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write every time that was taken, as JSON lines")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in ("prefix_tokens", "layers", "repeats")}
    base = GPU if options.group == "nccl" else CPU
    options.shape = msgspec.structs.replace(base, **{name: value for name, value in given.items() if value is not None})
    if options.ranks < 1 or (options.group == "nccl" and options.ranks > gpus):
        parser.error(f"{options.ranks} ranks on {gpus} GPUs, expected 1..{gpus}; take --group gloo for CPUs")
    wrong = options.shape.check(options.ranks)
    if wrong:
        parser.error(wrong)
    return options


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 when rows were wrong or a rank failed."""
    options = options_of(arguments)
    shape, parts = options.shape, options.only or PARTS
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        reports = reports_of(options.ranks, options.group, parts, shape)
    except RankFailedError as error:
        sys.stderr.write(f"ref_bench: {error}\n")
        return 1
    findings = findings_of(reports)
    meaning = MEANINGLESS if options.group == "gloo" else ""
    devices = [report.device for report in reports]
    versions = ", ".join(f"{name} {version}" for name, version in reports[0].versions.items())
    size = f"{shape.pages} pages of {shape.page_bytes} bytes, {shape.layers} layers"
    lines = [
        f"{', '.join(devices)}; {versions}",
        f"prefix of {shape.prefix_tokens} tokens, {size}; {shape.repeats} repeats, median [slowest, fastest]",
        *([meaning] if meaning else []),
        *table(findings),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.record:
        head = {
            "kvshard_bench": 1,
            "started": started,
            "group": options.group,
            "ranks": options.ranks,
            "devices": devices,
            "versions": reports[0].versions,
            "shape": shape,
            "meaningless": meaning,
        }
        record(options.record, head, findings)
    return int(any(isinstance(finding, Check) and not finding.equal for finding in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

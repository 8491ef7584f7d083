"""`kvshard doctor [WAY ..]`: what this host can run, and for the rest what is missing.

Exit codes: 0 all that was asked for can run (nothing asked for: always), 1 something cannot, 3 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from harness import render
from harness.doctor import WAYS, Host, Way
from harness.doctor_probe import probe
from harness.usage import UserError, nearest

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard doctor`."""
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"only these: {', '.join(way.name for way in WAYS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    asked = chosen(args.ways)
    host = probe()
    lacks = {way.name: list(way.lacks(host)) for way in asked}
    if args.json:
        sys.stdout.write(json.dumps(as_json(host, lacks), indent=2) + "\n")
    else:
        show(host, asked, lacks)
    return int(bool(args.ways) and any(lacks.values()))


def chosen(names: Sequence[str]) -> list[Way]:
    """The ways of these names, all without names. Raises `UserError`."""
    known = {way.name: way for way in WAYS}
    for name in names:
        if name not in known:
            raise UserError(f"there is no way {name!r}{nearest(name, known)} There is: {', '.join(known)}")
    return [known[name] for name in names] or list(WAYS)


def as_json(host: Host, lacks: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """What was found, for a program: `ways` has what each lacks, nothing when it can run."""
    return {
        "python": host.python,
        "system": host.system,
        "cores": host.cores,
        "memory_bytes": host.memory_bytes,
        "driver": host.driver or None,
        "nccl": host.nccl or None,
        "gpus": [
            {"name": gpu.name, "capability": list(gpu.capability), "memory_bytes": gpu.memory_bytes}
            for gpu in host.gpus
        ],
        "links": sorted(map(list, host.links)),
        "libraries": {
            name: {"version": its.version or None, "why": its.why or None} for name, its in host.libraries.items()
        },
        "ways": dict(lacks),
    }


def facts(host: Host) -> Iterator[str]:
    """The host itself, its GPUs and its packages, a line for each."""
    yield f"{host.system}, Python {host.python}, {host.cores} cores, {host.memory_bytes / GIB:.0f} GiB"
    for index, gpu in enumerate(host.gpus):
        reached = sorted({a + b - index for a, b in host.links if index in (a, b)})
        capability = "{}.{}".format(*gpu.capability)
        apart = sorted(set(range(len(host.gpus))) - {index, *reached})
        peers = f", reads GPU {', '.join(map(str, reached))}" if reached else ""
        peers += f", GPU {', '.join(map(str, apart))} only through the host" if apart else ""
        yield f"GPU {index}: {gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB, capability {capability}{peers}"
    if not host.gpus:
        yield "no GPU that torch can use"
    yield f"driver {host.driver or 'none'}, NCCL {host.nccl or 'none'}"
    there = [f"{name} {its.version}" for name, its in host.libraries.items() if its.version and not its.why]
    yield f"packages: {', '.join(there) or 'none'}"


def show(host: Host, asked: Sequence[Way], lacks: Mapping[str, Sequence[str]]) -> None:
    """What was found, for a person; a fact stays on one line, however narrow the terminal is."""
    console = render.console_for(sys.stdout)
    for fact in facts(host):
        console.print(fact, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for title in ("way", "runs", "what it is, or what is missing"):
        table.add_column(title, overflow="fold", no_wrap=title != "what it is, or what is missing")
    for way in asked:
        missing = lacks[way.name]
        mark = Text("no", style="red") if missing else Text("yes", style="green")
        table.add_row(way.name, mark, Text("\n".join([way.does, *(f"- {each}" for each in missing)])))
    console.print(table)

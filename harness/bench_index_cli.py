"""`kvshard bench index`: how long tree and allocator take for a request, without rows, beside another engine's.

The default engine `ref?like=sglang` is the reference by the rules of the other one, so that both do the same work.
Exit codes: 0 done, 3 an option that cannot work or engines that did different work (one line on stderr says which),
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from harness.bench_index import BenchEngine, BenchReport, Workload, measure, report
from harness.bench_index_table import bench_markdown, bench_table
from harness.capacity import CapacityError
from harness.capacity_engines import index_engine
from harness.capacity_values import progress, replacing, target, whole
from harness.provenance import kvshard_version, versions

EXIT_DONE = 0
EXIT_UNUSABLE = 3
ENGINES = ("ref?like=sglang", "sglang", "sglang?tree=rust")

# option, field of Workload, metavar, help
_OPTIONS = (
    ("--shards", "shards", "N", "ranks that hold one copy of the cache; 1 is replicated"),
    ("--page-size", "page_size", "TOKENS", "tokens per page"),
    ("--requests", "requests", "K", "requests of a round"),
    ("--prompt", "prompt_tokens", "TOKENS", "tokens of each prompt"),
    ("--pages", "pages_per_rank", "PAGES", "pages per rank; with fewer than the requests draw, some are evicted"),
    ("--rounds", "rounds", "R", "rounds, each with a run of every engine, behind one that warms up"),
    ("--seed", "seed", "S", "seed of the prompts"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard bench`."""
    parser.add_argument("what", choices=("index",), help="what is timed: index, the tree and the allocator")
    defaults = Workload()
    for option, name, metavar, text in _OPTIONS:
        shown = f"{text} (default {getattr(defaults, name)})"
        parser.add_argument(option, default=str(getattr(defaults, name)), metavar=metavar, help=shown)
    parser.add_argument(
        "--engines",
        metavar="ENGINE,..",
        help=f"engines to time, the first is what the others are compared with (default {','.join(ENGINES)}, of which "
        "those that are not installed are left out)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report, with every round, as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the table as Markdown")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    try:
        workload = _workload(args)
        written = [(target(args.json, "--json"), as_json), (target(args.markdown, "--markdown"), as_markdown)]
        engines, missing = _engines(args.engines, workload)
        with progress("bench", len(engines) * (workload.rounds + 1)) as advance:
            times, hits = measure(workload, engines, advance)
        found = report(workload, _versions(), times, hits, missing)
        _publish(found, written)
    except CapacityError as error:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"kvshard bench index: {error}")
        return EXIT_UNUSABLE
    return EXIT_DONE


def as_json(found: BenchReport) -> bytes:
    """The report as a JSON file."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def as_markdown(found: BenchReport) -> bytes:
    """The report as a Markdown file."""
    return bench_markdown(found).encode()


def _workload(args: argparse.Namespace) -> Workload:
    values = vars(args)
    given = {
        name: whole(values[option.removeprefix("--").replace("-", "_")], option, 0 if name == "seed" else 1)
        for option, name, _, _ in _OPTIONS
    }
    return Workload(**given)


def _engines(given: str | None, workload: Workload) -> tuple[list[BenchEngine], list[str]]:
    """The engines; and those of the default that are not here, with the reason. One that was asked for must be here."""
    engines: list[BenchEngine] = []
    missing: dict[str, None] = {}
    for address in ENGINES if given is None else given.split(","):
        try:
            engines.append(index_engine(address, workload.prompt_tokens, 1))
        except CapacityError as error:
            if given is not None:
                raise
            missing[str(error)] = None
    names = [engine.name for engine in engines]
    if len(set(names)) < len(names):
        raise CapacityError(f"--engines {given!r}: an engine is named twice; expected each once")
    return engines, list(missing)


def _versions() -> dict[str, str]:
    found = versions()
    return {
        "kvshard": kvshard_version(),
        "python": found["python"],
        "torch": found["torch"],
        "CPUs": str(os.cpu_count()),
    }


def _publish(found: BenchReport, written: Sequence[tuple[Path | None, Callable[[BenchReport], bytes]]]) -> None:
    for path, text_of in written:
        if path is not None:
            with replacing(path) as part:
                part.write_bytes(text_of(found))
    console = Console(highlight=False)
    console.print(bench_table(found))

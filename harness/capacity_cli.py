"""`kvshard capacity`: what KV cache sharding buys, told from request traffic.

With several engines the same requests go through each, cell by cell in turn, and their hits and times are compared.

Exit codes: 0 done, 3 a file or an option that cannot work (one line on stderr says which), 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
from rich.console import Console

from harness.capacity import CapacityError, IndexEngine, Layout, Report, Row, Sizing, bound, budget
from harness.capacity_engines import index_engine
from harness.capacity_jobs import Task, replay_grid
from harness.capacity_plot import load_figure, save_plot
from harness.capacity_table import comparison, report_tables
from harness.capacity_values import progress, replacing, size, target, whole
from harness.traffic import Request, TrafficError, generate, read_trace

EXIT_DONE = 0
EXIT_UNUSABLE = 3
EXIT_INTERRUPTED = 130

# option, default, metavar, help. Every value is text here and checked in _options: a bad one is one line and code 3.
_OPTIONS = (
    (
        "--engine",
        "ref",
        "ENGINE,..",
        "whose allocator and tree; the first is what others are compared with (ref, sglang)",
    ),
    ("--seed", None, "S", "seed of the generated traffic (default 0)"),
    ("--generate", None, "K", "requests to generate (default 2000)"),
    ("--requests", None, "K", "take the first K requests only"),
    ("--shards", "2,4,8", "N,..", "ranks of the sharded layouts; the replicated one is always shown"),
    ("--memory-per-rank", "32GiB", "SIZE,..", "KV cache memory of a rank, scratch included, e.g. 16GiB,32GiB,64GiB"),
    ("--page-size", "64", "TOKENS", "tokens per page; divides 512"),
    (
        "--row-bytes",
        "708",
        "B",
        "bytes per token and layer; 708 is the fp8 DSA latent (576) with its indexer keys (132)",
    ),
    ("--layers", "78", "L", "layers"),
    ("--context", "131072", "TOKENS", "longest request served; sizes the scratch slots of the sharded layouts"),
    ("--chunk", "8192", "TOKENS", "tokens of one prefill chunk; sizes the scratch slots too"),
    ("--in-flight", "1", "K", "a request finishes, and unlocks its pages, when the K-th later one arrives"),
    ("--jobs", "1", "J", "processes"),
    ("--json", None, "FILE", "write the report as JSON"),
    ("--plot", None, "FILE.png", "write hit rate against memory as a picture (extra `plot`)"),
)


class Options(msgspec.Struct, frozen=True):
    """The command line, checked."""

    trace: Path | None
    seed: int
    generated_requests: int
    requests: int | None
    layouts: list[Layout]
    memories: list[int]
    sizing: Sizing
    in_flight: int
    jobs: int
    engines: list[str]
    json: Path | None
    plot: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard capacity`."""
    parser.add_argument(
        "trace", nargs="?", metavar="TRACE.jsonl", help="request trace; without it traffic is generated"
    )
    for option, default, metavar, text in _OPTIONS:
        shown = f"{text} (default {default})" if default else text
        parser.add_argument(option, default=default, metavar=metavar, help=shown)


def main(argv: Sequence[str] | None = None) -> int:
    """The command by itself."""
    parser = argparse.ArgumentParser(
        "kvshard capacity", description="What KV cache sharding buys, told from request traffic."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace, engine: IndexEngine | None = None) -> int:
    """The command; returns its exit code. engine: whose allocator and tree are replayed (default: the reference's)."""
    problems = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        options = _options(args)
        report = _report(options, [engine] if engine else _engines(options))
        _publish(report, options)
    except (CapacityError, TrafficError) as error:
        problems.print(f"kvshard capacity: {error}")
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        problems.print("kvshard capacity: interrupted")
        return EXIT_INTERRUPTED
    if not any(row.replay for row in report.rows):
        problems.print("kvshard capacity: no layout fits; give more --memory-per-rank (the table says what is missing)")
        return EXIT_UNUSABLE
    return EXIT_DONE


def _options(args: argparse.Namespace) -> Options:
    if args.trace is not None and (args.seed, args.generate) != (None, None):
        raise CapacityError(
            f"{args.trace}: --seed and --generate are for generated traffic; leave out them or the trace"
        )
    shards = sorted({whole(part, "--shards", 2) for part in args.shards.split(",")})
    sizing = Sizing(
        page_size=whole(args.page_size, "--page-size"),
        row_bytes=whole(args.row_bytes, "--row-bytes"),
        layers=whole(args.layers, "--layers"),
        context_tokens=whole(args.context, "--context"),
        chunk_tokens=whole(args.chunk, "--chunk"),
    )
    return Options(
        trace=None if args.trace is None else Path(args.trace),
        seed=whole("0" if args.seed is None else args.seed, "--seed", 0),
        generated_requests=whole("2000" if args.generate is None else args.generate, "--generate"),
        requests=None if args.requests is None else whole(args.requests, "--requests"),
        layouts=[Layout(count) for count in (1, *shards)],
        memories=sorted({size(part, "--memory-per-rank") for part in args.memory_per_rank.split(",")}),
        sizing=sizing,
        in_flight=whole(args.in_flight, "--in-flight"),
        jobs=whole(args.jobs, "--jobs"),
        engines=_names(args),
        json=target(args.json, "--json"),
        plot=target(args.plot, "--plot", ".png"),
    )


def _names(args: argparse.Namespace) -> list[str]:
    names: list[str] = args.engine.split(",")
    if len(names) > 1 and args.jobs != "1":
        raise CapacityError(f"--jobs {args.jobs!r} with several engines: their times are compared, so leave it out")
    if len(names) > 1 and args.plot is not None:
        raise CapacityError(f"--plot {args.plot!r} with several engines: it shows one; plot them one by one")
    return names


def _engines(options: Options) -> list[IndexEngine]:
    return [index_engine(name, options.sizing.context_tokens, options.in_flight) for name in options.engines]


def _report(options: Options, engines: Sequence[IndexEngine]) -> Report:
    if options.plot:
        load_figure()
    requests, title = _traffic(options)
    best = bound(requests, options.sizing.page_size)
    reports = [
        Report(
            title=title,
            engine=engine.name,
            generated=options.trace is None,
            requests=len(requests),
            input_tokens=best.input_tokens,
            in_flight=options.in_flight,
            sizing=options.sizing,
            bound=best,
            rows=rows,
        )
        for engine, rows in zip(engines, _rows(options, engines, requests), strict=True)
    ]
    return msgspec.structs.replace(reports[0], others=reports[1:])


def _rows(options: Options, engines: Sequence[IndexEngine], requests: Sequence[Request]) -> list[list[Row]]:
    """The grid of each engine."""
    tasks = [Task(requests, options.sizing, options.in_flight, engine) for engine in engines]
    cells = [(layout, memory) for layout in options.layouts for memory in options.memories]
    grids = [[budget(layout, memory, options.sizing, engine) for layout, memory in cells] for engine in engines]
    total = sum(not row.note for rows in grids for row in rows)
    with progress("replay", len(requests) * total) as advance:
        if len(tasks) == 1:
            return [replay_grid(tasks[0], grids[0], options.jobs, advance)]
        # a cell of one engine right after the same cell of the other: a slow hour of the machine is slow for both
        pairs = [
            [task.replay(rows[place], advance) for task, rows in zip(tasks, grids, strict=True)]
            for place in range(len(cells))
        ]
    return [list(rows) for rows in zip(*pairs, strict=True)]


def _traffic(options: Options) -> tuple[list[Request], str]:
    if options.trace is None:
        source = generate(options.seed, options.generated_requests)
        title = f"generated traffic, seed {options.seed}"
    else:
        source, title = read_trace(options.trace), options.trace.name
    requests = list(islice(source, options.requests))
    tokens = sum(request.input_length for request in requests)
    return requests, f"{title}: {len(requests):,} requests, {tokens:,} input tokens"


def _publish(report: Report, options: Options) -> None:
    if options.json:
        with replacing(options.json) as path:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if options.plot:
        with replacing(options.plot) as path:
            save_plot(report, path)
    console = Console(highlight=False)
    for each in (report, *report.others):
        console.print(report_tables(each))
    if report.others:
        console.print(comparison(report))

"""`kvshard capacity`: what KV cache sharding buys, told from request traffic.

Exit codes: 0 done, 3 a file or an option that cannot work (one line on stderr says which), 130 interrupted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from harness.adapters.ref_index import RefIndexEngine
from harness.capacity import CapacityError, IndexEngine, Layout, Report, Sizing, bound, budget
from harness.capacity_jobs import Task, replay_grid
from harness.capacity_plot import load_figure, save_plot
from harness.capacity_table import report_tables
from harness.traffic import Request, TrafficError, generate, read_trace

EXIT_DONE = 0
EXIT_UNUSABLE = 3
EXIT_INTERRUPTED = 130

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}

# option, default, metavar, help. Every value is text here and checked in _options: a bad one is one line and code 3.
_OPTIONS = (
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
        report = _report(options, engine or RefIndexEngine())
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
    shards = sorted({_whole(part, "--shards", 2) for part in args.shards.split(",")})
    sizing = Sizing(
        page_size=_whole(args.page_size, "--page-size"),
        row_bytes=_whole(args.row_bytes, "--row-bytes"),
        layers=_whole(args.layers, "--layers"),
        context_tokens=_whole(args.context, "--context"),
        chunk_tokens=_whole(args.chunk, "--chunk"),
    )
    return Options(
        trace=None if args.trace is None else Path(args.trace),
        seed=_whole("0" if args.seed is None else args.seed, "--seed", 0),
        generated_requests=_whole("2000" if args.generate is None else args.generate, "--generate"),
        requests=None if args.requests is None else _whole(args.requests, "--requests"),
        layouts=[Layout(count) for count in (1, *shards)],
        memories=sorted({_size(part, "--memory-per-rank") for part in args.memory_per_rank.split(",")}),
        sizing=sizing,
        in_flight=_whole(args.in_flight, "--in-flight"),
        jobs=_whole(args.jobs, "--jobs"),
        json=_target(args.json, "--json"),
        plot=_target(args.plot, "--plot", ".png"),
    )


def _whole(text: str, option: str, least: int = 1) -> int:
    if not re.fullmatch(r"\d{1,18}", text.strip()) or (value := int(text)) < least:
        raise CapacityError(f"{option} {text!r}: expected a whole number of at least {least}")
    return value


def _size(text: str, option: str) -> int:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT]iB|)", text.strip(), re.IGNORECASE | re.ASCII)
    value = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if value < 1:
        raise CapacityError(f"{option} {text!r}: expected a size such as 8GiB, 512MiB or 1.5TiB")
    return value


def _target(text: str | None, option: str, suffix: str = "") -> Path | None:
    """Where a result goes; looked at before the work begins."""
    if text is None:
        return None
    path = Path(text)
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise CapacityError(f"{option} {text!r}: expected a regular file in a folder that exists")
    if suffix and path.suffix.lower() != suffix:
        raise CapacityError(f"{option} {text!r}: expected a file name that ends with {suffix}")
    return path.resolve()  # a link stays a link: the file it leads to is replaced


def _report(options: Options, engine: IndexEngine) -> Report:
    if options.plot:
        load_figure()
    requests, title = _traffic(options)
    rows = [budget(layout, memory, options.sizing, engine) for layout in options.layouts for memory in options.memories]
    task = Task(requests, options.sizing, options.in_flight, engine)
    best = bound(requests, options.sizing.page_size)
    with _progress(len(requests) * sum(not row.note for row in rows)) as advance:
        rows = replay_grid(task, rows, options.jobs, advance)
    return Report(
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


def _traffic(options: Options) -> tuple[list[Request], str]:
    if options.trace is None:
        source = generate(options.seed, options.generated_requests)
        title = f"generated traffic, seed {options.seed}"
    else:
        source, title = read_trace(options.trace), options.trace.name
    requests = list(islice(source, options.requests))
    tokens = sum(request.input_length for request in requests)
    return requests, f"{title}: {len(requests):,} requests, {tokens:,} input tokens"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, counted in requests over all rows; none when stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("replay"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("replay", total=total)
        yield lambda count: progress.advance(bar, count)


def _publish(report: Report, options: Options) -> None:
    if options.json:
        with _replacing(options.json) as path:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if options.plot:
        with _replacing(options.plot) as path:
            save_plot(report, path)
    Console(highlight=False).print(report_tables(report))


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary file beside `target` that takes its place once it is whole; gone when writing it fails."""
    path = target.with_name(f".{target.name}.part")
    try:
        yield path
        path.replace(target)
    except OSError as error:
        raise CapacityError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        path.unlink(missing_ok=True)

"""`kvshard gate run --runner sgl-eval`: AIME asked, found and scored by sgl-eval, with the problems that it ships.

sgl-eval is a program of its own, and may live in an environment of its own: it pins old majors of common libraries.
It asks by itself, so what kvshard promises of its own requests does not hold: a failed request is tried again up to
six times, and a run that was interrupted cannot be gone on with. Its files stay beside the samples.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.gate_ask import Endpoint, endpoint
from harness.gate_runner import EXIT_DONE, EXIT_INTERRUPTED, counted, on_signals
from harness.gate_tasks import AIME_NAMES
from harness.render import duration, safe
from harness.samples import Samples, State, read, write
from harness.usage import UserError

PROGRAM = "sgl-eval"
INSTALL = "python3 -m venv sgl-eval && sgl-eval/bin/pip install sgl-eval==0.1.3, and put sgl-eval/bin on PATH"
NOT_ITS = ("native", "shots", "shots_data", "filter", "moved")  # options that sgl-eval has nothing for
LOOK_SECONDS, ENDING_SECONDS = 0.2, 10.0
LOG = "sgl-eval.log"
REASON = re.compile(r"(?:returning empty sample|backing off \d+s): (.+)")  # in its log, of one request
TAIL = 300  # characters of its log that an error shows


class Ended(NamedTuple):
    """How the program ended: `code` None where it was ended here; the end of its log, on one line."""

    code: int | None
    tail: str
    is_interrupted: bool = False


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    out = _checked(args)
    program = found()
    server = endpoint(args.engine, args.model, args.timeout, is_chat=True)
    folder, started = out.with_name(f"{out.name}.{PROGRAM}"), time.monotonic()
    folder.mkdir(parents=True)
    ended = watched(command(program, server, folder, args), folder, args.timeout)
    if ended.is_interrupted:
        sys.stderr.write(f"kvshard gate run: interrupted; what was answered is in {folder}; start again with --out\n")
        return EXIT_INTERRUPTED
    if ended.code != 0:
        how = f"ended with {ended.code}" if ended.code is not None else f"had no answer for {args.timeout:g} s"
        raise UserError(f"{PROGRAM} {how}: {ended.tail}; what was answered is in {folder}: is {args.engine} well?")
    samples = _samples(folder)
    write(out, samples.all)
    return _told(args, samples, out, folder, time.monotonic() - started)


def _checked(args: argparse.Namespace) -> Path:
    """The sample file. Raises `UserError` where an option does not fit."""
    if args.task not in AIME_NAMES:
        raise UserError(
            f"--runner {PROGRAM} --task {args.task!r}: expected {', '.join(AIME_NAMES)}; leave --runner out"
        )
    given = [name for name in NOT_ITS if (value := getattr(args, name)) is not None and value is not False]
    if given:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"--runner {PROGRAM}: has nothing for {words}; leave it out")
    if args.data is not None and not args.data.is_file():
        raise UserError(f"{args.data}: is no file; expected JSON lines of {{id, problem, expected_answer}}")
    if args.repeats > 1 and not args.temperature:
        raise UserError(
            f"--repeats {args.repeats}: {PROGRAM} asks at temperature 0, where repeats are copies; expected 1, or a "
            "temperature with --temperature"
        )
    out: Path = args.out or Path(f"samples-{args.task}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    for path in (out, out.with_name(f"{out.name}.{PROGRAM}")):
        if path.exists():
            raise UserError(f"--out {out}: {path} is there, and {PROGRAM} goes on with no run; name another file")
    return out


def found() -> str:
    """The program: beside this Python, or on PATH. Raises `UserError`."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which(PROGRAM, path=beside) or shutil.which(PROGRAM)
    if program is None:
        raise UserError(f"--runner {PROGRAM}: no such program in {beside} or on PATH; install it: {INSTALL}")
    return program


def command(program: str, server: Endpoint, folder: Path, args: argparse.Namespace) -> list[str]:
    """The words that it is started with."""
    words = [program, "run", args.task, "--base-url", f"{server.client.url}/v1", "--model", server.model]
    words += ["--out-dir", str(folder), "--num-threads", str(args.concurrency), "--n-repeats", str(args.repeats)]
    options = {
        "--num-examples": args.limit,
        "--max-tokens": args.max_tokens,
        "--temperature": args.temperature,
        "--top-p": None if args.temperature else 1,  # says nothing at temperature 0; its 0.95 some servers refuse
        "--from-dataset": args.data,
    }
    return words + [word for name, value in options.items() if value is not None for word in (name, str(value))]


def watched(words: Sequence[str], folder: Path, seconds: float) -> Ended:
    """Runs it until it ends, is called off, or has told no answer for so long."""
    with _started(words, folder / LOG) as process, on_signals() as is_stopped:
        seen, last = (0, 0), time.monotonic()
        while process.poll() is None and not is_stopped() and time.monotonic() - last <= seconds:
            sizes = [path.stat().st_size for path in folder.glob("*/output-rs*.jsonl")]
            if (len(sizes), sum(sizes)) != seen:
                seen, last = (len(sizes), sum(sizes)), time.monotonic()
            time.sleep(LOOK_SECONDS)
        return Ended(process.poll(), _tail(folder), is_stopped())


@contextlib.contextmanager
def _started(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process group of its own, which is gone afterwards."""
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            _wait(process, lambda: os.killpg(process.pid, signal.SIGKILL))


def _wait(process: subprocess.Popen[bytes], kill: Callable[[], None]) -> None:
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            kill()
        process.wait()


def _samples(folder: Path) -> Samples:
    """What it wrote. Raises `UserError`."""
    runs = sorted(path.parent for path in folder.glob("*/output-rs0.jsonl"))
    if len(runs) != 1:
        raise UserError(f"{folder}: {PROGRAM} wrote {len(runs)} runs, expected one: {_tail(folder)}")
    return read(runs[0])


def _told(args: argparse.Namespace, samples: Samples, out: Path, folder: Path, seconds: float) -> int:
    """Says what the run came to. Raises `UserError` when too many requests failed."""
    counts = counted({(each.item, each.repeat): each for each in samples.all})
    total = len(samples.all)
    if counts.errors > args.unjudged_max / 100 * total:
        has_failed = any(each.state is State.ERROR and each.error is None for each in samples.all)
        last = _reason(folder) if has_failed else "empty response"
        raise UserError(
            f"{counts.errors:,} of {total:,} requests failed ({100 * counts.errors / total:.1f} %); at most "
            f"{args.unjudged_max:g} % may; one of them: {last}; the samples are in {out}: is {args.engine} well?"
        )
    times = f" x {args.repeats}" if args.repeats > 1 else ""
    what = f"{args.task} by {PROGRAM}, {len(samples.answers):,} items{times}"
    sys.stdout.write(f"{what}: {safe(counts.told)}, {duration(seconds)}\nsamples: {safe(str(out))}\n")
    return EXIT_DONE


def _log(folder: Path) -> str:
    log = folder / LOG
    return log.read_text(errors="replace") if log.exists() else ""


def _tail(folder: Path) -> str:
    """The end of its log on one line."""
    return " ".join(_log(folder).split())[-TAIL:] or "it wrote nothing"


def _reason(folder: Path) -> str:
    """Why a request failed: its samples do not say, its log does."""
    found = REASON.findall(_log(folder))
    return found[-1][:TAIL] if found else f"finish_reason 'error', see {folder / LOG}"

"""A trace is a whole file or none, and it replays without drawing anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.case import cases_in
from harness.trace import (
    FORMAT,
    Trace,
    TraceError,
    TraceFooter,
    TraceHeader,
    TraceStep,
    ranges,
    read,
    replay,
    told,
    write,
)
from harness.types import (
    Abort,
    AnyOp,
    Config,
    Evict,
    Extend,
    Extended,
    Finish,
    Flush,
    Locate,
    Ok,
    Open,
    Opened,
    Settle,
    Together,
)
from tests import miniature, sample_cases

register_cpu_ci(est_time=10, stage="commit")

Change = Callable[[list[bytes]], list[bytes]]
READS = cases_in([sample_cases])[0]
TOKENS = (7, 7, 7)
CHUNK = Extend("r0", 3, sample_cases.stamps(TOKENS, 0, 3, Config()))
OPS: tuple[AnyOp, ...] = (Open("r0", TOKENS), CHUNK)


def sample() -> Trace:
    header = TraceHeader(
        kvshard_trace=FORMAT,
        case=READS.id,
        module="tests.sample_cases",
        engine="py:here:make",
        engine_name="mini",
        engine_version="1",
        config=Config(),
        seed=1,
    )
    replies = (Ok(Opened(0)), None)
    steps = tuple(TraceStep(op=op, reply=reply) for op, reply in zip(OPS, replies, strict=True))
    return Trace(header=header, steps=steps, footer=TraceFooter(steps=2, claim="c.", seen="s", expected="e", why="w"))


def test_a_trace_survives_the_round_trip(tmp_path: Path) -> None:
    """Ops with rows and replies, also a missing one, are read as they were written; no other file is left."""
    path = tmp_path / "folder" / "trace.jsonl"

    write(path, sample())

    assert read(path) == sample()
    assert [file.name for file in path.parent.iterdir()] == ["trace.jsonl"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda lines: [], "0 lines; a trace has a header, its ops and a footer"),
        (lambda lines: lines[:-1], ":3: "),
        (lambda lines: [lines[0], lines[2], lines[3]], "the footer counts 2 ops, the file has 1"),
        (lambda lines: [*lines[:2], b"{", lines[3]], ":3: "),
        (
            lambda lines: [lines[0].replace(b'trace":1', b'trace":2'), *lines[1:]],
            ":1: trace format 2; this version reads 1",
        ),
        (lambda lines: [lines[0], lines[1].replace(b'"open"', b'"opne"'), *lines[2:]], ":2: Invalid value 'opne'"),
    ],
)
def test_a_broken_trace_is_a_named_error(tmp_path: Path, change: Change, part: str) -> None:
    """The message names file, line and reason."""
    path = tmp_path / "trace.jsonl"
    write(path, sample())
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))

    with pytest.raises(TraceError) as caught:
        read(path)

    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_a_missing_trace_is_told(tmp_path: Path) -> None:
    """A file that is not there is told with what was expected."""
    with pytest.raises(TraceError, match="No such file or directory; expected a trace file written by `kvshard run`"):
        read(tmp_path / "none.jsonl")


def test_a_replay_shows_the_violation_again() -> None:
    """The same ops break the claim on the wrong engine and hold on the right one."""
    _, violation = replay(READS, miniature.wrong(), Config(), OPS)
    play, nothing = replay(READS, miniature.correct(), Config(), OPS)

    assert violation is not None
    assert violation.seen == "1 distinct rows"
    assert nothing is None
    assert [type(reply.value) for reply in play.replies if isinstance(reply, Ok)] == [Opened, Extended]


@pytest.mark.parametrize(
    ("op", "line"),
    [
        (Open("a", (1, 2, 3, 9)), "open a tokens 1-3,9 (4)"),
        (CHUNK, "extend r0 by 3"),
        (Finish("a"), "finish a"),
        (Abort("a"), "abort a"),
        (Evict(8), "evict 8"),
        (Evict(8, "host"), "evict 8 host"),
        (Flush(), "flush"),
        (Settle(), "settle"),
        (Locate((0, 1, 300)), "locate 0-1,300"),
        (Together((Finish("a"), Abort("b"))), "together [finish a; abort b]"),
    ],
)
def test_ops_are_told_on_one_line(op: AnyOp, line: str) -> None:
    """Tokens in ranges, rows left out."""
    assert told(op) == line


def test_ranges_of_nothing() -> None:
    """No number is said so; neighbours are joined in the order given."""
    assert (ranges(()), ranges((3, 2, 1)), ranges((1, 2, 2, 3))) == ("none", "3,2,1", "1-2,2-3")

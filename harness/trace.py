"""A trace: the ops of one counterexample as a JSONL file, written once and replayed without Hypothesis.

First line header, then one line per op with the reply it got, last line footer. A file without a footer is not a trace.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.adapter import Engine
from harness.case import Case, Violation
from harness.play import Play
from harness.types import AnyOp, AnyReply, Config, Extend, Generate, Open, Together, op_name

FORMAT = 1
TOKENS_SHOWN = 4


class TraceHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which case of which module, on which engine and config."""

    kvshard_trace: int
    case: str
    module: str  # where the case is written
    engine: str  # the address
    engine_name: str
    engine_version: str
    config: Config
    seed: int


class TraceStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One op and the reply it got when the trace was written; None when the op got none."""

    op: AnyOp
    reply: AnyReply | None


class TraceFooter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How it ended."""

    steps: int
    claim: str
    seen: str
    expected: str
    why: str


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    header: TraceHeader
    steps: tuple[TraceStep, ...]
    footer: TraceFooter


class TraceError(ValueError):
    """A file is not a trace; the message names file, line and reason."""


def write(path: Path, trace: Trace) -> None:
    """Writes a trace in one piece: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [trace.header, *trace.steps, trace.footer]
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: Path) -> Trace:
    """Reads a trace. Raises `TraceError`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read: {error.strerror}; expected a trace file written by `kvshard run`"
        ) from error
    if len(lines) < 2:
        raise TraceError(f"{path}: {len(lines)} lines; a trace has a header, its ops and a footer")
    kinds: list[object] = [TraceHeader, *[TraceStep] * (len(lines) - 2), TraceFooter]
    parts = [_line(path, number, line, kind) for number, (line, kind) in enumerate(zip(lines, kinds, strict=True), 1)]
    trace = Trace(header=parts[0], steps=tuple(parts[1:-1]), footer=parts[-1])  # type: ignore[arg-type]  # _line checked
    if trace.header.kvshard_trace != FORMAT:
        raise TraceError(f"{path}:1: trace format {trace.header.kvshard_trace}; this version reads {FORMAT}")
    if trace.footer.steps != len(trace.steps):
        raise TraceError(f"{path}: the footer counts {trace.footer.steps} ops, the file has {len(trace.steps)}")
    return trace


def _line(path: Path, number: int, line: bytes, kind: object) -> object:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}:{number}: {error}; expected a {getattr(kind, '__name__', kind)} line") from error


def replay(made: Case, engine: Engine, config: Config, ops: Sequence[AnyOp]) -> tuple[Play, Violation | None]:
    """Plays `ops` under the case's watch; the violation, if one shows. Raises `ClaimError` as a run does."""
    play = Play(made, engine, config)
    try:
        for op in ops:
            play.do(op)
    except Violation as violation:
        return play, violation
    finally:
        play.close()
    return play, None


def told(op: AnyOp) -> str:
    """One op as a line for people: tokens in ranges, rows left out."""
    if isinstance(op, Together):
        return f"together [{'; '.join(told(one) for one in op.ops)}]"
    if isinstance(op, Open):
        return f"open {op.request} tokens {ranges(op.tokens)} ({len(op.tokens)})"
    if isinstance(op, Extend):
        return f"extend {op.request} by {op.count}"
    if isinstance(op, Generate):
        return _generate(op)
    values, defaults = msgspec.structs.astuple(op), type(op).__struct_defaults__
    while defaults and values[-1] == defaults[-1]:  # what goes without saying
        values, defaults = values[:-1], defaults[:-1]
    fields = [str(ranges(value) if isinstance(value, tuple) else value) for value in values]
    return " ".join([op_name(op), *fields])


def _generate(op: Generate) -> str:
    """Prompts of servers are long and made of random tokens: the first ones tell which it is."""
    first = ",".join(str(token) for token in op.tokens[:TOKENS_SHOWN])
    more = ",.." if len(op.tokens) > TOKENS_SHOWN else ""
    plain = Generate(request=op.request, tokens=op.tokens)
    asked = [
        f"{name} {getattr(op, name)}"
        for name in Generate.__struct_fields__
        if name != "max_new_tokens" and getattr(op, name) != getattr(plain, name)
    ]
    words = [f"generate {op.request}", f"{op.max_new_tokens} tokens after [{first}{more}] ({len(op.tokens)})", *asked]
    return ", ".join(words)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, runs of neighbours as `first-last`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts) or "none"

"""`kvshard replay`: plays a counterexample again, op by op, under the watch of its case. Draws nothing.

Exit codes: 1 the violation shows again, 0 it does not, 3 the trace, the case or the engine cannot be used.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console

from harness import here, render
from harness.adapter import Engine
from harness.case import Case, ClaimError, Violation
from harness.connect import close, connect
from harness.play import Play
from harness.result import Failure, message
from harness.suite import all_cases, case_by_id
from harness.trace import Trace, TraceError, read, told
from harness.trial import config_line
from harness.types import AnyReply, Extended, Ok, Opened, Replies, Value
from harness.usage import UserError
from harness.usage import told as told_error

EXIT_FAIL = 1
EXIT_ERROR = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard replay`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, as a failure names it")
    parser.add_argument("--engine", metavar="ADDRESS", help="another engine than the one of the trace")
    parser.add_argument("--suite", metavar="SUITE", help="package, file or folder of the case (default: the trace's)")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    try:
        trace = read(args.file)
    except TraceError as error:
        raise UserError(str(error)) from error
    here.importable()
    made = case_by_id(trace.header.case, all_cases((args.suite or trace.header.module,)))
    address = args.engine or trace.header.engine
    console = render.console_for(sys.stdout)
    engine = connect(address)
    try:
        violation = _play(trace, made, engine, console)
    finally:
        close(engine)
    words = ["kvshard", "replay", here.short(args.file)]
    words += ["--engine", address] if args.engine else []
    words += ["--suite", args.suite] if args.suite else []
    if violation is None:
        console.print(f"\nnot reproduced: {made.id} holds over all {len(trace.steps)} ops", soft_wrap=True)
        return 0
    console.print("\n" + message(_failure(trace, made, violation, shlex.join(words))), soft_wrap=True)
    same = (violation.claim or made.claim) == trace.footer.claim
    console.print(
        "reproduced" if same else f"another violation than the trace's, which broke: {trace.footer.claim}",
        soft_wrap=True,
    )
    return EXIT_ERROR if isinstance(violation, ClaimError) else EXIT_FAIL


def told_reply(reply: AnyReply) -> str:
    """A reply as a line for people: rows left out."""
    if isinstance(reply, Replies):
        return f"[{'; '.join(told_reply(one) for one in reply.replies)}]"
    if isinstance(reply, Ok):
        return f"ok {_told_value(reply.value)}"
    return f"{type(reply).__name__.lower()}: {reply.why}"


def _told_value(value: Value) -> str:
    if isinstance(value, Extended):
        return f"[{value.start}, {value.end}) computed, [0, {value.end}) read"
    if isinstance(value, Opened):
        return f"{value.cached} cached"
    fields = [f"{name} {getattr(value, name)}" for name in value.__struct_fields__]
    return " ".join(fields) or "done"


def _play(trace: Trace, made: Case, engine: Engine, console: Console) -> Violation | None:
    """Tells every op before it is played, so that an op that never returns is seen. Raises `UserError`."""
    manifest = engine.describe()
    console.print(
        f"{made.id} on {manifest.name} {manifest.version}, {config_line(trace.header.config)}", soft_wrap=True
    )
    play = None
    try:
        play = Play(made, engine, trace.header.config)
        for number, step in enumerate(trace.steps, 1):
            console.print(f"{number:3}. {told(step.op)}", soft_wrap=True)
            reply = play.do(step.op)
            console.print(f"     {told_reply(reply)}", soft_wrap=True)
    except Violation as violation:
        if play is not None and len(play.replies) == len(play.ops) and play.replies:
            console.print(f"     {told_reply(play.replies[-1])}", soft_wrap=True)
        return violation
    except Exception as error:
        raise UserError(f"the replay broke off: {told_error(error)}") from error
    finally:
        if play is not None:
            play.close()
    return None


def _failure(trace: Trace, made: Case, violation: Violation, command: str) -> Failure:
    return Failure(
        claim=violation.claim or made.claim,
        seen=violation.seen,
        expected=violation.expected,
        why=violation.why,
        config=config_line(trace.header.config),
        ops=tuple(told(step.op) for step in trace.steps),
        replay=command,
    )

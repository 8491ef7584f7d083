"""A task that needs no lm-eval, N + 1, and runs of it; as a program: `python tests/gate_run_rig.py ITEMS WORDS..`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from harness.cli import Parser
from harness.gate_ask import Endpoint, endpoint
from harness.gate_cli import add_arguments
from harness.gate_runner import asked
from harness.gate_tasks import Item, Scored, Task
from tests.fake_openai import Said, prompt_of


def successors(items: int, **changes: Any) -> Task:
    made = Task(
        name="successors",
        definition="d1",
        filter="none",
        filters=("none",),
        shots=0,
        data="made",
        items=tuple(Item(f"item{at}", f"{at} + 1 = ") for at in range(items)),
        generation={"max_tokens": 8, "temperature": 0.0, "stop": ["\n"]},
        score=lambda at, text: Scored(text == str(at + 1), text or "[invalid]"),
    )
    return made._replace(**changes)


def number_of(body: dict[str, Any]) -> int:
    return int(prompt_of(body).split()[0])


def right(body: dict[str, Any]) -> Said:
    return Said(str(number_of(body) + 1))


def arguments(*words: str) -> argparse.Namespace:
    parser = Parser(prog="kvshard gate")
    add_arguments(parser)
    found: argparse.Namespace = parser.parse_args(["run", "--task", "successors", *words])
    return found


def asks(args: argparse.Namespace) -> Endpoint:
    return endpoint(args.engine, args.model, args.timeout, is_chat=args.chat)._replace(is_native=args.native)


def run(task: Task, url: str, out: Path, *words: str) -> int:
    """Raises UserError, where the command line says it and ends with 2."""
    args = arguments("--engine", url, "--out", str(out), *words)
    return asked(task, asks(args), args)


if __name__ == "__main__":
    args = arguments(*sys.argv[2:])
    sys.exit(asked(successors(int(sys.argv[1])), asks(args), args))

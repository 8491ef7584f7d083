"""`kvshard gate`: accuracy gates that fail for the right reason, from per-item samples of two runs.

  gate run              ask a server every item of a task, and keep the answers as samples
  gate compare A B      is the candidate B no worse than the baseline A, on the same items
  gate tokens           how far two servers' log probabilities of the same tokens are apart
  gate arms             one task on two conditions: sharded, restored from the host, P/D, under load
  gate family FILE      several comparisons judged together
  gate sequential A B C runs of a candidate one after another, each new evidence with its own error rate
  gate plan             how many items and repeats it takes to see a loss
  gate calibrate A B    how often answers flip between runs of one engine
  gate explain A B      which answers differ
  gate simulate         how often gates are right

A sample file is of kvshard, of lm-eval (samples_*.jsonl of --log_samples) or of sgl-eval (output-rs*.jsonl, or the
folder). Losses, margins and rates are in points and percent. docs/gates.md says what the verdicts mean.

Exit codes of compare, tokens, arms, family and sequential:
0 pass, 1 fail (a loss is shown), 3 inconclusive, 2 bad input or invalid run (too many requests failed, answers were cut
off, a condition did not hold). Of tokens 1 is a distance. Of run: 0 all items asked, 2 bad input or too many requests
failed, 130 interrupted. The other commands: 0 done, 2 bad input. Nothing but what is shown is 1.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.usage import UserError

EXIT_BAD = 2
_CODES = "exit codes: 0 pass, 1 fail, 3 inconclusive, 2 bad input or invalid run"
_DONE = "exit codes: 0 done, 2 bad input"
RUNNERS = {"lm-eval": "harness.gate_runner", "sgl-eval": "harness.gate_sgl_eval"}
_ASKED = "exit codes: 0 all items asked, 2 bad input or too many requests failed, 130 interrupted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard gate`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, function: str, text: str, codes: str = _DONE, module: str = "harness.gate_run"
    ) -> Callable[..., Any]:
        made = commands.add_parser(name, help=text, description=text, epilog=codes, allow_abbrev=False)
        made.set_defaults(function=function, module=module)
        made.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
        return made.add_argument

    _run(command("run", "run", "ask a server every item of a task", _ASKED, "harness.gate_runner"))
    _compare(command("compare", "compare", "judge a candidate against a baseline, item by item", _CODES))
    text = "how far two servers' log probabilities of the same tokens are apart"
    _tokens(command("tokens", "run", text, _CODES, "harness.gate_tokens"))
    text = "one task on two conditions at a time: sharded, warm, restored from the host, P/D, under load"
    _arms(command("arms", "run", text, _CODES, "harness.gate_arms"))
    _family(command("family", "family", "several comparisons judged together", _CODES, "harness.gate_family"))
    text = "runs of a candidate one after another, each new evidence with its own error rate"
    _sequential(command("sequential", "run", text, _CODES, "harness.gate_sequential"))
    _plan(command("plan", "make_plan", "how many items and repeats it takes to see a loss"))
    _calibrate(command("calibrate", "calibrate_runs", "how often answers flip between runs of one engine"))
    _explain(command("explain", "explain", "the answers that differ, lost ones first"))
    _simulate(command("simulate", "simulate_gates", "how often gates are right, by simulation"))


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    try:
        module = importlib.import_module(RUNNERS.get(getattr(args, "runner", ""), args.module))
    except ImportError as error:
        raise UserError(
            f"gate needs scipy and statsmodels ({error}); install them with: pip install 'kvshard[gate]'"
        ) from error
    try:
        code: int = getattr(module, args.function)(args)
        sys.stdout.flush()
        return code
    except UserError:
        raise
    # 1 says that a loss is shown, and it is also Python's code for a traceback and rich's where nobody reads the output
    except (SystemExit, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception:  # noqa: BLE001  # for that reason
        traceback.print_exc(file=sys.stderr)
    return EXIT_BAD


def number(low: float, high: float, *, closed: bool = False, full: bool = False) -> Callable[[str], float]:
    """A reader of numbers between two bounds; `closed`: the lower one is allowed, `full`: the upper one is."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value < high or (closed and value == low) or (full and value == high)):
            lower, upper = "from" if closed else "above", "" if full else "below "
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number {lower} {low:g} to {upper}{high:g}")
        return value

    return read


def whole(low: int) -> Callable[[str], int]:
    """A reader of whole numbers from a lower bound on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {low}")
        return int(text)

    return read


_POINTS = number(0, 100)
_SHARE = number(0, 1)
_ALPHA = number(0, 0.5)
_RATE = number(0, 100, closed=True)
_PART = number(0, 100, closed=True, full=True)


def _run(add: Callable[..., Any]) -> None:
    add("--engine", required=True, metavar="URL", help="a running server with OpenAI's dialect: http://host:port")
    _task(add)
    text = "who asks and scores: kvshard with a task of lm-eval, or sgl-eval for aime24, 25, 26 (default lm-eval)"
    add("--runner", choices=tuple(RUNNERS), default="lm-eval", help=text)
    text = "ask /generate, where an answer tells the accept length of its drafts as well"
    add("--native", action="store_true", help=text)
    add("--repeats", type=whole(1), default=1, metavar="K", help="answers to each item, with the seeds 0 to K-1 (1)")
    add("--temperature", type=number(0, 10, closed=True), metavar="T", help="(default: as the task says)")
    add("--concurrency", type=whole(1), default=8, metavar="C", help="requests in flight (default 8)")
    text = "the sample file; a run goes on where it stopped (default: a new one, samples-TASK-TIME.jsonl)"
    add("--out", type=Path, metavar="SAMPLES.jsonl", help=text)
    add("--moved", action="store_true", help="go on although the server has another address than before")
    text = "failed requests above which a run is a failure (default 1)"
    add("--unjudged-max", type=_RATE, default=1.0, metavar="PERCENT", help=text.replace("%", "%%"))


def _task(add: Callable[..., Any]) -> None:
    """What is asked, and how."""
    text = "a task of lm-eval by name (gsm8k, aime24, aime25, aime26, ..), or a file TASK.yaml"
    add("--task", required=True, metavar="TASK", help=text)
    add("--model", metavar="NAME", help="(default: the only one of the server)")
    add("--chat", action="store_true", help="ask /v1/chat/completions, the prompt as one message of the user")
    add("--data", type=Path, metavar="FILE", help="JSON lines in place of the task's data set; nothing is fetched then")
    text = "the split that examples come from (default: the file beside --data with 'train' in place of 'test')"
    add("--shots-data", type=Path, metavar="FILE", help=text)
    add("--shots", type=whole(0), metavar="N", help="examples in the prompt (default: as the task says)")
    add("--limit", type=whole(1), metavar="N", help="the first N items only")
    add("--filter", metavar="NAME", help="how the answer is found (default: the task's first way)")
    add("--max-tokens", type=whole(1), metavar="N", help="of an answer (default: as the task says, or 256)")
    text = "limit on the time of a request (default 600)"
    add("--timeout", type=number(0, 1e6), default=600.0, metavar="SECONDS", help=text)


def _arms(add: Callable[..., Any]) -> None:
    add("--engine", required=True, metavar="URL", help="the server to judge: http://host:port")
    text = "servers behind a router, whose caches are dropped and whose counters are read; the prefill worker first"
    add("--workers", nargs="+", metavar="URL", help=text)
    _task(add)
    add("--replicated", metavar="URL", help="arm: another server that is not sharded")
    add("--plain", metavar="URL", help="arm: a server that is no P/D pair")
    add("--warm", action="store_true", help="arm: the items again, from the device")
    add("--restored", action="store_true", help="arm: the items again, from the host")
    add("--load", type=whole(2), metavar="C", help="arm: one request at a time against C")
    text = "items that are to have a page from the device or the host (default 50)"
    add("--hits-min", type=_PART, default=50.0, metavar="PERCENT", help=text)
    _pressure(add)
    add("--margin", type=_POINTS, default=2.0, metavar="POINTS", help="a loss that may not be (default 2)")
    text = "judge drafts as well: items, net, that may not accept fewer of them (default: accept lengths are only told)"
    add("--draft-margin", type=_POINTS, metavar="PERCENT", help=text)
    add("--alpha", type=_ALPHA, default=0.05, help="of all arms together (default .05)")
    add("--concurrency", type=whole(1), default=8, metavar="C", help="requests in flight, but for --load (default 8)")
    add("--out", type=Path, metavar="DIR", help="keep the samples of all runs")
    _unjudged(add)


def _pressure(add: Callable[..., Any]) -> None:
    text = "tokens of other prompts that evict, in sizes of the device (default 1.2)"
    add("--pressure", type=number(0, 100), default=1.2, metavar="X", help=text)


def _sequential(add: Callable[..., Any]) -> None:
    add("baseline", type=Path, metavar="BASE", help="samples of the baseline")
    add("candidates", type=Path, nargs="+", metavar="CAND", help="samples of the candidate's runs, in their order")
    add("--margin", type=_POINTS, default=2.0, metavar="POINTS", help="a loss that may not be (default 2)")
    add("--alpha", type=_ALPHA, default=0.05, help="of all runs together: half, a quarter, .. for each (default .05)")
    text = "expected; a wrong guess costs items, not errors (default 3.4)"
    add("--flip-rate", type=_RATE, default=3.4, metavar="PERCENT", help=text)
    add("--seed", type=whole(0), default=0, help="of the order of the items (default 0)")
    _reading(add)
    _unjudged(add)


def _family(add: Callable[..., Any]) -> None:
    add("file", type=Path, metavar="FILE.toml", help="[[pair]] tables: name, baseline, candidate; filter, margin")
    add("--margin", type=_POINTS, default=2.0, metavar="POINTS", help="of pairs that say none (default 2)")
    add("--alpha", type=_ALPHA, default=0.05, help="of all pairs together (default .05)")
    _unjudged(add)


def _compare(add: Callable[..., Any]) -> None:
    add("baseline", type=Path, metavar="A", help="samples of the baseline; with --reference, of the candidate")
    add("candidate", type=Path, nargs="?", metavar="B", help="samples of the candidate")
    add("--margin", type=_POINTS, default=2.0, metavar="POINTS", help="a loss that may not be (default 2)")
    add("--alpha", type=_ALPHA, default=0.05, help="chance of a wrong fail, and of a wrong pass (default .05)")
    add("--power", type=_SHARE, default=0.8, help="of the least loss that is reported (default .8)")
    add("--reference", type=_POINTS, metavar="PERCENT", help="only a score of the baseline is left: not paired")
    add(
        "--reference-n",
        type=whole(1),
        metavar="N",
        help="items behind that score; without it it counts as free of error",
    )
    _reading(add)
    add(
        "--common-only",
        action="store_true",
        help="compare the common items where the arms' items differ, and say how many",
    )
    _unjudged(add)


def _reading(add: Callable[..., Any]) -> None:
    add("--filter", metavar="NAME", help="of lm-eval: which of several ways to find the answer")


def _unjudged(add: Callable[..., Any]) -> None:
    text = "failed requests, or answers cut off, above which a run is invalid (default 1)"
    add("--unjudged-max", type=_RATE, default=1.0, metavar="PERCENT", help=text.replace("%", "%%"))


def _tokens(add: Callable[..., Any]) -> None:
    text = "the server to judge: http://host:port, or http://decode?prefill=http://prefill for a pair; &dialect=openai"
    add("--engine", required=True, metavar="URL", help=text)
    add("--baseline", required=True, metavar="URL", help="the server that is right; it is asked twice")
    add("--prompts", metavar="FILE.jsonl", help='lines of {"prompt": "text"} or {"input_ids": [..]}')
    add("--task", metavar="TASK", help="prompts of a task of lm-eval instead, by name or a file TASK.yaml")
    add("--data", type=Path, metavar="FILE", help="JSON lines in place of the task's data set")
    add("--limit", type=whole(1), metavar="N", help="the first N prompts only")
    text = "of the baseline's greedy answer, the continuation of prompts that have none (default 16)"
    add("--tokens", type=whole(1), default=16, metavar="N", help=text)
    text = "nats that rounding explains (default: by the servers' type, 1e-4 in float32, 0.05 in bfloat16)"
    add("--tolerance", type=number(0, 100), metavar="X", help=text)
    add(
        "--share-max", type=_PART, default=10.0, metavar="PERCENT", help="of a prompt's tokens that may be over it (10)"
    )
    add("--far", type=number(0, 100), metavar="X", help="nats that no token may be over (default 0.02, 0.5)")
    add("--bitwise", action="store_true", help="all log probabilities and greedy tokens are to be equal")
    add("--greedy", action="store_true", help="other greedy tokens fail: for engines that promise the same ones")
    text = "read the prompts of the way 'cached' from the host: other prompts evict them from the engine's device first"
    add("--restored", action="store_true", help=text)
    _pressure(add)
    text = "prompts that the engine has to read from its cache, else invalid (default 0; with --restored 50)"
    add("--cached-min", type=_PART, default=0.0, metavar="PERCENT", help=text)
    add("--alpha", type=_ALPHA, default=0.05, help="of the comparison with the baseline's own noise (default .05)")
    add("--concurrency", type=whole(1), default=1, metavar="C", help="requests in flight (default 1)")
    add("--timeout", type=number(0, 1e6), default=120.0, metavar="SECONDS", help="of a request (default 120)")
    text = "failed prompts above which the result is invalid (default 1)"
    add("--unjudged-max", type=_RATE, default=1.0, metavar="PERCENT", help=text.replace("%", "%%"))
    add("--out", type=Path, metavar="FILE", help="the same as --json")


def _plan(add: Callable[..., Any]) -> None:
    add("--loss", type=_POINTS, required=True, metavar="POINTS", help="the loss to be seen")
    add("--flip-rate", type=_RATE, metavar="PERCENT", help="of two runs (default: a row each for 0, 1, 3.4 and 5)")
    add("--alpha", type=_ALPHA, default=0.05, help="(default .05)")
    add("--power", type=_SHARE, default=0.8, help="(default .8)")
    add("--accuracy", type=_POINTS, default=94.0, metavar="PERCENT", help="for the unpaired numbers (default 94)")
    add("--items", type=whole(2), metavar="N", help="of a small set: how many repeats of each")


def _calibrate(add: Callable[..., Any]) -> None:
    add("runs", type=Path, nargs="+", metavar="RUN", help="samples of two or more runs, or one with repeats")
    _reading(add)
    _unjudged(add)


def _explain(add: Callable[..., Any]) -> None:
    add("baseline", type=Path, metavar="A", help="samples of the baseline")
    add("candidate", type=Path, metavar="B", help="samples of the candidate")
    add("--top", type=whole(1), default=50, metavar="N", help="answers shown (default 50)")
    _reading(add)
    add("--common-only", action="store_true", help="look at the common items where the arms' items differ")


def _simulate(add: Callable[..., Any]) -> None:
    add(
        "--items", type=whole(20), nargs="+", default=[200, 500, 1319], metavar="N", help="sizes (default 200 500 1319)"
    )
    add("--flip-rates", type=_RATE, nargs="+", default=[0, 1, 3.4, 5], metavar="PERCENT", help="(default 0 1 3.4 5)")
    add("--runs", type=whole(1), default=10_000, metavar="N", help="per cell (default 10000)")
    add("--seed", type=whole(0), default=0, help="(default 0)")
    add("--accuracy", type=_POINTS, default=94.0, metavar="PERCENT", help="of the baseline (default 94)")
    add(
        "--slack",
        type=_POINTS,
        default=0.9,
        metavar="POINTS",
        help="of the threshold gate, under the accuracy (default .9)",
    )
    add("--margin", type=_POINTS, metavar="POINTS", help="(default: the least loss that a cell shows)")
    add("--alpha", type=_ALPHA, default=0.05, help="(default .05)")
    add("--power", type=_SHARE, default=0.8, help="(default .8)")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--plot", type=Path, metavar="FILE.png", help="write them as a picture (extra `plot`)")

"""How often an accuracy gate is right about real servers with a planted fault: `python -m ci.gate_trials`.

The table suites/selfcheck/gates.toml says which fault goes into which worker, what `kvshard gate arms` compares, and
for which loss `kvshard gate plan` says the number of items. Each trial has servers of its own, and the gate runs 20
times on them. Every run is evidence of its own: its contexts, facts and questions are drawn for it alone from the
trial's name, --seed and the number of the run, so no two runs share an item, and the caches are dropped before each.

`--record` keeps each run as it comes; what the file has already is not run again.

Exit codes: 0 every run said what was expected, 1 one did not, 3 wrong usage, servers that fail, or a fault that was
never run, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from ci.e2e_faults_trial import RUN
from ci.eval_tasks import PAGE_SIZE, Row, row
from ci.gate_trials_table import POINTS, Table, Trial, chosen, table, topology
from ci.model_tasks import Tasks
from harness.fault_files import LIBRARY, library
from harness.gate_cli import add_arguments
from harness.gate_cli import run as gate
from harness.launch.deployment import Deployment
from harness.launch.processes import LaunchError
from harness.record import decoded, write_text
from harness.usage import UserError

TABLE = Path("suites/selfcheck/gates.toml")
PER_CONTEXT = 8  # questions about one context
EXIT_UNEXPECTED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 3, 130
Key = tuple[str, int, int]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a gate said."""

    trial: str
    seed: int
    number: int
    outcome: str  # of the gate, or "error"
    n: int = 0
    lost: int = 0
    gained: int = 0
    said: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> Key:
        """What tells it from other runs."""
        return self.trial, self.seed, self.number


def drawn(seed: str, items: int, pages: int, unrelated: int) -> list[Row]:
    """Documents that nobody has asked before: facts of fresh contexts, then sums, whose prompts have a page or two.

    Two contexts alternate, as in the task's own data, so that requests of one batch read different pages.
    """
    rng, tasks, rows, number = random.Random(seed), Tasks(kinds=1), list[Row](), 0
    while len(rows) < items - unrelated:
        made = [tasks.context(rng, pages, PAGE_SIZE) for _ in range(2)]
        asked = [rng.sample(questions, min(PER_CONTEXT, pages)) for _, questions in made]
        for questions in zip(*asked, strict=True):
            for at, question in enumerate(questions):
                text = row(made[at][0] + question.prompt, question.answer)
                rows.append({"context": number + at, "page": question.page, **text})
        number += len(made)
    sums = [row(each.prompt, each.answer) for each in tasks.sums(rng, unrelated)]
    return rows[: items - unrelated] + [{"context": -1, "page": -1, **each} for each in sums]


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser("python -m ci.gate_trials", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--table", type=Path, default=TABLE, metavar="FILE", help=f"the table of trials (default {TABLE})")
    add("--only", action="append", default=[], metavar="NAME", help="only this trial; may be given several times")
    add("--runs", type=int, default=20, metavar="N", help="runs of the gate in each trial (default 20)")
    add("--seed", type=int, default=1, metavar="INT", help="of the items (default 1)")
    add("--log-dir", type=Path, default=Path("kvshard-logs"), metavar="DIR", help="logs of workers and gates, by trial")
    add("--record", type=Path, metavar="FILE", help="keep results (JSONL); what it has is not run again")
    add("--markdown", type=Path, metavar="FILE", help="write the table with the results as Markdown")
    return parser


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`, `LaunchError`."""
    known = library(os.environ.get("KVSHARD_FAULT_LIBRARY", LIBRARY), checked=False).faults  # as the ranks do
    found = table(args.table, known)
    trials = chosen(found, args.only)
    ended = {each.key: each for each in _kept(args.record)}
    idle = []
    for trial in trials:
        wanted = [(trial.name, args.seed, number) for number in range(1, args.runs + 1)]
        missing = [number for _, _, number in wanted if (trial.name, args.seed, number) not in ended]
        folder = args.log_dir / trial.name.replace(" ", "-")
        for its in tried(found, trial, missing, args.seed, folder):
            ended[its.key] = its
            _keep(args.record, its)
            sys.stdout.write(line(trial, its) + "\n")
            sys.stdout.flush()
        if missing and trial.fault and not times_run(folder, trial):
            idle.append(trial.name)
    results = {trial.name: [ended[trial.name, args.seed, at] for at in range(1, args.runs + 1)] for trial in trials}
    text = markdown(found, trials, results)
    sys.stdout.write(text)
    if args.markdown is not None:
        write_text(args.markdown, text)
    if idle:
        raise UserError(f"what the fault changes was never run in {', '.join(idle)}; nothing is shown by that")
    right = all(each.outcome == trial.expected for trial in trials for each in results[trial.name])
    return 0 if right else EXIT_UNEXPECTED


def line(trial: Trial, its: Run) -> str:
    """One run, on one line."""
    amiss = "" if its.outcome == trial.expected else f"  EXPECTED {trial.expected.upper()}: {its.said}"
    counts = f"{its.lost} lost, {its.gained} gained of {its.n}"
    return f"{trial.name} {its.number}: {its.outcome}, {counts}, {its.seconds:.0f} s{amiss}"


def tried(found: Table, trial: Trial, numbers: Sequence[int], seed: int, folder: Path) -> Iterator[Run]:
    """Brings up the trial's servers and runs the gate on them, once for each number. Raises `LaunchError`."""
    if not numbers:
        return
    folder.mkdir(parents=True, exist_ok=True)
    items = found.items(trial)
    unrelated = round(items * trial.unrelated / POINTS)
    with Deployment(topology(found, trial), folder) as up:
        for number in numbers:
            data, out = folder / f"items-{number}.jsonl", folder / f"gate-{number}.json"
            rows = drawn(f"{trial.name} {seed} {number}", items, found.contexts, unrelated)
            write_text(data, "".join(json.dumps(each) + "\n" for each in rows))
            out.unlink(missing_ok=True)
            options = ("--task", found.task, "--data", str(data), "--json", str(out))
            words = up.filled(["arms", *found.asked, *trial.words, *options])
            started = time.monotonic()
            with (folder / f"gate-{number}.log").open("w") as log:
                why = asked(words, log)
            up.check()
            seconds = round(time.monotonic() - started, 1)
            its = Run(trial=trial.name, seed=seed, number=number, outcome="error", seconds=seconds)
            yield read_run(out, why, its, drafts=trial.drafts)


def asked(words: Sequence[str], log: IO[str]) -> str:
    """Runs `kvshard gate` with these words; returns why it could not be asked, which a verdict is not."""
    parser = argparse.ArgumentParser("kvshard gate")
    add_arguments(parser)
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            gate(parser.parse_args(list(words)))
        except UserError as error:
            return str(error)
    return ""


def read_run(out: Path, why: str, its: Run, *, drafts: bool) -> Run:
    """What the gate wrote about its one arm, or about the arm's drafts.

    An error where it wrote nothing, or where answers are lost though the trial is about drafts, which change none.
    """
    if not out.exists():
        return msgspec.structs.replace(its, said=why or "the gate wrote nothing; see its log")
    answers, *its_drafts = json.loads(out.read_text())["members"]
    if drafts and (answers["outcome"] != "pass" or not its_drafts):
        return msgspec.structs.replace(its, said=f"the answers: {answers['said']}")
    member = its_drafts[0] if drafts else answers
    result = member["result"] or {}
    counts = {name: result.get(name, 0) for name in ("n", "lost", "gained")}
    return msgspec.structs.replace(its, outcome=member["outcome"], said=member["said"], **counts)


def times_run(folder: Path, trial: Trial) -> int:
    """How often the ranks ran what the fault changes, by their logs."""
    logs = [(folder / f"{name}.log").read_text(errors="replace") for name in trial.workers]
    return sum(int(match["times"]) for log in logs for match in RUN.finditer(log) if match["id"] == trial.fault)


def markdown(found: Table, trials: Sequence[Trial], results: Mapping[str, Sequence[Run]]) -> str:
    """The table of the trials, with what each came to."""
    heads = ("trial", "fault", "loss planned", "n", "margin", "lost of n", "gained", "verdicts", "seconds a run")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for trial in trials:
        its = results[trial.name]
        said = Counter(each.outcome for each in its)
        verdicts = ", ".join(f"{outcome} {count} of {len(its)}" for outcome, count in said.most_common())
        fault = f"`{trial.fault}`" if trial.fault else "none"
        seconds = sum(each.seconds for each in its) / len(its)
        cells = (trial.name, fault, f"{trial.loss:g}", str(found.items(trial)), f"{trial.its_margin:g}")
        more = (_span(its, lambda each: each.lost), _span(its, lambda each: each.gained), verdicts, f"{seconds:.0f}")
        lines.append(f"| {' | '.join((*cells, *more))} |")
    return "\n".join(lines) + "\n"


def _span(runs: Sequence[Run], number: Callable[[Run], int]) -> str:
    numbers = [number(each) for each in runs]
    mean = sum(numbers) / len(numbers)
    return f"{min(numbers)} to {max(numbers)}, mean {mean:.1f}" if len(set(numbers)) > 1 else str(numbers[0])


def _keep(path: Path | None, its: Run) -> None:
    if path is not None:
        with path.open("ab") as record:
            record.write(msgspec.json.encode(its) + b"\n")


def _kept(path: Path | None) -> list[Run]:
    if path is None or not path.exists():
        return []
    return [decoded(path, number, text, Run) for number, text in enumerate(path.read_bytes().splitlines(), 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    args = arguments().parse_args(argv)
    try:
        return run(args)
    except (UserError, LaunchError) as error:
        sys.stderr.write(f"gate_trials: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("gate_trials: interrupted\n")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

"""Mutation of the reference: `python ci/mutation.py` changes one thing of its source at a time, and runs the suites.

The mutants are cosmic-ray's (`pip install 'kvshard[mutation]'`); each runs in a process of its own, which loads the
changed source in place of the file's. To make all of them takes minutes: `--list` keeps them. A mutant that no case
kills is a hole, or a change that no op can tell.

Exit codes: 0 all were run, 2 none was, 3 wrong usage. Whether the score is good is for a reader to say.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from harness import forks  # noqa: E402 - found once the root is on the path
from harness.connect import connect  # noqa: E402 - found once the root is on the path
from harness.suite import all_cases  # noqa: E402 - found once the root is on the path
from harness.trial import BUDGETS, Trial  # noqa: E402 - found once the root is on the path
from harness.types import Verdict  # noqa: E402 - found once the root is on the path
from harness.unit_tests import first_failure  # noqa: E402 - found once the root is on the path

PACKAGE = "kvshard_ref"
PRELOAD = ("torch", "hypothesis", "harness.trial", "harness.suite", "harness.connect", "suites.machine")
SECONDS_MAX = 300.0  # of one mutant


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed module."""

    module: str
    operator: str
    line: int
    change: str  # the lines that differ, -old +new
    source: str
    seed: int = 0
    budgets: tuple[str, ...] = ("smoke",)
    tests: bool = False


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant: killed, survived, or ended: its process did, or took too long."""

    module: str
    operator: str
    line: int
    change: str
    outcome: str
    case: str
    why: str
    seconds: float


class Finder(importlib.abc.MetaPathFinder):
    """Finds one module in a mutant's source."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Only the mutant's module is found here."""
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_loader(name, Loader(name, str(file_of(name)), self.mutant.source))


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from text as if it were its file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_data(self, path: str | bytes) -> bytes:
        """The text."""
        return self.source.encode()

    def path_stats(self, path: str | bytes) -> Any:
        """None: what is compiled is not kept for the file."""
        raise OSError(f"{path!r} is not what is loaded")


def file_of(module: str) -> Path:
    """The file of a module of the project."""
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def mutants(paths: Sequence[Path]) -> Iterator[Mutant]:
    """Every change of these files that the interpreter would see: not one of an annotation or a docstring."""
    mutating = importlib.import_module("cosmic_ray.mutating")  # an extra, without types
    plugins = importlib.import_module("cosmic_ray.plugins")

    for path in paths:
        source = path.read_text()
        before, lines = seen(source), source.splitlines()
        for name in plugins.operator_names():
            if "Variable" in name:  # these need to be told of which
                continue
            occurrence = 0
            while (changed := mutating.mutate_code(source, plugins.get_operator(name)(), occurrence)) is not None:
                occurrence += 1
                if seen(changed) == before:
                    continue
                diff = [
                    line for line in difflib.ndiff(lines, changed.splitlines()) if line[:2] in ("- ", "+ ")
                ]  # what ndiff says between the lines is for eyes
                pairs = enumerate(zip(lines, changed.splitlines(), strict=False), 1)
                line = next((at for at, (old, new) in pairs if old != new), len(lines))
                told = " ".join(" ".join(each.split()) for each in diff)
                yield Mutant(f"{PACKAGE}.{path.stem}", name.removeprefix("core/"), line, told, changed)


def seen(source: str) -> str:
    """What is left of a source without annotations and docstrings, as one text; empty when it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        first = node.body[0] if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            first.value = ast.Constant(None)
    return ast.dump(tree)


def fate(mutant: Mutant) -> Fate:
    """The suites on one mutant, in this process: until a case fails, on each budget in turn."""
    started = time.monotonic()
    sys.meta_path.insert(0, Finder(mutant))

    def ended(outcome: str, case: str = "", why: str = "") -> Fate:
        told = (mutant.module, mutant.operator, mutant.line, mutant.change)
        return Fate(*told, outcome, case, " ".join(why.split())[:300], round(time.monotonic() - started, 3))

    try:
        engine = connect("ref")
    except Exception as error:  # noqa: BLE001 - a module that does not load is killed by any test
        return ended("killed", "import", f"{type(error).__name__}: {error}")
    for budget in mutant.budgets:
        for made in all_cases():
            trial = Trial(made, engine, "ref", replace(BUDGETS[budget], shrink_seconds=0.0), mutant.seed)
            result, _ = trial.run()
            if result.verdict not in (Verdict.PASS, Verdict.SKIP):
                return ended("killed", made.id, f"{result.verdict}: {result.why}")
    test = failed_test(mutant.module) if mutant.tests else ""
    return ended("killed" if test else "survived", test)


def failed_test(module: str) -> str:
    """The first unit test to fail, of the files that import the module; empty when all pass."""
    files = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if f"from {module} " in path.read_text()]
    return first_failure([str(path) for path in files], "-m", "not slow", "-p", "no:xdist")[1] if files else ""


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    add = parser.add_argument
    add("modules", nargs="*", help=f"modules of {PACKAGE} (default all)")
    add("--sample", type=int, metavar="COUNT", help="only so many, drawn by the seed")
    add("--seed", type=int, default=0)
    add("--budget", nargs="*", choices=tuple(BUDGETS), default=["smoke"], help="tried in this order (default smoke)")
    add("--tests", action="store_true", help="then the unit tests that import the module")
    add("--jobs", type=int, default=2)
    add("--list", type=Path, metavar="FILE", help="write the mutants (JSONL) and run none: needs cosmic-ray")
    add("--mutants", type=Path, metavar="FILE", help="run these, written by --list: needs no cosmic-ray")
    add("--record", type=Path, metavar="FILE", help="write what became of each (JSONL), as it ends")
    return parser


def _drawn(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Mutant]:
    """The mutants that are asked for, in random order: a run that is cut short is a sample as well."""
    paths = [ROOT / PACKAGE / f"{name}.py" for name in args.modules] or sorted((ROOT / PACKAGE).glob("*.py"))
    missing = [path.stem for path in paths if not path.is_file()]
    if missing:
        parser.error(f"no module {', '.join(missing)} in {PACKAGE}; expected {', '.join(_stems())}")
    if args.mutants is not None:
        found = [Mutant(**json.loads(line)) for line in args.mutants.read_text().splitlines()]
    else:
        try:
            found = list(mutants(paths))
        except ModuleNotFoundError as error:
            parser.error(f"{error}; pip install 'kvshard[mutation]', or give --mutants")
    draw = random.Random(args.seed)
    draw.shuffle(found)
    return [
        replace(each, seed=args.seed, budgets=tuple(args.budget), tests=args.tests) for each in found[: args.sample]
    ]


def _stems() -> list[str]:
    return [path.stem for path in sorted((ROOT / PACKAGE).glob("*.py")) if path.stem != "__init__"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = _arguments()
    args = parser.parse_args(argv)
    drawn = _drawn(args, parser)
    if args.list is not None:
        args.list.write_text("".join(json.dumps(asdict(each)) + "\n" for each in drawn))
        print(f"{len(drawn)} mutants in {args.list}")
        return 0
    counts = Counter[str]()
    with (args.record or Path(os.devnull)).open("w", buffering=1) as record:
        for mutant, told in forks.each(drawn, fate, workers=args.jobs, seconds_max=SECONDS_MAX, preload=PRELOAD):
            what = (mutant.module, mutant.operator, mutant.line, mutant.change)
            result = Fate(*what, "ended", "", told.why, 0.0) if isinstance(told, forks.Died) else told
            counts[result.outcome] += 1
            record.write(json.dumps(asdict(result)) + "\n")
            if result.outcome != "killed":
                print(f"{result.outcome:9} {result.module}:{result.line} {result.change} {result.why}", flush=True)
    score = (counts["killed"] + counts["ended"]) / max(1, counts.total())
    print(f"{counts.total()} mutants: {dict(counts)}; {100 * score:.1f} % noticed")
    return 0 if counts else 2


if __name__ == "__main__":
    sys.exit(main())

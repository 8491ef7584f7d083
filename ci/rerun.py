"""The command lines that a comment asked for, as a plan of one part: `kvshard ci rerun` runs it like any other.

So a command whose tests were all skipped has not passed, and what it leaves behind is ended.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ci.comment_plan import ARGUMENT, PYTEST
from ci.plan import Entry, Plan
from ci.registry import registrations
from ci.runners import Runner
from harness.usage import UserError

STAGE = "rerun"
_FORMS = f"{' '.join(PYTEST)} FILE[::NODE], or python3 FILE [Class.method] -f"


def rerun_plan(commands: str, labels: str, root: Path, runners: Mapping[str, Runner]) -> Plan:
    """The plan of these command lines, a JSON list of lists. Raises `UserError`, `RegistrationError`.

    The runner is one with these labels, a JSON list; of several the one that all the files are registered on.
    """
    wanted, lines = _listed("labels", labels), _listed("commands", commands)
    able = [runner for runner in runners.values() if list(runner.labels) == wanted]
    if not able:
        raise UserError(f"no runner has the labels {wanted}; expected those of one; see ci/runners.toml")
    if not lines:
        raise UserError("commands is empty; expected at least one command line; see docs/comments.md")
    for runner in able[:-1]:
        with contextlib.suppress(UserError):
            return _plan(lines, root, runner)
    return _plan(lines, root, able[-1])


def _plan(lines: Sequence[Any], root: Path, runner: Runner) -> Plan:
    return Plan(STAGE, runner, (tuple(_entry(line, root, runner) for line in lines),), ())


def _listed(name: str, text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list):
        raise UserError(f"{name} {text[:80]!r}; expected a list in JSON; the comment handler makes it")
    return value


def _entry(line: Any, root: Path, runner: Runner) -> Entry:
    """One command line, with what its file says of itself on this runner."""
    is_text = isinstance(line, list) and all(isinstance(word, str) and ARGUMENT.fullmatch(word) for word in line)
    if not is_text:
        raise UserError(f"command {line!r}; expected arguments of {ARGUMENT.pattern}; see docs/comments.md")
    file, node, arguments, is_script = _read(line)
    if Path(file).is_absolute() or ".." in Path(file).parts or not (root / file).is_file():
        raise UserError(f"{file}: no file below {root}; expected a test file of the pull request; name it again")
    made = next((made for made in _registered(root, file) if made.runner == runner.name), None)
    if made is None:
        raise UserError(f"{file} is not registered on {runner.name}; expected it to be; look at its registration")
    least = 1 if node or (is_script and arguments != ("-f",)) else made.min_tests  # a part of a file has fewer
    return Entry(replace(made, is_script=is_script, min_tests=least), made.est_time, node, arguments)


def _read(line: Sequence[str]) -> tuple[str, str, tuple[str, ...], bool]:
    """File, node, arguments and whether it is run as a script. Raises `UserError`."""
    start = len(PYTEST)
    if tuple(line[:start]) == PYTEST and len(line) == start + 1:
        file, _, node = line[-1].partition("::")
        return file, node, PYTEST[3:], False
    if len(line) in {3, 4} and line[0] == "python3" and line[-1] == "-f" and not line[1].startswith("-"):
        return line[1], "", tuple(line[2:]), True
    raise UserError(f"command {' '.join(line)}; expected {_FORMS}; see docs/comments.md")


def _registered(root: Path, file: str) -> Sequence[Any]:
    return registrations(Path(file), (root / file).read_text(encoding="utf-8"))

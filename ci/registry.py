"""The registrations of test files, read from their syntax trees: nothing is imported, so no torch and no GPU is needed.

This is the only parser of the markers; runner, planner, comment handler and lint ask it. It also understands sglang's
markers (`register_cuda_ci`, `register_cpu_ci`, `register_amd_ci`, ..), so that an existing tree can be planned.
"""

from __future__ import annotations

import ast
import datetime as dt
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ci.registration import Disabled, Problem, Registration, RegistrationError
from ci.skim import MARKER, skimmed
from harness.usage import UserError, nearest

__all__ = [
    "Disabled",
    "Parsed",
    "Problem",
    "Registration",
    "RegistrationError",
    "Registry",
    "parse",
    "registrations",
    "scan",
]

CPU_RUNNER = "ubuntu-latest"
SGLANG_BACKENDS = ("cpu", "cuda", "amd", "npu", "xpu", "musa", "mlx", "mps", "ppu")

_MARKER = re.compile(r"register_([a-z0-9]+)_ci")
_MENTION = re.compile(r"\bregister_[a-z0-9]+_ci\b")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_LINK = re.compile(r"https?://[^\s,;()]+")
_DATE = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")
_OWN_KEYWORDS = ("est_time", "stage", "runner", "nightly", "disabled", "gate", "min_tests")
_SGLANG_POSITIONS = ("est_time", "suite", "nightly", "disabled")
_SGLANG_KEYWORDS = (*_SGLANG_POSITIONS, "stage", "runner_config", "in_process_group")
_DISABLED_FORM = '{"reason": "..", "issue": "https://..", "until": "2027-01-31"}'


@dataclass(frozen=True)
class Parsed:
    """What one file says."""

    registrations: tuple[Registration, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Registry:
    """What the files below some folders say; paths are relative to `root`, in order."""

    root: Path
    registrations: tuple[Registration, ...]
    problems: tuple[Problem, ...]
    unregistered: tuple[Path, ...]  # test_*.py without a marker
    files: int

    def checked(self) -> Registry:
        """Itself. Raises `RegistrationError` when a file has a problem."""
        if self.problems:
            raise RegistrationError(self.problems)
        return self


def registrations(path: Path, text: str | None = None) -> list[Registration]:
    """The registrations of a file, or of `text` as its content. Raises `RegistrationError`, `OSError`."""
    parsed = parse(path, path.read_bytes() if text is None else text)
    if parsed.problems:
        raise RegistrationError(parsed.problems)
    return list(parsed.registrations)


def scan(root: Path, folders: Iterable[str | Path] = (".",), *, whole: bool = False) -> Registry:
    """The registrations of all Python files below these folders of `root`. Raises `UserError` for a missing folder.

    Unless `whole`, what stands between registrations and guard is not parsed: a mistake there comes up when it runs.
    """
    found: list[Registration] = []
    problems: list[Problem] = []
    unregistered: list[Path] = []
    paths = sorted({path for folder in folders for path in _files(root, Path(folder))})
    for path in paths:
        content = (root / path).read_bytes()
        parsed = _scanned(Path(path), content, whole=whole) if MARKER.search(content) else Parsed((), ())
        found += parsed.registrations
        problems += parsed.problems
        if not parsed.registrations and not parsed.problems and os.path.basename(path).startswith("test_"):  # noqa: PTH119  # a Path for each of 12,000 files takes longer than reading them
            unregistered.append(Path(path))
    return Registry(root, tuple(found), tuple(problems), tuple(unregistered), len(paths))


def _scanned(path: Path, content: bytes, *, whole: bool) -> Parsed:
    less = content if whole else skimmed(content)
    parsed = parse(path, less)
    return parse(path, content) if parsed.problems and less is not content else parsed


def _files(root: Path, folder: Path) -> Iterator[str]:
    """Python files below the folder (or the file itself), as text relative to root."""
    start = root / folder
    if start.is_file():
        yield start.relative_to(root).as_posix()
        return
    if not start.is_dir():
        raise UserError(f"{start}: there is no such folder; expected one with test files; check --root and the folders")
    prefix = len(f"{root}{os.sep}") if root != Path() else 0
    for at, names, files in os.walk(start):
        names[:] = [name for name in names if not name.startswith(".") and name != "__pycache__"]
        yield from (f"{at}/{name}"[prefix:] for name in files if name.endswith(".py"))


def parse(path: Path, content: str | bytes) -> Parsed:
    """The registrations and problems of a file with this content; `path` is only told on."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = (error.lineno if isinstance(error, SyntaxError) else None) or 1
        told = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        return Parsed((), (Problem(path, line, f"no Python: {told}", "a file that parses", "correct it"),))
    found: list[Registration] = []
    problems: list[Problem] = []
    calls = [call for statement in tree.body if (call := _top_level_call(statement)) is not None]
    is_script = any(_is_main_guard(statement) for statement in tree.body)
    for call in calls:
        try:
            found.append(_registration(path, call, is_script=is_script))
        except _Mistake as error:
            problems.append(error.at(path, call.lineno))
    text = content if isinstance(content, str) else content.decode(errors="replace")
    if len(_MENTION.findall(text)) != len(calls) + sum(map(_imported, tree.body)):  # else there is no other use of one
        problems += _hidden(path, tree, {id(call.func) for call in calls})
    return Parsed(tuple(found), (*sorted(problems, key=lambda problem: problem.line), *_repeated(found)))


class _Mistake(Exception):  # noqa: N818  # a value on its way to a Problem
    """What is wrong with a call."""

    def __init__(self, value: str, expected: str, step: str) -> None:
        super().__init__(value)
        self._told = (value, expected, step)

    def at(self, path: Path, line: int) -> Problem:
        """The problem, at its place."""
        return Problem(path, line, *self._told)


def _top_level_call(statement: ast.stmt) -> ast.Call | None:
    """The call of a marker that this statement is."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        name = statement.value.func
        if isinstance(name, ast.Name) and _MARKER.fullmatch(name.id):
            return statement.value
    return None


def _is_main_guard(statement: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__":` with a call below it."""
    if not (isinstance(statement, ast.If) and isinstance(statement.test, ast.Compare)):
        return False
    sides = [statement.test.left, *statement.test.comparators]
    names = [side.id for side in sides if isinstance(side, ast.Name)]
    values = [side.value for side in sides if isinstance(side, ast.Constant)]
    is_equal = [type(operator) for operator in statement.test.ops] == [ast.Eq]
    calls = any(isinstance(node, ast.Call) for inner in statement.body for node in ast.walk(inner))
    return is_equal and (names, values) == (["__name__"], ["__main__"]) and calls


def _imported(statement: ast.stmt) -> int:
    """How many markers it imports under their own names."""
    names = statement.names if isinstance(statement, ast.ImportFrom) else []
    return sum(1 for alias in names if alias.asname is None and _MARKER.fullmatch(alias.name))


def _hidden(path: Path, tree: ast.Module, seen: set[int]) -> Iterator[Problem]:
    """Uses of markers that CI does not see, though they look like registrations."""
    step = "call it by its plain name as a statement of its own at the top level"
    where = "a top-level statement, not one inside an if, a function, a class or another expression"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname not in (None, alias.name) and _MARKER.fullmatch(alias.name):
                    yield Problem(path, node.lineno, f"{alias.name} as {alias.asname}", alias.name, step)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in seen:
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if _MARKER.fullmatch(name):
                yield Problem(path, node.lineno, ast.unparse(node), where, step)


def _repeated(found: Iterable[Registration]) -> Iterator[Problem]:
    """Registrations on a runner that the file has already; sglang tells them apart by stage too."""
    first: dict[tuple[str, ...], int] = {}
    for made in found:
        key = (made.runner, made.backend, made.stage) if made.suite else (made.runner,)
        before = first.setdefault(key, made.line)
        if before != made.line:
            value = f"runner {made.runner!r} a second time (first in line {before})"
            yield Problem(made.path, made.line, value, "one registration for each runner", "remove one of the two")


def _registration(path: Path, call: ast.Call, *, is_script: bool) -> Registration:
    """The registration that a call makes. Raises `_Mistake`."""
    marker = call.func.id if isinstance(call.func, ast.Name) else ""
    backend = marker.removeprefix("register_").removesuffix("_ci")
    if backend not in (*SGLANG_BACKENDS, "gpu"):
        known = [f"register_{name}_ci" for name in ("gpu", *SGLANG_BACKENDS)]
        near = nearest(marker, known).removeprefix("; ").rstrip(".")
        raise _Mistake(f"marker {marker}", f"one of {', '.join(known)}", near or "correct its name")
    given = {keyword.arg for keyword in call.keywords}
    is_own = backend == "gpu" or (backend == "cpu" and not call.args and not given & {"suite", "runner_config"})
    values = _arguments(
        marker, call, _OWN_KEYWORDS if is_own else _SGLANG_KEYWORDS, () if is_own else _SGLANG_POSITIONS
    )
    made = _own(marker, backend, values) if is_own else _sglang(marker, backend, values)
    return Registration(
        path=path,
        backend=backend,
        est_time=float(values["est_time"]),
        nightly=values.get("nightly", False),
        line=call.lineno,
        is_script=is_script,
        **made,
    )


def _own(marker: str, backend: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What this project's own marker says, checked."""
    runner = values.get("runner", CPU_RUNNER if backend == "cpu" else None)
    for name, value in (("stage", values.get("stage")), ("runner", runner)):
        if value is None:
            raise _Mistake(f"{marker} without {name}", f"{name}=", "add it")
    if values["est_time"] <= 0:
        raise _Mistake(f"est_time={values['est_time']}", "more than 0 seconds", "write how long the file takes")
    return {
        "stage": values["stage"],
        "runner": runner,
        "disabled": _disabled(values.get("disabled")),
        "gate": values.get("gate", False),
        "min_tests": values.get("min_tests", 1),
    }


def _sglang(marker: str, backend: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same for sglang's: a stage and a runner_config, or a suite, whose name is STAGE-test-RUNNER for most."""
    stage, runner, suite = values.get("stage"), values.get("runner_config"), values.get("suite")
    if (stage is None) != (runner is None) or (stage is None) == (suite is None):
        given = ", ".join(name for name in ("stage", "runner_config", "suite") if values.get(name) is not None)
        expected = "either stage and runner_config, or suite alone"
        raise _Mistake(
            f"{marker} with {given or 'none of stage, runner_config, suite'}", expected, "give one of the two"
        )
    if suite is None:
        suite = f"{stage}-test-{runner}"
    else:
        stage, cut, runner = suite.partition("-test-")
        stage, runner = (stage, runner) if cut and stage and runner else (suite, backend)
    reason = values.get("disabled")
    if reason is not None and not isinstance(reason, str):
        raise _Mistake(f"disabled={reason!r}", "a string", "write the reason")
    return {
        "stage": stage,
        "runner": runner,
        "suite": suite,
        "disabled": None if reason is None else Disabled(reason),
    }


def _arguments(marker: str, call: ast.Call, keywords: tuple[str, ...], positions: tuple[str, ...]) -> dict[str, Any]:
    """The values of the arguments, each a literal of the right type; those that are None are left out."""
    if any(isinstance(value, ast.Starred) for value in call.args) or any(word.arg is None for word in call.keywords):
        raise _Mistake(f"{marker}(*..)", "arguments that are written out", "replace * and ** by the arguments")
    if len(call.args) > len(positions):
        allowed = f"at most {len(positions)} positional arguments" if positions else "keyword arguments only"
        step = f"use the keywords {', '.join(keywords)}"
        raise _Mistake(f"{marker} with {len(call.args)} positional arguments", allowed, step)
    given = [*zip(positions, call.args, strict=False), *((str(word.arg), word.value) for word in call.keywords)]
    values: dict[str, Any] = {}
    for name, node in given:
        if name not in keywords:
            near = nearest(name, keywords).removeprefix("; ").rstrip(".")
            raise _Mistake(f"keyword {name!r} of {marker}", f"one of {', '.join(keywords)}", near or "remove it")
        if name in values:
            raise _Mistake(f"{name} of {marker} twice", "one value", "remove one")
        values[name] = _literal(name, node)
    if values.get("est_time") is None:
        raise _Mistake(f"{marker} without est_time", "est_time=SECONDS", "add how long the file takes")
    return {name: value for name, value in values.items() if value is not None}


def _literal(name: str, node: ast.expr) -> Any:
    """The value of a literal. Raises `_Mistake` for anything else, and for a literal of another type."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        step = "write the value itself: CI reads it without running the file"
        raise _Mistake(f"{name}={ast.unparse(node)}", "a literal", step) from None
    check, expected = _CHECKS[name]
    if value is None and name not in {"est_time", "min_tests", "gate"}:
        return None
    if not check(value):
        raise _Mistake(f"{name}={value!r}", expected, "correct it")
    return value


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_A_NAME = (_is_name, "a name of letters, digits, '.', '_' and '-'")
_A_FLAG = (_is_flag, "True or False")
_CHECKS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "est_time": (_is_seconds, "a number of seconds"),
        "stage": _A_NAME,
        "runner": _A_NAME,
        "runner_config": _A_NAME,
        "suite": _A_NAME,
        "in_process_group": (lambda value: isinstance(value, str), "a string"),
        "nightly": _A_FLAG,
        "gate": _A_FLAG,
        "min_tests": (_is_count, "a whole number of at least 1"),
        "disabled": (lambda value: isinstance(value, str | dict), f"{_DISABLED_FORM}, or one string that holds them"),
    }
)


def _disabled(value: Any) -> Disabled | None:
    """The reason, the issue and the day of expiry. Raises `_Mistake` when one is missing."""
    if value is None:
        return None
    told = f"disabled={value!r}"
    if isinstance(value, str):
        link, date = _LINK.search(value), _DATE.search(_LINK.sub(" ", value))
        reason = " ".join(_DATE.sub(" ", _LINK.sub(" ", value)).replace("()", " ").replace("( )", " ").split()).strip(
            " ,;:-"
        )
        value = {"reason": reason, "issue": link and link[0], "until": date and date[0]}
    if sorted(map(str, value)) != ["issue", "reason", "until"] or not all(value.values()):
        raise _Mistake(told, f"reason, issue and until, as in {_DISABLED_FORM}", "add what is missing, remove the rest")
    reason, issue, until = (str(value[name]) for name in ("reason", "issue", "until"))
    if not _LINK.fullmatch(issue):
        raise _Mistake(f"issue {issue!r} in disabled", "a link, https://..", "link the issue that will enable it again")
    try:
        return Disabled(reason, issue, dt.date.fromisoformat(until))
    except ValueError:
        raise _Mistake(f"until {until!r} in disabled", "a date such as 2027-01-31", "correct it") from None

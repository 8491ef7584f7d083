"""Planted faults: small wrong variants of an engine that runs in this process, and the right ones beside them.

A fault replaces text of one function, or a whole function; `planted` puts it in place and takes it back. What it
changed tells when it is run, so that a fault that was never exercised is no survivor.

    Edit   old text -> new text    of the function's source, which is compiled again
    Swap   the function            calls go to `by(original, *arguments)`
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from harness.usage import UserError, nearest, told

LEVELS = ("component", "request", "both")
ANNOTATIONS = annotations.compiler_flag  # as the changed modules have it
NAME = "__kvshard_fault__"  # in the globals of a changed function


class FaultError(UserError):
    """A fault cannot be planted; the message names it, its target and what was expected."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Text of a function that is replaced. `target` is `module:function` or `module:Class.method`.

    `old` is part of one line, or whole lines, at any indentation; it must be in the function exactly once. Whole lines
    that are replaced by nothing leave a `pass`.
    """

    target: str
    old: str
    new: str = ""


@dataclass(frozen=True, slots=True)
class Swap:
    """A function that is replaced: `by(original, *arguments)` is called in its place."""

    target: str
    by: Callable[..., Any]


Change = Edit | Swap


@dataclass(frozen=True, slots=True)
class Fault:
    """A variant that breaks the contract: the suites must find it.

    `like` names the real bug it is modelled on, such as B08, or "systematic"; `breaks` the invariants or cases
    (beginnings of ids) expected to catch it, which are tried first; `engine` an address at which its kind can be seen,
    if that is another one; `tests` the unit tests, paths from the project's root, that find what no op can reach: they
    are run instead.
    """

    id: str
    does: str
    kind: str
    like: str
    breaks: tuple[str, ...]
    changes: tuple[Change, ...]
    level: str = "component"
    engine: str = ""
    tests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """Another right design: the suites must pass it. `drops` are the promises of the manifest that it does not keep."""

    id: str
    does: str
    changes: tuple[Change, ...]
    drops: tuple[str, ...] = ()


class Reached:
    """Counts how often changed code was run."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        """Called by changed code."""
        self.times += 1


@contextmanager
def planted(changes: Sequence[Change]) -> Iterator[Reached]:
    """The changes are in place within. Raises `FaultError` when one cannot be; then none is."""
    reached = Reached()
    by_target: dict[str, list[Change]] = {}
    for change in changes:
        by_target.setdefault(change.target, []).append(change)
    with ExitStack() as undo:
        for target, its in by_target.items():
            undo.enter_context(_in_place(target, its, reached))
        yield reached


@contextmanager
def _in_place(target: str, changes: Sequence[Change], reached: Reached) -> Iterator[None]:
    function = function_at(target)
    if function.__closure__:
        raise FaultError(f"{target} uses variables of an outer function; change that function instead")
    edits = [change for change in changes if isinstance(change, Edit)]
    swaps = [change for change in changes if isinstance(change, Swap)]
    if len(swaps) > 1 or (edits and swaps):
        raise FaultError(f"{target}: {len(edits)} edits and {len(swaps)} swaps; expected edits alone, or one swap")
    if hasattr(function, NAME):
        raise FaultError(f"{target} is changed already, as {getattr(function, NAME)}; expected one target a function")
    before = (function.__code__, function.__defaults__, function.__kwdefaults__)
    changed = edited(function, edits) if edits else _calls(target)
    hooks: dict[str, Any] = function.__globals__.setdefault(NAME, {})  # of one module's functions
    hooks[target] = reached if edits else _counting(swaps[0], function, reached)
    # where a call comes from is told, and allowed, by its qualified name
    code = _renamed(changed.__code__, changed.__code__.co_qualname, before[0].co_qualname)
    function.__code__, function.__defaults__, function.__kwdefaults__ = (
        code.replace(co_name=before[0].co_name),
        changed.__defaults__,
        changed.__kwdefaults__,
    )
    setattr(function, NAME, target)
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before
        delattr(function, NAME)
        del hooks[target]


def _renamed(code: CodeType, old: str, new: str) -> CodeType:
    """The code, and what is nested in it, under another qualified name."""
    consts = tuple(_renamed(each, old, new) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=consts, co_qualname=new + code.co_qualname.removeprefix(old))


def function_at(target: str) -> FunctionType:
    """The function that `target` names; of a property its getter. Raises `FaultError`."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise FaultError(f"target {target!r}; expected module:function or module:Class.method")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise FaultError(f"target {target!r}: {told(error, __file__)}") from error
    for name in path.split("."):
        try:
            found = inspect.getattr_static(found, name)
        except AttributeError:
            raise FaultError(f"target {target!r}: there is no {name!r}{nearest(name, dir(found))}") from None
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    found = inspect.unwrap(found) if callable(found) else found
    if not isinstance(found, FunctionType):
        raise FaultError(f"target {target!r} is a {type(found).__name__}; expected a function")
    return found


def edited(function: FunctionType, edits: Sequence[Edit]) -> FunctionType:
    """The function with the edits made, and a call of the hook before what they changed. Raises `FaultError`."""
    target = edits[0].target
    source, was = _definition(target, function)
    fresh = source
    for edit in edits:
        fresh = with_edit(fresh, edit)
    new_tree = _parsed(target, fresh)
    made = new_tree.body[0] if len(new_tree.body) == 1 else None
    if not isinstance(made, ast.FunctionDef):
        raise FaultError(f"{target}: the edit of {edits[0].old!r} leaves no function, or more than one statement")
    was.decorator_list = made.decorator_list = []  # they are not run again
    if ast.dump(was) == ast.dump(made):
        raise FaultError(f"{target}: the edit of {edits[0].old!r} changes nothing")
    same_arguments = ast.dump(was.args) == ast.dump(made.args)
    if same_arguments:  # then the values of the defaults stay, too
        made.args.defaults, made.args.kw_defaults = [], [None] * len(made.args.kwonlyargs)
    _mark(was.body, made.body, target)
    ast.increment_lineno(new_tree, function.__code__.co_firstlineno - 1)
    space: dict[str, Any] = dict(function.__globals__)
    try:
        code = compile(ast.fix_missing_locations(new_tree), function.__code__.co_filename, "exec", ANNOTATIONS)
        exec(code, space)  # noqa: S102 - running what a fault says is what this is for
    except Exception as error:
        raise FaultError(f"{target}: the edit gives no function: {told(error, __file__)}") from error
    changed: FunctionType = space[made.name]
    if same_arguments:
        changed.__defaults__, changed.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return changed


def _definition(target: str, function: FunctionType) -> tuple[str, ast.FunctionDef]:
    """The source of a function, at the left margin, and its tree. Raises `FaultError`."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        found = ast.parse(source).body[0]
    except (OSError, SyntaxError) as error:
        raise FaultError(f"{target}: its source cannot be read: {error}") from error
    if not isinstance(found, ast.FunctionDef):
        raise FaultError(f"{target} is no `def`; change the function around it, or swap it")
    return source, found


def with_edit(source: str, edit: Edit) -> str:
    """The source with the edit made. Raises `FaultError` unless `old` is there exactly once."""
    wanted = textwrap.dedent(edit.old.strip("\n")).strip().splitlines()
    lines = source.splitlines()
    found = [at for at in range(len(lines)) if _same(lines[at : at + len(wanted)], wanted)]
    if len(found) == 1:
        at = found[0]
        indent = " " * (len(lines[at]) - len(lines[at].lstrip()))
        fresh = textwrap.dedent(edit.new.strip("\n")).strip().splitlines() or ["pass"]
        return "\n".join([*lines[:at], *[indent + line for line in fresh], *lines[at + len(wanted) :]]) + "\n"
    times = len(found) or source.count(edit.old)
    if times != 1:
        raise FaultError(f"{edit.target}: found {times} times, expected once: {edit.old!r}")
    return source.replace(edit.old, edit.new)


def _same(lines: Sequence[str], wanted: Sequence[str]) -> bool:
    return textwrap.dedent("\n".join(lines)).strip().splitlines() == wanted


def _parsed(target: str, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise FaultError(f"{target}: the edit gives no Python: {error.msg}: {(error.text or '').strip()!r}") from None


def _mark(old: list[ast.stmt], new: list[ast.stmt], target: str) -> None:
    """Put the call of the hook before the first statement that differs, as deep as only one block differs."""
    pairs = list(zip(old, new, strict=False))
    at = next((at for at, (was, now) in enumerate(pairs) if ast.dump(was) != ast.dump(now)), len(pairs))
    at = 0 if at == len(old) == len(new) else at  # the arguments differ
    if at < len(pairs) and len(old) == len(new) and all(ast.dump(a) == ast.dump(b) for a, b in pairs[at + 1 :]):
        blocks = _blocks(*pairs[at])
        if blocks is not None:
            _mark(*blocks, target)
            return
    new.insert(at, ast.parse(f"{NAME}[{target!r}]()").body[0])


def _blocks(was: ast.AST, now: ast.AST) -> tuple[list[ast.stmt], list[ast.stmt]] | None:
    """The one block in which two compound statements differ; None when more differs."""
    if type(was) is not type(now):
        return None
    pairs = [(getattr(was, field, None), getattr(now, field, None)) for field in was._fields]
    differing = [(before, after) for before, after in pairs if _dumped(before) != _dumped(after)]
    match differing:
        case [([ast.stmt(), *_] as before, [ast.stmt(), *_] as after)]:
            return before, after
        case [([ast.ExceptHandler() | ast.match_case(), *_] as before, [*after])] if len(before) == len(after):
            arms = [(old, new) for old, new in zip(before, after, strict=True) if ast.dump(old) != ast.dump(new)]
            return _blocks(*arms[0]) if len(arms) == 1 else None
    return None


def _dumped(value: object) -> object:
    if isinstance(value, list):
        return [_dumped(each) for each in value]
    return ast.dump(value) if isinstance(value, ast.AST) else value


def _calls(target: str) -> FunctionType:
    """A function that calls the hook. It finds it by name, because code that is put into a function has no closure."""
    space: dict[str, Any] = {}
    exec(f"def calls(*given, **named): return {NAME}[{target!r}](*given, **named)", space)  # noqa: S102 - see above
    made: FunctionType = space["calls"]
    return made


def _counting(swap: Swap, function: FunctionType, reached: Reached) -> Callable[..., Any]:
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__

    def call(*given: Any, **named: Any) -> Any:
        reached()
        return swap.by(original, *given, **named)

    return call


def check(faults: Mapping[str, Fault | Variant]) -> None:
    """Plants each for a moment. Raises `FaultError` for the first that cannot be, or says something that is not so."""
    for each in faults.values():
        if isinstance(each, Fault) and not each.changes:
            raise FaultError(f"fault {each.id!r} changes nothing; expected an Edit or a Swap")
        if isinstance(each, Fault) and each.level not in LEVELS:
            raise FaultError(f"fault {each.id!r}: level {each.level!r}; expected one of {', '.join(LEVELS)}")
        try:
            with planted(each.changes):
                pass
        except FaultError as error:
            raise FaultError(f"fault {each.id!r}: {error}") from None

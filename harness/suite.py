"""Suites: where cases are found, by the name of a package or by a path. Needs no pytest."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from harness import here
from harness.case import Case, cases_in
from harness.usage import UserError, nearest, told

SUITES = ("suites.invariants",)
OWN = "suites"  # this project's: `e2e` is short for `suites.e2e`


class SuiteError(UserError):
    """A suite or a case cannot be found or imported."""


def named(suite: str) -> str:
    """The full name of a suite of this project; any other is as it was."""
    short = suite.isidentifier() and not _importable(suite) and not Path(suite).exists()
    return f"{OWN}.{suite}" if short and _importable(f"{OWN}.{suite}") else suite


def all_cases(suites: Sequence[str] = SUITES) -> list[Case]:
    """The cases of these packages, modules, files and folders, in the order they are written. Raises `SuiteError`."""
    modules = {module.__name__: module for suite in suites for module in modules_of(named(suite))}
    try:
        return cases_in(modules.values())
    except ValueError as error:
        raise SuiteError(str(error)) from error


def case_by_id(name: str, cases: Iterable[Case]) -> Case:
    """The case with this id. Raises `SuiteError` with the nearest one."""
    by_id = {made.id: made for made in cases}
    if name not in by_id:
        raise SuiteError(f"no case is called {name!r}{nearest(name, by_id)} `kvshard list` shows all {len(by_id)}")
    return by_id[name]


def modules_of(suite: str) -> list[ModuleType]:
    """The modules of a suite: `test_*` of a package, one module, `test_*.py` of a folder, or one file."""
    path = located(suite)
    if path is not None:
        files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        return [_from_file(file) for file in files]
    package = module(suite)
    if not hasattr(package, "__path__"):
        return [package]
    found = pkgutil.walk_packages(package.__path__, f"{suite}.")
    return [module(info.name) for info in found if info.name.rpartition(".")[2].startswith("test_")]


def located(suite: str) -> Path | None:
    """The file or folder that a suite is, None for an importable name. Raises `SuiteError` when it is neither."""
    here.importable()
    path = Path(suite)
    if not suite.endswith(".py") and "/" not in suite and _importable(suite):
        return None
    if not path.exists():
        raise SuiteError(f"suite {suite!r} is no module and no file or folder in {Path.cwd()}{nearest(suite, SUITES)}")
    return path


def module(name: str) -> ModuleType:
    """The module of this name. Raises `SuiteError`."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise SuiteError(f"suite module {name} cannot be imported: {told(error, __file__)}") from error


def root_of(file: Path) -> Path:
    """The folder from which a file's module is imported, as pytest does it: the first upwards that is no package."""
    folder = file.resolve().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _from_file(file: Path) -> ModuleType:
    root = root_of(file)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return module(".".join(file.resolve().relative_to(root).with_suffix("").parts))


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False

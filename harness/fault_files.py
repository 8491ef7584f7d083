"""Files of faults: Python modules with `FAULTS` and `VARIANTS`, wherever they lie."""

from __future__ import annotations

import pkgutil
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from harness.connect import module_of_file
from harness.fault import Fault, FaultError, Variant, check
from harness.suite import module

LIBRARY = "suites.selfcheck"
Plantable = TypeVar("Plantable", Fault, Variant)


@dataclass(frozen=True, slots=True)
class Library:
    """Faults and variants by id, in the order of the files."""

    faults: Mapping[str, Fault] = field(default_factory=dict)
    variants: Mapping[str, Variant] = field(default_factory=dict)


def library(where: str = LIBRARY, *, checked: bool = True) -> Library:
    """What a file, the files of a folder (all `*.py` but `_*.py`), or a package holds. Raises `FaultError`.

    If `checked`, every fault is planted for a moment: a text that is no longer in its function is an error, never a
    pass.
    """
    faults: dict[str, Fault] = {}
    variants: dict[str, Variant] = {}
    for each in _modules(where):
        for fault in _tuple(each, "FAULTS", Fault):
            _put(faults, fault, each, variants)
        for variant in _tuple(each, "VARIANTS", Variant):
            _put(variants, variant, each, faults)
    if not faults and not variants:
        raise FaultError(f"faults {where!r}: no FAULTS and no VARIANTS in any module there")
    if checked:
        check(faults)
        check(variants)
    return Library(faults, variants)


def _modules(where: str) -> Iterable[ModuleType]:
    path = Path(where)
    if path.is_dir():
        return [module_of_file(where, str(file)) for file in sorted(path.rglob("[!_]*.py"))]
    if path.suffix == ".py" or "/" in where:
        return [module_of_file(where, where)]
    package = module(where)
    if not hasattr(package, "__path__"):
        return [package]
    return [module(info.name) for info in pkgutil.walk_packages(package.__path__, f"{where}.") if not info.ispkg]


def _tuple(found: ModuleType, name: str, kind: type[Plantable]) -> tuple[Plantable, ...]:
    made = getattr(found, name, ())
    if not isinstance(made, tuple | list):
        raise FaultError(f"{name} of {found.__file__} is a {type(made).__name__}; expected a tuple of {kind.__name__}")
    wrong = [type(each).__name__ for each in made if not isinstance(each, kind)]
    if wrong:
        raise FaultError(f"{name} of {found.__file__} holds a {wrong[0]}; expected a tuple of {kind.__name__}")
    return tuple(made)


def _put(known: dict[str, Plantable], made: Plantable, found: ModuleType, others: Container[str]) -> None:
    if made.id in known or made.id in others:
        raise FaultError(f"fault id {made.id!r} of {found.__file__} is used before; ids are unique")
    known[made.id] = made

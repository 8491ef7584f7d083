"""Checks of single arguments; all raise GeometryError with the value and what was expected."""

from __future__ import annotations

from collections.abc import Sequence

from kvshard_ref.errors import GeometryError


def one_of(what: str, choice: str, choices: Sequence[str]) -> None:
    """Raise unless `choice` is one of `choices`."""
    if choice not in choices:
        raise GeometryError(f"{what} is {choice!r}, expected one of {choices}")


def at_least(least: int, what: str, **counts: int) -> None:
    """Raise for a count below `least`."""
    for name, count in counts.items():
        if count < least:
            raise GeometryError(f"{what}: {name} is {count}, expected at least {least}")

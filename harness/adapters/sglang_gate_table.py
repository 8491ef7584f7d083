"""The table of launch flags: fixtures/launch/sglang.toml as rows, and a verdict in the words of that table."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from harness.adapters.sglang_gate import Host, Model, Refused, Verdict

PATH = Path(__file__).resolve().parents[2] / "fixtures" / "launch" / "sglang.toml"
DIGITS = 12  # of a fraction of memory, which is what is left of a subtraction
Changes = Mapping[str, tuple[object, object]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the gate says: a refusal for one of these reasons, or what it adjusts and warns of. Empty: accepted."""

    refused: frozenset[str] = frozenset()  # the table's ids; a text that fits none stands for itself
    changes: Changes = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How sglang says it, and where."""

    text: str
    lines: str  # "first-last" of the file of the gate

    def holds(self, where: str) -> bool:
        """Whether `file:line` is one of these lines."""
        first, last = (int(line) for line in self.lines.split("-"))
        return first <= int(where.rpartition(":")[2] or 0) <= last


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration that is accepted."""

    model: dict[str, Any]
    flags: dict[str, Any]
    env: dict[str, str]
    decided: dict[str, Any]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One combination. See the head of the file."""

    id: str
    base: str
    source: str
    set: dict[str, Any] = msgspec.field(default_factory=dict)
    unset: tuple[str, ...] = ()
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    decided: dict[str, Any] = msgspec.field(default_factory=dict)
    gpu_mib: float = Host().gpu_mib
    accept: bool = False
    refuse: str = ""
    adjust: dict[str, tuple[Any, Any]] = msgspec.field(default_factory=dict)
    warn: tuple[str, ...] = ()
    note: str = ""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A launch command in a file beside the table."""

    file: str
    model: dict[str, Any]
    source: str
    accept: bool = False
    refuse: str = ""
    adjust: dict[str, tuple[Any, Any]] = msgspec.field(default_factory=dict)


class NotRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the table does not show."""

    what: str
    why: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    release: str
    reason: dict[str, Reason]
    warning: dict[str, str]
    base: dict[str, Base]
    row: tuple[Row, ...]
    command: tuple[Command, ...]
    not_run: tuple[NotRun, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One question to the gate."""

    flags: Mapping[str, object]
    model: Model
    host: Host


def load(path: Path = PATH) -> Table:
    """The table. Raises msgspec.ValidationError or tomllib.TOMLDecodeError with the place that is wrong."""
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Table)


def launch(table: Table, row: Row) -> Launch:
    """The row's base, with `set` and its like put in and `unset` taken out."""
    base = table.base[row.base]
    flags, model, env, decided = (
        {name: value for name, value in {**of_base, **of_row}.items() if name not in row.unset}
        for of_base, of_row in (
            (base.flags, row.set),
            (base.model, row.model),
            (base.env, row.env),
            (base.decided, row.decided),
        )
    )
    return Launch(flags, Model(**model), Host(env=env, gpu_mib=row.gpu_mib, decided=decided))


def expected(row: Row | Command, warnings: tuple[str, ...] = ()) -> Outcome:
    """The row's outcome. Raises ValueError for one that has not exactly one."""
    if (row.accept, bool(row.refuse), bool(row.adjust)).count(True) != 1:
        raise ValueError(f"{row!r}: expected one of accept, refuse and adjust")
    return outcome(row.refuse, {name: (before, after) for name, (before, after) in row.adjust.items()}, warnings)


def outcome(refused: str, changes: Changes, warnings: tuple[str, ...]) -> Outcome:
    """An outcome whose values can be compared."""
    return Outcome(
        frozenset({refused} - {""}),
        {name: (_value(before), _value(after)) for name, (before, after) in changes.items()},
        warnings,
    )


def actual(table: Table, verdict: Verdict) -> Outcome:
    """A verdict in ids of the table. A refusal for two reasons at once, or none, stands there with its text."""
    if isinstance(verdict, Refused):
        ids = [id_ for id_, reason in table.reason.items() if reason.text in verdict.reason]
        return outcome(ids[0] if len(ids) == 1 else verdict.reason, {}, ())
    warnings = tuple(
        next((id_ for id_, text in table.warning.items() if line.startswith(text)), line) for line in verdict.warnings
    )
    return outcome("", getattr(verdict, "changes", {}), warnings)


def _value(value: object) -> object:
    if value is None:
        return "unset"
    return round(value, DIGITS) if isinstance(value, float) else value

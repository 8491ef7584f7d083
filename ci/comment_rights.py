"""Who may give which command: a table in the repository beside the write access that GitHub reports.

The table is read from the base branch, so a pull request cannot change the rights under which it is tested.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType

from ci.comment_parse import Bad, Command, check_path

TABLE = Path(__file__).parent / "permissions.toml"
RIGHTS = ("test", "failed", "tag", "extra")
NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rerun-test": ("test",),
        "rerun-group": ("test",),
        "rerun-failed-ci": ("failed",),
        "tag-run-ci-label": ("tag",),
        "tag-and-rerun-ci": ("tag", "failed"),
    }
)
WRITES = frozenset({"admin", "maintain", "write"})
RUNS_CODE = frozenset({"test", "failed", "tag"})  # of the pull request, on the project's runners
COOLDOWN_MINUTES_MAX = 7 * 24 * 60


@dataclass(frozen=True, slots=True)
class User:
    """What one user without write access may do."""

    may: tuple[str, ...] = ()
    cooldown_minutes: int = 0
    forks: bool = False  # also on pull requests that come from a fork


@dataclass(frozen=True, slots=True)
class Table:
    """The table as read."""

    bot: str
    workflow: str
    folders: tuple[str, ...]  # with tests
    labels: tuple[str, ...]
    labels_extra: tuple[str, ...]
    cooldown_minutes: int
    users: Mapping[str, User] = field(default_factory=dict)  # by login in lower case
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Commenter:
    """Who commented, and where."""

    login: str
    permission: str = "none"  # what GitHub reports: admin, maintain, write, triage, read, none
    is_author: bool = False  # of the pull request
    is_fork: bool = False  # the pull request comes from a fork

    @property
    def writes(self) -> bool:
        """Whether GitHub says that they may write to the repository."""
        return self.permission in WRITES


def read_table(text: str) -> Table:
    """The table of a TOML text; raises `ValueError` with place and reason."""
    raw = tomllib.loads(text)
    users = {}
    for login, entry in raw.get("users", {}).items():
        may, cooldown = tuple(entry.get("may", ())), entry.get("cooldown_minutes", raw["cooldown_minutes"])
        if unknown := set(may) - set(RIGHTS) or set(entry) - {"may", "cooldown_minutes", "forks"}:
            raise ValueError(f"users.{login}: {sorted(unknown)} is none of {RIGHTS}, may, cooldown_minutes, forks")
        if not 0 <= cooldown <= COOLDOWN_MINUTES_MAX:
            raise ValueError(f"users.{login}: cooldown_minutes {cooldown} is not in 0..{COOLDOWN_MINUTES_MAX}")
        users[login.lower()] = User(may, cooldown, entry.get("forks", False) is True)
    groups = {name: tuple(specs) for name, specs in raw.get("groups", {}).items()}
    labels = raw["labels"]
    return Table(
        bot=raw["bot"],
        workflow=raw["workflow"],
        folders=tuple(raw["folders"]),
        labels=tuple(labels["ci"]),
        labels_extra=tuple(labels["extra"]),
        cooldown_minutes=raw["cooldown_minutes"],
        users=users,
        groups=groups,
    )


def needs(command: Command) -> tuple[str, ...]:
    """The rights that a command takes."""
    return (*NEEDS[command.name], *(("extra",) if "extra" in command.arguments else ()))


def check_rights(table: Table, who: Commenter, command: Command) -> None:
    """Raises `Bad` where the commenter may not give the command."""
    if who.writes:
        return
    entry = table.users.get(who.login.lower(), User())
    own = ("failed",) if who.is_author else ()
    for right in needs(command):
        if right not in entry.may and right not in own:
            whose = "you are not in the table" if who.login.lower() not in table.users else "your entry lacks it"
            why = f"no permission: `/{command.name}` needs the right `{right}`, and {whose}"
            raise Bad(why, f"ask a maintainer to give the command, or for an entry in `ci/{TABLE.name}`")
        if who.is_fork and right in RUNS_CODE and not entry.forks:
            why = f"no permission: the pull request comes from a fork, and `/{command.name}` runs its code"
            raise Bad(why, "someone with write access, or whose entry says `forks = true`, can give the command")


def cooldown_minutes(table: Table, who: Commenter) -> int:
    """Minutes between two commands of this user."""
    if who.writes:
        return 0
    entry = table.users.get(who.login.lower())
    return table.cooldown_minutes if entry is None else entry.cooldown_minutes


def check_cooldown(table: Table, who: Commenter, used: Iterable[datetime], now: datetime) -> None:
    """Raises `Bad` where the last command of this user is too recent."""
    wait = timedelta(minutes=cooldown_minutes(table, who))
    last = max(used, default=None)
    if last is not None and now < last + wait:
        left = math.ceil((last + wait - now).total_seconds() / 60)
        minutes = cooldown_minutes(table, who)
        why = f"cooldown: one comment with commands in {minutes} minutes, the last was at {last:%H:%M} UTC"
        raise Bad(why, f"write it again in {left} minutes")


def group_specs(table: Table, name: str) -> tuple[str, ...]:
    """What a group stands for: its specs in the table, else the folder of that name."""
    check_path(name)
    return table.groups.get(name) or (f"{name.removesuffix('/')}/",)

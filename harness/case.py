"""A case: one claim about any engine, with what it needs, what must have been seen, and how its ops are drawn."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, TypeVar

from hypothesis.strategies import SearchStrategy

from harness.capabilities import CAPABILITIES
from harness.types import AnyOp, AnyReply, Axes, Config, Manifest
from harness.views import Snapshot

T = TypeVar("T")
CASE_ATTRIBUTE = "__kvshard_case__"
_ID = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")


class Violation(AssertionError):  # noqa: N818  # a finding about the engine, not an error of ours
    """A claim is broken: what was seen, what was expected and why, and where."""

    def __init__(self, seen: str, expected: str, why: str, claim: str | None = None) -> None:
        super().__init__(f"seen {seen}; expected {expected}, because {why}")
        self.seen = seen
        self.expected = expected
        self.why = why
        self.claim = claim  # None: the claim of the case


class ClaimError(Violation):
    """The adapter contradicts its own manifest: a declared op is unsupported, a declared field cannot be seen."""

    def __init__(self, seen: str, expected: str, why: str) -> None:
        super().__init__(seen, expected, why, claim="An adapter does what its manifest claims.")


class Draw(Protocol):
    """Hypothesis' `data.draw`: one value from a strategy, recorded so that it can shrink."""

    def __call__(self, strategy: SearchStrategy[T], label: Any = None) -> T:
        """A value that the strategy allows."""
        ...


class Table(Protocol):
    """Where a plan plays its ops: each is applied, looked at and judged before the next one is drawn."""

    config: Config
    manifest: Manifest
    watch: Any  # the suite's own type; only its plans read it
    steps_max: int  # how many moves a plan makes at most

    def do(self, op: AnyOp) -> AnyReply:
        """Applies and judges one op."""
        ...


class Watch(Protocol):
    """The judge of one session: sees every op with its reply and, if the case needs it, the state around it."""

    @property
    def seen(self) -> Counter[str]:
        """How often each event was met."""
        ...

    def after(self, op: AnyOp, reply: AnyReply, before: Snapshot | None, after: Snapshot | None) -> None:
        """Raises `Violation` when the claim is broken."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One claim. `seen` are the non-vacuity conditions: event -> how often the whole run must have met it at least.

    Those of `seen_in_groups` only hold for an engine that can be opened with several ranks.
    """

    id: str
    claim: str
    reason: str
    invariants: tuple[str, ...]
    needs: tuple[str, ...]
    seen: Mapping[str, int]
    watch: Callable[[Config, Manifest], Watch]
    configs: Callable[[Axes], SearchStrategy[Config]]
    plan: Callable[[Draw, Table], None]
    examples: float = 1.0  # times the budget's number of examples
    module: str = ""
    seen_in_groups: Mapping[str, int] = field(default_factory=dict)
    looks: bool = field(init=False, default=False)  # whether any snapshot is needed

    def __post_init__(self) -> None:
        object.__setattr__(self, "looks", any(need.startswith("snapshot.") for need in self.needs))
        if not _ID.fullmatch(self.id):
            raise ValueError(f"case id {self.id!r}: expected `noun.claim` in lower case with underscores")
        if not self.claim.endswith("."):
            raise ValueError(
                f"case {self.id}: its docstring must begin with the claim, one sentence ending with a full stop"
            )
        if not self.reason:
            raise ValueError(
                f"case {self.id}: the second paragraph of its docstring must name the kind of bug behind it"
            )
        for need in self.needs:
            if need not in CAPABILITIES:
                raise ValueError(f"case {self.id} needs {need!r}, which is no capability; see harness/capabilities.py")


def paragraphs(doc: str | None) -> tuple[str, str]:
    """The claim (first paragraph) and the reason (the rest) of a docstring, each on one line."""
    parts = inspect.cleandoc(doc or "").split("\n\n", 1)
    claim, reason = [*parts, ""][:2]
    return " ".join(claim.split()), " ".join(reason.split())


def as_test(made: Case, function: Callable[..., None]) -> Callable[[Any], None]:
    """The pytest function that runs a case; it carries the case, so that tools find it without pytest."""

    def test(kvshard_run: Callable[[Case], None]) -> None:
        kvshard_run(made)

    test.__name__ = function.__name__
    test.__qualname__ = function.__qualname__
    test.__doc__ = function.__doc__
    test.__module__ = function.__module__
    setattr(test, CASE_ATTRIBUTE, made)
    return test


def cases_in(modules: Iterable[ModuleType]) -> list[Case]:
    """All cases of these modules in the order they are written. Raises ValueError for an id that is used twice."""
    found: dict[str, Case] = {}
    for module in modules:
        for value in vars(module).values():
            made = getattr(value, CASE_ATTRIBUTE, None)
            if not isinstance(made, Case):
                continue
            if made.id in found:
                raise ValueError(
                    f"case id {made.id!r} is used in {found[made.id].module} and in {made.module}; ids are unique"
                )
            found[made.id] = made
    return list(found.values())


def vacuous(made: Case, seen: Mapping[str, int], axes: Axes) -> list[str]:
    """The non-vacuity conditions that a run on such an engine did not meet, as sentences; empty when it met all."""
    groups = made.seen_in_groups if max(axes.shards) > 1 else {}
    return [
        f"saw {seen.get(event, 0)} times {event!r}, needs {least}"
        for event, least in {**made.seen, **groups}.items()
        if seen.get(event, 0) < least
    ]


def select(cases: Sequence[Case], pattern: str | None) -> list[Case]:
    """The cases whose id contains `pattern`; all when it is None."""
    return [made for made in cases if pattern is None or pattern in made.id]

"""What a hunt came to: the line that a record of a selfcheck keeps, and that its tables are made of."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """What became of a fault, or of a variant that is right."""

    KILLED = "killed"
    SURVIVED = "survived"  # all cases passed, although what it changes was run
    IDLE = "idle"  # what it changes was never run
    PASSED = "passed"  # a variant that all cases pass
    REFUSED = "refused"  # a variant that a case fails, or does not prove
    ERROR = "error"  # harness or process failed: says nothing about the fault

    @property
    def wanted(self) -> bool:
        """Whether it is what a suite should come to."""
        return self in (Outcome.KILLED, Outcome.PASSED)


class Hunted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One fault or variant at one seed."""

    id: str
    seed: int
    outcome: Outcome
    why: str = ""  # in one sentence, unless it is what was wanted
    case: str = ""  # that killed it
    claim: str = ""
    seen: str = ""
    config: str = ""
    ops: tuple[str, ...] = ()  # of the shortest counterexample found
    raised: bool = False  # the engine raised or hung, no claim about its state was broken
    expected: bool = False  # the case is of an invariant that the fault names
    seconds: float = 0.0  # to the first counterexample
    shrink_seconds: float | None = None  # where it was shrunk
    cases: int = 0  # tried
    reached: int = 0  # how often what it changes was run
    killers: tuple[str, ...] = ()  # every case that fails, where all were tried

"""What became of one fault in a sweep of gates."""

from __future__ import annotations

from typing import Literal

import msgspec

DRAFTS = " drafts"  # how a comparison of accept lengths ends its name
Fate = Literal["answers", "drafts", "error", "not met", "nothing"]


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of the arms; without items it could not be judged, and `said` says why."""

    name: str
    n: int = 0
    lost: int = 0
    gained: int = 0
    said: str = ""

    @property
    def differs(self) -> bool:
        """Whether an item came out otherwise."""
        return self.lost + self.gained > 0

    @property
    def told(self) -> str:
        """It in a few words."""
        return (
            f"{self.name}: {self.said}"
            if self.said
            else f"{self.name} {self.lost} lost, {self.gained} gained of {self.n}"
        )


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, in servers of its own, under one run of all arms."""

    fault: str
    seed: int
    runs: int  # how often all ranks together ran what it changes
    members: tuple[Judged, ...] = ()
    said: str = ""  # why the gate could not be asked, or servers that failed
    seconds: float = 0.0

    @property
    def outcome(self) -> Fate:
        """A fault that was never run shows nothing, whatever else was seen."""
        if not self.runs and not self.said:
            return "not met"
        differ = [each.name for each in self.members if each.differs]
        if any(not name.endswith(DRAFTS) for name in differ):
            return "answers"
        if self.said or any(each.said for each in self.members):
            return "error"
        return "drafts" if differ else "nothing"

    @property
    def line(self) -> str:
        """It on one line."""
        return f"{self.fault}: {self.outcome}, run {self.runs} times, {self.told}, {self.seconds:.0f} s"

    @property
    def told(self) -> str:
        """What each comparison saw, or why there was none."""
        if self.said:
            return self.said
        return ", ".join(each.told for each in self.members)

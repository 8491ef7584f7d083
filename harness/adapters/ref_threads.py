"""The ranks of one session as threads of this process: what plain and simulated ones have in common."""

from __future__ import annotations

from collections.abc import Callable

from harness import views as v
from harness.adapters.ref_rank import RefRank
from harness.lockstep import Lockstep


class RankThreads:
    """Ranks of a lockstep, which goes back to where it came from at the end."""

    def __init__(self, lockstep: Lockstep, give_back: Callable[[Lockstep], None]) -> None:
        self._open: Lockstep | None = lockstep
        self._give_back = give_back
        self._ranks: list[RefRank] = []

    @property
    def _lockstep(self) -> Lockstep:
        if self._open is None:
            raise RuntimeError("apply after close: open a new session")
        return self._open

    def view(self) -> list[v.RankView]:
        """What every rank shows."""
        return [rank.view() for rank in self._ranks]

    def close(self) -> None:
        """What is pending is dropped with the session."""
        if self._open is not None and self._open.usable:
            self._give_back(self._open)
        self._open = None

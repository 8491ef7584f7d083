"""What a wrong cache would have read: how a fault changes a prompt of which a part is cached, or what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """A prompt whose first `cached` tokens are in the cache. `earlier`: prompts of before, newest first."""

    tokens: Tokens
    cached: int
    page: int
    earlier: Sequence[Tokens] = ()

    @property
    def pages(self) -> int:
        """Whole ones that are cached."""
        return self.cached // self.page

    def at(self, number: int) -> slice:
        """The tokens of a page."""
        return slice(number * self.page, (number + 1) * self.page)


Change = Callable[[Hit], Tokens | None]
"""The prompt whose rows are read in place of its own; None where this hit has no room for the fault."""


def swapped_page(hit: Hit) -> Tokens | None:
    """The first two pages that differ change places: those farthest from the answer."""
    for number in range(hit.pages - 1):
        first, second = hit.tokens[hit.at(number)], hit.tokens[hit.at(number + 1)]
        if first != second:
            return hit.tokens[: hit.at(number).start] + second + first + hit.tokens[hit.at(number + 1).stop :]
    return None


def stale_page(hit: Hit) -> Tokens | None:
    """The page in the middle of the hit is still that of the last prompt before which has another one there."""
    where = hit.at((hit.pages - 1) // 2)
    for its in hit.earlier if hit.pages else ():
        if len(its) >= where.stop and its[where] != hit.tokens[where]:
            return hit.tokens[: where.start] + its[where] + hit.tokens[where.stop :]
    return None


def lost_page(hit: Hit) -> Tokens | None:
    """The page in the middle of the hit is missing."""
    where = hit.at((hit.pages - 1) // 2)
    return hit.tokens[: where.start] + hit.tokens[where.stop :] if hit.pages else None


def lost_last_token(hit: Hit) -> Tokens | None:
    """The last cached token is missing."""
    return hit.tokens[: hit.cached - 1] + hit.tokens[hit.cached :] if hit.cached else None


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, and the cases that are about it; `handed_over` are those beside them where a proxy stands before decode.

    There prefill counts hits and sees salts: what is about these alone has no case.
    """

    does: str
    cases: tuple[str, ...]
    handed_over: tuple[str, ...] = ()
    change: Change | None = None
    counts_more: bool = False  # one page more is told as cached than was
    unsalted: bool = False  # requests lose their salt on the way
    stays: bool = False  # that a client has left is not told

    def asked(self, *, pair: bool) -> tuple[str, ...]:
        """The cases that are about it."""
        return () if pair and (self.counts_more or self.unsalted) else self.cases + self.handed_over * pair


CONTENT = (
    *("cache.answers_as_computed", "cache.batch_as_alone", "cache.every_length_hits"),
    *("cache.answers_under_pressure", "load.answers_as_alone"),
)
HANDED_OVER = ("parity.answers_as_control", "handover.late_answers")
COUNTS = ("cache.counts_whole_pages", "cache.every_length_hits", "cache.answers_under_pressure")
UNCHANGED = ("cache.salts_apart", "abort.by_leaving")  # cases that are about no rows
NOTHING = "nothing"
FAULTS: Mapping[str, Planted] = MappingProxyType(
    {
        NOTHING: Planted("No fault: the noise of a right engine.", (*CONTENT, *UNCHANGED), HANDED_OVER),
        "swapped_page": Planted("Two cached pages change places.", CONTENT, HANDED_OVER, swapped_page),
        "stale_page": Planted("A cached page is that of an earlier prompt.", CONTENT, HANDED_OVER, stale_page),
        "lost_page": Planted("A cached page is missing.", CONTENT, HANDED_OVER, lost_page),
        "lost_last_token": Planted("The last cached token is missing.", CONTENT, HANDED_OVER, lost_last_token),
        "wrong_count": Planted("A hit is told as one page longer.", COUNTS, counts_more=True),
        "no_salt": Planted("A salt is passed over.", ("cache.salts_apart",), unsalted=True),
        "client_kept": Planted("A client that leaves is not noticed.", ("abort.by_leaving",), stays=True),
    }
)

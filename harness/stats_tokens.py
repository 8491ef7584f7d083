"""How far two servers' log probabilities of the same tokens are apart, token by token, and what a gate says of it.

    computed  the tokens of prompt and continuation, all of them computed
    cached    those of the continuation, behind a prompt that may come from the cache
    written   those of the greedy answer, up to the first token that differs

A token is *over* when it is further than the tolerance; a row of tokens is *off* when more of it is over than may be,
or one token is further than `far`. The same rule judges the baseline against itself, asked a second time: that is how
much of a distance is noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from harness.stats import StatsError, mcnemar_p
from harness.stats_gate import Outcome

WAYS = ("computed", "cached", "written")


class Limits(NamedTuple):
    """What may be: distances in nats, a share of a row's tokens, and the chance of a wrong fail beside own noise."""

    tolerance: float
    far: float
    share_max: float = 0.1
    alpha: float = 0.05

    def allowed(self, tokens: int) -> int:
        """Tokens of a row that may be over; one always may, unless none may."""
        return max(1, int(self.share_max * tokens)) if self.share_max else 0


BITWISE = Limits(0.0, 0.0, 0.0)


class Row(NamedTuple):
    """Log probabilities of an item's tokens in one way; values of one length, NaN where a server told no number."""

    item: str
    way: str
    start: int  # position of the first token
    tokens: tuple[int, ...]
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    again: tuple[float, ...]  # the baseline a second time


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """The token that is furthest apart."""

    item: str
    way: str
    position: int
    page: int | None
    token: int
    baseline: float
    candidate: float
    distance: float


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Distances of some tokens; None where there is none."""

    tokens: int
    over: int
    mean: float | None
    p99: float | None
    max: float | None


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One page: its distances, and how many items are over the tolerance there for the first time."""

    page: int
    begins: int
    spread: Spread


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on distances."""

    outcome: Outcome
    items: int
    off: tuple[str, ...]  # items
    off_again: tuple[str, ...]  # items on which the baseline is as far from itself
    p: float | None  # of the candidate's being off no more often than the baseline is from itself
    spread: Spread
    own: Spread  # of the baseline from itself
    ways: dict[str, Spread]
    worst: Worst | None
    pages: tuple[Place, ...]


def distances(one: Sequence[float], other: Sequence[float]) -> np.ndarray:
    """Of each token, infinite where only one is a number; equal values are at 0, also infinite ones."""
    a, b = np.asarray(one, float), np.asarray(other, float)
    if a.shape != b.shape:
        raise StatsError(f"{a.size} and {b.size} log probabilities: expected one for each token in both arms")
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    apart[np.isnan(apart)] = np.inf
    apart[a == b] = 0.0
    return np.asarray(apart)


def is_off(apart: np.ndarray, limits: Limits) -> bool:
    """Whether a row is further apart than may be."""
    over = int((apart > limits.tolerance).sum())
    return over > limits.allowed(apart.size) or bool((apart > limits.far).any())


def spread(apart: np.ndarray, limits: Limits) -> Spread:
    """The numbers of some distances."""
    if not apart.size:
        return Spread(tokens=0, over=0, mean=None, p99=None, max=None)
    return Spread(
        tokens=int(apart.size),
        over=int((apart > limits.tolerance).sum()),
        mean=float(apart.mean()),
        p99=float(np.quantile(apart, 0.99, method="higher")),
        max=float(apart.max()),
    )


def judge_tokens(rows: Sequence[Row], limits: Limits, page: int) -> Judged:
    """The verdict; `page`: tokens of a page. Raises `StatsError` when there is no token to judge."""
    apart = [distances(row.baseline, row.candidate) for row in rows]
    again = [distances(row.baseline, row.again) for row in rows]
    if not sum(each.size for each in apart):
        raise StatsError("no token was scored by both servers")
    off, off_again = (
        tuple(dict.fromkeys(row.item for row, each in zip(rows, found, strict=True) if is_off(each, limits)))
        for found in (apart, again)
    )
    p = mcnemar_p(len(set(off) - set(off_again)), len(set(off_again) - set(off))) if off_again else None
    worse = Outcome.FAIL if p is None or p <= limits.alpha else Outcome.INCONCLUSIVE
    return Judged(
        outcome=worse if off else Outcome.PASS,
        items=len({row.item for row in rows}),
        off=off,
        off_again=off_again,
        p=p,
        spread=spread(np.concatenate(apart), limits),
        own=spread(np.concatenate(again), limits),
        ways={
            way: spread(np.concatenate(found), limits)
            for way in WAYS
            if (found := [each for row, each in zip(rows, apart, strict=True) if row.way == way])
        },
        worst=_worst(rows, apart, page),
        pages=_pages(rows, apart, limits, page),
    )


def _worst(rows: Sequence[Row], apart: Sequence[np.ndarray], page: int) -> Worst | None:
    found = max(range(len(rows)), key=lambda at: float(apart[at].max(initial=-1.0)))
    row, at = rows[found], int(apart[found].argmax())
    if not apart[found][at]:
        return None
    return Worst(
        item=row.item,
        way=row.way,
        position=row.start + at,
        page=(row.start + at) // page,
        token=row.tokens[at],
        baseline=row.baseline[at],
        candidate=row.candidate[at],
        distance=float(apart[found][at]),
    )


def _pages(rows: Sequence[Row], apart: Sequence[np.ndarray], limits: Limits, page: int) -> tuple[Place, ...]:
    """A lost page shows in the tokens of the pages behind it, so where distances begin is where to look."""
    pages = [(row.start + np.arange(each.size)) // page for row, each in zip(rows, apart, strict=True)]
    firsts: dict[str, int] = {}
    for row, each, places in zip(rows, apart, pages, strict=True):
        over = places[each > limits.tolerance]
        if over.size:
            firsts[row.item] = min(int(over[0]), firsts.get(row.item, int(over[0])))
    begins, all_pages, all_apart = Counter(firsts.values()), np.concatenate(pages), np.concatenate(apart)
    return tuple(
        Place(page=int(number), begins=begins[int(number)], spread=spread(all_apart[all_pages == number], limits))
        for number in np.unique(all_pages)
    )

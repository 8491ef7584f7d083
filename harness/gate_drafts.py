"""Whether drafts are still accepted: accept lengths of two runs, item by item.

A draft changes no answer, so a lost row of it is in no score; it is in the tokens that a pass gives. Only items that
both runs answered alike are compared, since another answer is another draft.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from harness.samples import Samples, State
from harness.stats import Pairs
from harness.stats_gate import POINTS, GateResult, Terms, judge_pairs

ALIKE = 1e-9  # quotients of the same whole numbers


class Drafts(NamedTuple):
    """Mean accept lengths, and the items that accepted less or more in the candidate."""

    items: int
    baseline: float
    candidate: float
    shorter: int
    longer: int

    @property
    def told(self) -> str:
        """On one line."""
        return (
            f"accept length {self.baseline:.2f} and {self.candidate:.2f} on {self.items:,} items answered alike, "
            f"{self.shorter:,} of them shorter, {self.longer:,} longer"
        )


def drafts(baseline: Samples, candidate: Samples) -> Drafts | None:
    """None where the engines tell no accept length."""
    pairs = [
        (one.accept_length, other.accept_length)
        for item, repeats in baseline.answers.items()
        for repeat, one in repeats.items()
        if (other := candidate.answers.get(item, {}).get(repeat)) is not None
        and one.state is other.state is State.ANSWERED
        and one.answer == other.answer
    ]
    told = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not told:
        return None
    differences = [other - one for one, other in told]
    return Drafts(
        items=len(told),
        baseline=sum(one for one, _ in told) / len(told),
        candidate=sum(other for _, other in told) / len(told),
        shorter=sum(each < -ALIKE for each in differences),
        longer=sum(each > ALIKE for each in differences),
    )


def judge_drafts(found: Drafts, terms: Terms) -> GateResult:
    """The tests of accuracy, with an item that accepts less in place of a lost one; the margin is in percent of items.

    Nothing is assumed of how far lengths move: without a fault an item is as likely shorter as longer.
    """
    same = found.items - found.shorter - found.longer
    result = judge_pairs(Pairs(same, found.shorter, found.longer, 0), terms)
    net = f"net {POINTS * (found.shorter - found.longer) / found.items:.1f} % of the items"
    return msgspec.structs.replace(
        result, said=f"Drafts: {found.told}: {net} are shorter, p = {result.p_loss:.2g}; {terms.margin:.0%} may be."
    )

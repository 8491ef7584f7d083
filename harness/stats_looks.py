"""Several runs of a candidate against one run of the baseline, looked at one after another.

Each look has its own part of alpha, a half, a quarter, an eighth and so on, so however many runs there are, and
whenever one stops adding them, the chance of any wrong fail is alpha at most, and so is that of a wrong pass. The first
look is the sequential gate, item by item. A later one pools all runs so far: without a change the runs of an item can
be exchanged, so each of them is the baseline's with the same chance. That makes the test of a loss exact, also with
more runs in one arm; with one run in each it is the exact McNemar test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from harness.stats import StatsError, mcnemar_p, pairs_of
from harness.stats_gate import Outcome
from harness.stats_paired import noninferior_p
from harness.stats_repeats import mean_noninferior_p, repeats_of
from harness.stats_sequential import FAIL, PASS, run_through, sequential

OUTCOMES = {FAIL: Outcome.FAIL, PASS: Outcome.PASS}


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What was known with so many runs of the candidate; accuracies are fractions."""

    runs: int
    outcome: Outcome
    alpha: float  # of this look, in each direction
    items: int  # that were needed: less than all where the first look stopped early
    n: int
    baseline: float
    candidate: float  # of all runs so far
    p_loss: float  # of all items
    p_noninferior: float


def alpha_of(look: int, alpha: float) -> float:
    """Of the look with this number, from 1 on; all of them together have alpha."""
    return alpha * 0.5**look


def looks(baseline: Any, candidates: Sequence[Any], margin: float, alpha: float, flip_rate: float) -> list[Look]:
    """Looks up to the one that decides; answers are right or wrong by item, in a random order. Raises `StatsError`."""
    right = np.asarray(baseline, bool)
    runs = [np.asarray(each, bool) for each in candidates]
    if right.ndim != 1 or right.size < 2 or not runs or any(each.shape != right.shape for each in runs):
        raise StatsError("looks: expected runs of the same two items or more, one of the baseline, one of a candidate")
    found: list[Look] = []
    for count in range(1, len(runs) + 1):
        part = alpha_of(count, alpha)
        first = count == 1
        found.append(
            _first(right, runs[0], margin, part, flip_rate) if first else _pooled(right, runs[:count], margin, part)
        )
        if found[-1].outcome is not Outcome.INCONCLUSIVE:
            break
    return found


def _first(right: Any, run: Any, margin: float, alpha: float, flip_rate: float) -> Look:
    """The sequential gate, which stops where one side is shown."""
    stopped = run_through(sequential(right.size, margin, flip_rate, alpha), run.astype(int) - right.astype(int))
    pairs = pairs_of(right, run)
    return Look(
        runs=1,
        outcome=OUTCOMES.get(stopped.outcome, Outcome.INCONCLUSIVE),
        alpha=alpha,
        items=stopped.items,
        n=right.size,
        baseline=pairs.baseline,
        candidate=pairs.candidate,
        p_loss=mcnemar_p(pairs.lost, pairs.gained),
        p_noninferior=noninferior_p(pairs, margin),
    )


def _pooled(right: Any, runs: Sequence[Any], margin: float, alpha: float) -> Look:
    """All runs so far together."""
    counts, ones = np.sum(runs, axis=0), np.ones(right.size, int)
    repeats = repeats_of(right.astype(int), ones, counts, ones * len(runs))
    p_loss, p_noninferior = pooled_loss_p(right, runs), mean_noninferior_p(repeats, margin)
    shown = Outcome.FAIL if p_loss <= alpha else Outcome.INCONCLUSIVE
    return Look(
        runs=len(runs),
        outcome=Outcome.PASS if p_noninferior <= alpha else shown,
        alpha=alpha,
        items=right.size,
        n=right.size,
        baseline=float(right.mean()),
        candidate=float(counts.mean() / len(runs)),
        p_loss=p_loss,
        p_noninferior=p_noninferior,
    )


def pooled_loss_p(baseline: Any, candidates: Sequence[Any]) -> float:
    """One-sided and exact: the chance that the baseline is right so often, if each run of an item could be its own.

    Of an item that m of k runs have right the baseline is right with chance m / k.
    """
    right = np.asarray(baseline, bool)
    totals = right + np.sum(candidates, axis=0, dtype=int)
    runs = len(candidates) + 1
    moved = (totals > 0) & (totals < runs)
    chance = np.ones(1)  # of each number of items that the baseline has right
    for share in totals[moved] / runs:
        chance = np.convolve(chance, (1 - share, share))
    return min(1.0, float(chance[int(right[moved].sum()) :].sum()))

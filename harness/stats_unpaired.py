"""The fallback when only a score of the baseline is left: no pairs, so the noise of the items is in the way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest  # type: ignore[import-untyped]  # scipy ships no types
from statsmodels.stats.proportion import (  # type: ignore[import-untyped]  # statsmodels ships no types
    confint_proportions_2indep,
    test_proportions_2indep,
)

from harness.stats import Interval, StatsError, checked_share, proportion_interval


class Unpaired(NamedTuple):
    """A candidate against a score."""

    p_loss: float
    p_noninferior: float
    interval: Interval  # of candidate less reference, each end at alpha


def against_score(right: int, n: int, score: float, score_n: int | None, margin: float, alpha: float) -> Unpaired:
    """Score tests of two proportions (Miettinen and Nurminen 1985) and Newcombe's interval (1998).

    score_n: items behind the score. Without it the score counts as free of error, which flatters the gate, and
    the tests are exact binomial ones.
    """
    if not 0 <= right <= n or n < 1:
        raise StatsError(f"{right} right of {n}: expected a count between 0 and n")
    checked_share(score, "reference score")
    if score_n is None:
        low, high = proportion_interval(right, n, 1 - 2 * alpha)
        floor = max(0.0, score - margin)
        return Unpaired(
            p_loss=float(binomtest(right, n, score, alternative="less").pvalue),
            p_noninferior=float(binomtest(right, n, floor, alternative="greater").pvalue),
            interval=Interval(low - score, high - score),
        )
    if score_n < 1:
        raise StatsError(f"a reference of {score_n} items: expected one or more")
    behind = round(score * score_n)
    test = {"count1": right, "nobs1": n, "count2": behind, "nobs2": score_n, "compare": "diff"}
    with np.errstate(divide="ignore", invalid="ignore"):  # statsmodels also makes ratios, which may be 0 / 0
        ends = confint_proportions_2indep(right, n, behind, score_n, method="newcomb", compare="diff", alpha=2 * alpha)
        loss = test_proportions_2indep(**test, value=0, method="score", alternative="smaller").pvalue
        worse = test_proportions_2indep(**test, value=-margin, method="score", alternative="larger").pvalue
    # where both arms have all right, or all wrong, nothing varies and the statistic of no difference is 0 / 0
    p_loss = 1.0 if np.isnan(loss) else float(loss)
    return Unpaired(p_loss, float(worse), Interval(float(ends[0]), float(ends[1])))

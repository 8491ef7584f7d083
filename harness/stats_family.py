"""A family of gates: many of them, so that one fails by luck now and then."""

from __future__ import annotations

from collections.abc import Sequence

from statsmodels.stats.multitest import multipletests  # type: ignore[import-untyped]  # statsmodels ships no types


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): below alpha, the chance of any false alarm in the family is alpha at most."""
    if not p_values:
        return []
    return [float(p) for p in multipletests(p_values, method="holm")[1]]

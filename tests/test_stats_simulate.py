"""Operating characteristics: what simulation says of the gates is what their design promises."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom  # type: ignore[import-untyped]  # scipy ships no types

from ci.register import register_cpu_ci
from harness.stats import StatsError
from harness.stats_simulate import Cell, Setting, cell, simulate, unpaired_z, worst

register_cpu_ci(est_time=15, stage="commit")

SMALL = Setting(items=(200,), flip_rates=(0.0, 0.05), runs=4000)


def promises(setting: Setting, cells: list[Cell]) -> None:
    """False alarms and wrong passes at or below alpha, losses found at or above the power: within noise."""
    noise = 3.5 * np.sqrt(0.2 * 0.8 / setting.runs)
    for each in cells:
        assert each.healthy.failed <= setting.alpha + 1.5 * noise * 0.5
        assert each.worse.failed >= setting.power - noise
        assert each.worse.passed <= setting.alpha + 1.5 * noise * 0.5
        assert each.healthy.sequential_failed <= setting.alpha + 1.5 * noise * 0.5
        assert each.worse.sequential_passed <= setting.alpha + 1.5 * noise * 0.5
        assert each.healthy.sequential_items < each.n
        for shares in (each.healthy, each.worse):
            assert 1 == pytest.approx(shares.passed + shares.failed + shares.inconclusive)
            assert sorted(shares.threshold_failed, reverse=True) == list(shares.threshold_failed)  # retries hide


def test_promises_of_a_small_set() -> None:
    """200 items, no flips and many."""
    cells = list(simulate(SMALL))
    promises(SMALL, cells)
    assert (max(each.healthy.failed for each in cells), min(each.worse.failed for each in cells)) == worst(cells)


@pytest.mark.slow
def test_promises_of_all_sizes() -> None:
    """200, 500 and 1,319 items at flip rates of 0, 1, 3.4 and 5 %."""
    setting = Setting(runs=3000, seed=7)
    promises(setting, list(simulate(setting)))


def test_published_threshold() -> None:
    """Accuracy .9384, threshold .935, 1,299 items, flips 3.4 %: 17 % of unchanged runs fail, 3 % after a retry."""
    setting = Setting(items=(1299,), flip_rates=(0.034,), runs=8000, accuracy=0.9384, slack=0.0034, margin=0.02)
    first, second, _ = cell(setting, 1299, 0.034).healthy.threshold_failed
    assert (0.17, 0.03) == pytest.approx((first, second), abs=0.012)


def test_a_seed_repeats_and_cells_stand_alone() -> None:
    """The same seed gives the same cell, alone or in a table; another seed gives another."""
    setting = Setting(items=(200,), flip_rates=(0.034,), runs=200)
    table = list(simulate(Setting(items=(60, 200), flip_rates=(0.0, 0.034), runs=200)))
    assert cell(setting, 200, 0.034) == table[-1]
    assert cell(Setting(runs=200, seed=1), 200, 0.034) != table[-1]


def test_a_fixed_margin_is_kept() -> None:
    """With a margin smaller than what can be seen most healthy runs are inconclusive, and no more of them fail."""
    found = cell(Setting(runs=1000, margin=0.005), 200, 0.05)
    assert 0.005 == found.margin
    assert found.healthy.inconclusive > 0.8
    assert found.healthy.failed <= 0.05


def test_threshold_without_flips_never_varies() -> None:
    """An engine that always answers the same either fails always or never."""
    found = cell(Setting(runs=500), 500, 0.0)
    assert (0.0, 0.0, 0.0) == found.healthy.threshold_failed
    expected = float(binom.sf(4, 470, found.loss * 500 / 470))
    assert expected == pytest.approx(found.worse.threshold_failed[0], abs=0.07)


def test_unpaired_z() -> None:
    """The pooled statistic, zero for equal scores at the ceiling too."""
    z = unpaired_z(np.array([1224, 1299]), np.array([1214, 1299]), 1299)
    assert [-0.82, 0.0] == pytest.approx(z.tolist(), abs=0.01)


def test_impossible_settings_are_refused() -> None:
    """A set on which no loss can be shown, and an accuracy that leaves no sure items."""
    with pytest.raises(StatsError, match="a loss of any size; take more items"):
        list(simulate(Setting(items=(4,), flip_rates=(0.0,))))
    with pytest.raises(StatsError, match="take more items"):
        list(simulate(Setting(items=(200,), flip_rates=(0.1,), accuracy=0.94)))

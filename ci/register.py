"""Markers at the top of a test file: where in CI it runs, and for how long. They do nothing; CI reads them unexecuted.

    from ci.register import register_cpu_ci, register_gpu_ci

    register_cpu_ci(est_time=20, stage="commit")
    register_gpu_ci(est_time=300, stage="commit", runner="2-gpu-h100")

Only literals, only at the top level, one call for each runner. `ci.registry` reads them; docs/ci.md explains them.
"""

from __future__ import annotations

from collections.abc import Mapping


def register_gpu_ci(
    *,
    est_time: float,
    stage: str,
    runner: str,
    nightly: bool = False,
    disabled: Mapping[str, str] | str | None = None,
    gate: bool = False,
    min_tests: int = 1,
) -> None:
    """The file runs on this GPU runner, for about `est_time` seconds.

    A gate is never retried. Fewer than `min_tests` executed tests are a failure. `disabled` is a mapping with the keys
    `reason`, `issue` (a link) and `until` (the date from which it counts no more), or one string that holds them.
    """


def register_cpu_ci(
    *,
    est_time: float,
    stage: str,
    nightly: bool = False,
    disabled: Mapping[str, str] | str | None = None,
    runner: str = "ubuntu-latest",
    gate: bool = False,
    min_tests: int = 1,
) -> None:
    """The file runs on this runner without a GPU; the rest as for `register_gpu_ci`."""

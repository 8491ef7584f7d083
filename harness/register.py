"""Markers at the top of a test file: where in CI it runs, and for how long. CI reads them unexecuted.

    from harness.register import register_cpu_ci, register_gpu_ci

    register_cpu_ci(est_time=20, stage="commit")
    register_gpu_ci(est_time=300, stage="commit", runner="2-gpu-h100")

Only literals, only at the top level, one call for each runner. `ci.registry` reads them; docs/ci.md explains them.
They do one thing: in `python FILE -f` the first one runs the tests of a file that has no `__main__` guard.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec

RUNS = "ci.direct"  # runs a file that was started directly; nothing else here needs it
Arguments = ParamSpec("Arguments")


def _runs_what_was_started(marker: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """The marker; in the file that Python was started with it runs the tests of that file, and exits."""

    @functools.wraps(marker)
    def called(*args: Arguments.args, **keywords: Arguments.kwargs) -> None:
        marker(*args, **keywords)
        caller = sys._getframe(1).f_globals  # noqa: SLF001  # every test file pays for it, and this costs least
        if caller["__name__"] != "__main__" or "__file__" not in caller:
            return
        code = importlib.import_module(RUNS).run(Path(caller["__file__"]), sys.argv[1:])
        if code is not None:
            sys.exit(code)

    return called


@_runs_what_was_started
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


@_runs_what_was_started
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

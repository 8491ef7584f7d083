"""What is wrong with the registrations of a tree, by file and line."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ci import runners as runner_table
from ci.plan import Timings
from ci.registry import Problem, Registry
from ci.runners import Runners

ESTIMATE_FACTOR = 3.0  # that an estimate may be wrong by
ESTIMATE_SECONDS = 15.0  # that never matter: a process takes that long to start on a busy machine


def lint(
    registry: Registry,
    runners: Runners,
    today: dt.date,
    *,
    require: bool = False,
    timings: Mapping[str, Timings] = MappingProxyType({}),
) -> list[Problem]:
    """All problems; `require` adds test files without a registration, `timings` estimates that are wrong, by runner."""
    found = [*registry.problems, *runner_table.problems(registry, runners), *_expired(registry, today)]
    found += [*_scripts(registry, runners), *_same_labels(registry, runners)]
    found += _unregistered(registry) if require else ()
    found += _estimates(registry, timings)
    return sorted(found, key=lambda problem: (problem.path.as_posix(), problem.line, problem.value))


def _expired(registry: Registry, today: dt.date) -> Iterator[Problem]:
    """An expired `disabled` counts no more, so the file runs; the line has to go, or be renewed with a reason."""
    for made in registry.registrations:
        if made.disabled is not None and made.disabled.is_expired(today):
            value = f"disabled until {made.disabled.until}: {made.disabled.reason} ({made.disabled.issue})"
            step = "the file runs again: remove disabled, or look at the issue and renew it"
            yield Problem(made.path, made.line, value, f"a date after {today}", step)


def _scripts(registry: Registry, runners: Runners) -> Iterator[Problem]:
    """An install script that is not there would be found out on the runner."""
    used = {made.runner for made in registry.registrations}
    for name in sorted(used & set(runners)):
        script = runners[name].install
        if script is not None and not (registry.root / script).is_file():
            value = f"install = {script!r} of runner {name!r}"
            yield Problem(runners.source, 1, value, f"a file below {registry.root}", "correct the path")


def _same_labels(registry: Registry, runners: Runners) -> Iterator[Problem]:
    """A file on two runners with the same labels: `ci rerun` is told labels, so it would run on one of them twice."""
    seen: dict[tuple[object, ...], str] = {}
    for made in registry.registrations:
        if made.runner not in runners:
            continue
        first = seen.setdefault((made.path, made.stage, runners[made.runner].labels), made.runner)
        if first != made.runner:
            value = f"runner {made.runner!r} beside {first!r}, which has the same labels"
            yield Problem(
                made.path, made.line, value, "runners with labels of their own", "remove one, or split the file"
            )


def _unregistered(registry: Registry) -> Iterator[Problem]:
    for path in registry.unregistered:
        step = "register it, or move it out of these folders"
        yield Problem(path, 1, "no registration", "register_cpu_ci or register_gpu_ci", step)


def _estimates(registry: Registry, timings: Mapping[str, Timings]) -> Iterator[Problem]:
    """An estimate that is far too high or low makes parts that end at different times, and limits that mean nothing."""
    for made in registry.registrations:
        took = timings.get(made.runner, {}).get(made.path.as_posix())
        if took is None or abs(took - made.est_time) <= ESTIMATE_SECONDS:
            continue
        if max(took, made.est_time) > ESTIMATE_FACTOR * min(took, made.est_time):
            value = f"est_time {made.est_time:g} s, and it took {took:.0f} s on {made.runner}"
            yield Problem(made.path, made.line, value, "about what it takes", f"write est_time={max(1, round(took))}")

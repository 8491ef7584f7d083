"""Where a run comes from: versions, commit, seed and the environment variables that are read."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

PACKAGES = ("torch", "hypothesis", "pytest", "pytest-xdist")
SEED_MAX = 2**32 - 1

# Every environment variable that anything below harness/, kvshard_ref/ or suites/ reads, or that rich reads for it.
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "CI": "set in CI: the default seed is then the commit, so that a run can be repeated from it",
        "COLUMNS": "width of the terminal in characters",
        "FORCE_COLOR": "colours even where there is no terminal",
        "NO_COLOR": "no colours",
        "TERM": "kind of terminal; `dumb` shows no live table",
        "HYPOTHESIS_STORAGE_DIRECTORY": "where Hypothesis keeps its caches",
        "PYTEST_ADDOPTS": "options that pytest adds to every run",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "pytest loads no plugins but those named",
        "KVSHARD_FAULT": "faults, by id with commas between, that a server of the reference plants in itself",
        "KVSHARD_FAULT_LIBRARY": "where KVSHARD_FAULT looks them up",
        "PYTHONPATH": "where Python looks for modules first",
        "UCX_NET_DEVICES": "the network devices that NIXL may use",
    }
)


def kvshard_version() -> str:
    """The version of the installed package, or of the clone that this file is in."""
    try:
        return version("kvshard")
    except PackageNotFoundError:
        project = Path(__file__).parent.parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text())["project"]["version"])


def versions() -> dict[str, str]:
    """Versions of Python and of what a run depends on; imports none of it."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def environment() -> dict[str, str]:
    """The environment variables of `ENVIRONMENT` that are set, and every KVSHARD_* one, so that a typo is seen."""
    names = [name for name in sorted(os.environ) if name in ENVIRONMENT or name.startswith("KVSHARD_")]
    return {name: os.environ[name] for name in names}


def commit(folder: Path | None = None) -> str | None:
    """The commit of the git checkout around `folder` (the working directory), `-dirty` when files differ; else None."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def default_seed(at: str | None, *, in_ci: bool) -> tuple[int, str]:
    """A seed and where it comes from: the commit in CI, so that each commit tries other runs and can be repeated."""
    if in_ci and at is not None:
        return int(at[:8], 16), f"from commit {at[:12]}"
    return random.SystemRandom().randint(0, SEED_MAX), "random"


def in_ci() -> bool:
    """Whether this process runs in CI."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")

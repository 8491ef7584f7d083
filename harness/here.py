"""The working directory, as a user sees it: modules in it can be imported, paths below it are short."""

from __future__ import annotations

import sys
from pathlib import Path


def importable() -> None:
    """A console script does not see the modules of the working directory; users expect it to, as with `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def short(path: Path) -> str:
    """A path as it is typed here: relative when it lies below the working directory."""
    full = path.resolve()
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else str(full)

"""Libraries that a transport needs and this project does not require."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType


class MissingLibraryError(ImportError):
    """The library is not installed here, or cannot be loaded; the text has the command that installs it."""


def load(transport: str, modules: Sequence[str], install: str) -> ModuleType:
    """The first of `modules` that is installed. Raises MissingLibraryError.

    Loaded when a transport is made and not when its file is imported: the libraries are optional, and some start
    threads, which a process that still forks must not have.
    """
    for name in modules:
        if _installed(name):
            try:
                return importlib.import_module(name)
            except ImportError as error:
                raise MissingLibraryError(
                    f"{transport}: {name} cannot be loaded ({error}); install what it needs: {install}"
                ) from error
    raise MissingLibraryError(f"{transport}: none of {', '.join(modules)} is installed; install it: {install}")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # finding a submodule loads its package, which may be a shell without its content
        return False

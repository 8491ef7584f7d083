"""Makes one seed draw the same in every process.

Hypothesis prefers constants that it finds in the source of the modules that happen to be loaded. So a draw depends on
what else a process has imported, and a seed would repeat a run only with the same jobs, the same selection and the same
source of the engine. There is no setting against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants


@contextmanager
def without_source_constants() -> Iterator[None]:
    """Draws inside of it depend on the seed only. Hypothesis caches what it may draw: emptied at both ends."""
    with mock.patch.object(providers, "_get_local_constants", Constants):
        providers.CONSTANTS_CACHE.cache.clear()
        try:
            yield
        finally:
            providers.CONSTANTS_CACHE.cache.clear()

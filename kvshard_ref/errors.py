"""Errors of the reference: misuse (the caller is wrong) and refusal (the caller may try again later)."""

from __future__ import annotations


class MisuseError(ValueError):
    """A call that breaks the contract. The text names the value, what was expected and what to do; nothing changed."""


class GeometryError(MisuseError):
    """A size, count or index that cannot describe a placement, a pool or a location."""


class UnalignedError(MisuseError):
    """A position that must be a multiple of page_size (or the prompt's end) is not."""


class DoubleFreeError(MisuseError):
    """A page was freed that is free already, or named twice in one free."""


class ForeignPageError(MisuseError):
    """A page id outside the pool, or one of the reserved pages 0..N-1."""


class UnbalancedLockError(MisuseError):
    """A node was unlocked more often than it was locked."""


class CyclicOrderError(MisuseError):
    """The owners of a chain's pages do not go round the ranks from the rotation base."""


class UnknownRequestError(MisuseError):
    """No live request has this name."""


class DuplicateRequestError(MisuseError):
    """A live request has this name already, or one batch names a request twice."""


class ScratchOverflowError(MisuseError):
    """A batch was planned that does not fit the scratch slot; admission should have refused it."""


class DoubleBeginError(MisuseError):
    """A batch was begun while another one is open."""


class OutsideBatchError(MisuseError):
    """A scratch slot was read or written outside begin..end."""


class LayerOrderError(MisuseError):
    """Layers were not gathered or read in ascending order."""


class RefusedError(Exception):
    """A legal request that cannot be served now; the state is unchanged. `why` gives the numbers that decided it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

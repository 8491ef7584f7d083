"""Ways: options of the reference's address that are no part of a config."""

from __future__ import annotations

import msgspec


class Ways(msgspec.Struct, frozen=True):
    """How the reference does what it may do in several ways; see WorkerSpec."""

    padding: str = "tight"
    split: str = "interleave"

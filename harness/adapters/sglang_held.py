"""A live request of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Held:
    """A live request: sglang's own object, and what the contract adds to it."""

    req: Any
    tokens: int  # of the prompt
    cached: int  # when it was opened
    from_host: int = 0  # of them
    lock: Any = None  # from its open to its admission; then the request has its own
    host_lock: Any = None  # the same, on the copies
    admitted: bool = False
    forward: int = 0  # the last one that it was part of, as the rank counts them

    @property
    def computed(self) -> int:
        """Tokens whose rows exist."""
        return int(self.req.prefix_len) if self.admitted else self.cached

    @property
    def left(self) -> int:
        """Tokens that are not computed yet."""
        return self.tokens - self.computed

    @property
    def half_done(self) -> bool:
        """Whether it is between two chunks: what sglang's scheduler calls its chunked request."""
        return self.admitted and self.left > 0

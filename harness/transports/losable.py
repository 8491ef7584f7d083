"""Losable: an end whose connection can be cut on purpose, over any transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from harness.transports.end import FixedTicket
from kvshard_ref.transport import FAILED, Block, PeerLostError, Ticket, Transport


class Losable:
    """The end itself until `close`; from then on all its peers are lost to it, and it to them."""

    def __init__(self, end: Transport) -> None:
        self.name = end.name
        self.settle_seconds: float = getattr(end, "settle_seconds", 0.0)
        """How long after its end a peer may not be known to be lost."""
        self._end = end
        self._peers: set[str] = set()
        self._cut = False

    def register(self, regions: Mapping[str, torch.Tensor]) -> None:
        """See Transport."""
        self._end.register(regions)

    def connect(self, peer: str) -> None:
        """Raises PeerLostError."""
        self._check(peer)
        self._end.connect(peer)
        self._peers.add(peer)

    def write(self, peer: str, blocks: Sequence[Block]) -> Ticket:
        """See Transport."""
        return FixedTicket(FAILED, f"{self.name!r} is cut off") if self._cut else self._end.write(peer, blocks)

    def landed(self, pages: Sequence[int]) -> None:
        """See Transport."""
        self._end.landed(pages)

    def notify(self, peer: str, message: bytes) -> None:
        """Raises PeerLostError."""
        self._check(peer)
        self._end.notify(peer, message)

    def messages(self) -> list[tuple[str, bytes]]:
        """Nothing once it is cut off."""
        return [] if self._cut else self._end.messages()

    def lost(self) -> set[str]:
        """All peers once it is cut off."""
        return set(self._peers) if self._cut else self._end.lost()

    def close(self) -> None:
        """Cut the connection; writes that are under way fail or have landed. May be called again."""
        if not self._cut:
            self._cut = True
            self._end.close()

    def _check(self, peer: str) -> None:
        if self._cut:
            raise PeerLostError(f"{self.name!r} is cut off and does not reach {peer!r}")

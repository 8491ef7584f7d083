"""Staged: an end whose rows are on a GPU, over a transport that only knows memory of the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvshard_ref.transport import Block, Ticket, Transport


class Staged:
    """Rows leave and arrive through a copy of the regions on the CPU.

    A write takes the pages into the copy first; what a peer writes stays in the copy until `landed` takes it out.
    """

    def __init__(self, end: Transport) -> None:
        self.name = end.name
        self._end = end
        self._regions: dict[str, torch.Tensor] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def register(self, regions: Mapping[str, torch.Tensor]) -> None:
        """See Transport; regions on any device."""
        copies = {name: torch.zeros_like(pages, device="cpu") for name, pages in regions.items()}
        self._end.register(copies)
        self._regions.update(regions)
        self._copies.update(copies)

    def connect(self, peer: str) -> None:
        """Raises PeerLostError."""
        self._end.connect(peer)

    def write(self, peer: str, blocks: Sequence[Block]) -> Ticket:
        """See Transport; waits until the pages are on the CPU."""
        for region, page, _, count in blocks:
            if region in self._regions:  # what is wrong with a block is the transport's to say
                self._copies[region][page : page + count].copy_(self._regions[region][page : page + count])
        return self._end.write(peer, blocks)

    def landed(self, pages: Sequence[int]) -> None:
        """See Transport; one copy of all the pages, in the order of the work on the regions' device."""
        for name, region in self._regions.items():
            at = torch.tensor(pages, dtype=torch.int64)
            region[at.to(region.device)] = self._copies[name][at].to(region.device)

    def notify(self, peer: str, message: bytes) -> None:
        """Raises PeerLostError."""
        self._end.notify(peer, message)

    def messages(self) -> list[tuple[str, bytes]]:
        """See Transport."""
        return self._end.messages()

    def lost(self) -> set[str]:
        """See Transport."""
        return self._end.lost()

    def close(self) -> None:
        """See Transport."""
        self._end.close()

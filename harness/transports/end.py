"""WireEnd: what the transports of this folder share. Subclasses bring the write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.transports.book import AddressBook
from harness.transports.regions import Place, Regions
from harness.transports.wire import Link, Meta, Wire


class FixedTicket:
    """A write whose end is known from the start; `why` says what is wrong with a failed one."""

    def __init__(self, outcome: str, why: str = "") -> None:
        self.outcome = outcome
        self.why = why

    def poll(self) -> str:
        """DONE or FAILED."""
        return self.outcome


class WireEnd:
    """One end with a wire for messages; see kvshard_ref.transport.Transport for what the methods promise.

    `book` is a folder that the processes share. Not for use by several threads.
    """

    settle_seconds = 0.0
    """How long after the end of the wire something written can still land; a peer is `lost` only then."""

    def __init__(self, name: str, book: Path) -> None:
        self.name = name
        self.regions = Regions()
        self.wire = Wire(name, AddressBook(book), self)
        self.wire.set_card(self.card())

    def card(self) -> Meta:
        """What a peer must know about this end."""
        return {"regions": {name: list(place) for name, place in self.regions.places().items()}}

    def register(self, regions: Mapping[str, torch.Tensor]) -> None:
        """Raises MisuseError when a tensor is not contiguous [pages, elements] on the CPU, or its name is known."""
        self.regions.add(regions)
        self.enrol([self.regions.places()[name] for name in regions])
        self.wire.set_card(self.card())

    def enrol(self, places: Sequence[Place]) -> None:
        """Tell a library about new regions."""

    def connect(self, peer: str) -> None:
        """Raises PeerLostError."""
        self.wire.connect(peer)

    def landed(self, pages: Sequence[int]) -> None:
        """Nothing: peers write to the regions themselves."""

    def notify(self, peer: str, message: bytes) -> None:
        """Raises PeerLostError."""
        self.wire.notify(peer, message)

    def messages(self) -> list[tuple[str, bytes]]:
        """(peer, message)."""
        return self.wire.messages()

    def lost(self) -> set[str]:
        """Peers that are gone."""
        return self.wire.lost(self.settle_seconds)

    def close(self) -> None:
        """Leave; queued messages get a moment to go out."""
        self.wire.close()

    def body(self, link: Link, meta: Meta, size: int) -> Iterable[memoryview]:
        """Frames of other kinds are not for this end: their body is dropped."""
        return ()

    def arrived(self, link: Link, meta: Meta) -> None:
        """And nothing follows."""


def places_of(link: Link) -> dict[str, Place]:
    """The regions at the other end of a link."""
    regions: dict[str, Any] = link.card["regions"]
    return {name: Place(*place) for name, place in regions.items()}

"""Regions: the memory that one end offers its peers, and the bytes that a list of blocks means on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kvshard_ref.errors import MisuseError
from kvshard_ref.transport import Block


class Place(NamedTuple):
    """A region as a peer sees it: page count, bytes of a page, and the address of page 0 in its owner's memory."""

    pages: int
    page_bytes: int
    address: int


class Span(NamedTuple):
    """One contiguous piece of a write: `size` bytes from byte `start` of the own region to the peer's address."""

    region: str
    start: int
    size: int
    src_address: int
    dst_address: int


class OutOfRegionError(ValueError):
    """A block leaves a region, or the two sides do not have the same pages; the text names the block and the region."""


class Regions:
    """The registered tensors of one end. They are held, so their memory stays in place as long as this object lives."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._views: dict[str, memoryview] = {}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors [pages, elements of a page]; MisuseError when one is not contiguous, not on the CPU or known."""
        for name, tensor in tensors.items():
            what = f"region {name!r}: {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            if tensor.device.type != "cpu":
                raise MisuseError(f"{what}, expected memory of the CPU; this transport reads and writes nothing else")
            if tensor.dim() != 2 or not tensor.is_contiguous():
                raise MisuseError(
                    f"{what} with strides {tensor.stride()}, expected a contiguous [pages, elements of a page]; "
                    "register the pool's own page view, a copy would not be the pages"
                )
            if name in self._tensors:
                raise MisuseError(f"{what} is registered already, expected a name once; register new names only")
        for name, tensor in tensors.items():
            self._tensors[name] = tensor
            self._views[name] = tensor.view(torch.uint8).reshape(-1).numpy().data

    def places(self) -> dict[str, Place]:
        """What the peers are told: every region by name."""
        return {
            name: Place(tensor.shape[0], tensor.shape[1] * tensor.element_size(), tensor.data_ptr())
            for name, tensor in self._tensors.items()
        }

    def bytes_at(self, region: str, start: int, size: int) -> memoryview:
        """The memory of a region, from byte `start` on; writable."""
        return self._views[region][start : start + size]

    def pages_at(self, region: str, page: int, count: int, size_limit: int) -> memoryview:
        """The memory of `count` pages a peer wants to write, at most `size_limit` bytes; OutOfRegionError."""
        place = _within(self.places(), region, page, count, "destination")
        size = count * place.page_bytes
        if size > size_limit:
            raise OutOfRegionError(f"{count} pages of {region!r} take {size} bytes, expected {size_limit} that came")
        return self.bytes_at(region, page * place.page_bytes, size)

    def spans(self, blocks: Sequence[Block], peer: Mapping[str, Place]) -> list[Span]:
        """The byte ranges of the blocks, in their order; OutOfRegionError when any does not fit either side."""
        own, spans = self.places(), []
        for region, src_page, dst_page, count in blocks:
            source = _within(own, region, src_page, count, "source")
            target = _within(peer, region, dst_page, count, "destination")
            if source.page_bytes != target.page_bytes:
                raise OutOfRegionError(
                    f"region {region!r}: a page has {source.page_bytes} bytes here and {target.page_bytes} at the "
                    "peer, expected the same"
                )
            size = source.page_bytes
            start, reached = src_page * size, target.address + dst_page * size
            spans.append(Span(region, start, count * size, source.address + start, reached))
        return spans


def _within(places: Mapping[str, Place], region: str, page: int, count: int, side: str) -> Place:
    place = places.get(region)
    if place is None:
        raise OutOfRegionError(f"the {side} has no region {region!r}, expected one of {sorted(places)}")
    if page < 0 or count < 1 or page + count > place.pages:
        raise OutOfRegionError(
            f"{side} pages {page}..{page + count - 1} of region {region!r}, expected pages 0..{place.pages - 1}"
        )
    return place

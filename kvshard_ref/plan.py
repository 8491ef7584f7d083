"""Which scratch page each page of a prefill batch gets, and which pages a rank sends.

On page ids, which are plain ints here: owner = page mod N, local page = page div N (see placement).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvshard_ref.checks import one_of
from kvshard_ref.errors import CyclicOrderError, ForeignPageError, ScratchOverflowError
from kvshard_ref.placement import Placement
from kvshard_ref.scratch import ScratchSize

PADDINGS = ("tight", "per_request")
Pages = Sequence[Sequence[int]]
"""Page ids per request, by position."""


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The scratch pages of one batch (sglang 0.5.23, mem_cache/page_interleave_pool.py).

    With `block` pages per rank the scratch pages of a slot are::

        [owner*block, (owner+1)*block)           prefix pages of that owner, by local page, then padding
        [chunk_first, chunk_first+chunk pages)   chunk pages in batch order
        [trash_page, trash_page+1)               everything else

    All ranks agree on everything but `send_pages`.
    """

    block: int
    """Pages that each rank sends."""
    slots: dict[int, int]
    """Scratch page of each page id in the batch; any other page belongs to `trash_page`."""
    send_pages: list[int]
    """This rank's local pages in ascending order, padded with local page 0 up to `block`."""
    chunk_first: int
    trash_page: int


def block_pages(prefixes: Pages, placement: Placement, padding: str) -> int:
    """Pages that every rank sends for these prefixes, padding included; 0 without any prefix page.

    "per_request" adds up ceil(pages / N) over the requests, as sglang 0.5.23 does: a prefix of one page costs N.
    "tight" is the most distinct pages any owner has: a page that requests share counts once.
    """
    return _block(prefixes, _pages_by_owner(prefixes, placement), padding)


def plan_gather(
    placement: Placement, rank: int, prefixes: Pages, chunks: Pages, scratch: ScratchSize, padding: str = "tight"
) -> GatherPlan:
    """Lay out one batch.

    Prefix pages that requests share get one scratch page; chunk pages are fresh and never shared.
    Raises ScratchOverflowError when a region is too small, CyclicOrderError when the owners of a prefix do not go
    round the ranks, ForeignPageError for a reserved page or a chunk page that is in the batch twice.
    """
    for request, prefix in enumerate(prefixes):
        _check_cyclic(request, prefix, placement)
    owned = _pages_by_owner(prefixes, placement)
    block = _block(prefixes, owned, padding)
    fresh = [page for chunk in chunks for page in chunk]
    _check_fit("prefix", placement.shards * block, scratch.prefix_pages)
    _check_fit("chunk", len(fresh), scratch.chunk_pages)

    slots = {page: owner * block + index for owner, pages in enumerate(owned) for index, page in enumerate(pages)}
    if len({*fresh, *slots}) < len(fresh) + len(slots):
        repeated = sorted(page for page, times in Counter([*fresh, *slots]).items() if times > 1)
        raise ForeignPageError(f"plan: chunk pages {repeated} are in the batch twice, expected pages fresh from a draw")
    slots.update(zip(fresh, range(scratch.prefix_pages, scratch.trash_page), strict=False))
    if slots and min(slots) < placement.shards:
        raise ForeignPageError(
            f"plan: page {min(slots)} is in the batch, expected none below {placement.shards}: never draw reserved ones"
        )
    send_pages = [page // placement.shards for page in owned[rank]]
    send_pages += [0] * (block - len(send_pages))
    return GatherPlan(block, slots, send_pages, scratch.prefix_pages, scratch.trash_page)


def _pages_by_owner(prefixes: Pages, placement: Placement) -> list[list[int]]:
    """Distinct pages of each owner, ascending: within one owner page ids and local pages have the same order."""
    owned: list[list[int]] = [[] for _ in range(placement.shards)]
    for page in sorted(set().union(*prefixes)):
        owned[page % placement.shards].append(page)
    return owned


def _block(prefixes: Pages, owned: Sequence[Sequence[int]], padding: str) -> int:
    one_of("padding", padding, PADDINGS)
    if padding == "per_request":
        return sum(-(-len(prefix) // len(owned)) for prefix in prefixes)
    return max(map(len, owned))


def _check_cyclic(request: int, prefix: Sequence[int], placement: Placement) -> None:
    # per_request padding counts ceil(pages / N) per owner, which only holds for a rotation without a jump
    shards = placement.shards
    for position, (page, before) in enumerate(zip(prefix[1:], prefix, strict=False), start=1):
        if (page - before) % shards != 1 % shards:
            raise CyclicOrderError(
                f"plan: prefix page {position} of the batch's request {request} is page {page} of owner "
                f"{page % shards}, expected owner {(before + 1) % shards}: the owners of a chain must be cyclic; "
                "chains with different rotation bases were joined, decline that insert"
            )


def _check_fit(region: str, pages: int, limit: int) -> None:
    if pages > limit:
        raise ScratchOverflowError(
            f"plan: the batch needs {pages} pages of the {region} region of scratch, which has {limit}; "
            "admit less per batch or size the scratch for more"
        )

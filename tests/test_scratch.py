from __future__ import annotations

import pytest
import torch

from ci.register import register_cpu_ci
from kvshard_ref.components import Component, total_row_bytes
from kvshard_ref.errors import GeometryError
from kvshard_ref.placement import Placement
from kvshard_ref.scratch import ScratchSize

register_cpu_ci(est_time=10, stage="commit")

MLA_TINY = (Component("kv", 24, torch.bfloat16),)
GQA = (Component("k", 64 * 128, torch.bfloat16), Component("v", 64 * 128, torch.bfloat16))
DSA = (
    Component("kv", 576, torch.float8_e4m3fn),
    Component("index_keys", 128, torch.float8_e4m3fn),
    Component("index_scales", 1, torch.float32),
)
MLA = (Component("kv", 512 + 64, torch.bfloat16),)


@pytest.mark.parametrize(
    ("components", "row_bytes"),
    [(MLA_TINY, 48), (GQA, 32768), (DSA, 708), (MLA, 1152)],
    ids=["tiny", "gqa", "dsa", "mla"],
)
def test_row_bytes(components: tuple[Component, ...], row_bytes: int) -> None:
    """A token's bytes in one layer follow from the components."""
    assert total_row_bytes(components) == row_bytes


@pytest.mark.parametrize(
    ("components", "shards", "page_size", "context", "chunk", "rows", "bytes_two_slots"),
    [
        (MLA_TINY, 4, 16, 4096, 256, 33_040, 3_171_840),
        (MLA_TINY, 4, 16, 4097, 33, 33_344, 3_201_024),
        (GQA, 4, 16, 65_536, 4096, 528_400, 34_629_222_400),
        (DSA, 4, 64, 131_072, 8192, 1_056_832, 1_496_474_112),
        (DSA, 8, 64, 131_072, 8192, 1_056_832, 1_496_474_112),
        (DSA, 4, 64, 202_752, 8192, 1_630_272, 2_308_465_152),
        (DSA, 4, 64, 1_048_576, 8192, 8_396_864, 11_889_959_424),
        (MLA, 8, 64, 65_536, 8192, 532_544, 1_226_981_376),
    ],
)
def test_scratch_of_known_workers(
    components: tuple[Component, ...],
    shards: int,
    page_size: int,
    context: int,
    chunk: int,
    rows: int,
    bytes_two_slots: int,
) -> None:
    """Rows and bytes of a scratch slot come out as sglang 0.5.23 computes them, and double with an MTP runner."""
    size = ScratchSize.sized(Placement(shards, page_size), context, chunk)
    row_bytes = total_row_bytes(components)
    assert (size.rows, size.bytes(row_bytes)) == (rows, bytes_two_slots)
    assert size.bytes(row_bytes, runners=2) == 2 * bytes_two_slots


def test_context_is_aligned_before_it_is_multiplied() -> None:
    """One token beyond a group costs a whole group for each of the contexts."""
    placement = Placement(4, 16)
    exact = ScratchSize.sized(placement, 128, 16, contexts=3)
    beyond = ScratchSize.sized(placement, 129, 16, contexts=3)
    assert (exact.prefix_tokens, beyond.prefix_tokens) == (3 * 128, 3 * 192)


def test_regions_follow_each_other() -> None:
    """Prefix, chunk and trash page fill the slot without a gap."""
    size = ScratchSize(4096, 512, 16)
    assert (size.prefix_pages, size.chunk_pages, size.trash_page, size.rows) == (256, 32, 288, 289 * 16)


@pytest.mark.parametrize(("prefix", "chunk", "page_size"), [(17, 16, 16), (16, 8, 16), (-16, 16, 16), (0, 0, 0)])
def test_ragged_regions_are_refused(prefix: int, chunk: int, page_size: int) -> None:
    """A region that is no whole number of pages is an error that shows the value."""
    with pytest.raises(GeometryError, match="expected"):
        ScratchSize(prefix, chunk, page_size)


@pytest.mark.parametrize(("context", "chunk", "contexts"), [(0, 16, 8), (16, 0, 8), (16, 16, 0)])
def test_empty_budgets_are_refused(context: int, chunk: int, contexts: int) -> None:
    """A budget below one token or one context is an error."""
    with pytest.raises(GeometryError, match="is 0, expected at least 1"):
        ScratchSize.sized(Placement(2, 16), context, chunk, contexts)

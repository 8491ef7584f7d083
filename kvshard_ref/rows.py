"""RowBuffer: the rows of one component in one layer, as they lie in memory."""

from __future__ import annotations

import torch

from kvshard_ref.components import Component, raw


class RowBuffer:
    """`pages` [pages, page_size * width] on one device; a page is contiguous and is moved as it is.

    token-major (scales == 0)   [row 0][row 1] ... [row ps-1]
    page-major  (scales > 0)    [keys of row 0] ... [keys of row ps-1][scales of row 0] ... [scales of row ps-1]

    Page-major as the indexer of sglang 0.5.23, mem_cache/page_interleave_pool.py.
    """

    def __init__(
        self, component: Component, pages: int, page_size: int, device: torch.device | str, *, pinned: bool = False
    ) -> None:
        self.component = component
        self.page_size = page_size
        shape = (pages, page_size * component.width)
        self.pages = torch.zeros(shape, dtype=component.dtype, device=device, pin_memory=pinned)
        self._raw_pages = raw(self.pages)
        # whole pages are moved as the widest words that fit: fewer of them, and no index kernel is wider
        whole = page_size * component.row_bytes % 8 == 0
        self._words = self.pages.view(torch.int64 if whole else torch.uint8)
        # where a row's parts are: one [pages, ps, elements] view for each
        self._keys = keys = component.width - component.scales
        self._parts = [self._raw_pages[:, : page_size * keys].unflatten(1, (page_size, keys))]
        if component.scales:
            self._parts.append(self._raw_pages[:, page_size * keys :].unflatten(1, (page_size, component.scales)))

    @property
    def rows(self) -> torch.Tensor:
        """Rows [pages * page_size, width]; a view when token-major, a copy when page-major."""
        width = self.component.width
        if not self.component.scales:
            return self.pages.view(-1, width)
        return torch.cat(self._parts, dim=2).view(-1, width).view(self.component.dtype)

    def put(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [n, width] at rows [n] (int64)."""
        if not self.component.scales:
            self._raw_pages.view(-1, self.component.width).index_copy_(0, rows, raw(values))
            return
        at = (rows // self.page_size, rows % self.page_size)
        for part, fresh in zip(self._parts, self._split(raw(values)), strict=True):
            part.index_put_(at, fresh)

    def take(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [n, width] at rows [n] (int64), written to `out` when given."""
        if out is None:
            out = self.pages.new_empty(len(rows), self.component.width)
        if not self.component.scales:
            torch.index_select(self._raw_pages.view(-1, self.component.width), 0, rows, out=raw(out))
            return out
        at = (rows // self.page_size, rows % self.page_size)
        for part, target in zip(self._parts, self._split(raw(out)), strict=True):
            target.copy_(part[at])
        return out

    def take_pages(self, pages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Whole pages [n, page_size * width] in the given order (int64 [n]), written to `out` when given."""
        if out is None:
            out = self.pages.new_empty(len(pages), self.pages.shape[1])
        torch.index_select(self._words, 0, pages, out=out.view(self._words.dtype))
        return out

    def put_pages(self, pages: torch.Tensor, values: torch.Tensor) -> None:
        """Write whole pages [n, page_size * width] at pages [n] (int64)."""
        self._words.index_copy_(0, pages, values.view(self._words.dtype))

    def _split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Rows [n, width] as their parts: keys and, when page-major, scales."""
        return [values[:, : self._keys], values[:, self._keys :]] if self.component.scales else [values]

"""A live request and the pages it holds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvshard_ref.node import Node


@dataclass(slots=True, eq=False)
class Request:
    """One prompt between open and finish or abort.

    Positions, in pages::

        [0, cached div ps)              matched at open
        [0, protected)                  in the tree, locked through `node`
        [len(pages), +len(slots))       of these, on the host only: brought back when the request is admitted
        [protected, len(pages))         drawn, owned by this request alone
        [len(pages), pages_total)       promised once admitted, not drawn yet
    """

    name: str
    keys: list[Hashable]
    """One page key per whole page of the prompt."""
    tokens: int
    """Prompt length."""
    pages_total: int
    """Pages of the whole prompt, a partial last one included."""
    node: Node
    base: int | None
    """Rotation base; None until a match or the admission fixes it, never changed afterwards."""
    protected: int
    cached: int
    """Tokens matched at open."""
    computed: int
    """Tokens whose KV exists; page aligned until the prompt's end."""
    pages: list[int] = field(default_factory=list)
    """Device pages by position; page_size * len(pages) covers `computed` once admitted."""
    slots: list[int] = field(default_factory=list)
    """Host pages of the cached part that is on the host only; empty once admitted."""
    admitted: bool = False
    sending: bool = False
    """A transfer may read its pages."""
    ending: str = ""
    """"finish" or "abort", once it has ended while a transfer reads its pages."""


class Extent(NamedTuple):
    """One chunk of a request: tokens [start, end), with `start` page aligned."""

    request: Request
    start: int
    end: int
    prefix_pages: list[int]
    """Pages of [0, start)."""
    chunk_pages: list[int]
    """Pages of [start, end), drawn for this chunk."""

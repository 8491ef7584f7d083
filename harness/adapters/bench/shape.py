"""Shape: what the benchmark moves and how often."""

from __future__ import annotations

import msgspec
import torch

from kvshard_ref.components import Component


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal on all ranks."""

    page_size: int
    """Tokens of a page."""
    width: int
    """bfloat16 elements of a row."""
    prefix_tokens: int
    """Tokens whose rows are gathered, backed up, restored or sent, over all ranks."""
    layers: int
    compute: tuple[tuple[int, int, int], ...]
    """Matrix products of one layer, (m, k) times (k, n), run after the layer's prefix is there."""
    runs: tuple[int, ...]
    """Lengths of runs of consecutive pages in the host tier and at the receiver, 0 for one run of all."""
    repeats: int
    warmup: int = 3

    @property
    def component(self) -> Component:
        """The only one."""
        return Component("kv", self.width, torch.bfloat16)

    @property
    def pages(self) -> int:
        """Of the prefix."""
        return self.prefix_tokens // self.page_size

    @property
    def page_bytes(self) -> int:
        """Of one layer."""
        return self.page_size * self.component.row_bytes

    def check(self, ranks: int) -> str:
        """What is wrong with it; empty when nothing is."""
        group = ranks * self.page_size
        if self.prefix_tokens < group or self.prefix_tokens % group:
            return f"{self.prefix_tokens} prefix tokens, expected a multiple of {ranks} pages of {self.page_size}"
        if self.layers < 4:
            return f"{self.layers} layers, expected at least 4: the first two are the start and not timed"
        if self.repeats < 1:
            return f"{self.repeats} repeats, expected at least 1; 20 for figures to quote"
        return ""


# A latent row of 1,152 bytes, a prefix of 128 Ki tokens, and of a layer the attention's projections of 4,096 tokens.
GPU = Shape(
    page_size=64,
    width=576,
    prefix_tokens=131072,
    layers=16,
    compute=((4096, 7168, 2112), (4096, 1536, 24576), (4096, 16384, 7168)),
    runs=(0, 16, 1),
    repeats=20,
)
CPU = Shape(
    page_size=4, width=8, prefix_tokens=128, layers=4, compute=((16, 16, 16),), runs=(0, 4, 1), repeats=3, warmup=1
)
"""So small that only the working of the command is seen."""

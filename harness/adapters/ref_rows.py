"""Stamps to rows of the reference and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.types import Extend, Rows, Stamps
from kvshard_ref.components import Component

# A row is a few numbers wide, all made from the stamp, so that a row that was copied in part is seen.
# The indexer's last column is its scale, which lies apart from its keys.
COMPONENTS = {
    "kv": Component("kv", 3, torch.int64),
    "index": Component("index", 3, torch.int64, scales=1),
    "draft": Component("draft", 2, torch.int64),
    "draft_index": Component("draft_index", 3, torch.int64, scales=1),
}
COLUMN_SALT = 0x5851F42D4C957F2D
TORN = -1  # what a row reads as whose columns do not belong together


class RowCodec:
    """Column j of a row is its stamp changed by j. Ranks of one process share a codec, which then works once for all.

    It remembers the rows of the last op and the last reads, because all ranks ask for the same ones.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._salts = {
            name: torch.arange(component.width, dtype=torch.int64, device=device) * COLUMN_SALT
            for name, component in COMPONENTS.items()
        }
        self._device = device
        self._encoded: tuple[Extend, dict[str, torch.Tensor]] | None = None
        self._decoded: dict[str, tuple[torch.Tensor, tuple[Stamps, ...]]] = {}

    def encode(self, op: Extend) -> dict[str, torch.Tensor]:
        """The rows of a chunk, per component [layers, tokens, width]."""
        if self._encoded is None or self._encoded[0] is not op:
            rows = {name: self._rows(name, layers) for name, layers in op.rows.items()}
            self._encoded = (op, rows)
        return dict(self._encoded[1])

    def decode(self, reads: dict[str, torch.Tensor]) -> Rows:
        """The stamps of rows, per component [layers][tokens]; a row whose columns disagree is `TORN`."""
        return {name: self._stamps(name, rows) for name, rows in reads.items()}

    def _rows(self, component: str, layers: Sequence[Stamps]) -> torch.Tensor:
        stamps = torch.tensor(layers, dtype=torch.int64, device=self._device)
        return stamps.unsqueeze(-1) ^ self._salts[component]

    def _stamps(self, component: str, rows: torch.Tensor) -> tuple[Stamps, ...]:
        last = self._decoded.get(component)
        if last is not None and torch.equal(last[0], rows):
            return last[1]
        columns = rows ^ self._salts[component]
        whole = (columns == columns[..., :1]).all(dim=-1)
        stamps = tuple(tuple(layer) for layer in torch.where(whole, columns[..., 0], TORN).tolist())
        self._decoded[component] = (rows.clone(), stamps)
        return stamps

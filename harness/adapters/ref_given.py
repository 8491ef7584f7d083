"""GivenModel: in place of a model, rows of chunks come from the caller; what attention reads goes back to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvshard_ref.errors import MisuseError
from kvshard_ref.request import Extent
from kvshard_ref.runner import Runner
from kvshard_ref.spec import WorkerSpec
from kvshard_ref.worker import Chunk


class GivenModel:
    """Chunks bring per component of every runner a tensor [layers, count, width]; a rank uses only its own share."""

    def compute(self, runner: Runner, extents: Sequence[Extent], chunks: Sequence[Chunk]) -> GivenRows:
        """See Model."""
        return GivenRows(runner, extents, chunks)

    def check(self, spec: WorkerSpec, chunk: Chunk) -> None:
        """Raises MisuseError for rows of another shape or dtype than the worker's components have."""
        layers_of = spec.component_layers
        expected = {c.name: (c.dtype, (layers, chunk.count, c.width)) for c, layers in layers_of.items()}
        given = {name: (rows.dtype, tuple(rows.shape)) for name, rows in chunk.rows.items()}
        if given != expected:
            raise MisuseError(
                f"worker: the chunk of request {chunk.name!r} has rows {given}, expected per component {expected}"
            )


class GivenRows:
    """One runner's part in a batch; see Compute."""

    def __init__(self, runner: Runner, extents: Sequence[Extent], chunks: Sequence[Chunk]) -> None:
        self._runner = runner
        self._ends = [extent.end for extent in extents]
        self._shares = {c.name: self._share([each.rows[c.name] for each in chunks]) for c in runner.pool.components}
        self._reads: list[dict[str, torch.Tensor]] = []

    def fresh(self, layer: int) -> dict[str, torch.Tensor]:
        """See Compute."""
        return {name: rows[layer] for name, rows in self._shares.items()}

    def read(self, layer: int, rows: dict[str, torch.Tensor]) -> None:
        """See Compute."""
        self._reads.append(rows)

    def reads(self) -> list[dict[str, torch.Tensor]]:
        """Per request and component the rows [layers, end, width] that were read."""
        whole = {c.name: torch.stack([rows[c.name] for rows in self._reads]) for c in self._runner.pool.components}
        split = {name: rows.split(self._ends, dim=1) for name, rows in whole.items()}
        return [{name: parts[index] for name, parts in split.items()} for index in range(len(self._ends))]

    def _share(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's share [layers, padded, width] of the batch's chunk."""
        batch = rows[0] if len(rows) == 1 else torch.cat(list(rows), dim=1)
        return self._runner.share(batch).to(self._runner.pool.device)

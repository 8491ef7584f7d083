"""A model's part in a prefill batch: what it adds to the cache and what it reads, layer by layer, for one rank's share.

For one request::

    positions            [0 ............ start) [start ............. end)
                         rows in the cache       this chunk: computed here, each rank its share of the tokens
    draft's row at t     needs the target's hidden state at t and the token at t + 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvshard_ref.model import Reading, Rows, TinyModel
from kvshard_ref.request import Extent
from kvshard_ref.runner import Compute, Runner
from kvshard_ref.spec import WorkerSpec
from kvshard_ref.split import padded, places
from kvshard_ref.worker import Chunk

Reduce = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Batch:
    """One batch on its way through the target and the draft."""

    extents: Sequence[Extent]
    tokens: list[Tensor]
    """Per request int64 [1, known]: its prompt, and the token after it once that is known."""
    hidden: list[Tensor] = field(default_factory=list)
    """Per request [1, chunk, width]: the target's last hidden states, after the target has run."""


class ServedModel:
    """The Model of a prefill worker. `tokens_of` gives a request's tokens by its name."""

    def __init__(
        self, model: TinyModel, tokens_of: Callable[[str], Sequence[int]], reduce: Reduce | None = None
    ) -> None:
        self.model = model
        self.batch: Batch | None = None  # the last one
        self.next_token: Callable[[Batch], list[int]] = lambda batch: [-1] * len(batch.extents)
        """Called between target and draft: per request the token after the chunk when it is not of the prompt."""
        self._tokens_of = tokens_of
        self._reduce = reduce

    def check(self, spec: WorkerSpec, chunk: Chunk) -> None:
        """Tokens are known by name: there is nothing to check."""

    def compute(self, runner: Runner, extents: Sequence[Extent], chunks: Sequence[Chunk]) -> Compute:
        """See Model: the target first, its draft after it."""
        device = runner.pool.device
        if runner.pool.components[0].name != "draft_latent":
            tokens = [list(self._tokens_of(extent.request.name)) for extent in extents]
            self.batch = Batch(extents, [torch.tensor([each], device=device) for each in tokens])
            return TargetCompute(self.model, runner, self.batch, self._reduce)
        assert self.batch is not None  # noqa: S101  # the target's runner comes first
        for at, token in enumerate(self.next_token(self.batch)):
            if token >= 0:
                known = self.batch.tokens[at]
                self.batch.tokens[at] = torch.cat([known, known.new_tensor([[token]])], dim=1)
        return DraftCompute(self.model, runner, self.batch)


class _Share:
    """Which tokens of a batch's chunk are this rank's, request by request."""

    def __init__(self, runner: Runner, extents: Sequence[Extent]) -> None:
        counts = [extent.end - extent.start for extent in extents]
        self.count, group = sum(counts), runner.group
        self.padded = padded(self.count, group.size, runner.split)
        self.mine = [list[int]() for _ in extents]  # places in the request's chunk
        firsts = [sum(counts[:at]) for at in range(len(counts))]
        owner = [at for at, count in enumerate(counts) for _ in range(count)]
        for place in places(self.count, group.rank, group.size, runner.split):
            at = owner[place]
            self.mine[at].append(place - firsts[at])

    def pad(self, rows: Tensor) -> Tensor:
        """Rows [mine, width] to [padded, width]."""
        return torch.nn.functional.pad(rows, (0, 0, 0, self.padded - rows.shape[0]))


class TargetCompute:
    """The target's layers over one batch."""

    def __init__(self, model: TinyModel, runner: Runner, batch: Batch, reduce: Reduce | None) -> None:
        self._model, self._runner, self._batch, self._reduce = model, runner, batch, reduce
        self._share = _Share(runner, batch.extents)
        self._positions: list[Tensor] = []
        self._hidden: list[Tensor] = []
        for extent, tokens, mine in zip(batch.extents, batch.tokens, self._share.mine, strict=True):
            at = torch.tensor(mine, dtype=torch.int64, device=tokens.device)
            embedded = model.embed(tokens[:, extent.start : extent.end], tokens[:, : extent.start])
            self._positions.append(at + extent.start)
            self._hidden.append(embedded[:, at])

    def fresh(self, layer: int) -> dict[str, Tensor]:
        """See Compute."""
        parts = [
            self._model.layers[layer].fresh(hidden, positions)
            for hidden, positions in zip(self._hidden, self._positions, strict=True)
        ]
        return _padded(parts, self._share, self._runner)

    def read(self, layer: int, rows: dict[str, Tensor]) -> None:
        """See Compute."""
        latent, index = (rows[c.name].split([e.end for e in self._batch.extents]) for c in self._runner.pool.components)
        for at, (its_latent, its_index) in enumerate(zip(latent, index, strict=True)):
            if len(self._positions[at]):
                reading = Reading(Rows(its_latent[None], its_index[None]))
                hidden, positions = self._hidden[at], self._positions[at]
                self._hidden[at] = self._model.layers[layer].read(hidden, positions, reading, self._reduce)

    def reads(self) -> list[dict[str, Tensor]]:
        """See Compute; here every rank gets the last hidden states of the whole chunk."""
        share = self._share.pad(torch.cat(self._hidden, dim=1)[0])
        whole = self._runner.exchange(share, self._share.count)
        self._batch.hidden = [part[None] for part in whole.split([e.end - e.start for e in self._batch.extents])]
        return [{} for _ in self._batch.extents]


class DraftCompute:
    """The draft's rows over one batch. They need no attention: it has one layer, and nothing reads its output here."""

    def __init__(self, model: TinyModel, runner: Runner, batch: Batch) -> None:
        self._model, self._runner, self._batch = model, runner, batch
        self._share = _Share(runner, batch.extents)

    def fresh(self, layer: int) -> dict[str, Tensor]:
        """See Compute. A chunk whose next token is unknown repeats its last one in its place."""
        parts = []
        for extent, tokens, hidden, mine in zip(
            self._batch.extents, self._batch.tokens, self._batch.hidden, self._share.mine, strict=True
        ):
            following = tokens[:, extent.start + 1 : extent.end + 1]
            if following.shape[1] < extent.end - extent.start:
                following = torch.cat([following, tokens[:, -1:]], dim=1)
            at = torch.tensor(mine, dtype=torch.int64, device=tokens.device)
            embedded = self._model.embed(following, tokens[:, : extent.start + 1])
            inputs = self._model.draft.enter(embedded[:, at], hidden[:, at])
            parts.append(self._model.draft.layer.fresh(inputs, at + extent.start))
        return _padded(parts, self._share, self._runner)

    def read(self, layer: int, rows: dict[str, Tensor]) -> None:
        """See Compute."""

    def reads(self) -> list[dict[str, Tensor]]:
        """See Compute."""
        return [{} for _ in self._batch.extents]


def _padded(parts: Sequence[Rows], share: _Share, runner: Runner) -> dict[str, Tensor]:
    latent, index = (torch.cat([part[at][0] for part in parts]) for at in range(2))
    names = [component.name for component in runner.pool.components]
    return dict(zip(names, (share.pad(latent), share.pad(index)), strict=True))

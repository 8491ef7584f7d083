"""TinyModel: a GLM-style model of 2.2 M parameters: latent attention, an indexer in every layer, one NextN draft layer.

The caller owns the cache. To serve a chunk, layer by layer::

    hidden = model.embed(tokens, before)
    for layer in model.layers:
        fresh = layer.fresh(hidden, positions)                 # to be written, sharded, gathered, ...
        hidden = layer.read(hidden, positions, Reading(rows))  # rows of positions 0, 1, ...: prefix and chunk
    logits = model.logits(hidden)

Training goes through the same two steps, over whole sequences: see `TinyModel.whole` and `Draft.unroll`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvshard_ref.checks import at_least
from kvshard_ref.components import Component
from kvshard_ref.errors import GeometryError

Reduce = Callable[[Tensor], Tensor]
HIDDEN = -1e9  # score of a row that must not be read; finite, so that 0 * log of it is 0
FP8_MAX = 448.0
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Sizes of the model; widths in elements."""

    vocab: int = 260
    width: int = 192
    layers: int = 4
    gate_width: int = 512
    heads: int = 4
    query_rank: int = 96
    nope_width: int = 32
    rope_width: int = 16
    value_width: int = 32
    latent_width: int = 48
    index_heads: int = 4
    index_width: int = 32
    top_k: int = 64
    draft_steps: int = 3
    embedding_context: int = 8
    """Tokens that one embedding mixes, its own the last: so even the rows of layer 0 know the bytes before them."""
    rope_base: float = 10000.0
    quantised_index: bool = False
    """Index keys as 8 bit floats with one float32 scale per token; for serving, it has no gradient."""

    def __post_init__(self) -> None:
        sizes = {name: size for name, size in asdict(self).items() if type(size) is int}
        at_least(1, "ModelGeometry", **sizes)
        at_least(self.rope_width, "ModelGeometry, rope_width of an index key", index_width=self.index_width)
        if self.rope_width % 2 or self.rope_base <= 1:
            wrong = f"rope_width is {self.rope_width}, rope_base {self.rope_base}"
            raise GeometryError(f"ModelGeometry: {wrong}, expected an even width and a base above 1")

    def components(self, dtype: torch.dtype, prefix: str = "") -> tuple[Component, Component]:
        """Rows of one layer as the cache stores them: latent with its roped key, index key; `prefix` of their names."""
        latent = Component(f"{prefix}latent", self.latent_width + self.rope_width, dtype)
        if not self.quantised_index:
            return latent, Component(f"{prefix}index", self.index_width, dtype)
        width = self.index_width + SCALE_BYTES
        return latent, Component(f"{prefix}index", width, torch.uint8, scales=SCALE_BYTES)


class Rows(NamedTuple):
    """Rows of one layer for tokens [batch, n]."""

    latent: Tensor
    """[batch, n, latent_width + rope_width]: normalised latent, then the key's part with its position in it."""
    index_key: Tensor
    """[batch, n, index_width]; quantised: uint8 [batch, n, index_width + 4], keys, then the bytes of the scale."""

    def then(self, later: Rows) -> Rows:
        """These rows and the later ones, in one."""
        return Rows(torch.cat([self.latent, later.latent], dim=1), torch.cat([self.index_key, later.index_key], dim=1))


@dataclass(frozen=True, slots=True)
class Reading:
    """What a layer's queries read, and how."""

    rows: Rows
    """Of positions 0, 1, ... in this order; a query reads those up to its own position."""
    own: tuple[Rows, ...] = ()
    """Rows [batch, n] that only the query of the same place sees, for the positions up to its own, its own the last."""
    far: Tensor | None = None
    """bool [batch, n]: queries that may read all; the others read `window` rows. Training only."""
    window: int = 16
    sparse: bool = True
    """Read the top_k rows by index score; otherwise all."""
    losses: list[Tensor] | None = None
    """Training gets a scalar here: how far index scores are from attention."""


def rotate(values: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding of [..., n, even width] at positions int64 [n], halves paired; computed in float32."""
    half = values.shape[-1] // 2
    speeds = base ** (-torch.arange(half, device=values.device, dtype=torch.float32) / half)
    angles = positions[:, None].float() * speeds
    first, second = values.float().split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(values.dtype)


def select(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Mask [..., rows] of the top_k visible rows by score; of equal scores the lower position goes first."""
    if scores.shape[-1] <= top_k:
        return visible.expand(scores.shape)
    scores = scores.masked_fill(~visible, -math.inf)
    least = scores.topk(top_k, dim=-1).values[..., -1:]
    above, level = scores > least, scores == least
    counts = level.cumsum(dim=-1, dtype=torch.int32) + above.sum(dim=-1, keepdim=True)
    return (above | (level & (counts <= top_k))) & visible


def quantise(keys: Tensor) -> Tensor:
    """[..., width] as uint8 [..., width + 4]: 8 bit floats, then the float32 scale that they are multiplied by."""
    scale = keys.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / FP8_MAX
    bits = (keys.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    scale_bytes = scale.flatten().view(torch.uint8).view(*scale.shape[:-1], SCALE_BYTES)  # flat: there may be no key
    return torch.cat([bits, scale_bytes], dim=-1)


def dequantise(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The opposite of `quantise`, in `dtype`."""
    keys = packed[..., :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn).float()
    return (keys * packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)).to(dtype)


class Indexer(nn.Module):
    """Scores rows: sum over heads of weight * relu(query . key). It learns from attention alone."""

    def __init__(self, geometry: ModelGeometry) -> None:
        super().__init__()
        self.geometry = g = geometry
        self.key = nn.Linear(g.width, g.index_width, bias=False)
        self.key_norm = nn.LayerNorm(g.index_width)
        self.query = nn.Linear(g.query_rank, g.index_heads * g.index_width, bias=False)
        self.weight = nn.Linear(g.width, g.index_heads, bias=False)

    def keys(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Index rows for inputs [batch, n, width], as in Rows."""
        keys = self._place(self.key_norm(self.key(inputs.detach())), positions)
        return quantise(keys) if self.geometry.quantised_index else keys

    def scores(self, inputs: Tensor, query_latent: Tensor, positions: Tensor, reading: Reading) -> Tensor:
        """float32 [batch, n, rows + own] for inputs [batch, n, width] and query_latent [batch, n, query_rank]."""
        g = self.geometry
        queries = self.query(query_latent.detach()).unflatten(-1, (g.index_heads, g.index_width)).transpose(1, 2)
        keys, *own = (self._plain(each.index_key, queries.dtype) for each in (reading.rows, *reading.own))
        products = _products(self._place(queries, positions), keys, own)
        weights = self.weight(inputs.detach()).transpose(1, 2)[..., None]
        scores: Tensor = (products.relu() * weights).sum(dim=1).float()
        return scores / math.sqrt(g.index_width * g.index_heads)

    def _place(self, values: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first rope_width elements."""
        width, base = self.geometry.rope_width, self.geometry.rope_base
        return torch.cat([rotate(values[..., :width], positions, base), values[..., width:]], dim=-1)

    def _plain(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantise(index, dtype) if self.geometry.quantised_index else index


class Attention(nn.Module):
    """Latent attention in absorbed form: queries are taken into the latent space, so that rows are read as they lie."""

    def __init__(self, geometry: ModelGeometry) -> None:
        super().__init__()
        self.geometry = g = geometry
        self.query_down = nn.Linear(g.width, g.query_rank, bias=False)
        self.query_norm = nn.RMSNorm(g.query_rank, eps=1e-6)
        self.query_up = nn.Linear(g.query_rank, g.heads * (g.nope_width + g.rope_width), bias=False)
        self.row_down = nn.Linear(g.width, g.latent_width + g.rope_width, bias=False)
        self.latent_norm = nn.RMSNorm(g.latent_width, eps=1e-6)
        self.key_up = nn.Parameter(torch.empty(g.heads, g.nope_width, g.latent_width))
        self.value_up = nn.Parameter(torch.empty(g.heads, g.latent_width, g.value_width))
        self.out = nn.Linear(g.heads * g.value_width, g.width, bias=False)
        self.indexer = Indexer(g)
        self.scale = 1 / math.sqrt(g.nope_width + g.rope_width)

    def fresh(self, inputs: Tensor, positions: Tensor) -> Rows:
        """Rows for inputs [batch, n, width] at positions int64 [n]."""
        g = self.geometry
        latent, rope = self.row_down(inputs).split([g.latent_width, g.rope_width], dim=-1)
        roped = rotate(rope, positions, g.rope_base)
        return Rows(torch.cat([self.latent_norm(latent), roped], dim=-1), self.indexer.keys(inputs, positions))

    def forward(self, inputs: Tensor, positions: Tensor, reading: Reading) -> Tensor:
        """[batch, n, width] for inputs [batch, n, width] at positions int64 [n]."""
        g = self.geometry
        query_latent = self.query_norm(self.query_down(inputs))
        rows = reading.rows.latent
        queries = self._queries(query_latent, positions)
        logits = _products(queries, rows, [each.latent for each in reading.own]).float() * self.scale
        visible, near = self._masks(positions, reading)
        if reading.sparse or reading.losses is not None:
            scores = self.indexer.scores(inputs, query_latent, positions, reading)
            if reading.losses is not None:
                reading.losses.append(_divergence(logits, scores, visible, reading.far))
            if reading.sparse:
                visible = select(scores.detach(), visible, g.top_k)
        if reading.far is not None:
            visible = torch.where(reading.far[..., None], visible, near)
        shares = logits.masked_fill(~visible[:, None], -math.inf).softmax(dim=-1).to(rows.dtype)
        latent = shares[..., : rows.shape[1]] @ rows[:, None, :, : g.latent_width]
        for at, each in enumerate(reading.own, start=rows.shape[1]):
            latent = latent + shares[..., at : at + 1] * each.latent[:, None, :, : g.latent_width]
        out: Tensor = self.out(torch.einsum("bhnl,hlv->bnhv", latent, self.value_up).flatten(2))
        return out

    def _queries(self, query_latent: Tensor, positions: Tensor) -> Tensor:
        """[batch, heads, n, latent_width + rope_width]."""
        g = self.geometry
        queries = self.query_up(query_latent).unflatten(-1, (g.heads, g.nope_width + g.rope_width)).transpose(1, 2)
        nope, rope = queries.split([g.nope_width, g.rope_width], dim=-1)
        roped = rotate(rope, positions, g.rope_base)
        return torch.cat([torch.einsum("bhnd,hdl->bhnl", nope, self.key_up).to(roped.dtype), roped], dim=-1)

    @staticmethod
    def _masks(positions: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
        """Masks [1, n, rows + own], two of them: the rows up to a query's position, and those of them in its window."""
        at = torch.arange(reading.rows.latent.shape[1], device=positions.device)
        last = (positions - len(reading.own))[:, None]
        own = torch.ones(len(positions), len(reading.own), dtype=torch.bool, device=positions.device)
        visible = torch.cat([at <= last, own], dim=1)
        near = torch.cat([(at <= last) & (at > last - reading.window), own], dim=1)
        return visible[None], near[None]


def _products(queries: Tensor, rows: Tensor, own: list[Tensor]) -> Tensor:
    """[batch, heads, n, rows + own]: queries [batch, heads, n, width] with all rows, and each with its own ones."""
    common = queries @ rows.transpose(1, 2)[:, None]
    apart = [(queries * each[:, None]).sum(dim=-1, keepdim=True) for each in own]
    return torch.cat([common, *apart], dim=-1) if apart else common  # without a copy when serving


def _divergence(logits: Tensor, scores: Tensor, visible: Tensor, far: Tensor | None) -> Tensor:
    """Cross entropy of index scores with attention's shares, averaged over heads; queries that read far only."""
    with torch.no_grad():
        shares = logits.masked_fill(~visible[:, None], -math.inf).softmax(dim=-1).mean(dim=1)
    losses = -(shares * scores.masked_fill(~visible, HIDDEN).log_softmax(dim=-1)).sum(dim=-1)
    return losses.mean() if far is None else (losses * far).sum() / far.sum().clamp(min=1)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind its norm."""

    def __init__(self, geometry: ModelGeometry) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(geometry.width, eps=1e-6)
        self.attention = Attention(geometry)
        self.mlp_norm = nn.RMSNorm(geometry.width, eps=1e-6)
        self.gate_up = nn.Linear(geometry.width, 2 * geometry.gate_width, bias=False)
        self.down = nn.Linear(geometry.gate_width, geometry.width, bias=False)

    def fresh(self, hidden: Tensor, positions: Tensor) -> Rows:
        """The rows that hidden [batch, n, width] at positions int64 [n] adds to this layer's cache."""
        return self.attention.fresh(self.attention_norm(hidden), positions)

    def read(self, hidden: Tensor, positions: Tensor, reading: Reading, reduce: Reduce | None = None) -> Tensor:
        """The layer's output [batch, n, width]. The queries may be any part of a chunk whose rows are all there.

        `reduce` adds up what the ranks of a tensor parallel group compute, each with its part of the weights.
        """
        reduce = reduce or (lambda part: part)
        hidden = hidden + reduce(self.attention(self.attention_norm(hidden), positions, reading))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        output: Tensor = hidden + reduce(self.down(F.silu(gate) * up))
        return output


class Draft(nn.Module):
    """The NextN layer: from the hidden state at position t and the token at t + 1 it proposes the token at t + 2."""

    def __init__(self, geometry: ModelGeometry) -> None:
        super().__init__()
        self.steps = geometry.draft_steps
        self.token_norm = nn.RMSNorm(geometry.width, eps=1e-6)
        self.hidden_norm = nn.RMSNorm(geometry.width, eps=1e-6)
        self.join = nn.Linear(2 * geometry.width, geometry.width, bias=False)
        self.layer = Layer(geometry)
        self.norm = nn.RMSNorm(geometry.width, eps=1e-6)

    def enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input [batch, n, width] from embeddings at t + 1 and hidden states at t."""
        joined: Tensor = self.join(torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], dim=-1))
        return joined

    def unroll(self, embedded: Tensor, hidden: Tensor, start: int, prefix: Rows | None, **how: Any) -> list[Tensor]:
        """Hidden states [batch, n + 1 - s, width] of steps s = 1, 2, ... over a known text.

        embedded [batch, n, width]: place i is the token at start + i + 1; hidden [batch, n, width]: the target's, place
        i at start + i. Step s at place i proposes the token at start + i + s + 1 and has seen those before it.
        Later steps read rows of the first, and from there on their own ones, as in serving. `how` as in Reading.
        """
        outputs: list[Tensor] = []
        own: tuple[Rows, ...] = ()
        for step in range(self.steps):
            count = max(0, embedded.shape[1] - step)
            inputs = self.enter(embedded[:, step:], hidden[:, :count])
            at = torch.arange(start + step, start + step + count, device=hidden.device)
            fresh = self.layer.fresh(inputs, at)
            if step == 0:
                rows = fresh if prefix is None else prefix.then(fresh)
            else:
                own = (*(Rows(each.latent[:, :count], each.index_key[:, :count]) for each in own), fresh)
            hidden = self.layer.read(inputs, at, Reading(rows, own=own, **how))
            outputs.append(hidden)
        return outputs


class TinyModel(nn.Module):
    """The target's layers, their embedding, which is the head as well, and the draft. Tokens are int64 [batch, n]."""

    def __init__(self, geometry: ModelGeometry, seed: int = 0) -> None:
        super().__init__()
        self.geometry = g = geometry
        self.embedding = nn.Parameter(torch.empty(g.vocab, g.width))
        self.mix = nn.Parameter(torch.empty(g.embedding_context, g.width))
        self.stack = nn.ModuleList([Layer(g) for _ in range(g.layers)])
        self.norm = nn.RMSNorm(g.width, eps=1e-6)
        self.draft = Draft(g)
        self._initialise(torch.Generator().manual_seed(seed))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The target's layers, first to last."""
        return tuple(each for each in self.stack if isinstance(each, Layer))

    def embed(self, tokens: Tensor, before: Tensor | None = None) -> Tensor:
        """[batch, n, width]. `before` [batch, m]: the tokens before the chunk, the last embedding_context - 1 count."""
        context = self.geometry.embedding_context - 1
        known = tokens if before is None else torch.cat([before[:, max(0, before.shape[1] - context) :], tokens], dim=1)
        vectors = F.pad(F.embedding(known, self.embedding), (0, 0, context, 0))
        mixed = torch.zeros_like(vectors[:, context:])
        for back, weight in enumerate(self.mix):
            mixed = mixed + vectors[:, context - back : vectors.shape[1] - back] * weight
        return mixed[:, known.shape[1] - tokens.shape[1] :]

    def logits(self, hidden: Tensor) -> Tensor:
        """[batch, n, vocab] of the target's last hidden states [batch, n, width]."""
        return F.linear(self.norm(hidden), self.embedding)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """[batch, n, vocab] of the draft's hidden states [batch, n, width]."""
        return F.linear(self.draft.norm(hidden), self.embedding)

    def whole(self, embedded: Tensor, far_layer: Tensor | None = None, **how: Any) -> Tensor:
        """The target's last hidden states [batch, n, width] of whole sequences, embedded [batch, n, width].

        far_layer int64 [batch, n]: the only layer in which this token's query reads beyond the window; -1: all are.
        `how` as in Reading.
        """
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        hidden = embedded
        for number, layer in enumerate(self.layers):
            far = None if far_layer is None else (far_layer == number) | (far_layer < 0)
            hidden = layer.read(hidden, positions, Reading(layer.fresh(hidden, positions), far=far, **how))
        return hidden

    def _initialise(self, generator: torch.Generator) -> None:
        """Normal weights of the usual size; norms stay as they come."""
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.5 * weight.shape[-1] ** -0.5, generator=generator)
        nn.init.normal_(self.mix, std=0.3, generator=generator)
        nn.init.ones_(self.mix[0])


def save(model: TinyModel, path: Path) -> None:
    """Write the weights as safetensors, the geometry among its metadata."""
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, path, {"format": "pt", "geometry": json.dumps(asdict(model.geometry))})


def load(path: Path, **changes: Any) -> TinyModel:
    """The model that `save` wrote, in float32 on the CPU; `changes` of its geometry, such as quantised_index=True."""
    with safe_open(path, "pt") as file:
        geometry = json.loads(file.metadata()["geometry"])
    model = TinyModel(ModelGeometry(**geometry | changes))
    model.load_state_dict(load_file(path))
    return model

"""The sharded pools of one rank: their construction, and stamps in and out of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from harness import types as t
from harness.adapters.ref_rows import COMPONENTS
from harness.adapters.sglang_install import Parts
from harness.adapters.sglang_standins import index_store
from harness.views import BufferView

# A row is the reference's three 64-bit numbers as four 16-bit floats each: the pools' own type, copied bit for bit.
DTYPE = torch.bfloat16
FLOATS = 8 // DTYPE.itemsize
WIDTH = COMPONENTS["kv"].width
INDEX_BYTES, SCALE_BYTES = 128, 4  # of an indexer row
TARGET: Mapping[str, str] = MappingProxyType({"kv": "kv", "index": "index"})
DRAFT: Mapping[str, str] = MappingProxyType({"kv": "draft", "index": "draft_index"})
KEY = 2  # of the numbers, in a key row; the others are in its value row, so that a copy of one alone is seen


@dataclass(frozen=True, slots=True)
class Layer:
    """In the place of sglang's `RadixAttention`, as far as a pool looks at it."""

    layer_id: int


RowsOf = Mapping[str, Tensor]  # component -> int64 [tokens, WIDTH]


class Rows(Protocol):
    """One kind of pool, and how rows go through it."""

    pool: Any

    def write(self, layer: int, locs: Tensor, rows: RowsOf) -> None:
        """Store the rows of a chunk."""
        ...

    def read(self, layer: int, places: Tensor) -> dict[str, Tensor]:
        """What attention reads at these rows of the scratch slot, int64 [tokens, WIDTH] of every component."""
        ...

    def stride(self) -> int:
        """Bytes from one row of a layer to the next, in the buffer that offsets are told for."""
        ...

    def buffers(self) -> dict[str, BufferView]:
        """What every component has on this rank in a layer."""
        ...


def spec_of(parts: Parts, config: t.Config, rank: int) -> Any:
    """The shard layout. Sizes of the scratch follow sglang's own rule, with the config's number of contexts."""
    span = config.shards * config.page_size
    context = -(-config.context_tokens // span) * span
    chunk = -(-config.chunk_tokens // config.page_size) * config.page_size
    return parts.ShardSpec(
        shard_rank=rank,
        shard_size=config.shards,
        page_size=config.page_size,
        max_prefix_tokens=config.scratch_contexts * context,
        chunk_tokens=chunk,
    )


def _common(config: t.Config, spec: Any, group: Any, layers: int) -> dict[str, Any]:
    return {
        "size": config.pages_per_rank * config.page_size,
        "page_size": config.page_size,
        "dtype": DTYPE,
        "layer_num": layers,
        "device": group.device,
        "enable_memory_saver": False,
        "shard_spec": spec,
        "shard_group": group,
    }


LATENT: Mapping[str, int] = MappingProxyType({"kv_lora_rank": KEY * FLOATS, "qk_rope_head_dim": (WIDTH - KEY) * FLOATS})


class MHARows:
    """Keys and values, one head. A key row holds the first KEY numbers, a value row the rest."""

    def __init__(self, parts: Parts, config: t.Config, spec: Any, group: Any, layers: int) -> None:
        self.pool = parts.MHAPool(
            **_common(config, spec, group, layers), head_num=1, head_dim=KEY * FLOATS, v_head_dim=(WIDTH - KEY) * FLOATS
        )

    def write(self, layer: int, locs: Tensor, rows: RowsOf) -> None:
        parts = rows["kv"].split([KEY, WIDTH - KEY], dim=1)
        keys, values = (part.contiguous().view(DTYPE).unsqueeze(1) for part in parts)
        self.pool.set_kv_buffer(Layer(layer), locs, keys, values)

    def read(self, layer: int, places: Tensor) -> dict[str, Tensor]:
        keys = self.pool.get_key_buffer(layer)[places]
        values = self.pool.get_value_buffer(layer)[places]
        return {"kv": torch.cat([part.squeeze(1).view(torch.int64) for part in (keys, values)], dim=1)}

    def stride(self) -> int:
        return int(self.pool.k_buffer[0][0].nbytes)

    def buffers(self) -> dict[str, BufferView]:
        return {"kv": _buffer(self.pool.k_buffer[0], self.pool.v_buffer[0])}


class MLARows:
    """One latent row for both; its last number is in the place of the rotary part."""

    def __init__(self, parts: Parts, config: t.Config, spec: Any, group: Any, layers: int) -> None:
        self.pool = self._pool(parts, _common(config, spec, group, layers))

    def _pool(self, parts: Parts, common: dict[str, Any]) -> Any:
        return parts.MLAPool(**common, **LATENT)

    def write(self, layer: int, locs: Tensor, rows: RowsOf) -> None:
        latent = rows["kv"].contiguous().view(DTYPE).unsqueeze(1)
        self.pool.set_kv_buffer(Layer(layer), locs, latent, latent)

    def read(self, layer: int, places: Tensor) -> dict[str, Tensor]:
        latent: Tensor = self.pool.get_key_buffer(layer)[places]
        return {"kv": latent.squeeze(1).view(torch.int64)}

    def stride(self) -> int:
        return int(self.pool.kv_buffer[0][0].nbytes)

    def buffers(self) -> dict[str, BufferView]:
        return {"kv": _buffer(self.pool.kv_buffer[0])}


class DSARows(MLARows):
    """A latent row, and an indexer row: a key of 128 bytes and a scale of 4, which lie apart in their page.

    The key holds the numbers over and over, the scale half of the last one again.
    """

    def _pool(self, parts: Parts, common: dict[str, Any]) -> Any:
        width = sum(LATENT.values())
        return parts.DSAPool(**common, **LATENT, kv_cache_dim=width, index_head_dim=INDEX_BYTES)

    def write(self, layer: int, locs: Tensor, rows: RowsOf) -> None:
        super().write(layer, locs, rows)
        if "index" in rows:
            keys, scales = _indexed(rows["index"])
            with index_store():
                self.pool.index_key_cache.store_quantized(
                    layer, locs, keys.view(torch.float8_e4m3fn), scales.view(torch.float32)
                )

    def read(self, layer: int, places: Tensor) -> dict[str, Tensor]:
        page = self.pool.page_size
        pages = self.pool.get_index_k_with_scale_buffer(layer)
        keys = pages[:, : page * INDEX_BYTES].reshape(-1, INDEX_BYTES)[places]
        scales = pages[:, page * INDEX_BYTES :].reshape(-1, SCALE_BYTES)[places]
        return {**super().read(layer, places), "index": numbers_of(keys, scales)}

    def buffers(self) -> dict[str, BufferView]:
        pages = self.pool.index_k_with_scale_buffer[0]
        whole = BufferView(
            rows=len(pages) * self.pool.page_size, row_bytes=INDEX_BYTES + SCALE_BYTES, allocated_bytes=pages.nbytes
        )
        return {**super().buffers(), "index": whole}


def _buffer(*parts: Tensor) -> BufferView:
    """A component whose row lies in these tensors, a part in each; it has as many rows as the shortest of them."""
    return BufferView(
        rows=min(map(len, parts)),
        row_bytes=sum(part[0].nbytes for part in parts),
        allocated_bytes=sum(part.nbytes for part in parts),
    )


def numbers_of(keys: Tensor, scales: Tensor) -> Tensor:
    """The numbers [tokens, WIDTH] of indexer rows; what does not belong together shows as a torn row."""
    numbers = keys.view(torch.int64)[:, :WIDTH].clone()
    expected = _indexed(numbers)
    whole = (keys == expected[0]).all(dim=1) & (scales == expected[1]).all(dim=1)
    numbers[:, -1] ^= ~whole
    return numbers


def _indexed(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of keys [tokens, INDEX_BYTES] and scales [tokens, SCALE_BYTES] that hold these numbers."""
    words = INDEX_BYTES // 8
    keys = numbers.repeat(1, -(-words // WIDTH))[:, :words].contiguous().view(torch.uint8)
    return keys, numbers[:, -1:].contiguous().view(torch.uint8)[:, :SCALE_BYTES].contiguous()


@dataclass(frozen=True, slots=True)
class Attention:
    """One kind of attention, and what a session with it can be opened with."""

    rows: type[MHARows | MLARows]
    components: tuple[str, ...] = ("kv", "draft")
    page_sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)  # the launch gate refuses pages of one token
    host: bool = True  # its copies are stood in for


ATTENTION: Mapping[str, Attention] = MappingProxyType(
    {
        "mha": Attention(MHARows),
        "mla": Attention(MLARows),
        "dsa": Attention(DSARows, components=("kv", "index", "draft", "draft_index"), page_sizes=(64,), host=False),
    }
)


@dataclass(frozen=True, slots=True)
class Model:
    """The target or its draft: a pool, and by the pool's names of components the contract's names of its rows."""

    rows: Rows
    names: Mapping[str, str]
    layers: int

    def write(self, layer: int, locs: Tensor, rows: RowsOf) -> None:
        """Store the rows of a chunk, by the contract's names. A row with fewer numbers begins again at its first."""
        self.rows.write(layer, locs, {own: _wide(rows[name]) for own, name in self.names.items() if name in rows})

    def read(self, layer: int, places: Tensor) -> dict[str, Tensor]:
        """What attention reads at these rows of the scratch slot, by the contract's names."""
        read = self.rows.read(layer, places)
        return {name: narrow(read[own], name) for own, name in self.names.items()}

    def buffers(self) -> dict[str, BufferView]:
        """What every component has on this rank in a layer, by the contract's names."""
        buffers = self.rows.buffers()
        return {name: buffers[own] for own, name in self.names.items()}


def _wide(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows[:, : WIDTH - rows.shape[1]]], dim=1)


def narrow(rows: Tensor, component: str) -> Tensor:
    """The numbers that a component has, of rows [.., WIDTH]; a row whose others are no repeat shows as torn."""
    width = COMPONENTS[component].width
    numbers, again = rows[..., :width].clone(), rows[..., width:]
    numbers[..., -1] ^= (again != numbers[..., : again.shape[-1]]).any(dim=-1)
    return numbers


def models_of(parts: Parts, config: t.Config, attention: str, spec: Any, group: Any) -> tuple[Model, ...]:
    """The target, and the draft if the config has its rows: the same geometry in a pool of its own."""
    make = ATTENTION[attention].rows
    return tuple(Model(make(parts, config, spec, group, layers), names, layers) for names, layers in named(config))


def named(config: t.Config) -> Iterator[tuple[dict[str, str], int]]:
    """(the contract's name of each component of the pool, layers) of the target, and of the draft if there is one."""
    for names, layers in ((TARGET, config.layers), (DRAFT, config.draft_layers)):
        own = {pool: name for pool, name in names.items() if name in config.components}
        if own:
            yield own, layers

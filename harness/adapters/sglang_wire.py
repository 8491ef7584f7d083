"""What stands in for a transfer backend of sglang, and for its decode worker: bytes of whole pages, and messages.

sglang's own need a GPU, a network and a bootstrap server. In their place are the reference's decode worker and its
messages; which page goes where is sglang's choice, see `harness.adapters.sglang_sends`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness import types as t
from harness.adapters.ref_decode import RefDecode, rank_name
from harness.adapters.ref_rows import RowCodec
from harness.adapters.sglang_pools import INDEX_BYTES, KEY, SCALE_BYTES, WIDTH, Model, named, narrow, numbers_of
from harness.transports.losable import Losable
from kvshard_ref.components import Component
from kvshard_ref.decode import DecodeWorker
from kvshard_ref.device import DeviceModule
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.sender import KVSender, Use
from kvshard_ref.transfer import Copy, Link, Message, blocks, geometry_of
from kvshard_ref.transport import Ticket, Transport

KEYS = Component("keys", KEY, torch.int64)
VALUES = Component("values", WIDTH - KEY, torch.int64)
LATENT = Component("latent", WIDTH, torch.int64)
INDEX = Component("index", INDEX_BYTES + SCALE_BYTES, torch.uint8, scales=SCALE_BYTES)


def buffers_of(attention: str, names: Mapping[str, str]) -> dict[Component, str]:
    """What is sent of a model, each with the name of sglang's list of buffers, one for each layer.

    `names` are those of `harness.adapters.sglang_pools.Model`.
    """
    lists = {KEYS: "k_buffer", VALUES: "v_buffer"} if attention == "mha" else {LATENT: "kv_buffer"}
    if "index" in names:
        lists[INDEX] = "index_k_with_scale_buffer"
    return {replace(component, name=of_model(component, names)): name for component, name in lists.items()}


def of_model(component: Component, names: Mapping[str, str]) -> str:
    """The name of a part of the target's rows or the draft's."""
    return component.name if names["kv"] == "kv" else f"{names['kv']}_{component.name}"


class SentPages(ShardPool):
    """The pages of a sglang pool, under the names of the reference's; the rows stay where sglang has them."""

    def __init__(self, model: Model, config: t.Config, attention: str, rank: int) -> None:
        self.rank = rank
        self.placement = Placement(config.shards, config.page_size)
        self.layers = model.layers
        lists = buffers_of(attention, model.names)
        self._lists = {component.name: getattr(model.rows.pool, name) for component, name in lists.items()}
        self.components = tuple(lists)

    def pages(self, layer: int, component: str) -> Tensor:
        """Tensor [local pages, elements of a page], in the type that the decode worker has."""
        rows: Tensor = self._lists[component][layer]
        if component.endswith(INDEX.name):  # pages already
            return rows.view(torch.uint8)
        return rows.view(torch.int64).view(len(rows) // self.placement.page_size, -1)


class Chosen(list[Copy]):
    """Copies of some of the components only."""

    def __init__(self, copies: Sequence[Copy], components: Sequence[str]) -> None:
        super().__init__(copies)
        self.components = tuple(components)


class Wire(Link):
    """The reference's link. Its decode worker checks the copies that it is told of, which sglang's does not.

    So it is told that all its pages are written; what is in them the rows show.
    """

    def __init__(self, transport: Transport, pages: Sequence[SentPages]) -> None:
        first = pages[0]
        super().__init__(transport, pages, lambda _: geometry_of(pages, first.placement.shards, first.rank))
        self._reserved: dict[Use, Sequence[int]] = {}

    def hear(self) -> list[tuple[str, Message]]:
        """See Link."""
        heard = super().hear()
        for peer, message in heard:
            if message.kind == "reserved":
                self._reserved[peer, message.room, message.generation] = message.body[0]
        return heard

    def tell(self, peer: str, message: Message) -> None:
        """See Link."""
        if message.kind == "done":
            pages = self._reserved.get((peer, message.room, message.generation), ())
            message = message._replace(body=[(0, page) for page in pages] if self.pool.rank == 0 else [])
        super().tell(peer, message)

    def write(self, peer: str, copies: Sequence[Copy]) -> Ticket:
        """Begin to make copies of the components that they are for."""
        components = copies.components if isinstance(copies, Chosen) else self.components
        names = [name for name in self._regions if name.partition(".")[0] in components]
        self.sent_bytes += len(copies) * sum(self._regions[name][0].nbytes for name in names)
        return self._transport.write(peer, blocks(names, copies, self.pool.placement))


class Rooms(KVSender):
    """The rooms that one rank knows of. What is sent to them, and in which chunks, is decided elsewhere."""

    def __init__(self, pages: Sequence[SentPages], transport: Transport) -> None:
        super().__init__(pages, transport)
        self.link: Wire = Wire(transport, pages)


class PartsCodec(RowCodec):
    """Rows of the contract's components, put together of what was sent; `models` are the names of each one's."""

    def __init__(self, codec: RowCodec, models: Sequence[Mapping[str, str]]) -> None:
        self._codec = codec
        self._models = models

    def decode(self, reads: dict[str, Tensor]) -> t.Rows:
        """See RowCodec."""
        return self._codec.decode({name: rows for names in self._models for name, rows in _rows(names, reads)})


def _rows(names: Mapping[str, str], reads: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The rows of one model, int64 [layers, tokens, numbers]."""
    kv = [reads[name] for part in (KEYS, VALUES, LATENT) if (name := of_model(part, names)) in reads]
    yield names["kv"], narrow(torch.cat(kv, dim=-1), names["kv"])
    if "index" in names:
        read = reads[of_model(INDEX, names)]
        keys, scales = read.flatten(0, 1).split([INDEX_BYTES, SCALE_BYTES], dim=1)
        keys = keys.clone(memory_format=torch.contiguous_format)  # one row alone counts as contiguous as it lies
        yield names["index"], numbers_of(keys, scales).view(*read.shape[:2], WIDTH)


class StandInDecode(RefDecode):
    """The reference's decode worker with the rows of a sglang pool."""

    def __init__(
        self,
        config: t.Config,
        attention: str,
        transport: Transport,
        codec: RowCodec,
        device: str = "cpu",
        device_module: DeviceModule | None = None,
    ) -> None:
        placement = Placement(1, config.decode_page_size or config.page_size)
        models = tuple(named(config))
        pools = [
            ShardPool(0, placement, config.decode_pages, layers, tuple(buffers_of(attention, names)), device)
            for names, layers in models
        ]
        self.transport = Losable(transport)
        self._codec = PartsCodec(codec, [names for names, _ in models])
        ranks = [rank_name(rank) for rank in range(config.shards)]
        self._worker = DecodeWorker(pools, self.transport, ranks, device_module)


Connect = Callable[[], Transport]

"""What stands in for a transfer backend of sglang, and for its decode worker: bytes of whole pages, and messages.

sglang's own need a GPU, a network and a bootstrap server. In their place are the reference's decode worker and its
messages; which page goes where is sglang's choice, see `harness.adapters.sglang_sends`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness import types as t
from harness.adapters.ref_decode import RefDecode, rank_name
from harness.adapters.ref_rows import RowCodec
from harness.adapters.sglang_pools import INDEX_BYTES, KEY, SCALE_BYTES, WIDTH, numbers_of
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


def buffers_of(attention: str, components: Sequence[str]) -> dict[Component, str]:
    """What is sent, each with the name of sglang's list of buffers, one for each layer."""
    if attention == "mha":
        return {KEYS: "k_buffer", VALUES: "v_buffer"}
    state = {INDEX: "index_k_with_scale_buffer"} if "index" in components else {}
    return {LATENT: "kv_buffer", **state}


class SentPages(ShardPool):
    """The pages of a sglang pool, under the names of the reference's; the rows stay where sglang has them."""

    def __init__(self, pool: Any, config: t.Config, attention: str, rank: int) -> None:
        self.rank = rank
        self.placement = Placement(config.shards, config.page_size)
        self.layers = config.layers
        self._lists = {
            component.name: getattr(pool, name) for component, name in buffers_of(attention, config.components).items()
        }
        self.components = tuple(buffers_of(attention, config.components))

    def pages(self, layer: int, component: str) -> Tensor:
        """Tensor [local pages, elements of a page], in the type that the decode worker has."""
        rows: Tensor = self._lists[component][layer]
        if component == INDEX.name:  # pages already
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

    def __init__(self, transport: Transport, pages: SentPages) -> None:
        super().__init__(transport, [pages], lambda _: geometry_of([pages], pages.placement.shards, pages.rank))
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
        components = copies.components if isinstance(copies, Chosen) else tuple(self.components)
        names = [name for name in self._regions if name.partition(".")[0] in components]
        self.sent_bytes += len(copies) * sum(self._regions[name][0].nbytes for name in names)
        return self._transport.write(peer, blocks(names, copies, self.pool.placement))


class Rooms(KVSender):
    """The rooms that one rank knows of. What is sent to them, and in which chunks, is decided elsewhere."""

    def __init__(self, pages: SentPages, transport: Transport) -> None:
        super().__init__([pages], transport)
        self.link: Wire = Wire(transport, pages)


class PartsCodec(RowCodec):
    """Rows of the contract's components, put together of what was sent."""

    def __init__(self, codec: RowCodec) -> None:
        self._codec = codec

    def decode(self, reads: dict[str, Tensor]) -> t.Rows:
        """See RowCodec."""
        if KEYS.name in reads:
            return self._codec.decode({"kv": torch.cat([reads[KEYS.name], reads[VALUES.name]], dim=-1)})
        rows = {"kv": reads[LATENT.name]}
        if INDEX.name in reads:
            keys, scales = reads[INDEX.name].flatten(0, 1).split([INDEX_BYTES, SCALE_BYTES], dim=1)
            keys = keys.clone(memory_format=torch.contiguous_format)  # one row alone counts as contiguous as it lies
            rows["index"] = numbers_of(keys, scales).view(*reads[INDEX.name].shape[:2], WIDTH)
        return self._codec.decode(rows)


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
        components = tuple(buffers_of(attention, config.components))
        pool = ShardPool(0, placement, config.decode_pages, config.layers, components, device)
        self.transport = Losable(transport)
        self._codec = PartsCodec(codec)
        ranks = [rank_name(rank) for rank in range(config.shards)]
        self._worker = DecodeWorker([pool], self.transport, ranks, device_module)


Connect = Callable[[], Transport]

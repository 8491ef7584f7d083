"""PrefixGather: brings the prefix of a batch to every rank, one layer ahead of its use, and holds the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvshard_ref.device import DeviceModule
from kvshard_ref.errors import DoubleBeginError, ForeignPageError, GeometryError, LayerOrderError, OutsideBatchError
from kvshard_ref.group import Group
from kvshard_ref.plan import GatherPlan, Pages, plan_gather
from kvshard_ref.pool import ShardPool
from kvshard_ref.rows import RowBuffer
from kvshard_ref.scratch import SLOTS, ScratchSize


class PrefixGather:
    """Two scratch slots, used in turn (slot = layer % 2), and the stream that fills them.

    A batch is begin, then per layer stage and read, then end::

        gather stream    G0        G1           G2           G3
        compute stream      S0 R0->kick1  S1 R1->kick2  S2 R2->kick3

    G(l) waits for the compute stream, so its slot is free (last read by layer l-2) and the pool's rows are written,
    and for the restore of layer l, if pages of the batch's prefix come from the host.
    The first read of layer l waits for G(l), then kicks G(l+1). G is a collective: every rank must read every layer,
    in ascending order, also a rank that owns no page. A batch without any prefix gathers nothing.

    Rules: sglang 0.5.23, mem_cache/page_interleave_pool.py.
    """

    def __init__(
        self, pool: ShardPool, group: Group, scratch: ScratchSize, padding: str, device_module: DeviceModule
    ) -> None:
        if (group.size, group.rank) != (pool.placement.shards, pool.rank):
            raise GeometryError(
                f"gather: the group has rank {group.rank} of {group.size}, the pool rank {pool.rank} of "
                f"{pool.placement.shards}; expected the same"
            )
        self.pool = pool
        self.group = group
        self.scratch = scratch
        self.padding = padding
        self.epoch = 0
        self.gathered_bytes = 0
        self.plan: GatherPlan | None = None  # of the open batch
        self._loads: Sequence[Any] = ()
        self._placement = pool.placement
        self._device_module = device_module
        self._stream = device_module.Stream()
        self._ready = [device_module.Event() for _ in range(SLOTS)]
        self._layer = -1  # last layer that was read
        self._gathered = -1  # last layer whose gather was issued
        self._slots = {
            c.name: [RowBuffer(c, scratch.trash_page + 1, scratch.page_size, pool.device) for _ in range(SLOTS)]
            for c in pool.components
        }
        self._send_pages = self._index([])
        pages = self._placement.shards * (pool.pages_per_rank + 1)
        self._table = torch.full((pages,), scratch.trash_page, device=pool.device)  # scratch page by page id

    @property
    def bytes(self) -> int:
        """Bytes of the scratch slots on this rank."""
        return sum(slot.pages.nbytes for slots in self._slots.values() for slot in slots)

    def begin(self, prefixes: Pages, chunks: Pages, loads: Sequence[Any] = ()) -> GatherPlan:
        """Open a batch and start gathering layer 0.

        `loads`: one event per layer, after which the rows of that layer are restored from the host; none to wait for
        when empty.
        Raises DoubleBeginError while a batch is open, and whatever plan_gather raises; then nothing has changed.
        """
        if self.plan is not None:
            raise DoubleBeginError(
                f"gather: begin while batch {self.epoch} is open at layer {self._layer}, expected end() of it first"
            )
        plan = plan_gather(self._placement, self.pool.rank, prefixes, chunks, self.scratch, self.padding)
        last = max(plan.slots, default=0)
        if last >= len(self._table):
            raise ForeignPageError(f"gather: page {last} is in the batch, expected pages below {len(self._table)}")
        self._table.fill_(plan.trash_page)
        self._table.index_copy_(0, self._index([*plan.slots]), self._index([*plan.slots.values()]))
        self._send_pages = self._index(plan.send_pages)
        self.plan = plan
        self._loads = loads
        self.epoch += 1
        self._layer = self._gathered = -1
        self.prefetch(0)
        return plan

    def translate(self, locs: torch.Tensor) -> torch.Tensor:
        """Scratch rows (int64, same shape) of locations; reserved and off-plan pages give rows of the trash page.

        Computed anew at each call: a location tensor changed in place must not give the rows of its old content.
        """
        self._open_plan("translate")
        ps = self.scratch.page_size
        return self._table.take(self._placement.page(locs)) * ps + locs % ps

    def prefetch(self, layer: int) -> None:
        """Start the gather of a layer on the gather stream; nothing to do when that was done or there is no prefix.

        Only the layer after the last one read can be prefetched, since an earlier slot is still in use.
        """
        block = self._open_plan("prefetch", layer).block
        if block == 0 or layer <= self._gathered:
            return
        slot, own = layer % SLOTS, slice(self.pool.rank * block, (self.pool.rank + 1) * block)
        pages = self.group.size * block
        self._stream.wait_stream(self._device_module.current_stream())
        with self._device_module.stream(self._stream):
            if self._loads:
                self._stream.wait_event(self._loads[layer])
            for component in self.pool.components:
                prefix = self._slots[component.name][slot].pages[:pages]
                self.pool.rows_of(layer, component.name).take_pages(self._send_pages, out=prefix[own])
                if self.group.size > 1:
                    self.group.all_gather(prefix, prefix[own])
                self.gathered_bytes += prefix.nbytes
            self._ready[slot].record(self._stream)
        self._gathered = layer

    def stage(self, layer: int, component: str, scratch_rows: torch.Tensor, rows: torch.Tensor) -> None:
        """Write chunk rows [n, width] at translated locations [n], in the layer read last or the next one."""
        self._open_plan("stage", layer)
        self._slots[component][layer % SLOTS].put(scratch_rows, rows)

    def read(
        self, layer: int, component: str, scratch_rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows [n, width] at translated locations [n]; the first read of a layer waits for it and kicks the next."""
        block = self._open_plan("read", layer).block
        if layer != self._layer:
            self._layer = layer
            if block:
                self._device_module.current_stream().wait_event(self._ready[layer % SLOTS])
            if layer + 1 < self.pool.layers:
                self.prefetch(layer + 1)
        return self._slots[component][layer % SLOTS].take(scratch_rows, out)

    def end(self) -> None:
        """Close the batch. Raises LayerOrderError when a layer was never read: the other ranks gather it."""
        block = self._open_plan("end").block
        unread = self._layer + 1
        self.plan = None
        if unread == self.pool.layers:
            return
        if block:
            # the gather of the unread layer must not run into the next batch's use of its slot
            self._device_module.current_stream().wait_event(self._ready[unread % SLOTS])
        raise LayerOrderError(
            f"gather: end of batch {self.epoch} with layer {unread} of {self.pool.layers} never read; "
            "every rank must read every layer, also when it owns nothing"
        )

    def settle(self) -> None:
        """Wait for all work on the device."""
        self._device_module.synchronize()

    def _open_plan(self, call: str, layer: int | None = None) -> GatherPlan:
        """The plan of the open batch, in which `call` may work on `layer` now."""
        if self.plan is None:
            raise OutsideBatchError(
                f"gather: {call} outside a batch, expected begin() before it: scratch rows are valid until end()"
            )
        if layer is not None:
            self._check_layer(call, layer)
        return self.plan

    def _check_layer(self, call: str, layer: int) -> None:
        if layer not in (self._layer, self._layer + 1) or not 0 <= layer < self.pool.layers:
            raise LayerOrderError(
                f"gather: {call} of layer {layer} after layer {self._layer} was read, expected layer "
                f"{max(self._layer, 0)} or {self._layer + 1} of {self.pool.layers}; visit layers in ascending order"
            )

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.pool.device)

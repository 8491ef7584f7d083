"""HostPool: one rank's host rows, and the two streams that copy its own pages between the tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kvshard_ref.device import DeviceModule, host_memory
from kvshard_ref.host_tier import Copy
from kvshard_ref.pool import ShardPool
from kvshard_ref.rows import RowBuffer


class OwnCopies(NamedTuple):
    """This rank's part of some copies."""

    pages: torch.Tensor
    """int64 [n] on the device: local device pages."""
    runs: list[tuple[int, int, int]]
    """(first of the n, first local host page, count): consecutive host pages are copied at once."""


class HostPool:
    """Per component and layer of every model one RowBuffer on the host, pinned where the device is a GPU.

    A backup reads pages that earlier work of the compute stream wrote; a restore overwrites pages that earlier work
    read, and reads host pages that backups wrote::

        compute stream   ... forward ........................ gather waits for ready(l), layer by layer
        backup stream        `-> wait, pages to host
        restore stream           `-> wait for both, layer 0 of all components, ready(0), layer 1, ready(1), ...

    A draft's layer d is restored with target layer min(d, L-1), so that it is complete before that layer's event.
    Every rank issues every copy and records its events, also a rank that owns none of the pages.
    Order and filter: sglang 0.5.23, mem_cache/l2_transfer.py and mem_cache/pool_host/page_interleave.py.
    """

    def __init__(self, pools: Sequence[ShardPool], pages_per_rank: int, device_module: DeviceModule) -> None:
        self._pools = pools
        self._device_module = device_module
        self._layers = pools[0].layers
        self._backup_stream = device_module.Stream()
        self._restore_stream = device_module.Stream()
        self.backup_bytes = 0
        self.restored_bytes = 0
        self._rows: list[list[tuple[RowBuffer, RowBuffer]]] = [[] for _ in range(self._layers)]
        for pool in pools:
            for layer in range(pool.layers):
                for component in pool.components:
                    host = RowBuffer(
                        component, pages_per_rank + 1, pool.placement.page_size, pinned=pool.device.type == "cuda"
                    )
                    host_memory(device_module, host.pages)
                    pair = (pool.rows_of(layer, component.name), host)
                    self._rows[min(layer, self._layers - 1)].append(pair)

    @property
    def bytes(self) -> int:
        """Bytes allocated on the host."""
        return sum(host.pages.nbytes for rows in self._rows for _, host in rows)

    def rows_of(self, layer: int) -> Iterator[tuple[RowBuffer, RowBuffer]]:
        """(device rows, host rows) of everything that is restored with a target layer."""
        yield from self._rows[layer]

    def backup(self, copies: Sequence[Copy]) -> Any:
        """Copy this rank's pages to the host, behind all work of the current stream; returns the event that says so."""
        own = self._own(copies)
        stream = self._backup_stream
        stream.wait_stream(self._device_module.current_stream())
        with self._device_module.stream(stream):
            for layer in range(self._layers):
                for device, host in self.rows_of(layer):
                    fresh = device.take_pages(own.pages)
                    for start, first, count in own.runs:
                        host.pages[first : first + count].copy_(fresh[start : start + count], non_blocking=True)
                    self.backup_bytes += fresh.nbytes
            done = self._device_module.Event()
            done.record(stream)
        return done

    def restore(self, copies: Sequence[Copy]) -> list[Any]:
        """Copy this rank's pages back, layer by layer; returns the events, one per target layer."""
        own = self._own(copies)
        stream, ready = self._restore_stream, []
        stream.wait_stream(self._device_module.current_stream())
        stream.wait_stream(self._backup_stream)
        with self._device_module.stream(stream):
            for layer in range(self._layers):
                for device, host in self.rows_of(layer):
                    fresh = device.pages.new_empty(len(own.pages), device.pages.shape[1])
                    for start, first, count in own.runs:
                        fresh[start : start + count].copy_(host.pages[first : first + count], non_blocking=True)
                    device.put_pages(own.pages, fresh)
                    self.restored_bytes += fresh.nbytes
                ready.append(self._device_module.Event())
                ready[-1].record(stream)
        return ready

    def _own(self, copies: Sequence[Copy]) -> OwnCopies:
        """The owner filter, by host page; page and host page of a pair have one owner."""
        placement, rank = self._pools[0].placement, self._pools[0].rank
        pairs = [
            (placement.local_page(page), placement.local_page(slot))
            for copy in copies
            for page, slot in zip(copy.pages, copy.slots, strict=True)
            if placement.page_owner(slot) == rank
        ]
        runs: list[tuple[int, int, int]] = []
        for index, (_, slot) in enumerate(pairs):
            if runs and slot == runs[-1][1] + runs[-1][2]:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((index, slot, 1))
        pages = torch.tensor([page for page, _ in pairs], dtype=torch.int64, device=self._pools[0].device)
        return OwnCopies(pages, runs)

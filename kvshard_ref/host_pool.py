"""HostPool: one rank's host rows, and the two streams that copy its own pages between the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from typing import Any

import numpy as np
import torch

from kvshard_ref.device import DeviceModule, HostDevice
from kvshard_ref.host_tier import Copy
from kvshard_ref.pool import ShardPool
from kvshard_ref.rows import RowBuffer


class HostPool:
    """Per component and layer of every model one RowBuffer on the host, pinned where the device is a GPU.

    A backup reads pages that earlier work of the compute stream wrote; a restore overwrites pages that earlier work
    read::

        compute stream   ... forward ........................ gather waits for ready(l), layer by layer
        backup stream        `-> wait, pages to host
        restore stream           `-> wait, layer 0 of all components, ready(0), layer 1, ready(1), ...

    Host pages that a restore reads are complete: their backup was acknowledged, or, when pages are spilled as they are
    evicted, the compute stream waited for it.

    A draft's layer d is restored with target layer min(d, L-1), so that it is complete before that layer's event.
    Every rank issues every copy and records its events, also a rank that owns none of the pages.
    Order and filter: sglang 0.5.23, mem_cache/l2_transfer.py and mem_cache/pool_host/page_interleave.py.
    """

    def __init__(self, pools: Sequence[ShardPool], pages_per_rank: int, device_module: DeviceModule) -> None:
        self._pools = pools
        self._device_module = device_module
        self._backup_stream = device_module.Stream()
        self._restore_stream = device_module.Stream()
        self.backup_bytes = 0
        self.restored_bytes = 0
        pinned = not isinstance(device_module, HostDevice)  # copies that are not awaited need it
        self.rows: list[list[tuple[RowBuffer, RowBuffer]]] = [[] for _ in range(pools[0].layers)]
        """Per target layer (device rows, host rows) of everything that is restored with it."""
        for pool in pools:
            for layer, component in product(range(pool.layers), pool.components):
                host = RowBuffer(component, pages_per_rank + 1, pool.placement.page_size, "cpu", pinned=pinned)
                self.rows[min(layer, len(self.rows) - 1)].append((pool.rows_of(layer, component.name), host))

    @property
    def bytes(self) -> int:
        """Bytes allocated on the host."""
        return sum(host.pages.nbytes for _, host in chain.from_iterable(self.rows))

    def backup(self, copies: Sequence[Copy]) -> Any:
        """Copy this rank's pages to the host, behind all work of the current stream; returns the event that says so."""
        stream, compute = self._backup_stream, self._device_module.current_stream()
        with self._device_module.stream(stream):
            pages, runs = self._own(copies)  # before the wait, because it may synchronise the stream
            stream.wait_stream(compute)
            for device, host in chain.from_iterable(self.rows):
                fresh = device.take_pages(pages)
                for start, first, count in runs:
                    host.pages[first : first + count].copy_(fresh[start : start + count], non_blocking=True)
                self.backup_bytes += fresh.nbytes
            done = self._device_module.Event()
            done.record(stream)
        return done

    def restore(self, copies: Sequence[Copy]) -> list[Any]:
        """Copy this rank's pages back, layer by layer; returns the events, one per target layer."""
        stream, compute, ready = self._restore_stream, self._device_module.current_stream(), []
        with self._device_module.stream(stream):
            pages, runs = self._own(copies)  # before the wait, as above
            stream.wait_stream(compute)
            for rows in self.rows:
                for device, host in rows:
                    fresh = device.pages.new_empty(len(pages), device.pages.shape[1])
                    for start, first, count in runs:
                        fresh[start : start + count].copy_(host.pages[first : first + count], non_blocking=True)
                    device.put_pages(pages, fresh)
                    self.restored_bytes += fresh.nbytes
                ready.append(self._device_module.Event())
                ready[-1].record(stream)
        return ready

    def _own(self, copies: Sequence[Copy]) -> tuple[torch.Tensor, list[list[int]]]:
        """This rank's part of the copies, by host page: a page and its host page have one owner. For the stream in use.

        Local device pages (int64 [n], on the device), and runs [first of the n, first local host page, count] of
        consecutive host pages, which are copied at once.
        """
        pool = self._pools[0]
        sides = ([copy.pages for copy in copies], [copy.slots for copy in copies])
        pages, slots = (np.array([*chain.from_iterable(side)], np.int64) for side in sides)
        own = pool.placement.page_owner(slots) == pool.rank
        local_pages, local_slots = pool.placement.local_page(pages[own]), pool.placement.local_page(slots[own])
        starts = np.flatnonzero(np.diff(local_slots, prepend=-2) != 1)
        runs = np.stack([starts, local_slots[starts], np.diff(starts, append=len(local_slots))], axis=1)
        return torch.from_numpy(local_pages).to(pool.device), runs.tolist()

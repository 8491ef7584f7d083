"""sglang's server with its real code changed: `SGLANG_PLANTED=no_load_wait python -m ci.sglang_planted FLAGS`.

A scheduler is a process of its own, which imports this module again before it starts, and so gets the fault as well.
`no_load_wait` and `early_send` need SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES to show surely: they read pages that are still
on their way. `owner_filter` and `no_gather_wait` need a sharded cache. With SGLANG_ONE_GPU=1, alone or beside a fault,
all ranks of the server run on the one GPU that it sees; NCCL from 2.30 on allows it (NCCL_MULTI_RANK_GPU_ENABLE=1).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any


def no_load_wait() -> None:
    """A forward does not wait for the layers that the host tier brings back."""

    def waited(*_: Any) -> None:
        """Not at all."""

    importlib.import_module("sglang.srt.managers.cache_controller").LayerDoneCounter.wait_until = waited


def early_send() -> None:
    """A prefill worker sends a cached prefix at once, also what the host tier has yet to bring back."""

    def sent(self: Any, req: Any, **_: bool) -> None:
        if not req.pending_bootstrap and req.prefix_len > req.start_send_idx:
            self.send_kv_chunk(req, last_chunk=False, end_idx=req.prefix_len)

    prefill = importlib.import_module("sglang.srt.disaggregation.prefill")
    prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk = sent


def owner_filter() -> None:
    """A rank keeps the pages of the next one, and backs them up."""

    def local_mask(self: Any, loc: Any, rank: int) -> Any:
        return self.owner_of(loc) == (rank + 1) % self.spec.shard_size

    importlib.import_module("sglang.srt.mem_cache.page_interleave").PageInterleavePlacement.local_mask = local_mask


def no_gather_wait() -> None:
    """Attention reads the prefix of a layer without waiting until it has been assembled."""

    def acquired(self: Any, layer_id: int) -> Any:
        if self._block_pages:
            self._prefetch_layer(layer_id + 1)
        return self._slots[layer_id % len(self._slots)]

    mixin = importlib.import_module("sglang.srt.mem_cache.page_interleave_pool").PageInterleaveKVPoolMixin
    mixin._acquire_slot_for_read = acquired  # noqa: SLF001  # the wait is nowhere else


def one_gpu() -> None:
    """Every rank gets the first GPU that the server sees, under the number 0."""

    @contextlib.contextmanager
    def reindexed(_: int) -> Iterator[int]:
        yield 0

    engine: Any = importlib.import_module("sglang.srt.entrypoints.engine")
    engine.maybe_reindex_device_id = reindexed


FAULTS = {
    "no_load_wait": no_load_wait,
    "early_send": early_send,
    "owner_filter": owner_filter,
    "no_gather_wait": no_gather_wait,
}

planted, shared = os.environ.get("SGLANG_PLANTED", ""), os.environ.get("SGLANG_ONE_GPU") == "1"
if planted not in FAULTS and (planted or not shared):
    sys.exit(f"SGLANG_PLANTED={planted!r}; expected {' or '.join(FAULTS)}, or SGLANG_ONE_GPU=1 and none")
if shared:
    one_gpu()
if planted:
    FAULTS[planted]()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")

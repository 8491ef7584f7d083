"""The host tier of one rank: sglang's own host pool and cache controller, driven as its scheduler drives them."""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from harness.adapters.sglang_hub import Gathering
from harness.adapters.sglang_install import Parts
from harness.adapters.sglang_stage import Place
from harness.views import MovedView

TURNS_MAX = 1024  # until all copies have ended; each may take many looks


class Meter:
    """In the place of sglang's metrics collector: adds up what moved between the tiers, and ignores the rest.

    It counts a copy when all ranks have acknowledged it.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def increment_backup_num_tokens(self, num_tokens: int, pool: object) -> None:
        self._counts["backup_tokens"] += num_tokens

    def increment_backup_num_bytes(self, num_bytes: int) -> None:
        self._counts["backup_bytes"] += num_bytes

    def increment_load_back_num_tokens(self, num_tokens: int, pool: object) -> None:
        self._counts["restored_tokens"] += num_tokens

    def increment_load_back_num_bytes(self, num_bytes: int) -> None:
        self._counts["restored_bytes"] += num_bytes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def moved(self) -> MovedView:
        """All of it."""
        return MovedView(**self._counts)


class HostTier:
    """What a tree has besides when it has a host tier. `settings` says what its configuration must hold."""

    def __init__(self, parts: Parts, tree: Any, params: Any, place: Place) -> None:
        self._tree = tree
        self.meter = Meter()
        tree.init_hicache(parts.get_server_args(), params)
        tree.metrics_collector = self.meter
        # the ranks agree by a minimum over their process group, in whose place is this one
        tree._all_reduce_attn_groups = lambda tensor, op: _minimum(place.group, tensor, op)  # noqa: SLF001  # see above
        self._controller = tree.cache_controller
        self._controller.write_fence_stream = self._controller.load_fence_stream = place.forwards.stream

    @staticmethod
    def settings(pages_per_rank: int, host_pages_per_rank: int, policy: str) -> dict[str, object]:
        """The server arguments of a host tier."""
        return {
            "enable_hierarchical_cache": True,
            "hicache_ratio": (host_pages_per_rank + 0.5) / pages_per_rank,  # it cuts to whole pages
            "hicache_write_policy": policy,
            "hicache_io_backend": "kernel",
            "hicache_mem_layout": "page_first",  # the only one for keys and values of different widths
        }

    @property
    def threshold(self) -> int:
        """Tokens on the host that are worth bringing back; fewer are computed again."""
        return int(self._tree.load_back_threshold)

    @property
    def load_waits(self) -> bool:
        """Whether pages that were matched as the device's still wait for their rows from the host."""
        return bool(self._controller.load_queue)

    def turn(self) -> None:
        """Start the copies that wait, and take those that all ranks know to be done."""
        self._tree.check_hicache_events()

    def start_loading(self) -> None:
        """What the admission has found on the host comes back, layer by layer; the gathers wait for it."""
        index = self._tree.ready_to_load_host_cache()
        self._controller.layer_done_counter.set_consumer(index)

    def flush(self) -> None:
        """What the last inserts want to have copied is on its way."""
        self._tree.flush_pending_backups()

    def settle(self) -> None:
        """Until nothing is under way. Raises RuntimeError when that never comes."""
        for _ in range(TURNS_MAX):
            self.turn()
            if not (self._tree.ongoing_write_through or self._tree.ongoing_load_back):
                return
        raise RuntimeError(f"copies are still under way after {TURNS_MAX} turns of the loop")

    def free(self) -> Iterator[Tensor]:
        """Free host pages of every owner class."""
        slots = self._controller.mem_pool_host.anchor_entry.host_pool._slots  # noqa: SLF001  # nothing else shows them
        for pages in zip(slots.class_free_pages, slots.class_release_pages, strict=True):
            yield torch.cat(pages)

    def pins(self) -> Counter[int]:
        """Node -> locks that copies have on it until they are acknowledged; a lock is on all nodes above too."""
        pins: Counter[int] = Counter()
        core = self._tree.tree_core
        copies = [*self._tree.ongoing_write_through.values(), *self._tree.ongoing_load_back.values()]
        for node_id, lock, *_ in copies:
            node = core.node_by_id(node_id) if lock is not None else core.root_node
            while node is not core.root_node:
                pins[node.id] += 1
                node = node.parent
        return pins

    def close(self) -> None:
        """The tree registers its end with the process, which would keep it for ever."""
        atexit.unregister(self._tree.shutdown)
        self._tree.release_host_resources()


def _minimum(group: Gathering, tensor: Tensor, op: object) -> None:
    if op != torch.distributed.ReduceOp.MIN:
        raise NotImplementedError(f"a reduction by {op}; only the minimum is stood in for")
    tensor.copy_(torch.tensor(group.minimum(tensor.flatten().tolist()), dtype=tensor.dtype).view_as(tensor))

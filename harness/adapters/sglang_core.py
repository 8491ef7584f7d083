"""The cache of one rank: allocator, tree, token table and pool, made as sglang's prefill worker makes them."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from harness import types as t
from harness.adapters.sglang_held import Held
from harness.adapters.sglang_host import HostTier
from harness.adapters.sglang_hub import ShardGroup
from harness.adapters.sglang_install import Parts
from harness.adapters.sglang_pools import models_of, spec_of
from harness.adapters.sglang_stage import Place
from harness.adapters.sglang_standins import pools_on


class Core:
    """Everything that a restart makes anew."""

    def __init__(self, parts: Parts, config: t.Config, *, attention: str, tree: str, place: Place) -> None:
        self._parts = parts
        self.config = config
        self.sees_nodes = tree == "python"  # the other core keeps its nodes to itself
        self.spec = spec_of(parts, config, place.group.rank)
        self.placement = parts.Placement(self.spec)
        with pools_on(place.device):
            group = ShardGroup(place.group, place.at)
            self.models = models_of(parts, config, attention, self.spec, group)
        self.rows = self.models[0].rows
        self.pool = self.rows.pool
        self.allocator = parts.Allocator(
            size=config.pages_per_rank * config.page_size,  # of one rank: it multiplies by the ranks itself
            physical_page_size=config.page_size,
            shard_size=config.shards,
            dtype=torch.int64,
            device=place.at,
            kvcache=self.pool,
            need_sort=True,  # as on every prefill worker
            shard_spec=self.spec,
        )
        self.table = parts.ReqToTokenPool(
            size=config.shards * config.pages_per_rank,  # a request in it has a page of its own at least
            max_context_len=config.context_tokens + config.page_size,
            device=place.at,
            enable_memory_saver=False,
        )
        params = parts.CacheInitParams(
            disable=False,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=config.page_size,
            tree_components=(parts.ComponentType.FULL,),
            tree_core_backend=tree,
            chunked_prefill_size=self.spec.chunk_tokens,
            # only the host tier looks at them
            **({"mtp_draft_device_pools": drafts} if (drafts := self._draft_pools()) else {}),
        )
        self.tree = parts.Tree(params)
        if self.sees_nodes:
            _number_nodes(self.tree)
        self.host = HostTier(parts, self.tree, params, place) if config.host_pages_per_rank else None
        pool = self.allocator.size
        if (limit := parts.get("max_input_len")) is not None:
            pool = limit(capacity=pool, page_size=config.page_size, shard_size=config.shards)
        self.prompt_tokens_max = min(config.context_tokens - 1, pool)  # one token is left for the answer

    def _draft_pools(self) -> tuple[Any, ...]:
        """Those whose rows go to the host behind the target's layers: one for each layer of a draft."""
        return tuple(model.rows.pool for model in self.models[1:]) if self.config.host_pages_per_rank else ()

    def match(self, req: Any, most: int) -> None:
        """Match the longest cached prefix of at most `most` tokens, as the scheduler does before each admission."""
        self._parts.match(req, self.tree, req.full_untruncated_fill_ids, max_prefix_len=most)
        req.kv.cache_protected_len = req.prefix_len

    def would_lock(self, tokens: Sequence[int]) -> bool:
        """Whether a lock on the longest cached prefix of these tokens would take pages that can be evicted now."""
        key = self._parts.RadixKey(array("q", tokens), limit=len(tokens) - 1)
        cached, node, _ = self.tree.tree_core.match_full_device_prefix(key)
        if not cached:
            return False
        before = self.tree.evictable_size()
        lock = self.tree.lock(node)
        after = self.tree.evictable_size()
        self.tree.unlock(lock)
        return bool(after < before)

    def lock(self, held: Held) -> None:
        """Keep what a request has matched, on both tiers, until it is admitted or ends."""
        node = held.req.best_match_node if held.from_host else held.req.last_node
        held.lock = self.tree.lock(node)
        if held.from_host:
            held.host_lock = self.tree.inc_host_lock_ref(node).to_dec_params()

    def unlock(self, held: Held) -> None:
        """Undo `lock`."""
        if held.host_lock is not None:
            self.tree.dec_host_lock_ref(held.lock.node, held.host_lock)
        self.tree.unlock(held.lock)
        held.lock = held.host_lock = None

    def turn(self) -> None:
        """One turn of the scheduler's loop: it looks at the copies that are under way."""
        if self.host is not None:
            self.host.turn()

    def clear(self) -> None:
        """Drop the cache, in the order of the scheduler's own flush."""
        self.tree.reset()
        self.table.clear()
        self.allocator.clear()
        self.table.reset_aux_cache_allocator()

    def close(self) -> None:
        """Give back what would outlive the session."""
        if self.host is not None:
            self.host.close()


def _number_nodes(tree: Any) -> None:
    """Number the nodes of each tree on its own: sglang counts them per process, and has one rank in each.

    Ranks compare what they did by these numbers.
    """
    core, numbers = tree.tree_core, itertools.count()
    register = core._register_node  # noqa: SLF001  # where a new node first shows its number

    def numbered(node: Any) -> None:
        node.id = next(numbers)
        register(node)

    core._register_node = numbered  # noqa: SLF001  # see above
    tree.reset()  # the root is numbered too

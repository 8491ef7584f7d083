"""The snapshot of one rank, read off sglang's own objects. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from msgspec.structs import replace

from harness import views as v
from harness.adapters.sglang_core import Core
from harness.adapters.sglang_held import Held
from harness.adapters.sglang_hub import Gathering
from harness.adapters.sglang_install import Parts


def rank_view(
    parts: Parts, core: Core, live: Mapping[str, Held], group: Gathering, rooms: Mapping[str, int], sent_bytes: int
) -> v.RankView:
    """Everything that can be seen of a rank; `rooms` are those that requests are on their way to."""
    allocator = core.allocator
    free = zip(allocator.class_free_pages, allocator.class_release_pages, strict=True)
    stats = parts.PoolStats._get_token_info(  # noqa: SLF001  # what the scheduler reports as usage
        SimpleNamespace(token_to_kv_pool_allocator=allocator, tree_cache=core.tree, max_total_num_tokens=allocator.size)
    )
    return v.RankView(
        rank=group.rank,
        capacity=(allocator.num_pages // allocator.shard_size,) * allocator.shard_size,
        free=tuple(tuple(torch.cat(pages).tolist()) for pages in free),
        requests={name: replace(request_view(core, held), room=rooms.get(name)) for name, held in live.items()},
        nodes=tuple(node_views(core)) if core.sees_nodes else None,
        host_free=tuple(tuple(pages.tolist()) for pages in core.host.free()) if core.host else (),
        moved=replace(core.host.meter.moved() if core.host else v.MovedView(), sent_bytes=sent_bytes),
        tokens_max=int(allocator.size),
        tokens_used=int(stats.full_num_used),
        buffers={name: buffer for model in core.models for name, buffer in model.buffers().items()},
        collectives=tuple(group.log),
    )


def request_view(core: Core, held: Held) -> v.RequestView:
    """One live request; before its first chunk it holds what it matched."""
    req, page = held.req, core.config.page_size
    if held.admitted:
        locs = core.table.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
        base = req.kv_rotation_base
    else:
        locs = core.tree.prefix_device_indices(req)[: held.cached - held.from_host]
        base = core.tree.rotation_base_of(req.best_match_node if held.from_host else req.last_node)
    return v.RequestView(
        tokens=held.tokens,
        computed=held.computed,
        cached=held.cached,
        pages=pages_of(locs, page),
        base=base if held.computed else None,
        host_pages=() if held.admitted or not held.from_host else host_pages(core, held),
    )


def host_pages(core: Core, held: Held) -> tuple[int, ...]:
    """The copies that a waiting request is to bring back, by position."""
    tree, locs = core.tree.tree_core, list[torch.Tensor]()
    node, last = tree.node_by_id(held.req.best_match_node), tree.node_by_id(held.req.last_node)
    while node is not last:
        copy = _full(node).host_value
        if copy is not None:
            locs.append(copy)
        node = node.parent
    return pages_of(torch.cat(locs[::-1]), core.config.page_size) if locs else ()


def node_views(core: Core) -> Iterator[v.NodeView]:
    """The tree without its root, parents before children."""
    page, root = core.config.page_size, core.tree.tree_core.root_node
    pins = core.host.pins() if core.host else {}
    for node, start in _below(root, page):
        full, pinned = _full(node), pins.get(node.id, 0)
        yield v.NodeView(
            node=node.id,
            parent=None if node.parent is root else node.parent.id,
            start=start,
            tokens=tuple(node.key.raw_token_ids()),
            pages=pages_of(full.value, page),
            base=node.rotation_base,
            locks=full.lock_ref - pinned,  # sglang counts its copies as holders
            host_pages=pages_of(full.host_value, page),
            pins=pinned,
        )


def tokens_in_tree(core: Core) -> int:
    """Cached tokens, on either tier; told without a look at any tensor."""
    return sum(len(node.key) for node, _ in _below(core.tree.tree_core.root_node, core.config.page_size))


def pages_of(locs: torch.Tensor | None, page: int) -> tuple[int, ...]:
    """Page ids of whole pages of locs, by position; none without locs."""
    return () if locs is None else tuple((locs[::page].long() // page).tolist())


def _full(node: Any) -> Any:
    """A node's own part of the one kind of state there is."""
    return node.component_data[0]


def _below(root: Any, page: int) -> Iterator[tuple[Any, int]]:
    """(node, pages above it) of everything below the root."""
    stack = [(child, 0) for child in reversed(root.children.values())]
    while stack:
        node, above = stack.pop()
        yield node, above
        stack.extend((child, above + len(node.key) // page) for child in reversed(node.children.values()))

"""Faults modelled on known bugs: copies between device and host, and what the ranks agree on about them."""

from __future__ import annotations

from harness.fault import Edit, Fault

DRAW_REFUSES = Edit("kvshard_ref.cache:PageCache._draw", old="raise RuntimeError(", new="raise RefusedError(")

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="host.backup-without-index",
        does="Only token-major components are copied to the host: indexer rows come back as something else.",
        kind="tiers",
        like="B30",
        breaks=("I12", "I13"),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.backup",
                old="for device, host in chain.from_iterable(self.rows):",
                new="""
for device, host in chain.from_iterable(self.rows):
    if device.component.scales:
        continue
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.restore-without-index",
        does="A restore brings back the token-major components alone: the indexer works with stale rows.",
        kind="tiers",
        like="B32",
        breaks=("I12",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                old="for device, host in rows:",
                new="""
for device, host in rows:
    if device.component.scales:
        continue
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.index-of-first-layer-only",
        does="A restore brings back the indexer rows of layer 0 alone, as if the other layers had none.",
        kind="tiers",
        like="B32",
        breaks=("I12",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                old="for device, host in rows:",
                new="""
for device, host in rows:
    if device.component.scales and rows is not self.rows[0]:
        continue
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.restore-without-draft",
        does="A restore brings back the target's rows alone, the draft reads those of other requests.",
        kind="draft",
        like="B50",
        breaks=("I20",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                old="for device, host in rows:",
                new="""
for device, host in rows:
    if device.component not in self._pools[0].components:
        continue
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.draft-index-stays",
        does="The draft's indexer rows are not copied to the host; its other rows are.",
        kind="draft",
        like="facts 10-19",
        breaks=("I20",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.backup",
                old="for device, host in chain.from_iterable(self.rows):",
                new="""
for device, host in chain.from_iterable(self.rows):
    if device.component.scales and device.component not in self._pools[0].components:
        continue
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.draft-behind-last-layer",
        does="The draft's rows are restored one host page away from where they were put.",
        kind="draft",
        like="facts 10-20",
        breaks=("I20",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                old="for start, first, count in runs:",
                new="""
for start, first, count in runs:
    first = first - (first > 1 and device.component not in self._pools[0].components)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.index-moved-by-token",
        does="A restore moves page-major pages token by token, as if key and scale of a token lay side by side.",
        kind="tiers",
        like="B54",
        breaks=("I12",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                old="device.put_pages(pages, fresh)",
                new="""
if device.component.scales:
    at = (pages[:, None] * device.page_size + torch.arange(device.page_size)).flatten()
    device.put(at, fresh.view(len(at), device.component.width))
else:
    device.put_pages(pages, fresh)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.only-rank-0-backs-up",
        does="One rank is elected to copy to the host, as for a replicated cache; the others' pages never arrive.",
        kind="tiers",
        like="B35",
        breaks=("I15", "I12"),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool.backup",
                old="pages, runs = self._own(copies)",
                new="pages, runs = self._own(copies if self._pools[0].rank == 0 else [])",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.every-rank-copies-all",
        does="Every rank copies every page between the tiers, to the places of its own ones.",
        kind="tiers",
        like="B35",
        breaks=("I15",),
        changes=(
            Edit(
                "kvshard_ref.host_pool:HostPool._own",
                old="own = pool.placement.page_owner(slots) == pool.rank",
                new="own = slots >= 0",
            ),
        ),
        level="both",
    ),
    Fault(
        id="radix.acknowledges-lower-half",
        does="The end of a copy unpins the node object alone; if it was split meanwhile its upper part stays pinned.",
        kind="tiers",
        like="B18",
        breaks=("I11", "I09"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.pin",
                old="if pages > 0:",
                new="if pages > 0 and (change > 0 or each is node):",
            ),
        ),
    ),
    Fault(
        id="host.copies-what-is-left",
        does="A planned copy reads the node's pages when it is carried out: after a split they are the suffix alone.",
        kind="tiers",
        like="B18",
        breaks=("tiers.everything_has", "I13", "I12"),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.take_planned",
                old="return planned",
                new="""
return [
    Copy(each.kind, each.node, each.node.pages, each.node.slots)
    if each.kind == "backup" and each.node.pages
    else each
    for each in planned
]
""",
            ),
        ),
    ),
    Fault(
        id="radix.hit-ends-at-device",
        does="A match of a new request never goes on into nodes that are on the host alone, so the host is never hit.",
        kind="tiers",
        like="B51",
        breaks=("I21",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.match",
                old="if child is None:",
                new="if child is None or (pages_max is not None and not child.pages):",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.restored-counted-twice",
        does="Tokens that come back from the host are counted in both phases of a restore.",
        kind="accounting",
        like="B67",
        breaks=("I22", "I21"),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.restore",
                old="self.restored_pages += len(slots)",
                new="self.restored_pages += 2 * len(slots)",
            ),
        ),
        level="both",
    ),
    Fault(
        id="host.twice-the-pages",
        does="The host tier takes twice the pages that it was given, one budget for each of two pools.",
        kind="accounting",
        like="B64",
        breaks=("I22",),
        changes=(
            Edit(
                "kvshard_ref.host_tier:HostTier.__init__",
                old="PageAllocator(tree.placement, pages_per_rank)",
                new="PageAllocator(tree.placement, 2 * pages_per_rank)",
            ),
            Edit(
                "kvshard_ref.host_pool:HostPool.__init__",
                old="RowBuffer(component, pages_per_rank + 1,",
                new="RowBuffer(component, 2 * pages_per_rank + 1,",
            ),
        ),
    ),
    Fault(
        id="worker.idle-rank-skips-agreement",
        does="A rank on which no copy has ended leaves out the agreement about ended copies; the others wait for it.",
        kind="mirror",
        like="B15",
        breaks=("I08", "I07"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.progress",
                old="self._acknowledge(self.group.minimum([done])[0])",
                new="""
if done:
    self._acknowledge(self.group.minimum([done])[0])
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="worker.rank-without-pages-skips-copy",
        does="A rank that owns no page of a copy keeps no event for it, so the ranks agree about different copies.",
        kind="mirror",
        like="B15",
        breaks=("I07", "I08", "I11"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._copy",
                old="self._copied.extend(events[copy.kind] for copy in planned)",
                new="""
mine = [any(self.pool.placement.page_owner(slot) == self.pool.rank for slot in copy.slots) for copy in planned]
self._copied.extend(events[copy.kind] for copy, own in zip(planned, mine, strict=True) if own)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="worker.host-room-by-rank",
        does="A copy is planned on those ranks alone whose own host memory has room for it.",
        kind="mirror",
        like="B15",
        breaks=("I07",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.__init__",
                old="spec.padding, spec.host_pages_per_rank, spec.host_policy",
                new="spec.padding, -(-spec.host_pages_per_rank // (1 + group.rank)), spec.host_policy",
            ),
        ),
        level="both",
    ),
    Fault(
        id="worker.hit-cut-by-own-copies",
        does="Each rank takes a hit only if its own copies have ended, without asking the others.",
        kind="mirror",
        like="B16",
        breaks=("I07",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.open",
                old="return self.cache.open(name, keys, len(prompt), asked).cached",
                new="""
busy = any(not event.query() for event in self._copied)
return self.cache.open(name, keys, len(prompt), min(ps, asked) if busy else asked).cached
""",
            ),
        ),
        level="both",
    ),
)

"""Faults modelled on known bugs: where a row lies, which rank owns it, how a batch is laid out, gathered and split."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="placement.offset-wraps-at-2-31",
        does="Row times row size is computed in signed 32 bits, so it becomes negative beyond 2 GiB.",
        kind="placement",
        like="B06",
        breaks=("I02",),
        changes=(
            Edit(
                "kvshard_ref.placement:Placement.byte_offset",
                old="return self.local_row(loc) * row_bytes",
                new="return (self.local_row(loc) * row_bytes + 2**31) % 2**32 - 2**31",
            ),
        ),
    ),
    Fault(
        id="placement.offset-wraps-at-2-32",
        does="Row times row size is computed in unsigned 32 bits, so it begins again at 0 beyond 4 GiB.",
        kind="placement",
        like="B06",
        breaks=("I02",),
        changes=(
            Edit(
                "kvshard_ref.placement:Placement.byte_offset",
                old="return self.local_row(loc) * row_bytes",
                new="return self.local_row(loc) * row_bytes % 2**32",
            ),
        ),
    ),
    Fault(
        id="placement.loc-truncated",
        does="A widened location is cut to 32 bits before its row is worked out, which N ranks reach N times sooner.",
        kind="placement",
        like="B06",
        breaks=("I02",),
        changes=(
            Edit("kvshard_ref.placement:Placement.local_row", old="loc = widen(loc)", new="loc = widen(loc) % 2**32"),
        ),
    ),
    Fault(
        id="plan.owners-of-contiguous-ids",
        does="The owners of a batch's prefix pages go round from the lowest id: wrong once the ids have a gap.",
        kind="gather",
        like="B01",
        breaks=("I19",),
        changes=(
            Edit(
                "kvshard_ref.plan:_pages_by_owner",
                old="""
for page in sorted(set().union(*prefixes)):
    owned[page % placement.shards].append(page)
""",
                new="""
pages = sorted(set().union(*prefixes))
for at, page in enumerate(pages):
    owned[(pages[0] + at) % placement.shards].append(page)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="pool.side-buffer-ends-early",
        does="Side buffers are made without the reserved page, so their last page lies outside.",
        kind="rows",
        like="B03",
        breaks=("I22", "I01"),
        changes=(
            Edit(
                "kvshard_ref.pool:ShardPool.__init__",
                old="RowBuffer(c, pages_per_rank + 1, placement.page_size, self.device)",
                new="RowBuffer(c, pages_per_rank + (c is components[0]), placement.page_size, self.device)",
            ),
        ),
    ),
    Fault(
        id="pool.plan-without-reserved-page",
        does="The memory plan charges for the allocatable pages alone; the buffers have a reserved one as well.",
        kind="accounting",
        like="B03",
        breaks=("I22",),
        changes=(
            Edit(
                "kvshard_ref.pool:ShardPool.planned_bytes",
                old="return (pages_per_rank + 1) * placement.page_size",
                new="return pages_per_rank * placement.page_size",
            ),
        ),
    ),
    Fault(
        id="pool.every-rank-persists",
        does="The owner filter is bypassed: every rank writes every row at the row's number, over its own ones.",
        kind="rows",
        like="facts 10-13",
        breaks=("I19", "I15"),
        changes=(
            Edit(
                "kvshard_ref.pool:ShardPool.owned",
                old="positions = np.flatnonzero(self.placement.owner(locs) == self.rank)",
                new="positions = np.arange(len(locs))",
            ),
        ),
        level="both",
    ),
    Fault(
        id="rows.page-major-taken-by-token",
        does="Rows of a page-major buffer are read as if key and scale of a token lay side by side.",
        kind="rows",
        like="B54",
        breaks=("I12", "I19"),
        changes=(
            Edit(
                "kvshard_ref.rows:RowBuffer.take",
                old="if not self.component.scales:",
                new="if len(rows):",
            ),
        ),
        level="both",
    ),
    Fault(
        id="plan.groups-by-stride",
        does="A prefix is sampled at every N-th page, the pages between are taken from the same row of the owners.",
        kind="gather",
        like="facts 10-4",
        breaks=("I19",),
        changes=(
            Edit(
                "kvshard_ref.plan:_pages_by_owner",
                old="for page in sorted(set().union(*prefixes)):",
                new="""
shards = placement.shards
sampled = {
    prefix[at] // shards * shards + (prefix[at] + step) % shards
    for prefix in prefixes
    for at in range(0, len(prefix), shards)
    for step in range(min(shards, len(prefix) - at))
}
for page in sorted(sampled):
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="plan.short-group-missed",
        does="Only whole groups of N prefix pages get a place in the scratch: the last short one reads trash.",
        kind="gather",
        like="facts 10-5",
        breaks=("I19",),
        changes=(
            Edit(
                "kvshard_ref.plan:_pages_by_owner",
                old="for page in sorted(set().union(*prefixes)):",
                new="""
shards = placement.shards
for page in sorted(set().union(*(prefix[: max(shards, len(prefix) // shards * shards)] for prefix in prefixes))):
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="plan.first-request-only",
        does="The plan of a batch has the prefix pages of its first request alone.",
        kind="gather",
        like="facts 10-7",
        breaks=("I24",),
        changes=(
            Edit("kvshard_ref.plan:_pages_by_owner", old="set().union(*prefixes)", new="set().union(*prefixes[:1])"),
        ),
        level="both",
    ),
    Fault(
        id="gather.page-keeps-scratch-row",
        does="A page that was translated once keeps its scratch page in later batches, whatever their plan says.",
        kind="gather",
        like="facts 10-8",
        breaks=("I19", "I24"),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.begin",
                old="self._table.index_copy_(0, self._index([*plan.slots]), self._index([*plan.slots.values()]))",
                new="""
memo = self.__dict__.setdefault("_memo", {})
kept = {page: memo.setdefault(page, slot) for page, slot in plan.slots.items()}
self._table.index_copy_(0, self._index([*kept]), self._index([*kept.values()]))
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="gather.index-translated-twice",
        does="For page-major components scratch rows are taken for locations and translated once more.",
        kind="gather",
        like="facts 10-12",
        breaks=("I19",),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.read",
                old="return self._slots[component][layer % SLOTS].take(scratch_rows, out)",
                new="""
slot = self._slots[component][layer % SLOTS]
if slot.component.scales:
    scratch_rows = self.translate(scratch_rows % (len(self._table) * self.scratch.page_size))
return slot.take(scratch_rows, out)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="runner.idle-rank-skips-exchange",
        does="A rank that computes none of the chunk's tokens leaves out the exchange of the others.",
        kind="gather",
        like="B55",
        breaks=("I08", "I23"),
        changes=(
            Edit(
                "kvshard_ref.runner:Runner.exchange",
                old="""
if self.group.size == 1 or self.split == "whole":
    return part[:count]
""",
                new="""
if self.group.size == 1 or self.split == "whole":
    return part[:count]
if self.group.rank >= count:
    return part.new_zeros(count, part.shape[1])
""",
            ),
        ),
        level="both",
    ),
)

"""Faults in rows and in the way they take to attention: split, pool, gather plan, scratch slots."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="plan.slots-by-position",
        does=("Scratch pages are numbered in the order of the chains, sent in ascending order: wrong when fragmented."),
        kind="gather",
        like="B01",
        breaks=("I19", "I23", "I16"),
        changes=(
            Edit(
                "kvshard_ref.plan:plan_gather",
                "for index, page in enumerate(pages)}",
                "for index, page in enumerate("
                "dict.fromkeys(p for prefix in prefixes for p in prefix if p % placement.shards == owner))}",
            ),
        ),
    ),
    Fault(
        id="split.empty-share-unpadded",
        does="A rank that gets none of the chunk's tokens sends an empty share instead of a padded one.",
        kind="rows",
        like="B55",
        breaks=("I08", "I23"),
        changes=(Edit("kvshard_ref.split:share", "if missing else", "if missing and mine.shape[-2] else"),),
    ),
    Fault(
        id="gather.kick-waits-once",
        does=(
            "Only the gather of layer 0 waits for the compute stream, so G(2) may overwrite a slot that "
            "layer 0 still reads."
        ),
        kind="order",
        like="B22",
        breaks=("I10",),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.prefetch",
                "self._stream.wait_stream(self._device_module.current_stream())",
                """
if layer == 0:
    self._stream.wait_stream(self._device_module.current_stream())
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="gather.restore-event-clamped",
        does="The gather of layers from 2 on waits for the restore of layer 1 alone.",
        kind="order",
        like="B23",
        breaks=("I10", "I12"),
        changes=(Edit("kvshard_ref.gather:PrefixGather.prefetch", "self._loads[layer]", "self._loads[min(layer, 1)]"),),
        engine="ref?device=order",
    ),
    Fault(
        id="gather.restore-instead-of-compute",
        does=(
            "With a prefix from the host the gather waits for the restore instead of the compute stream, not for both."
        ),
        kind="order",
        like="B24",
        breaks=("I10",),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.prefetch",
                "self._stream.wait_stream(self._device_module.current_stream())",
                """
if not self._loads:
    self._stream.wait_stream(self._device_module.current_stream())
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="gather.send-pages-memo",
        does=(
            "The indices of the pages to send are kept when a batch has the same first page and block "
            "as the one before."
        ),
        kind="gather",
        like="systematic",
        breaks=("I19", "I12"),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.begin",
                "self._send_pages = self._index(plan.send_pages)",
                """
memo = (plan.send_pages[:1], plan.block)
if memo != self.__dict__.get("_memo"):
    self._memo, self._send_pages = memo, self._index(plan.send_pages)
""",
            ),
        ),
    ),
    Fault(
        id="plan.send-by-position",
        does="A rank sends its prefix pages in the order of positions; the receivers expect them ascending.",
        kind="gather",
        like="B01",
        breaks=("I01", "I19"),
        changes=(
            Edit(
                "kvshard_ref.plan:plan_gather",
                "send_pages = [page // placement.shards for page in owned[rank]]",
                """
distinct = dict.fromkeys(page for prefix in prefixes for page in prefix)
send_pages = [page // placement.shards for page in distinct if page % placement.shards == rank]
""",
            ),
        ),
    ),
    Fault(
        id="runner.partial-page-not-persisted",
        does="Rows of a prompt's last partial page are taken for padding and go to the reserved page.",
        kind="rows",
        like="B39",
        breaks=("I16",),
        changes=(
            Edit(
                "kvshard_ref.runner:Runner.forward",
                "owned = self.pool.owned(chunk_locs)",
                """
ps = self.pool.placement.page_size
whole = [np.arange(e.start, e.end) < e.end // ps * ps for e in extents]
owned = self.pool.owned(np.where(np.concatenate(whole), chunk_locs, 0))
""",
            ),
        ),
    ),
    Fault(
        id="runner.share-by-pool-rank",
        does="A rank computes the share of its pool's rank, which is 0 on all ranks of the replicated layout.",
        kind="rows",
        like="B35",
        breaks=("I23", "I19"),
        changes=(Edit("kvshard_ref.runner:Runner.share", "self.group.rank", "self.pool.rank"),),
    ),
    Fault(
        id="split.pad-in-front",
        does="A share that is one row short is padded in front, not behind.",
        kind="rows",
        like="B55",
        breaks=("I23",),
        changes=(Edit("kvshard_ref.split:share", "(0, 0, 0, missing)", "(0, 0, missing, 0)"),),
    ),
    Fault(
        id="pool.single-row-not-written",
        does="A rank that owns exactly one row of a chunk does not write it.",
        kind="rows",
        like="systematic",
        breaks=("I19", "I15"),
        changes=(Edit("kvshard_ref.pool:ShardPool.write", "if count:", "if count > 1:"),),
    ),
    Fault(
        id="components.plan-without-scales",
        does="The memory plan charges an indexer's keys only.",
        kind="rows",
        like="B03",
        breaks=("I22",),
        changes=(
            Edit(
                "kvshard_ref.components:total_row_bytes",
                "sum(component.row_bytes for component in components)",
                "sum((component.width - component.scales) * component.dtype.itemsize for component in components)",
            ),
        ),
    ),
    Fault(
        id="plan.per-request-rounded-once",
        does="per_request padding rounds the batch's sum up, not each request: owners overlap in scratch.",
        kind="gather",
        like="B57",
        breaks=("reads.",),
        changes=(
            Edit(
                "kvshard_ref.plan:_block",
                "return sum(-(-len(prefix) // len(owned)) for prefix in prefixes)",
                "return -(-sum(len(prefix) for prefix in prefixes) // len(owned))",
            ),
        ),
        engine="ref?padding=per_request",
    ),
    Fault(
        id="plan.block-by-total",
        does=(
            "The tight block is the distinct pages over N, rounded up, not the most of any owner; "
            "skewed owners overlap."
        ),
        kind="gather",
        like="B08",
        breaks=("reads.",),
        changes=(
            Edit(
                "kvshard_ref.plan:_block",
                "return max(map(len, owned))",
                "return -(-sum(map(len, owned)) // len(owned))",
            ),
            Edit(
                "kvshard_ref.plan:plan_gather",
                "send_pages += [0] * (block - len(send_pages))",
                "send_pages = (send_pages + [0] * block)[:block]",
            ),
        ),
    ),
)

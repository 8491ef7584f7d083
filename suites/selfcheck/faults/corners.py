"""Faults that show only where two things meet: a batch, a split, a partial page, a tight owner, a lock."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="admission.hits-promise-nothing-in-batch",
        does="In one batch, a request that continues a cached prefix is not counted against those after it.",
        kind="admission",
        like="B08",
        breaks=("admission.brim_can_finish",),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._place",
                "self.promised = add(self.promised, needs)",
                "self.promised = add(self.promised, needs) if request.base is None else self.promised",
            ),
        ),
    ),
    Fault(
        id="admission.partial-page-uncounted",
        does="Scratch is checked without the partial last page of a chunk.",
        kind="admission",
        like="B57",
        breaks=("admission.refusal_changes_nothing", "reads.batches", "reads.crowded_scratch"),
        changes=(
            Edit(
                "kvshard_ref.admission:Review.grant",
                "chunk_pages = -(-end // self.placement.page_size) - len(request.pages) - len(request.slots)",
                "chunk_pages = end // self.placement.page_size - len(request.pages) - len(request.slots)",
            ),
        ),
    ),
    Fault(
        id="cache.promise-base-zero",
        does="What an admitted request was promised is written down as if its chain began at rank 0.",
        kind="admission",
        like="B08",
        breaks=("admission.brim_can_finish", "admission.admitted_can_finish", "admission.crowd_can_finish"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._extended",
                "self.promised = add(self.promised, pages_left(request, base, self.placement))",
                "self.promised = add(self.promised, pages_left(request, 0, self.placement))",
            ),
        ),
    ),
    Fault(
        id="cache.promise-returned-twice",
        does="A request that ends while it is sent gives its promise back again when the transfer is over.",
        kind="aborts",
        like="B11",
        breaks=("admission.sent_can_finish",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._end",
                "if request.admitted and request.base is not None and not request.ending:",
                "if request.admitted and request.base is not None:",
            ),
        ),
    ),
    Fault(
        id="cache.too-long-for-scratch-opened",
        does="A prompt whose prefix can never fit the scratch is opened and begun.",
        kind="admission",
        like="B08",
        breaks=("admission.crowd_can_finish", "admission.refusal_changes_nothing"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._check_size",
                "if padded > padded_max:",
                "if pages_total > padded_max + pool_pages:",
            ),
        ),
    ),
    Fault(
        id="cache.finish-tells-computed",
        does="Finish tells the computed whole pages, also when the tree declined them.",
        kind="units",
        like="B67",
        breaks=("hits.kept_is_in_the_cache",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.finish",
                "return request.protected * self.placement.page_size",
                "return request.computed // self.placement.page_size * self.placement.page_size",
            ),
        ),
    ),
    Fault(
        id="cache.evict-rounds-down",
        does="An eviction of tokens that are no whole pages takes a page less.",
        kind="eviction",
        like="B67",
        breaks=("radix.evictions_are_told",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.evict",
                "count = -(-tokens // self.placement.page_size)",
                "count = tokens // self.placement.page_size",
            ),
        ),
    ),
    Fault(
        id="radix.partly-locked-takes-nothing",
        does="A match whose first part is locked counts as locked whole.",
        kind="admission",
        like="B08",
        breaks=("admission.brim_can_finish",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.lockable_counts",
                "taken = match.pages[locked:]",
                "taken = [] if locked else match.pages",
            ),
        ),
    ),
    Fault(
        id="radix.cap-only-between-nodes",
        does="The limit of a match is looked at between nodes, not inside one.",
        kind="radix",
        like="B69",
        breaks=("hits.whole_pages_below_the_prompt",),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.match",
                "node, node_pages = child, _shared_pages(child.keys, keys, length, end)",
                "node, node_pages = child, _shared_pages(child.keys, keys, length, len(keys))",
            ),
        ),
    ),
    Fault(
        id="eviction.stale-entry-lost",
        does="A leaf that was used since it was queued is dropped from the queue when it comes up.",
        kind="eviction",
        like="systematic",
        breaks=("radix.evictions_are_told",),
        changes=(
            Edit(
                "kvshard_ref.eviction:LeafQueue.pop",
                "self.offer(node)",
                "",
            ),
        ),
    ),
    Fault(
        id="worker.refused-shifts-chunks",
        does="When a request of a batch is refused, the others get the rows of the one before.",
        kind="chunks",
        like="B57",
        breaks=("reads.crowded_scratch",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.extend",
                "reads = self._forward(extents, [chunks[index] for index in admitted])",
                "reads = self._forward(extents, chunks[: len(admitted)])",
            ),
        ),
    ),
    Fault(
        id="runner.one-token-not-exchanged",
        does="A chunk of one token is not exchanged between the ranks.",
        kind="split",
        like="B55",
        breaks=("split.every_length",),
        changes=(
            Edit(
                "kvshard_ref.runner:Runner.exchange",
                'if self.group.size == 1 or self.split == "whole":',
                'if self.group.size == 1 or self.split == "whole" or count == 1:',
            ),
        ),
    ),
    Fault(
        id="cache.sent-duplicate-of-one-page",
        does="A duplicate of a single page is replaced although a transfer reads it.",
        kind="transfer",
        like="systematic",
        breaks=("I11",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._insert",
                "if request.sending and len(self.tree.match(keys).pages) > request.protected:",
                "if request.sending and len(self.tree.match(keys).pages) > request.protected + 1:",
            ),
        ),
        tests=("tests/test_cache_sending.py",),
    ),
)

"""Faults of the index level around the tree: placement, allocator, requests, admission, sizes."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="placement.class-counts-mask",
        does=(
            "The start class of a run is taken with a bit mask instead of a remainder, which is wrong for N=3 alone."
        ),
        kind="placement",
        like="systematic",
        breaks=("I06", "I04", "I01"),
        changes=(
            Edit(
                "kvshard_ref.placement:Placement.class_counts",
                "cut = self.shards - start_class % self.shards",
                "cut = self.shards - (start_class & (self.shards - 1))",
            ),
        ),
    ),
    Fault(
        id="placement.page-owner-mask",
        does=("The owner of a page id (copies between tiers, transfers) comes from a bit mask: wrong for N=3 alone."),
        kind="placement",
        like="B01",
        breaks=("I15", "I12", "I16", "I01"),
        changes=(
            Edit(
                "kvshard_ref.placement:Placement.page_owner",
                "return widen(page) % self.shards",
                "return widen(page) & (self.shards - 1)",
            ),
        ),
    ),
    Fault(
        id="placement.row-narrowed",
        does="The local row is narrowed to signed 32 bits before it is multiplied; the product itself is wide.",
        kind="placement",
        like="B06",
        breaks=("I02",),
        changes=(
            Edit(
                "kvshard_ref.placement:Placement.byte_offset",
                "return self.local_row(loc) * row_bytes",
                "return ((self.local_row(loc) + 2**31) % 2**32 - 2**31) * row_bytes",
            ),
        ),
    ),
    Fault(
        id="allocator.partial-draw-kept",
        does=(
            "A draw notices a class that is too short when it comes to it, and keeps what it took from classes before."
        ),
        kind="allocator",
        like="B08",
        breaks=("tiers.rows_change", "tiers.serves_what_fits", "tiers.host_conserved"),
        changes=(
            Edit(
                "kvshard_ref.allocator:PageAllocator.draw_run",
                """
if any(need > len(stack) for need, stack in zip(needs, self._stacks, strict=True)):
    return None
""",
                "",
            ),
            Edit(
                "kvshard_ref.allocator:PageAllocator.draw_run",
                "cut = len(stack) - len(range(first, count, shards))",
                """
cut = len(stack) - len(range(first, count, shards))
if cut < 0:
    return None
""",
            ),
        ),
    ),
    Fault(
        id="allocator.free-assumes-one-chain",
        does=(
            "Freed pages go to classes in rotation from the first one: wrong when one free has leaves of two chains."
        ),
        kind="allocator",
        like="B01",
        breaks=("I01", "I04", "I05"),
        changes=(
            Edit(
                "kvshard_ref.allocator:PageAllocator.free",
                """
for page in reversed(pages):
    self._is_free[page] = 1
    self._stacks[page % shards].append(page)
""",
                """
for at in reversed(range(len(pages))):
    self._is_free[pages[at]] = 1
    self._stacks[(pages[0] + at) % shards].append(pages[at])
""",
            ),
        ),
    ),
    Fault(
        id="cache.insert-without-refresh",
        does=(
            "A waiting request does not hear that another one computed what it wants back from the "
            "host; it leaks a page."
        ),
        kind="accounting",
        like="systematic",
        breaks=("tiers.device_conserved",),
        changes=(Edit("kvshard_ref.cache:PageCache._insert", "self._refresh()", ""),),
    ),
    Fault(
        id="cache.unadmitted-promise-taken-back",
        does="A request with a hit that ends before its first chunk takes back promises that were never made.",
        kind="accounting",
        like="B11",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._end",
                "if request.admitted and request.base is not None and not request.ending:",
                "if request.base is not None and not request.ending:",
            ),
        ),
    ),
    Fault(
        id="cache.abort-keeps-promise",
        does="A request that is aborted in mid-prompt leaves the pages of its rest promised for ever.",
        kind="accounting",
        like="B11",
        breaks=("admission.idle_pool_serves_what_fits", "I06", "I17"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._end",
                "if request.admitted and request.base is not None and not request.ending:",
                'if ending == "finish" and request.admitted and request.base is not None:',
            ),
        ),
    ),
    Fault(
        id="cache.aborted-while-sent-stays",
        does="A request that is aborted while a transfer reads it is not released when the transfer ends.",
        kind="accounting",
        like="B47",
        breaks=("I17", "I04"),
        changes=(Edit("kvshard_ref.cache:PageCache.sent", "if request.ending:", 'if request.ending == "finish":'),),
    ),
    Fault(
        id="cache.flush-spills",
        does=(
            "With write_back a flush moves the cache to the host instead of dropping it; copies in flight stay there."
        ),
        kind="accounting",
        like="systematic",
        breaks=("I04", "I17"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.flush", "self._evict([pages])", "self._evict([pages], spill=self._spill)"
            ),
        ),
    ),
    Fault(
        id="cache.used-by-scarcest-class",
        does=("Used tokens are reported from the scarcest class times N, so every unbalanced request counts too much."),
        kind="accounting",
        like="B07",
        breaks=("units.used_is_what_is_held", "I22", "I04"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.used_tokens",
                """
idle_pages = sum(self.allocator.free_counts()) + sum(self.tree.evictable_counts())
""",
                """
idle_pages = self.placement.shards * min(add(self.allocator.free_counts(), self.tree.evictable_counts()))
""",
            ),
        ),
    ),
    Fault(
        id="admission.last-chunk-counts",
        does="Against a batch's chunk budget only the request before counts, so three can overflow the scratch.",
        kind="admission",
        like="B57",
        breaks=("split.batch_mixes", "I06", "I23"),
        changes=(
            Edit(
                "kvshard_ref.admission:Review.grant",
                "self.chunk_pages += chunk_pages",
                "self.chunk_pages = chunk_pages",
            ),
        ),
    ),
    Fault(
        id="admission.restored-pages-in-chunk",
        does=("Pages to bring back from the host count against the chunk budget: a long host hit is refused for ever."),
        kind="admission",
        like="B67",
        breaks=("tiers.serves_what_fits", "I06", "I13"),
        changes=(Edit("kvshard_ref.admission:Review.grant", " - len(request.slots)", ""),),
    ),
    Fault(
        id="admission.rest-from-base",
        does=(
            "The classes of the pages left are counted from the base, not from the position reached; skew accumulates."
        ),
        kind="admission",
        like="B08",
        breaks=("I06",),
        changes=(Edit("kvshard_ref.admission:pages_left", "base + drawn", "base"),),
    ),
    Fault(
        id="scratch.chunk-rounded-down",
        does="A chunk budget that is no multiple of the page size is rounded down, so a whole budget is refused.",
        kind="admission",
        like="B57",
        breaks=("I06", "I24"),
        changes=(
            Edit("kvshard_ref.scratch:ScratchSize.sized", "-(-chunk_tokens // ps) * ps", "chunk_tokens // ps * ps"),
        ),
    ),
    Fault(
        id="spec.draft-shares-chunk-budget",
        does=("With a draft each model's scratch is made for half of the chunk budget, so a whole budget is refused."),
        kind="placement",
        like="B64",
        breaks=("I06", "I22"),
        changes=(
            Edit(
                "kvshard_ref.spec:WorkerSpec.scratch",
                "self.chunk_tokens,",
                "-(-self.chunk_tokens // len(self.models)),",
            ),
        ),
    ),
    Fault(
        id="cache.evicted-in-pages",
        does="An eviction tells how many pages have left, where tokens are asked for.",
        kind="accounting",
        like="systematic",
        breaks=("radix.evictions",),
        changes=(Edit("kvshard_ref.cache:PageCache.evict", "return pages * self.placement.page_size", "return pages"),),
    ),
    Fault(
        id="cache.evicted-as-asked",
        does="An eviction tells what was asked for, also when there was less to evict.",
        kind="accounting",
        like="facts 10-A2",
        breaks=("radix.evictions",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.evict",
                "return pages * self.placement.page_size",
                "return count * self.placement.page_size",
            ),
        ),
    ),
    Fault(
        id="cache.evicts-one-round",
        does="An eviction does not wait for copies under way, and leaves what they pin although more was asked for.",
        kind="tiers",
        like="B22",
        breaks=("radix.evictions",),
        changes=(
            Edit("kvshard_ref.cache:PageCache.evict", "while pages < count and self._drained():", "while pages < 0:"),
        ),
    ),
    Fault(
        id="cache.evicted-copies-uncounted",
        does="What an eviction frees is counted in device pages; evicted copies count for nothing.",
        kind="accounting",
        like="B67",
        breaks=("tiers.evictions",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._evict",
                'len(freed.slots if tier == "host" else freed.pages)',
                "len(freed.pages)",
            ),
        ),
    ),
    Fault(
        id="cache.flush-counts-device-only",
        does="A flush tells the pages that were on the device, not those on the host only.",
        kind="accounting",
        like="B67",
        breaks=("tiers.evictions",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.flush",
                "sum(len(node.keys) for node in self.tree.nodes())",
                "sum(len(node.pages) for node in self.tree.nodes())",
            ),
        ),
    ),
)

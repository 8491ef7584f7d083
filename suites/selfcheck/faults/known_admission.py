"""Faults modelled on known bugs: who is admitted, to which chunks, and how much room is said to be left."""

from __future__ import annotations

from harness.fault import Edit, Fault

# what was admitted and cannot be drawn is told as a refusal, so that a property has to find it
DRAW_REFUSES = Edit("kvshard_ref.cache:PageCache._draw", old="raise RuntimeError(", new="raise RefusedError(")
FITS = "if min(subtract(room, needs)) >= 0:"

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="admission.sum-of-classes",
        does="A request is admitted when the owner classes together have its pages, whichever class they are of.",
        kind="admission",
        like="B08",
        breaks=("I06",),
        changes=(
            Edit("kvshard_ref.admission:Review._place", old=FITS, new="if sum(room) >= sum(needs):"),
            DRAW_REFUSES,
        ),
        level="both",
    ),
    Fault(
        id="admission.sum-of-classes-guarded",
        does="A request is admitted by the sum over the classes; what cannot be drawn then ends the worker.",
        kind="admission",
        like="B08",
        breaks=("I06",),
        changes=(Edit("kvshard_ref.admission:Review._place", old=FITS, new="if sum(room) >= sum(needs):"),),
        level="both",
    ),
    Fault(
        id="admission.first-chunk-only",
        does="Pages are reserved chunk by chunk: two half-done requests each hold what the other needs.",
        kind="admission",
        like="B13",
        breaks=("I06",),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._place",
                old="def _place(self, request: Request) -> int:",
                new="def _place(self, request: Request, pages: int) -> int:",
            ),
            Edit(
                "kvshard_ref.admission:Review._place",
                old="""
if request.admitted and request.base is not None:
    return request.base
""",
            ),
            Edit(
                "kvshard_ref.admission:Review._place",
                old="needs = pages_left(request, base, self.placement)",
                new="""
needs = self.placement.class_counts(base + len(request.pages), pages + len(request.slots))
""",
            ),
            Edit(
                "kvshard_ref.admission:Review.grant",
                old="base = self._place(request)",
                new="base = self._place(request, chunk_pages)",
            ),
            Edit(
                "kvshard_ref.cache:PageCache._extended",
                old="self.promised = add(self.promised, pages_left(request, base, self.placement))",
            ),
            Edit("kvshard_ref.cache:PageCache._draw", old="self.promised = subtract(self.promised, needs)"),
            Edit(
                "kvshard_ref.cache:PageCache._end",
                old="self.promised = subtract(self.promised, pages_left(request, request.base, self.placement))",
            ),
        ),
        level="both",
    ),
    Fault(
        id="admission.scratch-per-request",
        does="The prefix of each request is held against the whole scratch, not the prefixes of the batch together.",
        kind="admission",
        like="B08",
        breaks=("reads.crowded", "I06", "I19"),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._check_scratch",
                old="block_pages([*self.prefixes, prefix], self.placement, self.padding)",
                new="block_pages([prefix], self.placement, self.padding)",
            ),
            Edit(
                "kvshard_ref.plan:_check_fit", old="if pages > limit:", new='if pages > limit and region != "prefix":'
            ),
        ),
    ),
    Fault(
        id="admission.scratch-padded-per-request",
        does="Each request's prefix is charged to the scratch with padding of its own, shared pages or not.",
        kind="admission",
        like="facts 10-G",
        breaks=("admission.shared_pages", "I19"),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._check_scratch",
                old="block_pages([*self.prefixes, prefix], self.placement, self.padding)",
                new="sum(block_pages([one], self.placement, self.padding) for one in [*self.prefixes, prefix])",
            ),
        ),
    ),
    Fault(
        id="admission.scratch-group-less",
        does="The scratch counts as full when a last page per owner would still fit.",
        kind="admission",
        like="systematic",
        breaks=("admission.shared_pages", "I19"),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._check_scratch",
                old="self.scratch.prefix_pages, self",
                new="self.scratch.prefix_pages - 1, self",
            ),
        ),
    ),
    Fault(
        id="cache.unaligned-chunk-accepted",
        does="A chunk may end inside a page before the prompt's end.",
        kind="admission",
        like="B57",
        breaks=("misuse.refused_and_harmless", "I04", "I17"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._check_chunk",
                old="if end % self.placement.page_size and end != request.tokens:",
                new="if end > request.tokens:",
            ),
        ),
    ),
    Fault(
        id="cache.usage-floor-plus-aggregate",
        does="Used tokens are the capacity less N times the scarcest class's free pages and all evictable ones.",
        kind="accounting",
        like="facts 10-F",
        breaks=("I22",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.used_tokens",
                old="idle_pages = sum(self.allocator.free_counts()) + sum(self.tree.evictable_counts())",
                new="""
free_pages = self.placement.shards * min(self.allocator.free_counts())
idle_pages = free_pages + sum(self.tree.evictable_counts())
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="scratch.context-to-page-grid",
        does="The scratch holds contexts that are rounded up to the page size instead of N pages.",
        kind="admission",
        like="B57",
        breaks=("admission.idle",),
        changes=(
            Edit(
                "kvshard_ref.scratch:ScratchSize.sized",
                old="group = placement.shards * ps",
                new="group = ps",
            ),
        ),
    ),
    Fault(
        id="scratch.aligns-after-multiplying",
        does="Scratch is rounded up to whole pages of each rank for all contexts together, not for each one.",
        kind="admission",
        like="systematic",
        breaks=("admission.shared_pages_count_once",),
        changes=(
            Edit(
                "kvshard_ref.scratch:ScratchSize.sized",
                "return cls(contexts * -(-context_tokens // group) * group, -(-chunk_tokens // ps) * ps, ps)",
                "return cls(-(-contexts * context_tokens // group) * group, -(-chunk_tokens // ps) * ps, ps)",
            ),
        ),
    ),
    Fault(
        id="cache.lock-check-sums-classes",
        does="Whether a lock takes promised pages is checked over all classes together, not class by class.",
        kind="accounting",
        like="B08",
        breaks=("admission.brim",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._check_promises",
                "if any(take > have for take, have in zip(taken, room, strict=True)):",
                "if sum(taken) > sum(room):",
            ),
        ),
    ),
    Fault(
        id="admission.one-page-per-request",
        does="What is promised is reserved as a number of pages, not one per owner class.",
        kind="admission",
        like="facts 10-2",
        breaks=("admission.brim", "admission.refusal"),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._place",
                old=FITS,
                new="""
budget = self.placement.shards * min(add(self.free, self.evictable)) - sum(self.promised)
if min(subtract(room, needs)) >= 0 or budget >= sum(needs):
""",
            ),
            DRAW_REFUSES,
        ),
        level="both",
    ),
    Fault(
        id="admission.floor-plus-aggregate",
        does="The budget is N times the scarcest class plus all evictable pages, those of other classes too.",
        kind="admission",
        like="facts 10-A",
        breaks=("admission.scarce",),
        changes=(
            Edit(
                "kvshard_ref.admission:Review._place",
                old=FITS,
                new="""
budget = self.placement.shards * min(spare) + sum(self.evictable)
if min(subtract(room, needs)) >= 0 or budget >= sum(needs) + self.placement.shards:
""",
            ),
            DRAW_REFUSES,
        ),
        level="both",
    ),
    Fault(
        id="admission.host-slots-as-pages",
        does="Host pages of a prefix count for the scratch under their own numbers: an equal device page counts once.",
        kind="admission",
        like="B08",
        breaks=("tiers.crowded_scratch",),
        changes=(
            Edit(
                "kvshard_ref.admission:Review.grant",
                old="*(slot - HOST_IDS * self.placement.shards for slot in request.slots)",
                new="*request.slots",
            ),
        ),
        level="both",
    ),
)

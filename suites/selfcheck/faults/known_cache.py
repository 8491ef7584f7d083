"""Faults modelled on known bugs: the radix tree, what requests hold of it, and which pages are freed when."""

from __future__ import annotations

from harness.fault import Edit, Fault

PLAN_TAKES_ANY_OWNERS = Edit(
    "kvshard_ref.plan:plan_gather",
    old="""
for request, prefix in enumerate(prefixes):
    _check_cyclic(request, prefix, placement)
""",
)
TREE_TAKES_ANY_OWNERS = Edit("kvshard_ref.radix:RadixTree.insert", old="self._check_cyclic(pages, base)")

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="cache.partial-last-page-leaks",
        does="A request's end frees the pages of its whole computed ones alone: the partial last page is lost.",
        kind="allocator",
        like="B09",
        breaks=("I04", "I03"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._end",
                old="self.allocator.free(request.pages[request.protected :])",
                new="""
whole = max(request.protected, request.computed // self.placement.page_size)
self.allocator.free(request.pages[request.protected : whole])
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.waiting-abort-keeps-lock",
        does="A request that is aborted before its first chunk leaves its cached prefix locked.",
        kind="tree",
        like="B11",
        breaks=("I09", "I04"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._end",
                old="self.tree.unlock(request.node)",
                new="""
if request.admitted or ending == "finish":
    self.tree.unlock(request.node)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.refused-open-keeps-lock",
        does="An open that is refused because of promised pages has locked its prefix already.",
        kind="tree",
        like="B34",
        breaks=("I04", "I06"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.open",
                old="self._check_promises(name, self.tree.lockable_counts(match))",
                new="""
try:
    self._check_promises(name, self.tree.lockable_counts(match))
except RefusedError:
    self.tree.lock(match)
    raise
""",
            ),
        ),
    ),
    Fault(
        id="radix.split-counts-other-half",
        does="A lock that splits a node takes the lower half from the evictable pages, though it locks the upper one.",
        kind="accounting",
        like="B20",
        breaks=("admission.evicts_only_when_short", "I04", "I22", "I06"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.lock",
                old="self._count_evictable(each, -1)",
                new="self._count_evictable(match.node if each is node else each, -1)",
            ),
        ),
    ),
    Fault(
        id="radix.evictable-by-key-length",
        does="Evictable pages are counted by the length of the key, also for nodes that are on the host alone.",
        kind="accounting",
        like="B20",
        breaks=("tiers.serves_what_fits", "I04", "I22", "I06"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree._count_evictable",
                old="if node.pages:",
                new="if node.pages or node.slots:",
            ),
            Edit(
                "kvshard_ref.radix:RadixTree._count_evictable",
                old="class_counts(node.pages[0], len(node.pages))",
                new="class_counts((node.pages or node.slots)[0], len(node.keys))",
            ),
        ),
    ),
    Fault(
        id="radix.base-not-recorded",
        does="New nodes do not get the rotation base, so whoever hits them goes on from any owner.",
        kind="tree",
        like="facts 10-1",
        breaks=("I01", "I15"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.insert",
                old="list(keys[found.length :]), [], base, node, self.clock)",
                new="list(keys[found.length :]), [], None, node, self.clock)",
            ),
            TREE_TAKES_ANY_OWNERS,
            PLAN_TAKES_ANY_OWNERS,
        ),
    ),
    Fault(
        id="radix.rotations-spliced",
        does="A tail is inserted below a chain with another rotation base, so one path has two rotations.",
        kind="tree",
        like="facts 10-6",
        breaks=("I01", "I15", "I09"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.insert",
                old="""
if cached_base not in (None, base):
    return Insert(found.node, found.length, [], declined=True)
""",
            ),
            TREE_TAKES_ANY_OWNERS,
            PLAN_TAKES_ANY_OWNERS,
        ),
    ),
    Fault(
        id="radix.rotations-spliced-guarded",
        does="A tail is inserted below a chain with another rotation base; the plan of a later batch refuses the path.",
        kind="tree",
        like="facts 10-6",
        breaks=("I01", "I15", "I09"),
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.insert",
                old="""
if cached_base not in (None, base):
    return Insert(found.node, found.length, [], declined=True)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="radix.split-drops-base",
        does="The upper part of a split node gets all fields but the rotation base.",
        kind="tree",
        like="facts 10-26",
        breaks=("I09", "I03", "I01"),
        changes=(
            Edit("kvshard_ref.radix:RadixTree._split", old="id=next(self._ids),", new="id=next(self._ids), base=None,"),
            TREE_TAKES_ANY_OWNERS,
            PLAN_TAKES_ANY_OWNERS,
        ),
    ),
    Fault(
        id="cache.declined-suffix-leaks",
        does="A declined insert counts as done, so the request never frees the pages that it has kept.",
        kind="allocator",
        like="facts 10-5",
        breaks=("I04",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._insert",
                old="""
if done.declined or done.node is None:
    return
""",
                new="""
if done.declined or done.node is None:
    request.protected = whole
    return
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.evicted-short-group-stranded",
        does="Evicted pages are freed in groups of N: the rest of the last group belongs to nobody.",
        kind="allocator",
        like="facts 10-5",
        breaks=("I04",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._evict",
                old="self.allocator.free(freed.pages)",
                new="""
shards = self.placement.shards
self.allocator.free(freed.pages[: len(freed.pages) // shards * shards])
""",
            ),
        ),
    ),
    Fault(
        id="cache.duplicates-read-late",
        does="Duplicates are freed by a view of the request's row, which by then holds the cached pages.",
        kind="allocator",
        like="facts 10-10",
        breaks=("I05", "I04"),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._insert",
                old="duplicates = request.pages[request.protected : done.matched_pages]",
                new="row = slice(request.protected, done.matched_pages)",
            ),
            Edit(
                "kvshard_ref.cache:PageCache._insert",
                old="self.allocator.free(duplicates)",
                new="""
duplicates = request.pages[row]
self.allocator.free(duplicates)
""",
            ),
        ),
    ),
    Fault(
        id="cache.duplicates-never-freed",
        does="The request's own pages of tokens that the tree had already are counted and forgotten.",
        kind="allocator",
        like="facts 10-11",
        breaks=("I04",),
        changes=(Edit("kvshard_ref.cache:PageCache._insert", old="self.allocator.free(duplicates)"),),
        level="both",
    ),
    Fault(
        id="cache.tail-freed-twice",
        does="The partial last page is freed with the request's own pages and once more with the answer's.",
        kind="allocator",
        like="facts 10-22",
        breaks=("I05",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._end",
                old="self.allocator.free(request.pages[request.protected :])",
                new="""
self.allocator.free(request.pages[request.protected :])
if ending == "finish" and request.protected < len(request.pages):
    self.allocator.free(request.pages[-1:])
""",
            ),
            Edit(
                "kvshard_ref.allocator:PageAllocator._check_owned",
                old="if any(map(self._is_free.__getitem__, pages)):",
                new="if len(pages) > len(self._is_free):",
            ),
        ),
    ),
    Fault(
        id="cache.exact-multiple-hit-whole",
        does="A prompt of whole pages that are all cached is a hit to its end: no token is left to compute.",
        kind="tree",
        like="B38",
        breaks=("I21",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.open",
                old="(asked - 1) // self.placement.page_size",
                new="asked // self.placement.page_size",
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.middle-chunk-forgotten",
        does="The progress of a chunk that is neither the first nor the last is lost, so it is computed again.",
        kind="allocator",
        like="B59",
        breaks=("I24",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._extended",
                old="request.computed = end",
                new="""
if not request.cached < start < end < request.tokens:
    request.computed = end
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.insert-late",
        does="What the last chunk computed is inserted when the next prompt is opened, after its match.",
        kind="tree",
        like="B70",
        breaks=("I21",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.checkpoint",
                old="self._insert(self.request(name))",
                new="""
request = self.request(name)
if request.computed < request.tokens:
    self._insert(request)
""",
            ),
            Edit("kvshard_ref.cache:PageCache.finish", old="self._insert(request)"),
            Edit(
                "kvshard_ref.cache:PageCache.finish",
                old='self._end(request, "finish")',
                new='request.ending = "finish"',
            ),
            Edit(
                "kvshard_ref.cache:PageCache.finish",
                old="return request.protected * self.placement.page_size",
                new="return request.computed // self.placement.page_size * self.placement.page_size",
            ),
            Edit(
                "kvshard_ref.cache:PageCache.open",
                old="self.requests[name] = request",
                new="""
self.requests[name] = request
for late in [each for each in self.requests.values() if each.ending and not each.sending]:
    self._insert(late)
    self._end(late, late.ending)
""",
            ),
        ),
        level="both",
    ),
    Fault(
        id="cache.own-chunks-count-as-hits",
        does="What an insert finds in the tree is added to the request's cached tokens, its own earlier chunks too.",
        kind="accounting",
        like="B65",
        breaks=("chunks.computed",),
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._insert",
                old="request.node, request.protected = node, whole",
                new="""
request.node, request.protected = node, whole
request.cached = max(request.cached, done.matched_pages * self.placement.page_size)
""",
            ),
        ),
        level="both",
    ),
)

"""Right variants: other designs that keep the contract, so every case must pass them.

A case that fails one asks for how the reference does something, not for what an engine owes.
"""

from __future__ import annotations

from harness.fault import Edit, Variant
from suites.selfcheck.tier_variants import TIERS, TRANSFERS

PAGES = (
    Variant(
        "base_ties_to_the_highest",
        "Of several owner classes with the most free pages a new chain starts at the highest one.",
        changes=(
            Edit(
                "kvshard_ref.admission:Review._place",
                "sorted(range(self.placement.shards), key",
                "sorted(range(self.placement.shards)[::-1], key",
            ),
        ),
    ),
    Variant(
        "base_first_fit",
        "A new chain starts at the lowest owner class from which it fits.",
        changes=(
            Edit(
                "kvshard_ref.admission:Review._place",
                "roomiest_first = sorted(range(self.placement.shards), key=spare.__getitem__, reverse=True)",
                "roomiest_first = range(self.placement.shards)",
            ),
        ),
        drops=("balanced_seeding",),
    ),
    Variant(
        "free_first_in_first_out",
        "Pages are drawn in the order in which they were freed, not the last one first.",
        changes=(
            Edit("kvshard_ref.allocator:PageAllocator.free", "for page in reversed(pages):", "for page in pages:"),
            Edit("kvshard_ref.allocator:PageAllocator.free", ".append(page)", ".insert(0, page)"),
        ),
    ),
    Variant(
        "draws_from_the_top",
        "A fresh pool hands out its highest pages first.",
        changes=(
            Edit(
                "kvshard_ref.allocator:PageAllocator.__init__",
                "range(pages_per_rank, 0, -1)]",
                "range(1, pages_per_rank + 1)]",
            ),
        ),
    ),
)

EVICTIONS = (
    Variant(
        "evicts_ahead",
        "When pages are short, more are evicted than this draw needs.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._draw",
                "self._evict(subtract(needs, self.allocator.free_counts()), spill=self._spill)",
                """
                ahead = [1 + self.allocator.pages_per_rank // 4] * self.placement.shards
                self._evict(subtract(add(needs, ahead), self.allocator.free_counts()), spill=self._spill)
                """,
            ),
        ),
        drops=("lazy_eviction",),
    ),
    Variant(
        "evicts_the_most_recent",
        "Both tiers evict what was used last.",
        changes=(
            Edit(
                "kvshard_ref.eviction:LeafQueue.offer",
                "(node.last_access, node.id, node)",
                "(-node.last_access, -node.id, node)",
            ),
            Edit("kvshard_ref.eviction:LeafQueue.pop", "node.last_access == time", "node.last_access == -time"),
        ),
    ),
    Variant(
        "evicts_by_age",
        "Both tiers evict the node that was made first, used or not.",
        changes=(
            Edit(
                "kvshard_ref.eviction:LeafQueue.offer", "(node.last_access, node.id, node)", "(node.id, node.id, node)"
            ),
            Edit("kvshard_ref.eviction:LeafQueue.pop", "node.last_access == time", "node.id == time"),
        ),
    ),
    Variant(
        "evicts_twice_as_much",
        "An eviction that is asked for takes twice the tokens.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.evict",
                "count = -(-tokens // self.placement.page_size)",
                "count = 2 * -(-tokens // self.placement.page_size)",
            ),
        ),
    ),
)

ADMISSION = (
    Variant(
        "keeps_a_reserve",
        "While a request runs, the last free page of each owner class is not given to a new one.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._review",
                "free, evictable = self.allocator.free_counts(), self.tree.evictable_counts()",
                """
                free, evictable = self.allocator.free_counts(), self.tree.evictable_counts()
                if any(each.admitted and not each.ending for each in self.requests.values()):
                    free = [pages - 1 for pages in free]
                """,
            ),
        ),
    ),
    Variant(
        "runs_three_at_most",
        "No request is admitted while three run.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._review",
                "free, evictable = self.allocator.free_counts(), self.tree.evictable_counts()",
                """
                free, evictable = self.allocator.free_counts(), self.tree.evictable_counts()
                if sum(each.admitted and not each.ending for each in self.requests.values()) > 2:
                    free = evictable = [0] * self.placement.shards
                """,
            ),
        ),
    ),
    Variant(
        "batches_of_two",
        "A third chunk of a batch is refused.",
        changes=(
            Edit(
                "kvshard_ref.admission:Review.grant",
                "base = self._place(request)",
                """
                if len(self.prefixes) > 1:
                    raise RefusedError(f"request {request.name!r} is the third of its batch, expected at most two")
                base = self._place(request)
                """,
            ),
        ),
        drops=("batches_what_fits",),
    ),
    Variant(
        "opens_what_can_start",
        "A prompt is not opened while there is no room for it.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.open",
                "self._check_promises(name, self.tree.lockable_counts(match))",
                """
                self._check_promises(name, self.tree.lockable_counts(match))
                room = sum(self.allocator.free_counts()) + sum(self.tree.evictable_counts()) - sum(self.promised)
                if pages_total - match.length > room:
                    raise RefusedError(f"request {name!r} needs {pages_total - match.length} pages, there are {room}")
                """,
            ),
        ),
    ),
    Variant(
        "larger_scratch",
        "The scratch holds one context more than was asked for, and twice the chunk.",
        changes=(
            Edit(
                "kvshard_ref.scratch:ScratchSize.sized",
                "return cls(contexts * -(-context_tokens // group) * group, -(-chunk_tokens // ps) * ps, ps)",
                "return cls((contexts + 1) * -(-context_tokens // group) * group, 2 * -(-chunk_tokens // ps) * ps, ps)",
            ),
        ),
    ),
    Variant(
        "padded_per_request",
        "Each prefix of a batch is padded for itself, shared pages or not.",
        changes=(
            Edit("kvshard_ref.cache:PageCache.__init__", "self.padding = padding", 'self.padding = "per_request"'),
            Edit("kvshard_ref.runner:Runner.__init__", "spec.scratch, spec.padding", 'spec.scratch, "per_request"'),
        ),
        drops=("batches_what_fits",),
    ),
)

TREE = (
    Variant(
        "inserts_at_the_end",
        "Nothing of a request is in the tree before it finishes.",
        changes=(Edit("kvshard_ref.worker:PrefillWorker.extend", "self.cache.checkpoint(extent.request.name)"),),
    ),
    Variant(
        "inserts_at_any_end",
        "Nothing of a request is in the tree before it ends; an abort keeps what was computed, as a finish does.",
        changes=(
            Edit("kvshard_ref.worker:PrefillWorker.extend", "self.cache.checkpoint(extent.request.name)"),
            Edit(
                "kvshard_ref.cache:PageCache.abort",
                'self._end(self.request(name), "abort")',
                """
                self._insert(self.request(name))
                self._end(self.request(name), "abort")
                """,
            ),
        ),
    ),
    Variant(
        "keeps_duplicates",
        "Pages that the tree has from another request stay with theirs until it finishes.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.checkpoint",
                "self._insert(self.request(name))",
                """
                request = self.request(name)
                keys = request.keys[: request.computed // self.placement.page_size]
                if len(self.tree.match(keys).pages) <= request.protected:
                    self._insert(request)
                """,
            ),
        ),
    ),
    Variant(
        "nodes_of_two_pages",
        "No node of the tree is made longer than two pages.",
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.insert",
                "matched = len(found.pages)",
                """
                while len(node.keys) > 2:
                    self._split(node, 2)
                matched = len(found.pages)
                """,
            ),
        ),
    ),
    Variant(
        "rejoins_nodes",
        "A node and its only child become one when nobody holds them.",
        changes=(
            Edit(
                "kvshard_ref.radix:RadixTree.unlock",
                """
                for each in self.path(node):
                    each.locks -= 1
                    if each.locks == 0:
                        self._count_evictable(each, 1)
                        self._offer(each)
                """,
                """
                for each in self.path(node):
                    each.locks -= 1
                    if each.locks == 0:
                        self._count_evictable(each, 1)
                        self._offer(each)
                while node.parent is not None and node.parent.parent is not None:
                    above = node.parent
                    held = any(each.locks or each.pins for each in (above, node))
                    kinds = {(each.hits, not each.pages, not each.slots) for each in (above, node)}
                    if held or len(kinds) > 1 or len(above.children) > 1:
                        node = above
                        continue
                    node.keys, node.pages = above.keys + node.keys, above.pages + node.pages
                    node.slots, node.parent = above.slots + node.slots, above.parent
                    node.parent.children[node.keys[0]] = node
                    above.keys, above.pages, above.slots, above.children = [], [], [], {}
                """,
            ),
        ),
    ),
    Variant(
        "caches_whole_rounds",
        "Only whole rounds over the owners are kept, the rest of a prompt is computed again.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache._insert",
                "whole = request.computed // self.placement.page_size if request.admitted else 0",
                """
                whole = request.computed // self.placement.page_size // self.placement.shards * self.placement.shards
                whole = max(request.protected, whole) if request.admitted else 0
                """,
            ),
        ),
        drops=("keeps_finished",),
    ),
    Variant(
        "computes_a_page_again",
        "A hit leaves out its last page.",
        changes=(
            Edit(
                "kvshard_ref.cache:PageCache.open",
                "match = self.tree.match(keys, (asked - 1) // self.placement.page_size)",
                "match = self.tree.match(keys, max(0, (asked - 1) // self.placement.page_size - 1))",
            ),
        ),
        drops=("keeps_finished", "keeps_copies"),
    ),
)

FORWARD = (
    Variant(
        "gathers_when_read",
        "A layer is gathered when it is read, all layers in one scratch slot.",
        changes=(
            Edit("kvshard_ref.gather:PrefixGather.begin", "self.prefetch(0)"),
            Edit("kvshard_ref.gather:PrefixGather.prefetch", "slot, own = layer % SLOTS", "slot, own = 0"),
            Edit("kvshard_ref.gather:PrefixGather.stage", "layer % SLOTS", "0"),
            Edit(
                "kvshard_ref.gather:PrefixGather.read",
                "self._layer = layer",
                "self.prefetch(layer); self._layer = layer",
            ),
            Edit("kvshard_ref.gather:PrefixGather.read", "self._ready[layer % SLOTS]", "self._ready[0]"),
            Edit(
                "kvshard_ref.gather:PrefixGather.read",
                """
                if layer + 1 < self.pool.layers:
                    self.prefetch(layer + 1)
                """,
            ),
            Edit("kvshard_ref.gather:PrefixGather.read", "[layer % SLOTS].take", "[0].take"),
        ),
    ),
    Variant(
        "sends_pages_downwards",
        "Each rank sends its pages of a prefix from the highest to the lowest.",
        changes=(
            Edit(
                "kvshard_ref.plan:_pages_by_owner",
                "sorted(set().union(*prefixes))",
                "sorted(set().union(*prefixes), reverse=True)",
            ),
        ),
    ),
    Variant(
        "splits_in_blocks",
        "A rank computes consecutive tokens of a chunk.",
        changes=(
            Edit(
                "kvshard_ref.split:share",
                "rank::size",
                "rank * padded(count, size, split) : (rank + 1) * padded(count, size, split)",
            ),
            Edit(
                "kvshard_ref.split:restore",
                "return shares.transpose(0, 1).flatten(0, 1)[:count]",
                "return gathered[:count]",
            ),
        ),
    ),
    Variant(
        "looks_before_it_acts",
        "What has ended of copies and transfers is noted before an op is carried out, too.",
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.open",
                "prompt = tuple(tokens)",
                "self.progress(); prompt = tuple(tokens)",
            ),
            Edit(
                "kvshard_ref.worker:PrefillWorker.extend",
                "reasons = self.cache.review(wants)",
                "self.progress(); reasons = self.cache.review(wants)",
            ),
        ),
    ),
)

PLAIN = Variant("plain", "The engine as it is.", changes=())
VARIANTS: tuple[Variant, ...] = (PLAIN, *PAGES, *EVICTIONS, *ADMISSION, *TREE, *FORWARD, *TIERS, *TRANSFERS)

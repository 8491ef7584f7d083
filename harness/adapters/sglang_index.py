"""sglang's own allocator, tree and admission on page ids: for the capacity replay and the index benchmark.

No rows and no pool. A page key stands for the tokens of its page; a replicated cache has sglang's paged allocator, a
sharded one the allocator of its shards.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from harness.adapters.ref_index import RefIndexEngine
from harness.adapters.sglang_context import Contexts
from harness.adapters.sglang_install import Parts, installed, name_of, parts
from harness.bench_index import IndexParts, rest_counts, tokens_of
from harness.capacity import CapacityError, IndexCache, NotAdmittedError, Sizing
from harness.usage import UserError

TESTED = "0.5.23"
TREES = ("python", "rust")
CACHE = "sglang.srt.mem_cache"
TABLE_BYTES_MAX = 1 << 33
INSTALL = "in a clone of kvshard: bash ci/install_sglang.sh PYTHON, which installs it for a CPU"


class Index:
    """Allocator, tree and token table of one rank, as sglang's prefill worker makes them, without a pool.

    requests: that live at a time; context_tokens: of the longest one.
    """

    def __init__(
        self, loaded: Parts, tree: str, shards: int, page_size: int, pages_per_rank: int, table: tuple[int, int]
    ) -> None:
        requests, context_tokens = table
        requests = min(requests, shards * pages_per_rank)  # each has a page at least
        longest = -(-context_tokens // (shards * page_size)) * shards * page_size
        # the scratch has room for one request of any length, which is all that a pass has here
        spec = loaded.ShardSpec(
            shard_rank=0,
            shard_size=shards,
            page_size=page_size,
            max_prefix_tokens=longest,
            chunk_tokens=longest,
        )
        self.shards = shards
        self.page_size = page_size
        self.pages_per_rank = pages_per_rank
        self.chunk_tokens = longest
        size = pages_per_rank * page_size
        common = {"dtype": torch.int64, "device": "cpu", "kvcache": None, "need_sort": True}  # as on a prefill worker
        if shards == 1:
            paged = name_of(loaded.version, f"{CACHE}.allocator.paged", "PagedTokenToKVPoolAllocator")
            self.allocator = paged(size, page_size=page_size, **common)
        else:
            self.allocator = loaded.Allocator(
                size=size, physical_page_size=page_size, shard_size=shards, shard_spec=spec, **common
            )
        if (table_bytes := requests * longest * 4) > TABLE_BYTES_MAX:
            raise CapacityError(
                f"{requests} requests of up to {context_tokens} tokens on sglang: its token table would take "
                f"{table_bytes} bytes, expected at most {TABLE_BYTES_MAX}; lower --in-flight or --context"
            )
        self.table = loaded.ReqToTokenPool(
            size=requests, max_context_len=longest + page_size, device="cpu", enable_memory_saver=False
        )
        self.tree = loaded.Tree(
            loaded.CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(loaded.ComponentType.FULL,),
                tree_core_backend=tree,
                chunked_prefill_size=longest,
            )
        )

    def free_counts(self) -> list[int]:
        """Free pages per owner class."""
        if self.shards == 1:
            return [self.allocator.available_size() // self.page_size]
        counts: list[int] = self.allocator.class_free_page_counts()
        return counts


@dataclass(slots=True)
class _Live:
    """A request, and the lock that keeps what it has matched until it is admitted."""

    req: Any
    lock: Any


class SglangIndexCache:
    """IndexCache through the functions that sglang's scheduler calls for a prefill, one request in a pass."""

    def __init__(self, loaded: Parts, configured: Any, index: Index) -> None:
        self._parts = loaded
        self._configured = configured
        self._index = index
        self._live: dict[int, _Live] = {}
        self._evicted_tokens = 0
        # sglang adds up what it has evicted in its metrics, which are off; its own total goes by here
        evict = index.tree._evict  # noqa: SLF001  # where all evictions meet

        def counted(*args: Any, **options: Any) -> Any:
            result = evict(*args, **options)
            self._evicted_tokens += result.num_tokens_evicted
            return result

        index.tree._evict = counted  # noqa: SLF001  # see above

    def open(self, number: int, keys: array[int], tokens: int, prompt_tokens: int) -> int:
        with self._running():
            req = self._parts.Req(
                rid=str(number),
                origin_input_text="",
                origin_input_ids=keys,  # the answer too: to the cache both are tokens that were computed
                sampling_params=self._parts.SamplingParams(max_new_tokens=1),  # as on every prefill worker
            )
            req.refresh_fill_ids()
            self._parts.match(req, self._index.tree, req.full_untruncated_fill_ids, max_prefix_len=prompt_tokens - 1)
            req.kv.cache_protected_len = req.prefix_len
            self._live[number] = _Live(req, self._index.tree.lock(req.last_node))
        return int(req.prefix_len)

    def extend(self, number: int) -> None:
        live, index = self._live[number], self._index
        with self._running():
            adder = self._adder()
            verdict = adder.add_one_req(live.req, has_chunked_req=False, truncation_align_size=None).name
            if live.req not in adder.can_run_list:
                raise NotAdmittedError(f"the adder says {verdict}")
            index.tree.unlock(live.lock)  # the request has a lock of its own now
            try:
                self._parts.alloc_for_extend(batch_of(live.req, index))
            except RuntimeError as error:
                raise CapacityError(
                    f"request {number} was admitted and then there were no pages for it (free per owner class: "
                    f"{index.free_counts()}): sglang counts tokens, and a class that running requests hold gives none. "
                    "Its scheduler would end here; lower --in-flight or give more --memory-per-rank"
                ) from error
            self._parts.checkpoint(live.req, index.tree)

    def finish(self, number: int) -> None:
        req = self._live.pop(number).req
        with self._running():
            req.finished_reason = self._parts.FinishLength(length=0)
            self._parts.release(req, self._index.tree, checkpoint=True)

    def abort(self, number: int) -> None:
        live = self._live.pop(number)
        with self._running():
            self._index.tree.unlock(live.lock)

    def used_pages(self) -> list[int]:
        return [self._index.pages_per_rank - free for free in self._index.free_counts()]

    def evicted_pages(self) -> int:
        return self._evicted_tokens // self._index.page_size

    def _adder(self) -> Any:
        """The adder of one pass, as the scheduler makes it. A pass takes a request of any length, and nothing else."""
        return self._parts.PrefillAdder(
            page_size=self._index.page_size,
            tree_cache=self._index.tree,
            token_to_kv_pool_allocator=self._index.allocator,
            running_batch=None,
            new_token_ratio=0.0,
            rem_input_tokens=self._index.chunk_tokens,
            rem_chunk_tokens=self._index.chunk_tokens,
        )

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Sglang reads its configuration from the process: it is this cache's only while one of its calls runs."""
        with self._parts.use_context(self._configured):
            yield


def batch_of(req: Any, index: Index) -> Any:
    """A batch of one, as far as `alloc_for_extend` looks at it."""
    ends = torch.tensor([req.extend_end])
    return SimpleNamespace(
        reqs=[req],
        prefix_lens=[req.prefix_len],
        extend_lens=[req.extend_len],
        seq_lens=ends,
        seq_lens_cpu=ends,
        extend_num_tokens=req.extend_len,
        tree_cache=index.tree,
        req_to_token_pool=index.table,
        device="cpu",
        hisparse_coordinator=None,
        is_dllm=lambda: False,
        maybe_evict_swa=lambda: None,
    )


class SglangIndexParts:
    """IndexParts over allocator and tree alone: no request objects, no admission, no token table."""

    def __init__(self, loaded: Parts, index: Index) -> None:
        self._parts = loaded
        self._index = index
        base = f"{CACHE}.base_prefix_cache"
        self._match_params = name_of(loaded.version, base, "MatchPrefixParams")
        self._insert_params = name_of(loaded.version, base, "InsertParams")
        self._page_size: int = index.page_size
        self._no_loc = torch.full((1,), -1)

    def match(self, keys: array[int], tokens: int) -> int:
        tree = self._index.tree
        found = tree.match_prefix(self._match_params(key=self._parts.RadixKey(keys, limit=tokens - 1)))
        self._lock = tree.lock(found.last_device_node)
        self._cached = int(found.device_prefix_len)
        self._locs = tree.path_device_indices(found.last_device_node)
        self._base = tree.rotation_base_of(found.last_device_node) if self._cached else None
        self._keys, self._tokens = keys, tokens
        return self._cached

    def evict(self) -> int:
        index, page_size = self._index, self._page_size
        rest = -(-self._tokens // page_size) - self._cached // page_size
        wanted = max(rest_counts(rest, index.shards)) * index.shards * page_size
        short = wanted - index.allocator.available_size()
        if short <= 0:
            return 0
        evicted = index.tree.evict_for_alloc(self._parts.EvictParams(num_tokens=short)).num_tokens_evicted
        return int(evicted) // page_size

    def allocate(self) -> bool:
        before, after = torch.tensor([self._cached]), torch.tensor([self._tokens])
        last = self._locs[-1:] if self._cached else self._no_loc
        bases = {} if self._index.shards == 1 else {"rotation_bases": [self._base]}
        drawn = self._index.allocator.alloc_extend(
            before, before, after, after, last, self._tokens - self._cached, **bases
        )
        if drawn is None:
            return False
        if bases:
            self._base = bases["rotation_bases"][0]
        self._locs = torch.cat([self._locs, drawn])
        return True

    def insert(self) -> None:
        tree, whole = self._index.tree, self._tokens // self._page_size * self._page_size
        done = tree.insert(
            self._insert_params(
                key=self._parts.RadixKey(self._keys[:whole]),
                value=self._locs[:whole].clone(),
                prev_prefix_len=self._cached,
                rotation_base=self._base,
            )
        )
        lock = tree.lock(done.last_device_node)
        tree.unlock(self._lock)
        self._lock = lock

    def free(self) -> None:
        whole = self._tokens // self._page_size * self._page_size
        self._index.allocator.free_segment(self._locs[whole:], start_pos=whole)
        self._index.tree.unlock(self._lock)


@dataclass(frozen=True, slots=True)
class SglangIndexEngine:
    """IndexEngine and PartsEngine of sglang. Scratch is sized as the reference does it, which follows sglang's rule."""

    tree: str = "python"
    context_tokens: int = 131_072
    in_flight: int = 1
    version: str = field(default=TESTED)

    @property
    def name(self) -> str:
        """With the core of the tree: they are two implementations."""
        return f"sglang {self.version}, {self.tree} tree"

    def scratch_bytes(self, shards: int, sizing: Sizing) -> int:
        return RefIndexEngine().scratch_bytes(shards, sizing)

    def cache(self, shards: int, page_size: int, pages_per_rank: int) -> IndexCache:
        loaded = self._loaded()
        configured = Contexts(loaded).new()
        with loaded.use_context(configured):
            return SglangIndexCache(loaded, configured, self._index(loaded, shards, page_size, pages_per_rank))

    def parts(self, shards: int, page_size: int, pages_per_rank: int) -> IndexParts:
        loaded = self._loaded()
        with loaded.use_context(Contexts(loaded).new()):
            return SglangIndexParts(loaded, self._index(loaded, shards, page_size, pages_per_rank))

    def prompt(self, keys: list[int], tokens: int, page_size: int) -> array[int]:
        return tokens_of(keys, tokens, page_size)

    def named(self, tokens: array[int], page_size: int) -> array[int]:
        return tokens

    def _loaded(self) -> Parts:
        try:
            return parts()
        except UserError as error:
            raise CapacityError(f"{error}; {INSTALL}") from error

    def _index(self, loaded: Parts, shards: int, page_size: int, pages_per_rank: int) -> Index:
        if page_size < 2:
            raise CapacityError(f"page size {page_size} on sglang: its launch gate refuses it; expected 2 or more")
        index = Index(loaded, self.tree, shards, page_size, pages_per_rank, (self.in_flight + 1, self.context_tokens))
        core = type(index.tree.tree_core).__module__
        if (self.tree == "rust") != ("rust" in core):  # it falls back to the other core, and says so in its log only
            raise CapacityError(f"the {self.tree} tree was asked for, and sglang took {core}; is its extension there?")
        return index


def index_engine(options: dict[str, str], context_tokens: int, in_flight: int) -> SglangIndexEngine:
    """The engine behind `sglang` and `sglang?tree=rust`. Raises CapacityError; imports nothing of sglang."""
    tree = options.pop("tree", TREES[0])
    if tree not in TREES:
        raise CapacityError(f"option tree={tree!r} of engine sglang; expected one of {', '.join(TREES)}")
    if options:
        raise CapacityError(f"option {next(iter(options))!r} of engine sglang; expected tree")
    try:
        version = installed()
    except UserError as error:
        raise CapacityError(f"{error}; {INSTALL}") from error
    if version != TESTED:
        raise CapacityError(f"sglang {version} is installed; its index was tried with {TESTED} only: {INSTALL}")
    return SglangIndexEngine(tree, context_tokens, in_flight, version)

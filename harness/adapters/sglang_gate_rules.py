"""The rules of the launch gate, written down a second time: without an order, and without sglang.

A configuration is refused if any rule fires, and the reason given is that of a rule that fires. Otherwise the
adjustments are made, all of them. Ids are those of fixtures/launch/sglang.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from harness.adapters.sglang_gate import CORE, STAGING
from harness.adapters.sglang_gate_table import Launch, Outcome, outcome

MEMORY = "mem_fraction_static"
GRAPHS = "cuda_graph_config"
# what a flag is when nobody sets it, for all that the rules ask for
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "attention_backend": None,
        "attn_cp_size": 1,
        "attn_dp_size": 1,
        "chunked_prefill_size": None,
        "cp_strategy": None,
        "dcp_size": 1,
        "device": None,
        "disable_chunked_prefix_cache": False,
        "disable_radix_cache": False,
        "disaggregation_mode": "null",
        "disaggregation_transfer_backend": "mooncake",
        "dllm_algorithm": None,
        "dsa_decode_backend": None,
        "dsa_prefill_backend": None,
        "enable_dsa_cache_layer_split": False,
        "enable_dynamic_chunking": False,
        "enable_flexkv": False,
        "enable_hierarchical_cache": False,
        "enable_hisparse": False,
        "enable_kv_cache_sharding": False,
        "enable_lmcache": False,
        "enable_multi_layer_eagle": False,
        "enable_prefill_cp": False,
        "enable_session_radix_cache": False,
        "enable_streaming_session": False,
        "enable_two_batch_overlap": False,
        "enable_unified_cache_external_linker": False,
        "enable_unified_memory": False,
        "ep_join_mode": None,
        "hicache_host_memory_mode": "cache",
        "hicache_io_backend": "kernel",
        "hicache_mem_layout": "page_first",
        "hicache_storage_backend": None,
        "kv_cache_dtype": "auto",
        MEMORY: None,
        "page_size": None,
        "pp_size": 1,
        "prefill_attention_backend": None,
        "radix_cache_backend": None,
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "tp_size": 1,
    }
)
DSA_ARCHITECTURES = ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
MIB_PER_TOKEN = Fraction(3, 2)  # of a chunk, as sglang estimates what its activations need
TOKENS_COVERED = 2048  # by what is reserved in any case
TRUE = ("true", "1", "yes", "y")


class Seen:
    """A configuration as the rules see it: flags by their names, and what follows from several of them."""

    def __init__(self, launch: Launch) -> None:
        self._flags = {**DEFAULTS, **launch.flags, **launch.host.decided}
        self.model, self.host = launch.model, launch.host
        self.pinned = launch.flags.get(MEMORY) is not None  # the user's own fraction of memory is not touched

    def __getattr__(self, name: str) -> Any:
        return self._flags[name]

    @property
    def backend(self) -> Any:
        """Of attention in prefill."""
        return self.prefill_attention_backend or self.attention_backend

    @property
    def dsa(self) -> bool:
        """Whether the model is one with an indexer."""
        return self.model.architecture in DSA_ARCHITECTURES and self.model.index_topk is not None

    @property
    def mla(self) -> bool:
        """Whether the model caches a latent."""
        return self.model.attention == "mla"

    @property
    def validated_draft(self) -> bool:
        """The one kind of speculative decoding that may be used."""
        return (
            self.speculative_algorithm == "EAGLE"
            and self.model.architecture == "GlmMoeDsaForCausalLM"
            and self.model.nextn_layers == 1
            and self.speculative_eagle_topk == 1
            and not self.enable_multi_layer_eagle
        )

    @property
    def page(self) -> int:
        """Its tokens."""
        return self.page_size or 1

    @property
    def chunk(self) -> int:
        """Its tokens, 0 when prefill is not chunked."""
        return max(self.chunked_prefill_size or 0, 0)

    @property
    def rounded(self) -> int:
        """The chunk in whole pages, up."""
        return -(-self.chunk // self.page) * self.page if self.page > 1 else self.chunk

    @property
    def more_mib(self) -> Fraction:
        """What a rounded chunk needs beyond what was reserved, where that is taken from the fraction of memory."""
        more = max(self.rounded, TOKENS_COVERED) - max(self.chunk, TOKENS_COVERED)
        return Fraction(0) if self.pinned else MIB_PER_TOKEN * more

    @property
    def memory_known(self) -> bool:
        """Whether a fraction of memory can be corrected."""
        return bool(self.host.gpu_mib) and self.mem_fraction_static is not None

    @property
    def memory_left(self) -> Fraction:
        """The corrected fraction."""
        return Fraction(str(self.mem_fraction_static)) - self.more_mib / Fraction(self.host.gpu_mib)


Rule = Callable[[Seen], bool]
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "mode": lambda s: s.disaggregation_mode != "prefill",
        "speculative": lambda s: s.speculative_algorithm is not None and not s.validated_draft,
        "dllm": lambda s: s.dllm_algorithm is not None,
        "radix-backend": lambda s: s.radix_cache_backend is not None,
        "tree-core": lambda s: not s.disable_radix_cache and s.host.env.get(CORE, "python") != "python",
        "linker": lambda s: s.enable_unified_cache_external_linker,
        "streaming": lambda s: s.enable_streaming_session,
        "session-radix": lambda s: s.enable_session_radix_cache,
        "flexkv": lambda s: s.enable_flexkv,
        "unified-memory": lambda s: s.enable_unified_memory,
        "dcp": lambda s: s.dcp_size > 1,
        "storage": lambda s: s.enable_hierarchical_cache and s.hicache_storage_backend is not None,
        "dsa-host-mode": lambda s: s.enable_hierarchical_cache and s.dsa and s.hicache_host_memory_mode != "cache",
        "dsa-host-io": lambda s: (
            s.enable_hierarchical_cache
            and s.dsa
            and (s.hicache_io_backend, s.hicache_mem_layout)
            not in {("kernel", "layer_first"), ("kernel", "page_first")}
        ),
        "lmcache": lambda s: s.enable_lmcache,
        "hisparse": lambda s: s.enable_hisparse,
        "dynamic-chunk": lambda s: s.enable_dynamic_chunking and s.pp_size > 1,
        "two-batch": lambda s: s.enable_two_batch_overlap,
        "encoder-decoder": lambda s: s.model.encoder_decoder,
        "local-attention": lambda s: s.model.attention_chunk is not None,
        "dsa-topology": lambda s: (
            s.backend == "dsa"
            and (s.device, s.enable_prefill_cp, s.cp_strategy, s.pp_size, s.attn_cp_size > 1)
            != ("cuda", True, "interleave", 1, True)
        ),
        "dsa-kernels": lambda s: (
            s.backend == "dsa"
            and (s.dsa_prefill_backend, s.dsa_decode_backend, s.kv_cache_dtype, s.page_size)
            != ("trtllm", "trtllm", "fp8_e4m3", 64)
        ),
        "dsa-transfer": lambda s: (
            s.backend == "dsa"
            and (
                s.disaggregation_transfer_backend != "mooncake"
                or s.enable_dsa_cache_layer_split
                or s.model.index_kpool != 1
                or s.model.index_kpool_compress
            )
        ),
        "dsa-backend": lambda s: s.dsa and s.backend != "dsa",
        "backend": lambda s: s.backend not in ("dsa", "fa3", "trtllm_mla"),
        "trtllm-mla": lambda s: s.backend == "trtllm_mla" and not s.mla,
        "trtllm-cp": lambda s: s.backend == "trtllm_mla" and s.attn_cp_size > 1,
        "trtllm-chunked": lambda s: s.backend == "trtllm_mla" and s.disable_chunked_prefix_cache,
        "transfer": lambda s: s.disaggregation_transfer_backend not in ("mooncake", "nixl"),
        "staging": lambda s: s.host.env.get(STAGING, "").lower() in TRUE,
        "mla-dp": lambda s: s.mla and s.attn_cp_size == 1 and (s.attn_dp_size > 1 or s.ep_join_mode == "scale"),
        "mla-tp": lambda s: s.mla and s.attn_cp_size == 1 and s.tp_size == 1,
        "gqa-cp": lambda s: not s.mla and not (s.enable_prefill_cp and s.attn_cp_size > 1),
        "page": lambda s: s.page <= 1,
        "chunk": lambda s: s.chunk == 0,
        "memory-unknown": lambda s: s.more_mib > 0 and not s.memory_known,
        "memory-consumed": lambda s: s.more_mib > 0 and s.memory_known and s.memory_left <= 0,
    }
)


def by_the_rules(launch: Launch) -> Outcome:
    """What the gate may say: one of these reasons when there are any, else exactly these adjustments."""
    seen = Seen(launch)
    if not seen.enable_kv_cache_sharding:
        return Outcome()
    if fired := frozenset(id_ for id_, rule in RULES.items() if rule(seen)):
        return Outcome(fired)
    changes: dict[str, tuple[object, object]] = {}
    warnings = []
    if CORE not in launch.host.env:
        changes[CORE] = (None, "python")
    if seen.rounded != seen.chunk:
        changes["chunked_prefill_size"] = (seen.chunk, seen.rounded)
        warnings.append("round")
    if seen.more_mib > 0:
        changes[MEMORY] = (seen.mem_fraction_static, float(seen.memory_left))
    graphs = {phase: settings["backend"] for phase, settings in seen.cuda_graph_config.items()}
    if graphs["prefill"] != "disabled":
        changes[f"{GRAPHS}.prefill.backend"] = (graphs["prefill"], "disabled")
        warnings.append("graph")
    if graphs["decode"] != "disabled" and seen.speculative_algorithm is not None:
        changes[f"{GRAPHS}.decode.backend"] = (graphs["decode"], "disabled")
    return outcome("", changes, tuple(warnings))


def agrees(ruled: Outcome, said: Outcome) -> bool:
    """Whether what the gate said is what it may say."""
    return bool(said.refused) and said.refused <= ruled.refused if ruled.refused else ruled == said

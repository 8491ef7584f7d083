"""Generated combinations of launch flags: the gate of sglang says of each what independent rules say.

A setting is one change of a base of the table. All pairs of settings are tried; all triples of names with settings that
are harmless alone, because one that is refused alone hides the others; all combinations within groups of settings that
the gate reads together; and random combinations of three to six.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.adapters.sglang_gate import CORE, STAGING, absent, verdict
from harness.adapters.sglang_gate_rules import DEFAULTS, GRAPHS, MEMORY, RULES, agrees, by_the_rules
from harness.adapters.sglang_gate_table import Launch, Outcome, Row, actual, launch, load
from harness.adapters.sglang_install import parts
from harness.fault import Edit, planted

register_cpu_ci(est_time=75, stage="commit", runner="ubuntu-sglang")

pytestmark = [
    pytest.mark.slow,  # sglang takes many seconds to import
    pytest.mark.skipif(bool(absent()), reason=absent()),
]
TABLE = load()
BASES = tuple(TABLE.base)
GATE = "sglang.srt.arg_groups.kv_shard_hook:handle_kv_cache_sharding"
BACKENDS = "sglang.srt.arg_groups.kv_shard_hook:validate_kv_shard_attention_backend"
UNSET = "(unset)"


class Setting(NamedTuple):
    """One change of a base."""

    place: str  # a field of Row
    name: str
    value: Any


def of(place: str, name: str, *values: Any) -> tuple[Setting, ...]:
    return tuple(Setting(place, name, value) for value in values)


def graphs(decode: str, prefill: str) -> dict[str, dict[str, str]]:
    return {"decode": {"backend": decode}, "prefill": {"backend": prefill}}


# each group is what the gate reads together
SPECULATIVE = (
    of("set", "speculative_algorithm", "EAGLE", "EAGLE3", "NEXTN", UNSET),
    of("set", "speculative_eagle_topk", 1, 2, UNSET),
    of("set", "enable_multi_layer_eagle", True),
    of("model", "nextn_layers", 1, 2, UNSET),
    of("model", "architecture", "GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM", "LlamaForCausalLM"),
    of("decided", GRAPHS, graphs("breakable", "breakable"), graphs("full", "full"), graphs("disabled", "disabled")),
)
HOST = (
    of("set", "enable_hierarchical_cache", True),
    of("set", "hicache_storage_backend", "file"),
    of("set", "hicache_host_memory_mode", "buffer_only"),
    of("set", "hicache_io_backend", "direct"),
    of("set", "hicache_mem_layout", "layer_first", "page_first_direct"),
    of("model", "index_topk", 2048, UNSET),
    of("set", "disable_radix_cache", True),
    of("env", CORE, UNSET, "rust", ""),
)
GROUP = (
    of("model", "attention", "mla", "mha"),
    of("set", "attention_backend", "fa3", "trtllm_mla", "dsa", "flashinfer", UNSET),
    of("set", "enable_prefill_cp", True, False),
    of("set", "attn_cp_size", 1, 2),
    of("set", "cp_strategy", "zigzag", "interleave", UNSET),
    of("set", "attn_dp_size", 2),
    of("set", "tp_size", 1, 2),
)
ROUNDING = (
    of("set", "page_size", 1, 2, 16, 96, 128, UNSET),
    of("set", "chunked_prefill_size", -1, 1, 2000, 2047, 2049, 5000, 1 << 20, UNSET),
    of("set", MEMORY, 0.9),
    of("decided", MEMORY, 0.001, 0.5, UNSET),
    of("gpu_mib", "gpu_mib", 0, 24576, 143771),
)
# together with those: read one by one
ALONE = (
    of("set", "disaggregation_mode", "decode", UNSET),
    of("set", "dllm_algorithm", "LowConfidence"),
    of("set", "radix_cache_backend", "mine"),
    of("set", "enable_unified_cache_external_linker", True),
    of("set", "enable_streaming_session", True),
    of("set", "enable_session_radix_cache", True),
    of("set", "enable_flexkv", True),
    of("set", "enable_unified_memory", True),
    of("set", "dcp_size", 2),
    of("set", "enable_lmcache", True),
    of("set", "enable_hisparse", True),
    of("set", "enable_dynamic_chunking", True),
    of("set", "pp_size", 2),
    of("set", "enable_two_batch_overlap", True),
    of("model", "encoder_decoder", True),
    of("model", "attention_chunk", 8192),
    of("model", "index_kpool", 4),
    of("model", "index_kpool_compress", True),
    of("set", "device", "cpu"),
    of("set", "dsa_prefill_backend", "flashmla_sparse"),
    of("set", "dsa_decode_backend", "flashmla_kv"),
    of("set", "kv_cache_dtype", "bfloat16"),
    of("set", "enable_dsa_cache_layer_split", True),
    of("set", "disable_chunked_prefix_cache", True),
    of("set", "prefill_attention_backend", "fa3", "triton"),
    of("set", "decode_attention_backend", "triton"),
    of("set", "disaggregation_transfer_backend", "mooncake", "nixl", "mori"),
    of("env", STAGING, "1", "false"),
    of("set", "ep_join_mode", "scale"),
    of("set", "disaggregation_enable_kv_checksum", True),
    of("set", "enable_kv_cache_sharding", False),
)
GROUPS = {"speculative": SPECULATIVE, "host": HOST, "group": GROUP, "rounding": ROUNDING}
SETTINGS = tuple(setting for group in (*GROUPS.values(), ALONE) for values in group for setting in values)


def asked(base: str, chosen: Iterable[Setting]) -> Launch:
    """The base with these settings."""
    row: dict[str, Any] = {"set": {}, "model": {}, "env": {}, "decided": {}}
    unset, gpu_mib = [], 81920.0
    for place, name, value in chosen:
        if place == "gpu_mib":
            gpu_mib = value
        elif value == UNSET:
            unset.append(name)
        else:
            row[place][name] = value
    return launch(TABLE, Row(id="", base=base, source="", unset=tuple(unset), gpu_mib=gpu_mib, **row))


def names_differ(chosen: Sequence[Setting]) -> bool:
    return len({setting.name for setting in chosen}) == len(chosen)


def pairs() -> Iterator[tuple[Setting, ...]]:
    yield from filter(names_differ, combinations(SETTINGS, 2))


def triples(base: str) -> Iterator[tuple[Setting, ...]]:
    """All triples of names with settings that the rules do not refuse alone, and that change something.

    The values of a name come in turn.
    """
    plain, harmless = repr(asked(base, ())), dict[str, list[Setting]]()
    for setting in SETTINGS:
        alone = asked(base, [setting])
        if repr(alone) != plain and not by_the_rules(alone).refused:
            harmless.setdefault(setting.name, []).append(setting)
    for turn, names in enumerate(combinations(harmless, 3)):
        yield tuple(harmless[name][turn % len(harmless[name])] for name in names)


def within(group: str) -> Iterator[tuple[Setting, ...]]:
    """All combinations of the group's values, each of them also left as it is in the base."""
    for chosen in product(*[(None, *values) for values in GROUPS[group]]):
        yield tuple(setting for setting in chosen if setting is not None)


class Judged(NamedTuple):
    """What was tried."""

    wrong: list[str]
    tried: Counter[str]  # by reason, adjusted name, or "accepted"


def judged(base: str, tried: Iterable[tuple[Setting, ...]], stop_at: int = 3) -> Judged:
    """Where gate and rules differ."""
    wrong, counts = list[str](), Counter[str]()
    for chosen in tried:
        ruled, said = both(asked(base, chosen))
        counts.update([*said.refused, *said.changes] or ["accepted"])
        if not agrees(ruled, said):
            wrong.append(f"{base} {chosen}: rules {ruled}, gate {said}")
            if len(wrong) == stop_at:
                break
    return Judged(wrong, counts)


def both(ask: Launch) -> tuple[Outcome, Outcome]:
    return by_the_rules(ask), actual(TABLE, verdict(ask.flags, ask.model, ask.host))


@cache
def judged_pairs(base: str) -> Judged:
    return judged(base, pairs())


class TestGenerated:
    @pytest.mark.parametrize("base", BASES)
    def test_pairs(self, base: str) -> None:
        """Of all pairs of settings the gate says what the rules say."""
        assert [] == judged_pairs(base).wrong

    @pytest.mark.parametrize("base", BASES)
    def test_triples(self, base: str) -> None:
        """So of all triples of names, with settings that are harmless alone."""
        assert [] == judged(base, triples(base)).wrong

    @pytest.mark.parametrize(
        ("group", "base"),
        [("speculative", "mtp"), ("speculative", "mla"), ("host", "dsa"), ("group", "gqa"), ("rounding", "mla")],
    )
    def test_within(self, group: str, base: str) -> None:
        """So of all combinations within a group of settings that the gate reads together."""
        assert [] == judged(base, within(group)).wrong

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(
        st.sampled_from(BASES),
        st.lists(st.sampled_from(SETTINGS), min_size=3, max_size=6, unique_by=lambda setting: setting.name),
    )
    def test_random(self, base: str, chosen: list[Setting]) -> None:
        """So of random combinations of three to six settings."""
        ruled, said = both(asked(base, chosen))
        assert agrees(ruled, said), f"rules {ruled}, gate {said}"

    def test_coverage(self) -> None:
        """The pairs show every reason and every adjustment, and thousands of each kind of verdict."""
        tried = sum((judged_pairs(base).tried for base in BASES), Counter[str]())
        adjusted = {CORE, "chunked_prefill_size", MEMORY, f"{GRAPHS}.prefill.backend", f"{GRAPHS}.decode.backend"}
        kinds = sum(tried[id_] for id_ in RULES), sum(tried[name] for name in adjusted), tried["accepted"]
        assert (set(RULES) | adjusted | {"accepted"}, True) == (set(tried), min(kinds) > 1000), tried

    def test_defaults(self) -> None:
        """The rules know the release's own defaults."""
        plain = parts().ServerArgs(model_path="none")
        assert dict(DEFAULTS) == {name: getattr(plain, name) for name in DEFAULTS}


class TestBroken:
    """The comparison with the rules sees a gate that is wrong."""

    @pytest.mark.parametrize(
        ("target", "old", "new", "base", "seen"),
        [
            (GATE, "if cfg.enable_lmcache:", "if False:", "mla", "enable_lmcache"),
            (BACKENDS, "cfg.pp_size != 1", "False", "dsa", "pp_size"),
            (GATE, "does not support --enable-lmcache.", "does not support --enable-flexkv.", "mla", "enable_lmcache"),
            (GATE, "// page_size * page_size", "// page_size * page_size + page_size", "gqa", "chunked_prefill_size"),
            (GATE, "activation_delta_mb = 1.5 *", "activation_delta_mb = 1.0 *", "mla", "chunked_prefill_size"),
            (
                GATE,
                "graph_config = with_phase(graph_config, Phase.DECODE, backend=Backend.DISABLED)",
                "",
                "mtp",
                GRAPHS,
            ),
            (GATE, 'BACKEND.set("python")', 'BACKEND.set("rust")', "mla", CORE),
        ],
        ids=["rule", "condition", "reason", "page", "memory", "graph", "core"],
    )
    def test_seen(self, target: str, old: str, new: str, base: str, seen: str) -> None:
        """A rule or a condition away, a reason swapped, an adjustment off by a page: the pairs with it show it."""
        with planted((Edit(target, old, new),)):
            wrong = judged(base, pairs(), stop_at=5).wrong
        assert [True] * 5 == [seen in each for each in wrong]

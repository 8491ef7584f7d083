"""Settings of a worker: launch flags with sglang's names, and the combinations of them that cannot work."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

MODES = ("null", "prefill", "decode")
DTYPES = ("float32", "bfloat16")
DRAFTS = ("EAGLE", "NEXTN")


class SettingsError(ValueError):
    """A flag that cannot work; the text names it, its value, the reason, and what to do."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in tokens; `max_total_tokens` is of one rank, as its device has them."""

    model_path: str = ""
    load_format: str = "auto"
    random_seed: int = 1
    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str = ""
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 8998
    disaggregation_transfer_backend: str = "tcp"
    disaggregation_timeout: float = 300.0
    tp_size: int = 1
    attn_cp_size: int = 1
    cp_strategy: str = "interleave"
    enable_kv_cache_sharding: bool = False
    page_size: int = 64
    max_total_tokens: int = 16384
    context_length: int = 8192
    chunked_prefill_size: int = 2048
    enable_hierarchical_cache: bool = False
    hicache_ratio: float = 2.0
    hicache_write_policy: str = "write_through"
    speculative_algorithm: str = ""
    speculative_num_steps: int = 3
    speculative_eagle_topk: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    quantise_index: bool = False

    @property
    def ranks(self) -> int:
        """Processes of the worker."""
        return self.tp_size * self.attn_cp_size

    @property
    def drafts(self) -> int:
        """Tokens that the draft proposes in each pass; 0 without one."""
        return self.speculative_num_steps if self.speculative_algorithm else 0

    @property
    def host_pages(self) -> int:
        """Pages of the host tier on each rank."""
        pages = int(self.max_total_tokens // self.page_size * self.hicache_ratio)
        return max(1, pages) if self.enable_hierarchical_cache else 0

    def encoded(self) -> str:
        """As JSON, for the rank processes."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: str) -> Settings:
        """What `encoded` gave."""
        return cls(**json.loads(text))


HELP = {
    "model_path": "folder with model.safetensors, tokenizer.json and tokenizer_config.json",
    "load_format": "dummy: random weights instead of those of the folder",
    "random_seed": "of dummy weights",
    "host": "address to listen on",
    "port": "port to listen on",
    "served_model_name": "name of the model in answers (default: its path)",
    "disaggregation_mode": "plain worker, or one side of a prefill/decode pair",
    "disaggregation_bootstrap_port": "prefill: where decode workers find the ranks",
    "disaggregation_transfer_backend": "how pages get from prefill to decode",
    "disaggregation_timeout": "seconds that one side waits for the other",
    "tp_size": "tensor parallel ranks",
    "attn_cp_size": "context parallel ranks of a prefill worker",
    "cp_strategy": "which tokens of a chunk a context parallel rank computes",
    "enable_kv_cache_sharding": "prefill: store each page once in the group of ranks",
    "page_size": "tokens of a page",
    "max_total_tokens": "tokens that the device of one rank holds",
    "context_length": "prompt and answer together",
    "chunked_prefill_size": "tokens that one forward computes at most",
    "enable_hierarchical_cache": "a tier of the cache on the host",
    "hicache_ratio": "size of the host tier by that of the device",
    "hicache_write_policy": "when pages are copied to the host",
    "speculative_algorithm": "draft with the model's NextN layer",
    "speculative_num_steps": "tokens that are drafted in each pass",
    "speculative_eagle_topk": "branches of a draft",
    "device": "cpu or cuda",
    "dtype": "of weights and rows",
    "quantise_index": "index keys as 8 bit floats with a scale per token",
}
CHOICES = {
    "load_format": ("auto", "dummy"),
    "disaggregation_mode": MODES,
    "cp_strategy": ("interleave", "zigzag"),
    "hicache_write_policy": ("write_through", "write_through_selective", "write_back"),
    "speculative_algorithm": ("", *DRAFTS),
    "device": ("cpu", "cuda"),
    "dtype": DTYPES,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting."""
    for field in fields(Settings):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=HELP[field.name])
            continue
        told = f"{HELP[field.name]} (default {default})" if default != "" else HELP[field.name]
        choices = CHOICES.get(field.name)
        parser.add_argument(flag, type=type(default), default=default, choices=choices, help=told, metavar=None)


def settings_of(args: argparse.Namespace, transports: tuple[str, ...]) -> Settings:
    """Settings from parsed flags. Raises SettingsError for what cannot work, before anything is started."""
    given: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(Settings)}
    settings = Settings(**given)
    for flag, value, why in flaws(settings, transports):
        raise SettingsError(f"--{flag.replace('_', '-')} {value}: {why}")
    return settings


def flaws(s: Settings, transports: tuple[str, ...]) -> list[tuple[str, object, str]]:
    """Flag, value and reason of all that cannot work. The rules of sharding are those of sglang 0.5.23."""
    prefill, sharded = s.disaggregation_mode == "prefill", s.enable_kv_cache_sharding
    one_of, a_page = f"expected one of {', '.join(transports)}", f"expected at least a page of {s.page_size} tokens"
    files = ["tokenizer.json", *(["model.safetensors"] if s.load_format == "auto" else [])]
    missing = [name for name in files if not Path(s.model_path, name).is_file()]
    no_cache = "a decode worker has no prefix cache"
    own_only = f"with --disaggregation-mode {s.disaggregation_mode}: a rank has only its own pages, so none can decode"
    whole = f"with --enable-kv-cache-sharding: expected a multiple of --page-size {s.page_size}"
    checks = (
        (bool(missing), "model_path", f"no {' and no '.join(missing)} there"),
        (s.tp_size < 1, "tp_size", "expected 1 or more"),
        (s.attn_cp_size < 1, "attn_cp_size", "expected 1 or more"),
        (s.page_size < 1, "page_size", "expected 1 or more"),
        (s.context_length < s.page_size, "context_length", a_page),
        (s.max_total_tokens < s.page_size, "max_total_tokens", a_page),
        (s.chunked_prefill_size < s.page_size, "chunked_prefill_size", a_page),
        (s.hicache_ratio <= 0, "hicache_ratio", "expected more than 0"),
        (s.disaggregation_timeout <= 0, "disaggregation_timeout", "expected more than 0 seconds"),
        (s.disaggregation_transfer_backend not in transports, "disaggregation_transfer_backend", one_of),
        (s.attn_cp_size > 1 and not prefill, "attn_cp_size", "only a prefill worker splits prompts between ranks"),
        (s.speculative_eagle_topk != 1, "speculative_eagle_topk", "the draft is one chain: expected 1"),
        (bool(s.speculative_algorithm) and s.speculative_num_steps < 1, "speculative_num_steps", "expected 1 or more"),
        (s.disaggregation_mode == "decode" and s.enable_hierarchical_cache, "enable_hierarchical_cache", no_cache),
        (sharded and not prefill, "enable_kv_cache_sharding", own_only),
        (
            sharded and s.ranks < 2,
            "enable_kv_cache_sharding",
            "needs --attn-cp-size or --tp-size above 1 to share",
        ),
        (sharded and s.page_size < 2, "page_size", "with --enable-kv-cache-sharding: expected 2 or more"),
        (sharded and s.chunked_prefill_size % s.page_size != 0, "chunked_prefill_size", whole),
    )
    return [(flag, getattr(s, flag), why) for wrong, flag, why in checks if wrong]

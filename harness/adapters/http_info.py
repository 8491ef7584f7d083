"""What servers tell of themselves, and the manifest that comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.adapters.http_client import Client, Json, LostError
from harness.adapters.http_dialects import Dialect
from harness.adapters.http_metrics import ranks_of
from harness.types import Axes, Config, Manifest, Service
from harness.usage import UserError

TOKEN_IDS = (16, 250)
"""Of a model whose vocabulary is not told: every one has so many, and the first ones are often special."""
TOLERANCES: Mapping[str, tuple[float, float]] = {"float32": (1e-4, 0.02), "float": (1e-4, 0.02)}
TOLERANCES_DEFAULT = (0.05, 0.5)
"""Of log probabilities, near and far, by the type that the model computes in; 8 bits of mantissa in bfloat16."""
HOST_PREFIXES = ("hicache_backup_bytes_total", "hicache_backup_tokens_total", "load_back_bytes_total")


@dataclass(slots=True)
class Info:
    """One server's own words. Empty where it has no such endpoint."""

    args: Json = field(default_factory=dict)
    model: Json = field(default_factory=dict)
    card: Json = field(default_factory=dict)  # its first entry of /v1/models
    counters: dict[int, dict[str, float]] = field(default_factory=dict)
    flushes: bool = True

    @property
    def role(self) -> str:
        """What the worker is for: "prefill", "decode", or "" when it is a plain one."""
        mode = self.args.get("disaggregation_mode")
        return mode if mode in {"prefill", "decode"} else ""

    def number(self, *names: str) -> int | None:
        """The first of these arguments that is a number above 0."""
        values = [each.get(name) for name in names for each in (self.args, self.model, self.card)]
        return next((int(value) for value in values if isinstance(value, int | float) and value > 0), None)


def read(client: Client) -> Info:
    """Asks a server what it is. Raises `UserError` when it does not answer at all."""
    info = Info()
    try:
        info.args = _object(client, "/server_info") or _object(client, "/get_server_info")
        info.model = _object(client, "/model_info") or _object(client, "/get_model_info")
        cards = _object(client, "/v1/models").get("data")
        metrics = client.get("/metrics")
    except LostError as error:
        raise UserError(f"no server: {error}; start it, or give the URL that it listens at") from error
    info.card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
    if not (info.args or info.model or info.card):
        raise UserError(f"{client.url} answers, but has neither /server_info nor /v1/models: is it a model's server?")
    if metrics.ok:
        try:
            info.counters = ranks_of(metrics.body.decode())
        except ValueError as error:
            raise UserError(f"{client.url}/metrics: {error}") from error
    return info


def _object(client: Client, path: str) -> Json:
    told = client.get(path)
    found = told.json if told.ok else {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Told:
    """All that is known of the servers behind one address."""

    front: Info  # whose prefix cache it is: the prefill worker, or the one server
    decode: Info | None
    control: Info | None
    options: Mapping[str, str]
    dialect: Dialect

    @property
    def config(self) -> Config:
        """The one config of its sessions."""
        info, page = self.front, self.page
        args, ranks, own = info.args, self.ranks, self.rank_tokens
        host = bool(args.get("enable_hierarchical_cache"))
        host_tokens = max((int(each.get("hicache_host_total_tokens", 0)) for each in info.counters.values()), default=0)
        drafts = 1 if args.get("speculative_algorithm") else 0
        decode_tokens = self.decode.number("max_total_num_tokens") if self.decode else 0
        return Config(
            shards=ranks,
            page_size=page,
            pages_per_rank=(own or 0) // page,
            layout="sharded" if args.get("enable_kv_cache_sharding") else "replicated",
            layers=info.number("layers", "num_hidden_layers") or 1,
            components=("kv", "draft_kv")[: 1 + drafts],
            chunk_tokens=info.number("chunked_prefill_size") or self.context,
            context_tokens=self.context,
            host_pages_per_rank=max(1, host_tokens // page // ranks) if host else 0,
            host_policy=str(args.get("hicache_write_policy") or "write_through"),
            decode_pages=(decode_tokens or page) // page if self.decode else 0,
        )

    @property
    def page(self) -> int:
        """Tokens of a page; 1 where it is not told."""
        return int(self.options.get("page", 0)) or self.front.number("page_size", "block_size") or 1

    @property
    def ranks(self) -> int:
        """Of the worker with the prefix cache."""
        info = self.front
        told = (info.number("attn_cp_size") or 1) * (info.number("tp_size", "tensor_parallel_size") or 1)
        return max(told, len(info.counters)) if info.args.get("enable_kv_cache_sharding") else max(1, told)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.front.number("context_length", "max_model_len") or 2048

    @property
    def rank_tokens(self) -> int | None:
        """What one rank holds."""
        for state in self.front.args.get("internal_states") or []:
            capacity = (state.get("memory_usage") or {}).get("token_capacity") if isinstance(state, dict) else None
            if capacity:
                return int(capacity)
        return None

    def manifest(self) -> Manifest:
        """What such servers can be asked, and what they promise."""
        config, info = self.config, self.front
        ops = ["generate", "together", *(["abort"] if self.dialect.aborts else [])]
        ops += ["settle"] if info.counters else []
        ops += ["flush"] if info.flushes else []
        ops += ["kill", "restart"] if "operate" in self.options else []
        axes = Axes(
            shards=(config.shards,),
            page_sizes=(config.page_size,),
            layouts=(config.layout,),
            components=config.components,
            layers_max=config.layers,
            host_policies=(config.host_policy,) if config.host_pages_per_rank else (),
            decode=self.decode is not None,
            fixed=config,
        )
        return Manifest(
            name=str(info.card.get("owned_by") or self.dialect.name),
            version=str(info.args.get("version") or info.card.get("version") or "unknown"),
            ops=tuple(ops),
            shows=("counters",) if info.counters else (),
            promises=tuple(self._promises()),
            axes=axes,
            service=self._service(),
        )

    def _promises(self) -> Sequence[str]:
        own, native, info = self.options.get("promises", ""), self.dialect.promises, self.front
        found = {
            "control": self.control is not None,
            "seeded": True,
            "scores": True,
            "scores_prompt": "scores_prompt" in native,
            "counts_cached": True,
            "splits_cached": "splits_cached" in native or bool(info.args.get("splits_cached")),
            "counts_drafts": "counts_drafts" in native and bool(self.front.args.get("speculative_algorithm")),
            "keeps_finished": self.page > 1,
            "keeps_last": self.page > 1 or "keeps_last" in native,
            "salts": "salts" in native,
            "counts_cached_totals": counts(info, "cached_tokens_device_total"),
            "counts_sent_bytes": counts(info, "kv_transfer_bytes_total"),
            "counts_received": self.decode is not None and counts(self.decode, "received_tokens_total"),
            "keeps_copies": self._copies,
            "copies_all": self._copies,
            "rank_processes": "rank_processes" in native,
            "halves_wait": "halves_wait" in native and self.decode is not None,
            "hands_over": self.dialect.hands_over and self.decode is not None,
            "counts_host_bytes": all(counts(info, name) for name in HOST_PREFIXES),
        }
        # what a server does not keep to, its user takes away, and what no server can tell, its user says:
        # promises=-seeded,recalls_facts
        withdrawn = {name.removeprefix("-") for name in own.split(",") if name.startswith("-")}
        found |= {name: True for name in own.split(",") if name and not name.startswith("-")}
        if self.options.get("through"):
            withdrawn |= {"counts_cached", "splits_cached", "keeps_finished", "keeps_last", "counts_cached_totals"}
        return [name for name, holds in found.items() if holds and name not in withdrawn]

    @property
    def _copies(self) -> bool:
        """Whether every page that is computed gets a copy on the host."""
        return bool(self.config.host_pages_per_rank) and self.config.host_policy == "write_through"

    def _service(self) -> Service:
        info = self.front
        near, far = TOLERANCES.get(str(info.args.get("dtype")), TOLERANCES_DEFAULT)
        vocab = info.number("vocab_size")
        wait = info.args.get("disaggregation_timeout")
        return Service(
            token_ids=(TOKEN_IDS[0], vocab - 8 if vocab and vocab > TOKEN_IDS[0] + 100 else TOKEN_IDS[1]),
            pair=self.decode is not None,
            draft=bool(info.args.get("speculative_algorithm")),
            tokens_max=info.number("max_total_num_tokens"),
            rank_tokens_max=self.rank_tokens,
            wait_seconds=float(wait) if isinstance(wait, int | float) else None,
            logprob_near=float(self.options.get("near", near)),
            logprob_far=float(self.options.get("far", far)),
        )


def counts(info: Info, name: str) -> bool:
    """Whether all ranks of a server have a counter of this name."""
    return bool(info.counters) and all(name in counters for counters in info.counters.values())


def role_levels(counters: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Levels that tell of work under way, added up over the ranks."""
    return {name: sum(each.get(name, 0.0) for each in counters.values()) for name in sorted(_busy(counters))}


def _busy(counters: Mapping[int, Mapping[str, float]]) -> set[str]:
    names = {name for each in counters.values() for name in each}
    return {name for name in names if name.startswith("num_") and name.endswith("_reqs") and "_failed_" not in name}

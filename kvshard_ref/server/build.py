"""The program of a rank process: builds what the settings ask for, and serves until the face is gone.

`run(connect)` is called by the launcher, which knows transports: `connect(settings, name, folder)` makes an end.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvshard_ref.allocator import PageAllocator
from kvshard_ref.model import ModelGeometry, TinyModel, load
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.server.compute import ServedModel
from kvshard_ref.server.frames import Message
from kvshard_ref.server.generate import Generator
from kvshard_ref.server.groups import Groups, device_of, joined
from kvshard_ref.server.halves import DecodeHalf, PrefillHalf
from kvshard_ref.server.prefill import Job, Prefiller
from kvshard_ref.server.rank import Rank, serve, start_listening, teller
from kvshard_ref.server.receive import Receiver
from kvshard_ref.server.settings import Settings
from kvshard_ref.server.tensor_parallel import sliced, summed
from kvshard_ref.spec import DraftSpec, WorkerSpec
from kvshard_ref.transport import Transport
from kvshard_ref.worker import PrefillWorker

Connect = Callable[[Settings, str, Path], Transport]


def run(connect: Connect) -> None:
    """Serves over standard input and output."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up between the messages
    inbox, tell = start_listening(os.fdopen(0, "rb", buffering=0)), teller(pipe)
    first = inbox.get()
    if first is None:
        return
    settings, number = Settings.decoded(first["settings"]), int(first["rank"])
    torch.set_num_threads(1)
    if settings.device == "cuda":
        torch.cuda.set_device(device_of(settings, number))
    groups = joined(settings, number, tell, lambda: inbox.get() or {})
    build = Builder(settings, number, groups, lambda name: connect(settings, name, Path(first["book"])))
    rank = build.rank(tell)
    tell({"kind": "ready", "info": build.info()})
    try:
        serve(rank, inbox, settings.ranks - 1, groups.control)
    finally:
        if settings.ranks > 1:
            dist.destroy_process_group()


def fingerprint(model: TinyModel) -> str:
    """Tells other weights from these."""
    state = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(model.state_dict().items()):
        state.update(name.encode())
        state.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class Builder:
    """Makes the parts of one rank."""

    def __init__(self, settings: Settings, number: int, groups: Groups, end: Callable[[str], Transport]) -> None:
        self._settings, self._number, self._groups, self._end = settings, number, groups, end
        self._device = device_of(settings, number)
        self._dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        whole = self._loaded()
        self._weights = fingerprint(whole)
        whole = whole.to(self._device, self._dtype).eval()
        self.geometry: ModelGeometry = whole.geometry
        self._parameters = sum(weight.numel() for weight in whole.parameters())
        self._model = sliced(whole, groups.tensor.rank, groups.tensor.size)
        self._reduce = summed(groups.tensor)
        self._prefill: PrefillHalf | None = None

    def rank(self, tell: Callable[[Message], None]) -> Rank:
        """All of it."""
        settings, decode, receiver = self._settings, None, None
        if settings.disaggregation_mode != "prefill":
            decode = self._decode()
        if settings.disaggregation_mode != "decode":
            self._prefill = self._prefilled(decode)
        elif self._number == 0 and decode:
            receiver = Receiver(decode.generator.pools, self._end(f"decode {settings.port}"), settings.drafts)
        return Rank(settings, self._number, tell, self._prefill, decode, receiver)

    def info(self) -> Message:
        """Sizes that the face tells."""
        settings = self._settings
        shards = self._groups.cache.size if settings.enable_kv_cache_sharding else 1
        pages = settings.max_total_tokens // settings.page_size
        return {
            "vocab_size": self.geometry.vocab,
            "layers": self.geometry.layers,
            "parameters": self._parameters,
            "token_capacity": pages * settings.page_size,
            "max_total_num_tokens": pages * settings.page_size * shards,
            "weights": self._weights,
        }

    def _loaded(self) -> TinyModel:
        settings = self._settings
        if settings.load_format == "dummy":
            geometry = ModelGeometry(quantised_index=settings.quantise_index)
            return TinyModel(geometry, settings.random_seed)
        return load(Path(settings.model_path, "model.safetensors"), quantised_index=settings.quantise_index)

    def _models(self) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """Layers and components of the target and, with one, of its draft."""
        target = (self.geometry.layers, self.geometry.components(self._dtype))
        draft = (1, self.geometry.components(self._dtype, "draft_"))
        return (target, draft) if self._settings.drafts else (target,)

    def _decode(self) -> DecodeHalf:
        settings, pages = self._settings, self._settings.max_total_tokens // self._settings.page_size
        place = Placement(1, settings.page_size)
        pools = [ShardPool(0, place, pages, layers, components, self._device) for layers, components in self._models()]
        plain = settings.disaggregation_mode == "null"
        spread = None if plain or settings.ranks == 1 else lambda rows: dist.broadcast(rows, src=0)
        generator = Generator(self._model, pools, settings.drafts, self._reduce)
        return DecodeHalf(generator, PageAllocator(place, pages) if plain else None, spread)

    def _prefilled(self, decode: DecodeHalf | None) -> PrefillHalf:
        settings, prefill = self._settings, self._settings.disaggregation_mode == "prefill"
        target, *drafts = self._models()
        spec = WorkerSpec(
            ranks=self._groups.cache.size,
            page_size=settings.page_size,
            pages_per_rank=settings.max_total_tokens // settings.page_size,
            layers=target[0],
            components=target[1],
            chunk_tokens=settings.chunked_prefill_size,
            context_tokens=settings.context_length,
            layout="sharded" if settings.enable_kv_cache_sharding else "replicated",
            split=settings.cp_strategy if settings.attn_cp_size > 1 else "whole",
            draft=DraftSpec(*drafts[0]) if drafts else None,
            host_pages_per_rank=settings.host_pages,
            host_policy=settings.hicache_write_policy,
            ahead_tokens=1 if drafts else 0,
        )
        cache, first = self._groups.cache, self._groups.tensor.rank == 0 or settings.attn_cp_size == 1
        sends = first and (spec.layout == "sharded" or cache.rank == 0)  # of those with the same rows, one
        model = ServedModel(self._model, self._tokens_of, self._reduce)
        worker = PrefillWorker(
            spec,
            self._groups.cache,
            model,
            device=self._device,
            transport=self._end(f"prefill {cache.rank}") if sends and prefill else None,
        )
        return PrefillHalf(Prefiller(worker, model, self._hand_over(worker, decode) if decode else None))

    def _tokens_of(self, rid: str) -> tuple[int, ...]:
        assert self._prefill is not None  # noqa: S101  # batches come after the build
        return tuple(self._prefill.prefiller.tokens_of(rid))

    @staticmethod
    def _hand_over(worker: PrefillWorker, decode: DecodeHalf) -> Callable[[Job], bool]:
        def hand_over(job: Job) -> bool:
            pages = worker.cache.requests[job.ask.rid].pages
            return decode.take_over(job, [runner.pool for runner in worker.runners], pages)

        return hand_over

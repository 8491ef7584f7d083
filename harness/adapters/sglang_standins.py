"""All that is put in the place of names of sglang and torch, each only as long as its context is open."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from harness.adapters.sglang_hub import Communicator
from harness.sim.memory import is_host

POOLS = "sglang.srt.mem_cache.page_interleave_pool"
INDEX_STORE = "sglang.kernels.ops.kvcache.dsa_index_k_cache"
ABSENT = object()
HOST_REGISTER = "sglang.srt.mem_cache.pool_host.common"
# These keep the module of the process's one device in a global of theirs, and take streams and events from it.
OF_THE_PROCESS = ("sglang.srt.mem_cache.l2_transfer", "sglang.srt.managers.cache_controller")
# Their copies are CUDA kernels.
HOST_POOLS = (
    ("sglang.srt.mem_cache.pool_host.mha", "AsymmetricMHATokenToKVPoolHost"),
    ("sglang.srt.mem_cache.pool_host.mla", "MLATokenToKVPoolHost"),
)


@contextmanager
def pools_on(device: Any) -> Iterator[None]:
    """A pool that is made in here takes its streams and events from `device`, and gathers by its group.

    A pool asks torch for the module of its device, and its own module for the communicator; it keeps what it got.
    """
    with (
        mock.patch.object(torch, "get_device_module", return_value=device),
        mock.patch.object(importlib.import_module(POOLS), "PyNcclCommunicator", Communicator),
    ):
        yield


@contextmanager
def index_store() -> Iterator[None]:
    """Indexer rows are stored by torch: that is a Triton kernel, looked up in its module."""
    with mock.patch.object(importlib.import_module(INDEX_STORE), "_set_k_and_s_triton", _store_index):
        yield


def _store_index(buf: Tensor, loc: Tensor, index_k: Tensor, index_k_scale: Tensor, page_size: int) -> None:
    """Into pages of `page_size` keys and then their scales, uint8 [pages, bytes], at these token slots."""
    key, scale = index_k.view(torch.uint8), index_k_scale.view(torch.uint8)
    keys = buf[:, : page_size * key.shape[1]].view(buf.shape[0], page_size, -1)
    scales = buf[:, page_size * key.shape[1] :].view(buf.shape[0], page_size, -1)
    keys[loc // page_size, loc % page_size] = key
    scales[loc // page_size, loc % page_size] = scale


class RankDevices:
    """The device of the rank whose thread asks."""

    def __init__(self) -> None:
        self._here = threading.local()

    @contextmanager
    def of(self, device: Any) -> Iterator[None]:
        """This thread is a rank with this device."""
        before = getattr(self._here, "device", None)
        self._here.device = device
        try:
            yield
        finally:
            self._here.device = before

    def issue(self, work: Callable[[], None]) -> None:
        """Work of the rank's device. A device that sees every torch operation by itself needs no telling."""
        issue = getattr(self._here.device, "issue", None)
        work() if issue is None else issue(work)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """The tensor's memory is not used again before the stream's work on it is done; see `torch.cuda`."""
        keep = getattr(self._here.device, "keep", None)
        if keep is not None:  # a device on which memory has a life
            keep(tensor, stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here.device, name)


Replacement = tuple[Any, str, object]  # of a module or class, the name there, what is to stand for it


def copies_on(devices: RankDevices) -> tuple[Replacement, ...]:
    """Copies between the tiers are work of the rank's device, done by torch; host memory needs no registering."""
    engine = importlib.import_module(OF_THE_PROCESS[0]).L2TransferEngine
    pools = [getattr(importlib.import_module(module), name) for module, name in HOST_POOLS]
    return (
        (engine, "_record_stream", staticmethod(_record_stream(devices))),
        *((importlib.import_module(module), "device_module", devices) for module in OF_THE_PROCESS),
        *((pool, "backup_from_device_all_layer", _backup(devices)) for pool in pools),
        *((pool, "load_to_device_per_layer", _load(devices)) for pool in pools),
        (importlib.import_module(HOST_REGISTER), "_cuda_host_register", lambda *_, **__: None),
    )


@contextmanager
def put(replacements: Sequence[Replacement]) -> Iterator[None]:
    """All of them are in place, and what they stand for comes back. For each op: a mock takes long to make."""
    before = [(owner, name, vars(owner).get(name, ABSENT)) for owner, name, _ in replacements]
    try:
        for owner, name, new in replacements:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in reversed(before):
            if old is ABSENT:  # it was of a class above
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _backup(devices: RankDevices) -> Callable[..., None]:
    def backup(self: Any, _: object, host_indices: Tensor, device_indices: Tensor, *__: object, **___: object) -> None:
        def work() -> None:
            for host, layers in _buffers(self):
                for layer, rows in enumerate(layers):
                    host[host_indices, layer] = rows[device_indices]

        devices.issue(work)

    return backup


def _load(devices: RankDevices) -> Callable[..., None]:
    def load(  # as sglang calls it
        self: Any,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        *_: object,
        is_draft: bool = False,
        **__: object,
    ) -> None:
        if layer_id >= device_pool.layer_num and not is_draft:  # as its own does
            return

        def work() -> None:
            for host, layers in _buffers(self):
                layers[layer_id][device_indices] = host[host_indices, layer_id]

        devices.issue(work)

    return load


def _record_stream(devices: RankDevices) -> Callable[..., None]:
    """Sglang's own asks each tensor whether it is on a GPU, and here none is."""

    def record_stream(transfers: Iterable[Any], stream: Any) -> None:
        for transfer in transfers:
            for indices in (transfer.host_indices, transfer.device_indices):
                if not is_host(indices):
                    devices.keep(indices, stream)

    return record_stream


def _buffers(host_pool: Any) -> list[tuple[Tensor, list[Tensor]]]:
    """Pairs of a host buffer [rows, layers, ...] and the device's buffers [rows, ...] of each layer.

    The layers of a draft are the last ones, each in a pool of its own.
    """
    host = host_pool.kv_buffer
    if isinstance(host, tuple):
        return [(host[0], host_pool.device_k_buffers), (host[1], host_pool.device_v_buffers)]
    return [(host, host_pool.device_kv_buffers)]

"""The sglang package that is installed here: its version, and the names that the adapter touches.

Private names move from release to release, so each release that the adapter knows has a table of its own. sglang is
imported at the first session, not with this file: that takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

from harness.usage import UserError

CACHE = "sglang.srt.mem_cache"
MANAGERS = "sglang.srt.managers"
DISAGGREGATION = "sglang.srt.disaggregation"
# name here -> module and name there
NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Allocator": (f"{CACHE}.allocator.page_interleave", "PageInterleavePoolAllocator"),
        "CacheInitParams": (f"{CACHE}.cache_init_params", "CacheInitParams"),
        "ComponentType": (f"{CACHE}.unified_cache.component_type", "ComponentType"),
        "DSAPool": (f"{CACHE}.page_interleave_pool", "PageInterleaveDSATokenToKVPool"),
        "EvictParams": (f"{CACHE}.base_prefix_cache", "EvictParams"),
        "FinishLength": (f"{MANAGERS}.schedule_batch", "FINISH_LENGTH"),
        "MHAPool": (f"{CACHE}.page_interleave_pool", "PageInterleaveMHATokenToKVPool"),
        "MLAPool": (f"{CACHE}.page_interleave_pool", "PageInterleaveMLATokenToKVPool"),
        "Placement": (f"{CACHE}.page_interleave", "PageInterleavePlacement"),
        "PoolStats": (f"{MANAGERS}.scheduler_components.pool_stats_observer", "SchedulerPoolStatsObserver"),
        "PrefillAdder": (f"{MANAGERS}.schedule_policy", "PrefillAdder"),
        "Req": (f"{MANAGERS}.schedule_batch", "Req"),
        "ReqToTokenPool": (f"{CACHE}.memory_pool", "ReqToTokenPool"),
        "SamplingParams": ("sglang.srt.sampling.sampling_params", "SamplingParams"),
        "ServerArgs": ("sglang.srt.server_args", "ServerArgs"),
        "ShardSpec": (f"{CACHE}.page_interleave", "PageShardSpec"),
        "Tree": (f"{CACHE}.unified_radix_cache", "UnifiedRadixCache"),
        "alloc_for_extend": (f"{CACHE}.allocation", "alloc_for_extend"),
        "CommonSender": (f"{DISAGGREGATION}.common.conn", "CommonKVSender"),
        "MooncakeManager": (f"{DISAGGREGATION}.mooncake.conn", "MooncakeKVManager"),
        "PrefillScheduler": (f"{DISAGGREGATION}.prefill", "SchedulerDisaggregationPrefillMixin"),
        "StateType": (f"{DISAGGREGATION}.base.conn", "StateType"),
        "checkpoint": (f"{CACHE}.common", "checkpoint_kv_cache"),
        "RadixKey": (f"{CACHE}.radix_cache", "RadixKey"),
        "create_context": ("sglang.srt.runtime_context", "create_context"),
        "get_server_args": ("sglang.srt.runtime_context", "get_server_args"),
        "match": (f"{CACHE}.common", "match_kv_cache"),
        "max_input_len": (f"{DISAGGREGATION}.prefill", "max_bootstrap_input_len"),
        "release": (f"{CACHE}.common", "release_kv_cache"),
        "use_context": ("sglang.srt.runtime_context", "use_context"),
    }
)


@dataclass(frozen=True, slots=True)
class Release:
    """What one sglang release has, as the adapter needs it."""

    names: Mapping[str, tuple[str, str]]
    host: bool = True  # it has a host tier for sharded pools
    sends: bool = True  # its senders know of sharded pools
    draft: bool = True  # it builds a sharded pool for the draft as well
    attention: tuple[str, ...] = ("mha", "mla", "dsa")  # that the adapter can drive


def _without(*absent: str) -> Mapping[str, tuple[str, str]]:
    return MappingProxyType({name: place for name, place in NAMES.items() if name not in absent})


SENDING = ("CommonSender", "MooncakeManager", "PrefillScheduler", "StateType")
# newest first
RELEASES: Mapping[str, Release] = MappingProxyType(
    {
        "0.5.23": Release(NAMES),
        "0.5.22": Release(
            _without("max_input_len", "DSAPool", *SENDING),
            host=False,
            sends=False,
            draft=False,
            attention=("mha", "mla"),
        ),
    }
)
INSTALL = (
    "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu && "
    "pip install --no-deps sglang=={version}, then what it imports; no GPU package is needed"
)


class Parts:
    """The names of one sglang release: `parts.Allocator` and so on, as in its table. sglang has no types here."""

    def __init__(self, version: str, found: Mapping[str, Any]) -> None:
        self.version = version
        self._found = found

    def get(self, name: str) -> Any | None:
        """A name that not every release has; None in one without it."""
        return self._found.get(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._found[name]
        except KeyError:
            raise AttributeError(f"{name!r} is in no table of sglang {self.version}; add it to NAMES") from None


def installed() -> str:
    """The version that is installed, one that the adapter knows. Imports nothing. Raises UserError."""
    expected = " or ".join(RELEASES)
    how = INSTALL.format(version=next(iter(RELEASES)))
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"sglang is not installed; expected version {expected}: {how}") from None
    if version not in RELEASES:
        raise UserError(
            f"sglang {version} is installed; expected version {expected}: {how}. Another release needs a table of its "
            "own in RELEASES of harness/adapters/sglang_install.py"
        )
    return version


@cache
def parts() -> Parts:
    """Imports sglang. Raises UserError when it cannot be, or lacks a name of its table."""
    version = installed()
    with quiet():
        try:
            importlib.import_module("sglang")
            # after it, because transformers must not take the stub for the real one
            _stub_torchvision()
            found = {name: name_of(version, *place) for name, place in RELEASES[version].names.items()}
        except ImportError as error:
            how = INSTALL.format(version=version)
            raise UserError(f"sglang {version} cannot be imported: {error}; install what it needs: {how}") from error
    return Parts(version, found)


@contextmanager
def quiet() -> Iterator[None]:
    """It warns, and logs, of devices and kernels that are not here."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def name_of(version: str, module: str, name: str) -> Any:
    """A name of sglang. Raises UserError when this release lacks it, ImportError when its module cannot be imported."""
    imported = importlib.import_module(module)
    try:
        return getattr(imported, name)
    except AttributeError:
        raise UserError(
            f"sglang {version}: {module} has no {name}, which its table names; is the package changed? Otherwise "
            "correct the table in harness/adapters/sglang_install.py"
        ) from None


class _AnyName(type):
    """A class with whatever constant is asked for."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _AnyModule(ModuleType):
    """A module in which everything exists and nothing works."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyName(name, (), {}) if name[0].isupper() else _AnyModule(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


def _stub_torchvision() -> None:
    """It is imported for image models, which are not used here; the real one brings gigabytes along."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        full = f"torchvision{name}"
        module = _AnyModule(full)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
        sys.modules[full] = module
        parent, _, child = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)

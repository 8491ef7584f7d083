"""Looks at this host. Nothing that is missing or broken raises: it is a finding."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType
from typing import NamedTuple

import psutil

from harness.doctor import Gpu, Host, Library

IMPORT_SECONDS = 120


class Package(NamedTuple):
    """Names under which a package is installed, modules of which one must be importable, how to get it."""

    distributions: tuple[str, ...]
    modules: tuple[str, ...]  # none: it is not tried, its import takes long
    install: str


def _plain(name: str, module: str = "", install: str = "") -> Package:
    return Package((name,), (module or name,), install or f"pip install {name}")


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "torch": _plain("torch"),
        "hypothesis": _plain("hypothesis"),
        "fastapi": _plain("fastapi", install="pip install 'kvshard[serve]'"),
        "uvicorn": _plain("uvicorn", install="pip install 'kvshard[serve]'"),
        "prometheus-client": _plain("prometheus-client", "prometheus_client", "pip install 'kvshard[serve]'"),
        "tokenizers": _plain("tokenizers", install="pip install 'kvshard[serve]'"),
        "safetensors": _plain("safetensors"),
        "scipy": _plain("scipy", install="pip install 'kvshard[gate]'"),
        "lm-eval": _plain("lm_eval", install="pip install 'kvshard[lm-eval]'"),
        "sglang-router": _plain("sglang-router", "sglang_router", "pip install 'kvshard[router]'"),
        "sglang": Package(("sglang",), (), "bash ci/install_sglang.sh PYTHON, or all of sglang where there is a GPU"),
        "nixl": Package(
            ("nixl-cu12", "nixl-cu13", "nixl"),
            ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"),
            "pip install 'kvshard[nixl]'",
        ),
        "mooncake": Package(
            ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
            ("mooncake.engine",),
            "pip install 'kvshard[mooncake]'; apt-get install libibverbs1",
        ),
    }
)


def probe() -> Host:
    """Everything about this host; some seconds, mostly for imports in processes of their own."""
    libraries = {name: library(name) for name in PACKAGES}
    python, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory().total
    if libraries["torch"].why:
        return Host(python, system, cores, memory, driver=driver(), libraries=libraries)
    import torch  # noqa: PLC0415  # slow, and not there on every host

    found = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    gpus = tuple(
        Gpu(one.name, (one.major, one.minor), one.total_memory) for one in map(torch.cuda.get_device_properties, found)
    )
    pairs = ((a, b) for a, b in combinations(found, 2))
    links = frozenset(
        (a, b) for a, b in pairs if torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)
    )
    distributed = torch.distributed.is_available()
    has_nccl = distributed and torch.distributed.is_nccl_available() and bool(gpus)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""
    gloo = distributed and torch.distributed.is_gloo_available()
    return Host(python, system, cores, memory, gpus, links, driver(), nccl, gloo, libraries)


def library(name: str) -> Library:
    """Whether a package is installed and its import works, tried in a process of its own."""
    package = PACKAGES[name]
    version = next(filter(None, map(_version, package.distributions)), "")
    if not version:
        return Library("", f"not installed; {package.install}")
    whys = [_unimportable(module) for module in package.modules]
    return Library(version, "" if not whys or "" in whys else whys[-1])


def _unimportable(module: str) -> str:
    """Why a module cannot be imported, "" when it can."""
    asked = [sys.executable, "-c", f"import {module}"]
    try:
        tried = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"import {module} takes more than {IMPORT_SECONDS} s"
    said = tried.stderr.strip().splitlines()
    return "" if tried.returncode == 0 else said[-1] if said else f"import {module} ends with code {tried.returncode}"


def driver() -> str:
    """The version of NVIDIA's driver, "" without one."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return ""
    lines = told.stdout.split()
    return lines[0] if told.returncode == 0 and lines else ""


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""

"""Engines whose allocator and tree can be driven on page ids, by address: `ref?like=...`, as in harness.connect."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from harness.bench_index import BenchEngine
from harness.capacity import CapacityError
from harness.connect import AddressError, parse
from harness.usage import nearest

# name -> module with `index_engine(options, context_tokens=, in_flight=)`
ENGINES: Mapping[str, str] = MappingProxyType(
    {"ref": "harness.adapters.ref_index", "sglang": "harness.adapters.sglang_index"}
)


def index_engine(address: str, context_tokens: int, in_flight: int) -> BenchEngine:
    """The engine behind an address. Raises CapacityError, also when it is not installed.

    context_tokens: of the longest request; in_flight: requests that live at a time.
    """
    try:
        name, factory, options = parse(address)
    except AddressError as error:
        raise CapacityError(f"engine {error}") from None
    if factory is not None or name not in ENGINES:
        raise CapacityError(f"engine {name!r}{nearest(name, ENGINES)} Expected one of {', '.join(ENGINES)}")
    made = importlib.import_module(ENGINES[name]).index_engine
    engine: BenchEngine = made(options, context_tokens=context_tokens, in_flight=in_flight)
    return engine

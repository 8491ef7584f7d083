"""Engines by address: `ref?shards=4`, `py:package.module:factory`, `py:file.py:factory`, a URL, a registered name.

    address := name [?options] | py:module:factory [?options] | py:file.py:factory [?options] | URL [?options]
    options := key=value {& key=value}

A URL is that of a server, `http://host:port`; a `?`, `&`, `%`, `#` or `+` inside of an option is quoted as in any URL.

The options are keyword arguments of the factory, all of them strings. Other packages register names under the
entry-point group `kvshard.engines`. An address says how an engine is reached, so it stays out of reports; see
`Manifest.name`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from harness import here
from harness.adapter import Engine
from harness.capabilities import claimed
from harness.types import Manifest
from harness.usage import UserError, nearest, told

GROUP = "kvshard.engines"
UNIQUE = "kvshard_engine_"  # begins the name of a module that is loaded from a file
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {"ref": "harness.adapters.ref:RefEngine", "sglang": "harness.adapters.sglang:SglangEngine"}
)
LOADED: Mapping[str, str] = MappingProxyType({"sglang": "harness.adapters.sglang_loaded"})  # and what takes it long
SERVERS = "harness.adapters.http:HttpEngine"  # what is behind a URL
SCHEMES = ("http://", "https://")
GRAMMAR = (
    "a name, py:package.module:factory, py:path/to/file.py:factory or http://host:port, "
    "each with ?key=value&key=value if need be"
)


class AddressError(UserError):
    """No engine is behind an address; the message says which part of it is wrong."""


class Address(NamedTuple):
    """An address taken apart. `factory` is None for a registered name."""

    target: str  # name, module or file
    factory: str | None
    options: dict[str, str]


def parse(address: str) -> Address:
    """Takes an address apart; imports nothing. Raises `AddressError`."""
    where, _, query = address.partition("?")
    options = _options(address, query)
    if where.startswith(SCHEMES):
        return Address(where, None, options)
    if not where.startswith("py:"):
        if not where or ":" in where or "/" in where:
            raise AddressError(f"{address!r} is no address; expected {GRAMMAR}")
        return Address(where, None, options)
    target, colon, factory = where.removeprefix("py:").rpartition(":")
    if not colon or not target or not factory:
        raise AddressError(f"{address!r} names no factory; expected {GRAMMAR}")
    return Address(target, factory, options)


def is_server(address: str) -> bool:
    """Whether an engine runs already, behind a URL: then all its sessions share what it has."""
    return address.startswith(SCHEMES)


def engine_module(address: str) -> str:
    """The module that an engine comes from, for who wants it imported ahead; harmless where it is none."""
    target, factory, _ = parse(address)
    if factory is None and target in LOADED:
        return LOADED[target]
    built_in = _built_in(target) if factory is None else None
    return built_in.partition(":")[0] if built_in else __name__


def connect(address: str) -> Engine:
    """The engine behind an address. Raises `AddressError`."""
    target, factory, options = parse(address)
    if factory is not None:
        is_file = target.endswith(".py") or "/" in target
        module = module_of_file(address, target) if is_file else _module(address, target)
        return _made(address, _attribute(address, module, factory), options)
    built_in = _built_in(target)
    if built_in is not None:
        module_name, _, attribute = built_in.partition(":")
        make = _attribute(address, _module(address, module_name), attribute)
        try:
            return check_engine(make({"url": target, **options} if target not in BUILT_IN else options), address)
        except ValueError as error:
            raise AddressError(f"{address}: {error}") from error
    for entry in _registered():
        if entry.name == target:
            try:
                found = entry.load()
            except (Exception, SystemExit) as error:
                raise AddressError(f"{address}: {entry.value} cannot be imported: {told(error, __file__)}") from error
            return _made(address, found, options)
    names = [name for name, _ in engines()]
    raise AddressError(
        f"no engine is named {target!r}{nearest(target, names)} There is: {', '.join(names)}. Or give {GRAMMAR}"
    )


def engines() -> list[tuple[str, str]]:
    """Every engine that has a name, with where it comes from; imports none of them."""
    built_in = [(name, "built in") for name in BUILT_IN]
    return built_in + sorted((entry.name, entry.value) for entry in _registered() if entry.name not in BUILT_IN)


def check_engine(engine: object, where: str) -> Engine:
    """`engine` itself when it has the methods of an engine. Raises `AddressError`."""
    lacking = [name for name in ("describe", "open") if not callable(getattr(engine, name, None))]
    if lacking:
        raise AddressError(
            f"{where} gave a {type(engine).__name__} without {' and '.join(lacking)}; "
            "an engine has describe() and open(config)"
        )
    return engine  # type: ignore[return-value]  # checked above


def manifest_of(engine: Engine, where: str) -> Manifest:
    """The manifest of an engine, with only claims that exist. Raises `AddressError`."""
    try:
        manifest: object = engine.describe()
    except UserError as error:
        raise AddressError(f"{where}: {error}") from error
    except Exception as error:
        raise AddressError(f"{where}: describe() raised {told(error)}") from error
    if not isinstance(manifest, Manifest):
        raise AddressError(f"{where}: describe() gave a {type(manifest).__name__}; expected a harness.types.Manifest")
    try:
        claimed(manifest)
    except ValueError as error:
        raise AddressError(f"{where}: {error}") from error
    return manifest


def close(engine: Engine) -> None:
    """Ends an engine that has something to end."""
    end: Callable[[], object] | None = getattr(engine, "close", None)
    if callable(end):
        end()


def _built_in(target: str) -> str | None:
    """What this project has behind a name or a URL."""
    return SERVERS if target.startswith(SCHEMES) else BUILT_IN.get(target)


def _options(address: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise AddressError(f"{address!r}: options {query!r}; expected key=value&key=value after the ?") from None
    options = dict(pairs)
    if len(options) < len(pairs):
        twice = sorted({key for key, _ in pairs if [name for name, _ in pairs].count(key) > 1})
        raise AddressError(f"{address!r}: option {', '.join(twice)} is given twice")
    return options


def _registered() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


def _module(address: str, name: str) -> ModuleType:
    here.importable()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        hint = f"; looked in {Path.cwd()} and sys.path" if isinstance(error, ModuleNotFoundError) else ""
        raise AddressError(f"{address}: {name} cannot be imported: {told(error, __file__)}{hint}") from error


def module_of_file(address: str, name: str) -> ModuleType:
    """The module of one file, which `address` asks for. Raises `AddressError`.

    Its folder becomes importable, so that it finds what lies beside it.
    """
    path = Path(name).resolve()
    unique = f"{UNIQUE}{path.stem}_{hashlib.sha1(str(path).encode(), usedforsecurity=False).hexdigest()[:8]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise AddressError(f"{address}: there is no Python file {name} (in {Path.cwd()})")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses and pickle look a class up by its module's name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        raise AddressError(f"{address}: {name} cannot be imported: {told(error, __file__)}") from error
    return module


def _attribute(address: str, module: ModuleType, name: str) -> Any:
    found: Any = module
    where = Path(module.__file__ or "").name if module.__name__.startswith(UNIQUE) else module.__name__
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = nearest(part, [other for other in dir(found) if not other.startswith("_")])
            raise AddressError(f"{address}: {where} has no {part!r}{near}") from None
        where += f".{part}"
    return found


def _made(address: str, found: Any, options: dict[str, str]) -> Engine:
    """What the factory makes, or `found` itself when it is an engine already."""
    if not isinstance(found, type) and hasattr(found, "describe") and hasattr(found, "open"):
        if options:
            raise AddressError(f"{address}: takes no options, because it is an engine and not a factory")
        return check_engine(found, address)
    if not callable(found):
        kind = type(found).__name__
        raise AddressError(f"{address}: is a {kind}; expected a factory or an engine with describe() and open(config)")
    try:
        engine = found(**options)
    except UserError as error:
        raise AddressError(f"{address}: {error}") from error
    except (Exception, SystemExit) as error:
        raise AddressError(f"{address}: the factory raised {told(error, __file__)}") from error
    return check_engine(engine, address)

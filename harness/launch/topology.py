"""The topology file: which server processes belong together, how each is started, and when it counts as ready.

`docs/topologies.md` explains the format. A file that cannot work is a `TopologyError` with file, key, value, what was
expected and what to do.
"""

from __future__ import annotations

import copy
import graphlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec

from harness.usage import UserError, nearest

RESERVED = ("defaults", "entry")  # `--set` means these tables, so no worker has such a name
DOCUMENT = "docs/topologies.md"

Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*\Z")]
Variable = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
PortName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*\Z")]
HealthPath = Annotated[str, msgspec.Meta(pattern=r"^/[!-~]*\Z")]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
DeviceId = Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(min_length=1)]
S = TypeVar("S", bound=msgspec.Struct)
Gpus = Annotated[int, msgspec.Meta(ge=0)] | tuple[DeviceId, ...] | None

# field -> what it may hold
EXPECTED: Mapping[str, str] = MappingProxyType(
    {
        "name": f"a word of letters, digits, - and _, other than {' and '.join(RESERVED)}",
        "role": "a word of letters, digits, - and _",
        "command": "a list of strings, the program first",
        "env": "a table of variables, each a string or a whole number",
        "ports": "a list of names, each of lower-case letters, digits and _",
        "gpus": "a list of device ids, or how many",
        "after": "a list of names of workers",
        "health": "a path that begins with /",
        "ready_seconds": "a number of seconds above 0",
        "stop_seconds": "a number of seconds above 0",
        "worker": "the name of a worker",
    }
)


class TopologyError(UserError):
    """A topology that cannot work, or an option that does not fit it."""


class Defaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for every worker that does not say otherwise; `env` is merged variable by variable."""

    role: Word = "plain"
    env: dict[Variable, str | int] = {}
    ports: tuple[PortName, ...] = ()  # beside `port`, which every worker has
    gpus: Gpus = None  # None leaves CUDA_VISIBLE_DEVICES as it is
    health: HealthPath = "/health"
    ready_seconds: Seconds = 600.0  # loading the weights of a large model takes minutes
    stop_seconds: Seconds = 30.0


class Worker(Defaults, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server process."""

    name: Word
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    after: tuple[str, ...] = ()

    @property
    def port_names(self) -> tuple[str, ...]:
        """`port` and the further ones."""
        return ("port", *(name for name in self.ports if name != "port"))


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The worker whose URL is the address of the whole."""

    worker: str


class Topology(msgspec.Struct, frozen=True):
    """Workers in the order in which they may start: each behind those that it waits for."""

    source: str
    workers: tuple[Worker, ...]
    entry: str

    def worker(self, name: str) -> Worker:
        """The worker of that name. Raises `TopologyError`."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        names = [worker.name for worker in self.workers]
        raise TopologyError(f"{self.source} has no worker {name!r}{nearest(name, names)} There is: {', '.join(names)}")


def read(path: Path, settings: Sequence[str] = ()) -> Topology:
    """The topology of a file, with `NAME.key=value` settings over it. Raises `TopologyError`."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"{path}: {error.strerror}; expected a topology file, see {DOCUMENT}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: no TOML: {error}; correct that line") from error
    for setting in settings:
        document = with_setting(document, setting)
    return parse(document, str(path))


def parse(document: Mapping[str, Any], source: str = "topology") -> Topology:
    """The topology of a parsed document. Raises `TopologyError`."""
    for key in document:
        if key not in {"defaults", "worker", "entry"}:
            near = nearest(key, ("defaults", "worker", "entry"))
            raise TopologyError(f"{source}: unknown table [{key}]{near} There is: [defaults], [[worker]], [entry]")
    raw = document.get("worker")
    if not isinstance(raw, list) or not raw or not all(isinstance(one, dict) for one in raw):
        shown = "missing" if raw is None else repr(raw)
        raise TopologyError(f"{source}: worker is {shown}; expected one or more [[worker]] tables, see {DOCUMENT}")
    defaults = document.get("defaults", {})
    _struct(defaults, Defaults, source, "defaults")
    workers = [_worker(defaults, one, source, at) for at, one in enumerate(raw)]
    if "entry" not in document:
        step = "add [entry] with worker = NAME, whose URL is the address of the whole"
        raise TopologyError(f"{source}: [entry] is missing; {step}")
    entry = _struct(document["entry"], Entry, source, "entry").worker
    _check_names(workers, entry, source)
    return Topology(source, tuple(_in_order(workers, source)), entry)


def with_setting(document: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """The document with `NAME.key=value` in it; the value is TOML, or a string where it is none."""
    where, equals, text = setting.partition("=")
    name, *keys = where.strip().split(".")
    if not (equals and name and keys and all(keys)):
        step = "write NAME.key=value, NAME being a worker, defaults or entry"
        raise TopologyError(f"--set {setting}: not understood; {step}")
    changed = copy.deepcopy(dict(document))
    workers = changed.get("worker")
    named = [one for one in workers if isinstance(one, dict)] if isinstance(workers, list) else []
    tables: dict[str, Any] = {str(one.get("name")): one for one in named}
    for table in RESERVED:
        tables[table] = changed.setdefault(table, {}) if table == name else changed.get(table, {})
    if name not in tables:
        known = ", ".join(tables)
        raise TopologyError(f"--set {setting}: there is no {name!r}{nearest(name, tables)} There is: {known}")
    place = tables[name]
    for key in keys[:-1]:
        place = place.setdefault(key, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        raise TopologyError(f"--set {setting}: {where.rpartition('.')[0]} is no table; set the whole of it")
    place[keys[-1]] = _value(text)
    return changed


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text


def _worker(defaults: Mapping[str, Any], raw: Mapping[str, Any], source: str, at: int) -> Worker:
    name = raw.get("name")
    place = f"worker {name!r}" if isinstance(name, str) else f"worker number {at + 1}"
    merged = {**defaults, **raw}
    if isinstance(raw.get("env"), dict):
        merged["env"] = {**defaults.get("env", {}), **raw["env"]}
    worker = _struct(merged, Worker, source, place)
    if worker.name in RESERVED:
        raise _wrong(source, place, "name", worker.name)
    for field, words in (("ports", worker.ports), ("after", worker.after)):
        twice = sorted({word for word in words if words.count(word) > 1})
        if twice:
            what = f"{list(words)!r}; expected each name once"
            raise TopologyError(f"{source}: {place}: {field} = {what}; take out {', '.join(twice)}")
    return worker


def _struct(raw: Any, kind: type[S], source: str, place: str) -> S:
    """The table as that struct, or an error that names key, value and expectation."""
    if not isinstance(raw, dict):
        raise TopologyError(f"{source}: {place} = {raw!r}; expected a table; write [{place}]")
    fields = kind.__struct_fields__
    for key in raw:
        if key not in fields:
            near = nearest(key, fields)
            raise TopologyError(f"{source}: {place}: unknown key {key!r}{near} There is: {', '.join(fields)}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        said = str(error)
    if "missing required field" in said:
        field = said.rpartition("field `")[2].partition("`")[0]
        raise TopologyError(f"{source}: {place}: {field} is missing; expected {EXPECTED[field]}; add it")
    # msgspec's place is `$.env[...]`: the field is its first word
    field = said.rpartition("`$.")[2].partition("`")[0].partition(".")[0].partition("[")[0]
    raise _wrong(source, place, field, raw.get(field))


def _wrong(source: str, place: str, field: str, value: Any) -> TopologyError:
    what = f"{field} = {value!r}; expected {EXPECTED[field]}"
    return TopologyError(f"{source}: {place}: {what}; correct it, see {DOCUMENT}")


def _check_names(workers: Sequence[Worker], entry: str, source: str) -> None:
    names = [worker.name for worker in workers]
    for name in names:
        if names.count(name) > 1:
            raise TopologyError(f"{source}: worker {name!r} is there {names.count(name)} times; give each its own name")
    wanted = [(f"worker {worker.name!r}: after", name) for worker in workers for name in worker.after]
    for place, name in (*wanted, ("entry: worker", entry)):
        if name not in names:
            near = nearest(name, names)
            raise TopologyError(f"{source}: {place} names {name!r}, no worker{near} There is: {', '.join(names)}")


def _in_order(workers: Sequence[Worker], source: str) -> Iterator[Worker]:
    """Each behind those that it waits for, else in the order of the file."""
    by_name = {worker.name: worker for worker in workers}
    sorter = graphlib.TopologicalSorter({worker.name: worker.after for worker in workers})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        circle = " after ".join(reversed(error.args[1]))
        raise TopologyError(f"{source}: after goes in a circle: {circle}; take one of these out") from error
    places = list(by_name)
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=places.index)
        yield from (by_name[name] for name in ready)
        sorter.done(*ready)

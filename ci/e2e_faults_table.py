"""The table of faults that are planted in servers: which worker gets each, and what is expected of the e2e suite.

    topology = "fixtures/topologies/p2d2_small.toml"
    address = "{url:decode}?prefill={url:prefill}"     # what the suite is run on; with operate={log_dir} it may kill
    patient = ["--disaggregation-timeout", "60"]       # further arguments where nothing must be seen

    [[fault]]
    id = "host.every-rank-copies-all"
    workers = ["prefill"]
    expected = "caught"                                # or "hidden": it is run, and changes nothing that can be seen
    cases = ["host.ranks_carry_their_share"]           # of a caught one: tried first
    reason = ""                                        # of a hidden one: why nothing can be seen

`env` holds further variables of the workers. Only workers that the address names are started. Those that any fault is
for get the arguments of `patient`: a time that is short on purpose, and passes on a busy machine, is no fault.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from harness.launch.topology import Topology, read
from harness.usage import UserError, nearest, toml_of

KEYS = ("topology", "address", "patient", "fault")
_NAMED = re.compile(r"\{\w+:([\w-]+)\}")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault and what is expected of it."""

    id: str
    workers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    expected: Literal["caught", "hidden"]
    cases: tuple[str, ...] = ()
    reason: str = ""
    env: dict[str, str] = {}


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a file."""

    topology: str
    address: str
    patient: tuple[str, ...] = ()
    fault: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1)]

    @property
    def named(self) -> list[str]:
        """The workers that the address names."""
        return list(dict.fromkeys(_NAMED.findall(self.address)))


def table(path: Path, faults: Collection[str], cases: Collection[str]) -> Table:
    """The table of a file; `faults` and `cases` are the ids that there are. Raises `UserError`."""
    try:
        found = msgspec.convert(toml_of(path, f"expected a table of faults, see {__name__}"), Table)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}; expected {', '.join(KEYS)}, see {__name__}") from error
    for problem in _problems(found, faults, cases):
        raise UserError(f"{path}: {problem}")
    topology(found, found.fault)
    return found


def _problems(found: Table, faults: Collection[str], cases: Collection[str]) -> Iterator[str]:
    if not found.named:
        yield f"address {found.address!r} names no worker; write {{url:NAME}} where its URL belongs"
    ids = [entry.id for entry in found.fault]
    for entry in found.fault:
        place = f"fault {entry.id!r}"
        if entry.id not in faults:
            yield f"{place} is in no library{nearest(entry.id, faults)} Take an id of `kvshard selfcheck --only faults`"
        if ids.count(entry.id) > 1:
            yield f"{place} is there {ids.count(entry.id)} times; keep one"
        for name in entry.workers:
            if name not in found.named:
                yield f"{place}: worker {name!r}; expected one that the address names: {', '.join(found.named)}"
        for name in entry.cases:
            if name not in cases:
                yield f"{place}: there is no case {name!r} in the suite{nearest(name, cases)}"
        if entry.expected == "caught" and not entry.cases:
            yield f"{place} is expected to be caught by no case; name in `cases` what should catch it"
        if entry.expected == "hidden" and not entry.reason:
            yield f"{place} is expected to be hidden and has no reason; say in `reason` why nothing can be seen"


def chosen(found: Table, only: Sequence[str]) -> list[Entry]:
    """The entries with these ids, in the order of the table; all when none is named. Raises `UserError`."""
    ids = [entry.id for entry in found.fault]
    for name in only:
        if name not in ids:
            raise UserError(f"--only {name}: not in the table{nearest(name, ids)} There is: {', '.join(ids)}")
    return [entry for entry in found.fault if not only or entry.id in only]


def topology(found: Table, entries: Sequence[Entry]) -> Topology:
    """The topology with the faults planted, and no worker but those that the address names. Raises `TopologyError`."""
    whole = read(Path(found.topology))
    faulty = {name for entry in found.fault for name in entry.workers}
    is_patient = all(entry.expected == "hidden" for entry in entries)
    workers = []
    for name in found.named:
        worker = whole.worker(name)
        its = [entry for entry in entries if name in entry.workers]
        more = {name: value for entry in its for name, value in entry.env.items()}
        planted = {"KVSHARD_FAULT": ",".join(entry.id for entry in its)} if its else {}
        arguments = found.patient if is_patient and name in faulty else ()
        command = (*worker.command, *arguments)
        workers.append(replace(worker, command=command, env={**worker.env, **more, **planted}))
    return replace(whole, workers=tuple(workers), entry=found.named[0])

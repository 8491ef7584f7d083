"""The launch gate of sglang for KV cache sharding: what the real one says about one set of server flags.

The gate checks a configuration that earlier steps of sglang have completed, and may write into it. Those steps are not
run here: `Host.decided` says what they decided. Nothing that the gate writes outlives `verdict`, which puts names
of sglang and `os.environ` aside while it runs: one thread at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import msgspec

from harness.adapters.sglang_install import Parts, parts
from harness.usage import UserError, nearest

READ_FROM = "0.5.23"  # the release that the names, the rules and the fixtures were read from
# name here -> module and name there
NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "AttentionArch": ("sglang.srt.configs.model_config", "AttentionArch"),
        "CudaGraphConfig": ("sglang.srt.model_executor.cuda_graph_config", "CudaGraphConfig"),
        "declare": ("sglang.srt.arg_groups.overrides", "declare_resolution"),
        "envs": ("sglang.srt.environ", "envs"),
        "gate": ("sglang.srt.arg_groups.kv_shard_hook", "handle_kv_cache_sharding"),
        "logger": ("sglang.srt.arg_groups.kv_shard_hook", "logger"),
        "view": ("sglang.srt.arg_groups.overrides", "resolved_view"),
    }
)
CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
STAGING = "SGLANG_DISAGG_STAGING_BUFFER"
VARIABLES = (CORE, STAGING)  # of the environment, that the gate reads; it writes the first
ATTENTION = ("mla", "mha")


@dataclass(frozen=True, slots=True)
class Model:
    """What the gate reads of a model's configuration."""

    architecture: str
    attention: str  # one of ATTENTION; grouped queries are mha
    index_topk: int | None = None  # architectures that can be DSA are with it
    index_kpool: int = 1
    index_kpool_compress: bool = False
    nextn_layers: int | None = None
    attention_chunk: int | None = None
    encoder_decoder: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """What the gate reads beside flags and model."""

    env: Mapping[str, str] = field(default_factory=dict)  # all of sglang's variables that are set
    gpu_mib: float = 81920.0  # memory of a GPU; 0 when it is not known
    decided: Mapping[str, object] = field(
        default_factory=dict
    )  # flags as steps before the gate have set them, over those of the user
    passes: int = 1  # sglang runs the gate twice, the second time over all that was decided since


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server starts with these flags as they are."""

    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Adjusted:
    """It starts with other values: name -> (before, after). A variable of the environment has None for not set."""

    changes: Mapping[str, tuple[object, object]]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """It does not start. `where` is the file and line of sglang that said so."""

    reason: str
    where: str


Verdict = Accepted | Adjusted | Refused


class _Notes(logging.Logger):
    """Keeps what is logged, and hands nothing on."""

    def __init__(self) -> None:
        super().__init__("kvshard.launch")
        self.lines: list[str] = []

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name of logging
        return level >= logging.WARNING

    def handle(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def verdict(flags: Mapping[str, object], model: Model, host: Host = Host()) -> Verdict:
    """What the gate of the installed sglang says. Raises UserError when it cannot be asked.

    `flags` are names of ServerArgs as the user set them; `cuda_graph_config` may be a mapping of phases.
    """
    loaded = parts()
    found = {name: _name(loaded.version, *place) for name, place in NAMES.items()}
    record = _record(loaded, found, flags, host)
    standin = _configuration(found["AttentionArch"], model)
    record._model_config = standin  # noqa: SLF001 - its place for a configuration that somebody else made
    notes = _Notes()
    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(os, "environ", _environment(host)))
        undo.enter_context(mock.patch.object(importlib.import_module(NAMES["logger"][0]), "logger", notes))
        for name in VARIABLES:  # a variable keeps whether it was set to None, outside the environment
            variable = _attribute(loaded.version, found["envs"], name, NAMES["envs"][0])
            undo.enter_context(mock.patch.object(variable, "_set_to_none", new=False))
        try:
            for _ in range(host.passes):
                found["gate"](record, gpu_mem=host.gpu_mib)
        except UserError:
            raise
        except ValueError as error:
            return Refused(" ".join(str(error).split()), _place(error))
        except AttributeError as error:
            raise _missing(loaded.version, error, standin, record) from error
        changes = _changes(found["view"](record), record, host)
        changes |= {name: (host.env.get(name), value) for name, value in _variables() if host.env.get(name) != value}
    return Adjusted(changes, tuple(notes.lines)) if changes else Accepted(tuple(notes.lines))


def absent() -> str:
    """Why the gate of READ_FROM cannot be asked here; empty when it can. Imports nothing."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "sglang is not installed"
    return "" if version == READ_FROM else f"sglang {version} is installed; the launch gate was read from {READ_FROM}"


def flags_of(arguments: Sequence[str]) -> dict[str, object]:
    """The flags that a command line sets to other than their defaults, without the model's path.

    Raises UserError for a command line that does not parse.
    """
    loaded = parts()
    parser = _Parser(prog="sglang", allow_abbrev=False)  # a command that is written down has its options in full
    loaded.ServerArgs.add_cli_args(parser)
    record = loaded.ServerArgs.from_cli_args(parser.parse_args(list(arguments)))
    plain = loaded.ServerArgs(model_path=record.model_path)
    return {
        name: value for name in record.__struct_fields__ if (value := getattr(record, name)) != getattr(plain, name)
    }


class _Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"sglang does not take these arguments: {message}")


def _record(loaded: Parts, found: Mapping[str, Any], flags: Mapping[str, object], host: Host) -> Any:
    """The flags as sglang keeps them: those of the user, and over them what was decided since."""
    known = loaded.ServerArgs.__struct_fields__
    for name in {*flags, *host.decided}.difference(known):
        raise UserError(f"sglang {loaded.version}: ServerArgs has no field {name!r}{nearest(name, known)}")
    record = loaded.ServerArgs(**{"model_path": "none", **_graphs(found["CudaGraphConfig"], flags)})
    record._raw_input = msgspec.structs.asdict(record)  # noqa: SLF001 - as its resolution does first
    if host.decided:
        found["declare"](record, "kvshard", **_graphs(found["CudaGraphConfig"], host.decided))
    return record


def _graphs(made_by: Any, flags: Mapping[str, object]) -> dict[str, object]:
    graphs = flags.get("cuda_graph_config")
    return {**flags, "cuda_graph_config": made_by.from_dict(dict(graphs))} if isinstance(graphs, Mapping) else {**flags}


def _configuration(kinds: Any, model: Model) -> SimpleNamespace:
    """What sglang would have made of the model's files, as far as the gate reads it."""
    if model.attention not in ATTENTION:
        raise UserError(f"attention={model.attention!r} of a model; expected one of {', '.join(ATTENTION)}")
    index = {} if model.index_topk is None else {"index_topk": model.index_topk}
    files = SimpleNamespace(
        architectures=[model.architecture],
        index_kpool=model.index_kpool,
        index_kpool_compress=model.index_kpool_compress,
        **index,
    )
    return SimpleNamespace(
        hf_config=files,
        attention_arch=kinds[model.attention.upper()],
        num_nextn_predict_layers=model.nextn_layers,
        attention_chunk_size=model.attention_chunk,
        is_encoder_decoder=model.encoder_decoder,
    )


def _changes(view: Any, record: Any, host: Host) -> dict[str, tuple[object, object]]:
    """Flags that have other values than before, those of a nested configuration by their dotted names."""
    found: dict[str, tuple[object, object]] = {}
    # asking for all of the hundreds takes ten times as long as the gate does
    declared = getattr(record, "_resolved_overrides", None)
    names = record.__struct_fields__ if declared is None else {name for _, its in declared for name in its}
    for name in names:
        after = getattr(view, name)
        before = host.decided.get(name, getattr(record, name))
        if isinstance(before, Mapping):
            before = type(after).from_dict(dict(before))
        if before != after:
            found |= dict(_leaves(name, before, after))
    return found


def _leaves(name: str, before: Any, after: Any) -> list[tuple[str, tuple[object, object]]]:
    if before == after:
        return []
    if type(before) is not type(after) or not dataclasses.is_dataclass(after):
        return [(name, (before, after))]
    return [
        leaf
        for part in dataclasses.fields(after)
        for leaf in _leaves(f"{name}.{part.name}", getattr(before, part.name), getattr(after, part.name))
    ]


def _environment(host: Host) -> dict[str, str]:
    """A plain mapping: what is written into it does not reach the process."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")} | dict(host.env)


def _variables() -> list[tuple[str, str]]:
    return [(name, value) for name, value in os.environ.items() if name.startswith("SGLANG_")]


def _name(version: str, module: str, name: str) -> Any:
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"sglang {version}: {module} cannot be imported: {error}; {_next_step()}") from error
    return _attribute(version, imported, name, module)


def _attribute(version: str, owner: Any, name: str, place: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise UserError(f"sglang {version}: {place} has no {name}, which its launch gate had; {_next_step()}") from None


def _next_step() -> str:
    return (
        f"expected sglang {READ_FROM}, unchanged. For another release put the name's new place into NAMES of "
        "harness/adapters/sglang_gate.py, and read the rules again"
    )


def _missing(version: str, error: AttributeError, standin: SimpleNamespace, record: Any) -> Exception:
    """What to tell of an attribute that the gate did not find; of an object that is not made here, the error itself."""
    ours = {id(standin): "a model's configuration", id(standin.hf_config): "hf_config of a model", id(record): "flags"}
    if (what := ours.get(id(error.obj))) is None:
        return error
    return UserError(
        f"sglang {version}: its launch gate reads {error.name} of {what}, which nothing here has; {_next_step()}; "
        "what it reads of a model goes into Model"
    )


def _place(error: ValueError) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"

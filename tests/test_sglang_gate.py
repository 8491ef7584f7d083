"""The launch gate of sglang says of each row of the table what the table says, and leaves nothing behind."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.adapters.sglang_gate import (
    CORE,
    NAMES,
    Accepted,
    Adjusted,
    Host,
    Model,
    Refused,
    absent,
    flags_of,
    verdict,
)
from harness.adapters.sglang_gate_table import PATH, Command, Launch, Row, actual, expected, launch, load
from harness.adapters.sglang_install import parts
from harness.launch.plan import plan
from harness.launch.topology import read
from harness.usage import UserError
from tests.launch_rig import ROOT

register_cpu_ci(est_time=20, stage="commit", runner="ubuntu-sglang")

pytestmark = [
    pytest.mark.slow,  # sglang takes many seconds to import
    pytest.mark.skipif(bool(absent()), reason=absent()),
]
TABLE = load()
ROWS = {row.id: row for row in TABLE.row}
MLA = launch(TABLE, ROWS["base.mla"])
HOOK = NAMES["gate"][0]
GRAPHS = {"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}}
# in the place of python3: tells its arguments, and the variables of sglang
STUB = r"""#!/bin/bash
printf '%s\0' "$@"
for name in "${!SGLANG_@}"; do printf 'variable:%s=%s\0' "$name" "${!name}"; done
"""


def topology_flags(name: str, gpus: list[str]) -> dict[str, dict[str, Any]]:
    """Of each worker, with those that its environment adds."""
    topology = read(ROOT / "fixtures" / "topologies" / f"{name}.toml")
    ports = {worker.name: dict.fromkeys(worker.port_names, 5) for worker in topology.workers}
    launches = plan(topology, ports, Path("/logs"), gpus)
    return {
        each.name: flags_of(
            ["--model-path", "m", *each.command[4:], *each.environment.get("SGLANG_HICACHE", "").split()]
        )
        for each in launches
    }


class TestTable:
    @pytest.mark.parametrize("row", TABLE.row, ids=lambda row: row.id)
    def test_row(self, row: Row) -> None:
        """The gate accepts, refuses or adjusts as the row says, for the row's reason, at the row's lines."""
        asked = launch(TABLE, row)
        said = verdict(asked.flags, asked.model, asked.host)
        where = TABLE.reason[row.refuse].holds(said.where) if isinstance(said, Refused) and row.refuse else True
        assert (expected(row, row.warn), True) == (actual(TABLE, said), where), said

    def test_second_run(self) -> None:
        """The gate's second run, over what its first one set, changes nothing and refuses nothing more."""
        asked = {row.id: launch(TABLE, row) for row in TABLE.row}
        once = {id_: verdict(each.flags, each.model, each.host) for id_, each in asked.items()}
        twice = {
            id_: verdict(each.flags, each.model, Host(each.host.env, each.host.gpu_mib, each.host.decided, passes=2))
            for id_, each in asked.items()
        }
        assert once == twice


class TestUndone:
    def test_everything(self) -> None:
        """After every row environment, variables, modules, classes and loggers of sglang are as before."""
        ask(MLA)
        before = state()
        for row in TABLE.row:
            ask(launch(TABLE, row))
        assert before == state()

    def test_gate_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The gate itself leaves its choice of a tree core behind, and the comparison sees it."""
        monkeypatch.setenv(CORE, "to be taken back")
        monkeypatch.delenv(CORE)
        made: list[Any] = []
        monkeypatch.setattr(importlib.import_module(HOOK), "logger", logging.getLogger("kvshard.test"))
        ask(MLA)
        before, gate = state(), importlib.import_module(HOOK).handle_kv_cache_sharding
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.import_module(HOOK), NAMES["gate"][1], lambda record, **_: made.append(record))
            ask(MLA)
        gate(made[0], gpu_mem=1.0)
        after = state()
        assert [("environment", None, "python")] == [
            (key, before[key].get(CORE), after[key].get(CORE)) for key in before if before[key] != after[key]
        ]

    def test_after_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error that is no refusal comes out, and what was written before it is undone."""

        def broken(record: object, **_: object) -> None:
            os.environ[CORE] = "rust"
            raise RuntimeError("broken")

        monkeypatch.setattr(importlib.import_module(HOOK), NAMES["gate"][1], broken)
        before = state()
        with pytest.raises(RuntimeError, match="broken"):
            ask(MLA)
        assert before == state()

    def test_environment_of_the_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The gate sees the variables that it is given, not those of the process."""
        monkeypatch.setenv(CORE, "rust")
        monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
        assert Accepted() == ask(MLA)


class TestVerdict:
    def test_unset_variable(self) -> None:
        """A variable that was not set is None before."""
        said = verdict(MLA.flags, MLA.model, Host(decided=MLA.host.decided))
        assert Adjusted({CORE: (None, "python")}) == said

    def test_reason(self) -> None:
        """A refusal has the whole reason on one line, and its place."""
        said = ask(launch(TABLE, ROWS["lmcache"]))
        reason = "--enable-kv-cache-sharding does not support --enable-lmcache."
        assert Refused(reason, "kv_shard_hook.py:195") == said

    @pytest.mark.parametrize("name", sorted(NAMES))
    def test_missing_name(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A name that another release lacks is told with the release and what to do."""
        module, attribute = NAMES[name]
        monkeypatch.delattr(importlib.import_module(module), attribute)
        message = rf"^sglang 0\.5\.23: {module} has no {attribute}, .*NAMES of harness/adapters/sglang_gate\.py"
        with pytest.raises(UserError, match=message):
            ask(MLA)

    def test_missing_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So is a variable of the environment that sglang no longer has."""
        environ = importlib.import_module(NAMES["envs"][0])
        monkeypatch.delattr(environ.Envs, CORE)
        with pytest.raises(UserError, match=rf"has no {CORE}"):
            ask(MLA)

    @pytest.mark.parametrize(
        ("reads", "what"),
        [
            (lambda r: r._model_config.is_new, "reads is_new of a model's configuration"),
            (lambda r: r._model_config.hf_config.is_new, "reads is_new of hf_config of a model"),
            (lambda r: r.is_new, "reads is_new of flags"),
        ],
    )
    def test_missing_part_of_a_model(self, reads: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a gate reads of a model or of the flags and nothing here has is told."""
        monkeypatch.setattr(importlib.import_module(HOOK), NAMES["gate"][1], lambda record, **_: reads(record))
        with pytest.raises(UserError, match=what):
            ask(MLA)

    def test_other_attribute_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An attribute that sglang itself lost is an error of sglang."""
        monkeypatch.setattr(
            importlib.import_module(HOOK), NAMES["gate"][1], lambda *_, **__: getattr(logging, "is_" + "new")
        )
        with pytest.raises(AttributeError, match="is_new"):
            ask(MLA)

    @pytest.mark.parametrize(
        ("flags", "attention", "message"),
        [
            ({"page_sise": 64}, "mla", "ServerArgs has no field 'page_sise'; did you mean 'page_size'"),
            ({}, "gqa", "attention='gqa' of a model; expected one of mla, mha"),
        ],
    )
    def test_wrong_question(self, flags: dict[str, object], attention: str, message: str) -> None:
        """A flag or a kind of attention that does not exist is told."""
        with pytest.raises(UserError, match=message):
            verdict({**MLA.flags, **flags}, Model("LlamaForCausalLM", attention))


class TestCommands:
    @pytest.mark.parametrize("command", TABLE.command, ids=lambda command: command.file)
    def test_command(self, command: Command, tmp_path: Path) -> None:
        """Each launch command parses as sglang's own, and the gate says of it what the table says."""
        module, arguments, env = run(PATH.parent / command.file, tmp_path)
        flags = flags_of(arguments)
        decided = {"mem_fraction_static": 0.8, **flags, "cuda_graph_config": GRAPHS}
        said = verdict(flags, Model(**command.model), Host({CORE: "python", **env}, decided=decided))
        wanted = (["-m", "sglang.launch_server"], command.file != "decode.sh", expected(command))
        assert wanted == (module, flags.get("enable_kv_cache_sharding", False), actual(TABLE, said))

    @pytest.mark.parametrize(
        ("name", "model"),
        [("gqa", Model("Qwen3MoeForCausalLM", "mha")), ("mla", Model("DeepseekV2ForCausalLM", "mla"))],
    )
    def test_topology(self, name: str, model: Model) -> None:
        """The topologies of sglang that are shipped have flags of sglang's own; the gate takes their prefill worker."""
        flags = topology_flags(f"sglang_p2d2_{name}", ["0", "1", "2", "3"])
        decided = {**flags["prefill"], "cuda_graph_config": GRAPHS}
        said = verdict(flags["prefill"], model, Host({CORE: "python"}, decided=decided))

        assert ["prefill", "decode", "control"] == list(flags)
        assert [True, False, False] == [each.get("enable_kv_cache_sharding", False) for each in flags.values()]
        assert [True, False, False] == ["enable_hierarchical_cache" in each for each in flags.values()]
        assert [False, False, True] == ["disable_radix_cache" in each for each in flags.values()]
        assert isinstance(said, Accepted | Adjusted), said

    @pytest.mark.parametrize(
        ("name", "workers"), [("p1", ["server", "control"]), ("p1d1", ["prefill", "decode", "control"])]
    )
    def test_topology_of_one_gpu(self, name: str, workers: list[str]) -> None:
        """The unsharded topologies have flags of sglang's own; only the first worker keeps what it has computed."""
        flags = topology_flags(f"sglang_{name}_gqa", ["0"])

        assert workers == list(flags)
        assert [name == workers[0] for name in workers] == [
            "enable_hierarchical_cache" in each for each in flags.values()
        ]
        assert [name == "control" for name in workers] == ["disable_radix_cache" in each for each in flags.values()]
        assert not any("enable_kv_cache_sharding" in each for each in flags.values())

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--model-path", "m", "--enable-kv-cache-sharing"],
            ["--model-path", "m", "--enable-kv-cache-shard"],  # argparse would take a beginning
            ["--model-path", "m", "--cp-strategy", "zig"],
            ["--enable-kv-cache-sharding"],
        ],
    )
    def test_wrong_command(self, arguments: list[str]) -> None:
        """A command that sglang does not take is told, and does not end the process."""
        with pytest.raises(UserError, match="sglang does not take these arguments"):
            flags_of(arguments)

    def test_defaults_are_left_out(self) -> None:
        """Only what a command changes is a flag of it."""
        assert {"page_size": 64} == flags_of(["--model-path", "m", "--page-size", "64"])


class TestCoverage:
    def test_reasons_of_the_source(self) -> None:
        """Every refusal in the gate's source is a reason of the table: as many, each in its lines."""
        source = Path(str(importlib.import_module(HOOK).__file__)).read_text(encoding="utf-8").splitlines()
        raised = [number for number, line in enumerate(source, start=1) if line.strip().startswith("raise ")]
        found = [[id_ for id_, reason in TABLE.reason.items() if reason.holds(f":{number}")] for number in raised]
        assert [[id_] for id_ in TABLE.reason] == sorted(found, key=lambda ids: list(TABLE.reason).index(ids[0]))


def ask(launch: Launch) -> object:
    return verdict(launch.flags, launch.model, launch.host)


def state() -> dict[str, dict[str, object]]:
    """What a call could leave in the process: names of modules and classes by identity, their containers by content."""
    classes = {"flags": parts().ServerArgs, "variables": type(importlib.import_module(NAMES["envs"][0]).envs)}
    found: dict[str, dict[str, object]] = {
        "environment": {**os.environ, "": str(id(os.environ))},
        "logging": {name: logger_state(name) for name in ("", HOOK)} | {"off": logging.root.manager.disable},
    }
    for name, owner in classes.items():
        found[name] = {key: held(value) for key, value in vars(owner).items()}
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.") and module is not None:
            found[name] = {key: held(value) for key, value in vars(module).items()}
    return found


def logger_state(name: str) -> tuple[object, ...]:
    logger = logging.getLogger(name)
    return logger.level, logger.disabled, logger.propagate, tuple(logger.handlers), tuple(logger.filters)


def held(value: object) -> object:
    if isinstance(value, dict | list | set):
        return id(value), len(value), repr(value) if len(value) < 100 else ""
    settings = getattr(value, "__dict__", None)
    if type(value).__module__.startswith("sglang.") and isinstance(settings, dict):  # such as a variable of sglang
        return id(value), {key: id(its) for key, its in settings.items()}
    return id(value)


def run(script: Path, folder: Path) -> tuple[list[str], list[str], dict[str, str]]:
    """What the script hands to python: the module, its arguments, and the variables of sglang."""
    stub = folder / "python3"
    stub.write_text(STUB, encoding="utf-8")
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)],
        env={"PATH": f"{folder}:/usr/bin:/bin", "MODEL": "a model"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\0")[:-1]
    arguments = [word for word in words if not word.startswith("variable:")]
    env = dict(word.removeprefix("variable:").split("=", 1) for word in words if word.startswith("variable:"))
    return arguments[:2], arguments[2:], env

"""The topology file: what it may say, and what is said of one that cannot work."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness import serve_cli
from harness.launch.gpus import assigned, visible_gpus
from harness.launch.plan import BUILT_IN, Launch, plan
from harness.launch.topology import EXPECTED, Topology, TopologyError, Worker, parse, read, with_setting
from tests.launch_rig import ROOT

register_cpu_ci(est_time=10, stage="commit")

TEXT = """
[defaults]
ready_seconds = 30
env = { LEVEL = "info", THREADS = 1 }

[[worker]]
name = "router"
role = "router"
command = ["{python}", "-m", "router", "{port}", "{url:prefill}", "{bootstrap_port:prefill}", "{ports:prefill}"]
after = ["prefill"]

[[worker]]
name = "prefill"
role = "prefill"
command = ["serve", "{name}", "{role}", "{host}", "{url}", "{ports}", "{log_dir}/x", '{"a":{"b":"{port}"}}', "{{port}}"]
ports = ["bootstrap_port"]
env = { LEVEL = "debug", PEER = "{url:router}" }

[entry]
worker = "router"
"""
PORTS = {"router": {"port": 1}, "prefill": {"port": 2, "bootstrap_port": 3}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "set.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def one(**keys: Any) -> dict[str, Any]:
    return {"worker": [{"name": "a", "command": ["x"], **keys}], "entry": {"worker": "a"}}


def planned(document: Mapping[str, Any], visible: Sequence[str] = ()) -> list[Launch]:
    topology = parse(document)
    ports = {worker.name: dict.fromkeys(worker.port_names, 5) for worker in topology.workers}
    return list(plan(topology, ports, Path("/logs"), visible))


def error(document: Mapping[str, Any], visible: Sequence[str] = ()) -> str:
    with pytest.raises(TopologyError) as caught:
        planned(document, visible)
    return str(caught.value)


def test_workers_come_in_the_order_of_their_start(file: Path) -> None:
    """A worker stands behind those that it waits for, wherever the file has it."""
    assert ["prefill", "router"] == [worker.name for worker in read(file).workers]


def test_defaults_hold_for_all(file: Path) -> None:
    """A worker's own keys win; variables are merged one by one; the rest has defaults of its own."""
    prefill = read(file).worker("prefill")

    assert (30.0, 30.0, "/health") == (prefill.ready_seconds, prefill.stop_seconds, prefill.health)
    assert {"LEVEL": "debug", "THREADS": 1, "PEER": "{url:router}"} == prefill.env
    assert {"LEVEL": "info", "THREADS": 1} == read(file).worker("router").env


def test_placeholders(file: Path) -> None:
    """Own and other workers' values are filled in; JSON stays whole, doubled braces are the text itself."""
    prefill, router = plan(read(file), PORTS, Path("/logs"), ())

    assert (sys.executable, "-m", "router", "1", "http://127.0.0.1:2", "3", "2,3") == router.command
    own = ("prefill", "prefill", "127.0.0.1", "http://127.0.0.1:2", "2,3", "/logs/x")
    assert ("serve", *own, '{"a":{"b":"2"}}', "{port}") == prefill.command
    assert {"LEVEL": "debug", "THREADS": "1", "PEER": "http://127.0.0.1:1"} == prefill.environment


def test_settings_go_over_the_file(file: Path) -> None:
    """A value is TOML, or a string where it is none; a variable, [defaults] and [entry] can be set too."""
    settings = ["prefill.gpus=0", "prefill.health=/ready", "router.env.A=b=c", "defaults.stop_seconds=2"]
    topology = read(file, [*settings, "entry.worker=prefill", 'prefill.command=["y"]'])

    prefill, router = topology.workers
    assert (0, "/ready", ("y",), 2.0) == (prefill.gpus, prefill.health, prefill.command, prefill.stop_seconds)
    assert "b=c" == router.env["A"]
    assert "prefill" == topology.entry


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prefill.gpus", "--set prefill.gpus: not understood; write NAME.key=value"),
        ("gpus=1", "--set gpus=1: not understood"),
        ("prefil.gpus=1", "there is no 'prefil'; did you mean 'prefill'? There is: router, prefill, defaults, entry"),
        ("prefill.gpu=1", "worker 'prefill': unknown key 'gpu'; did you mean 'gpus'?"),
        ("prefill.role.x=1", "prefill.role is no table; set the whole of it"),
        ("prefill.gpus=few", "gpus = 'few'; expected a list of device ids, or how many"),
    ],
)
def test_bad_settings(file: Path, setting: str, said: str) -> None:
    """Each is told with the value, and what would do."""
    file.write_text(TEXT.replace('role = "prefill"', 'role = "prefill"\ngpus = 0'), encoding="utf-8")
    if setting.startswith("prefill.role"):
        file.write_text(TEXT, encoding="utf-8")
    with pytest.raises(TopologyError) as caught:
        read(file, [setting])
    assert said in str(caught.value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"workers": []}, "topology: unknown table [workers]; did you mean 'worker'?"),
    ({}, "topology: worker is missing; expected one or more [[worker]] tables"),
    ({"worker": {"name": "a"}}, "topology: worker is {'name': 'a'}; expected one or more [[worker]] tables"),
    ({"worker": [{"name": "a", "command": ["x"]}]}, "topology: [entry] is missing; add [entry] with worker = NAME"),
    ({**one(), "entry": "a"}, "topology: entry = 'a'; expected a table; write [entry]"),
    ({**one(), "entry": {"worker": "b"}}, "entry: worker names 'b', no worker"),
    ({**one(), "defaults": {"name": "a"}}, "defaults: unknown key 'name'"),
    ({**one(), "defaults": {"stop_seconds": 0}}, "defaults: stop_seconds = 0; expected a number of seconds above 0"),
    ({"worker": [{"command": ["x"]}]}, "worker number 1: name is missing; expected a word"),
    (one(name="a b"), "worker 'a b': name = 'a b'; expected a word of letters"),
    (one(name="entry"), "worker 'entry': name = 'entry'; expected a word of letters"),
    ({"worker": [{"name": "a"}]}, "worker 'a': command is missing; expected a list of strings, the program first"),
    (one(comand=["x"]), "worker 'a': unknown key 'comand'; did you mean 'command'?"),
    (one(command="x"), "command = 'x'; expected a list of strings"),
    (one(command=[]), "command = []; expected a list of strings"),
    (one(command=["x", 1]), "command = ['x', 1]; expected a list of strings"),
    (one(name="a\n"), "name = 'a\\n'; expected a word of letters"),
    (one(role=""), "role = ''; expected a word"),
    (one(env={"A": 1.5}), "env = {'A': 1.5}; expected a table of variables"),
    (one(env={"A B": "x"}), "env = {'A B': 'x'}; expected a table of variables"),
    (one(env="A=1"), "env = 'A=1'; expected a table of variables"),
    (one(ports=["Boot"]), "ports = ['Boot']; expected a list of names"),
    (one(ports=["b", "b"]), "ports = ['b', 'b']; expected each name once; take out b"),
    (one(ports=["url"]), "ports has 'url', which is a placeholder already; choose another name"),
    (one(gpus=-1), "gpus = -1; expected a list of device ids, or how many"),
    (one(gpus=True), "gpus = True; expected a list of device ids, or how many"),
    (one(health="health"), "health = 'health'; expected a path that begins with /"),
    (one(ready_seconds="5"), "ready_seconds = '5'; expected a number of seconds above 0"),
    (one(after=["b"]), "worker 'a': after names 'b', no worker. There is: a"),
    (one(after=["a"]), "after goes in a circle: a after a; take one of these out"),
    (
        one(command=["{prot}"]),
        "worker 'a': command has the unknown placeholder {prot}; did you mean 'port'? Known here:",
    ),
    (one(command=["{url:b}"]), "command has the unknown placeholder {url:b}; did you mean 'url:a'? Known here:"),
    (one(command=["{boot:a}"]), "{python} {role} {url} {url:a}. For the text itself write {{boot:a}}"),
    (one(env={"A": "{x}"}), "worker 'a': env.A has the unknown placeholder {x}."),
    (one(gpus=1), "worker 'a': gpus = 1, but this machine shows no GPU; use gpus = 0 for a run on the CPU"),
    (one(gpus=[0]), "worker 'a': gpus names '0', but this machine shows no GPU; use gpus = 0"),
    (one(gpus=0, env={"CUDA_VISIBLE_DEVICES": "1"}), "env.CUDA_VISIBLE_DEVICES and gpus are both there; keep one"),
]


@pytest.mark.parametrize(("document", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_documents(document: dict[str, Any], said: str) -> None:
    """Each is told with file, key, value, what was expected and what to do."""
    assert said in error(document)


def test_a_circle_is_told_in_order() -> None:
    """The message names the workers that wait for each other."""
    workers = [{"name": name, "command": ["x"], "after": [other]} for name, other in ("ab", "bc", "ca")]
    said = error({"worker": workers, "entry": {"worker": "a"}})

    assert any(circle in said for circle in ("a after b after c", "b after c after a", "c after a after b"))


def test_one_name_twice() -> None:
    """Two workers of one name are refused."""
    workers = [{"name": "a", "command": ["x"]}] * 2
    said = "topology: worker 'a' is there 2 times; give each its own name"
    assert said == error({"worker": workers, "entry": {"worker": "a"}})


def test_no_file_and_no_toml(tmp_path: Path) -> None:
    """Both are told with the path, and the second with the line."""
    with pytest.raises(TopologyError, match=r"nowhere\.toml: No such file or directory; expected a topology file"):
        read(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("[defaults]\nx 1\n", encoding="utf-8")
    with pytest.raises(TopologyError, match=r"bad\.toml: no TOML: .*line 2"):
        read(tmp_path / "bad.toml")


def test_every_key_has_its_expectation() -> None:
    """No key can be wrong without a word on what is right."""
    assert [] == [field for field in Worker.__struct_fields__ if field not in EXPECTED]


def test_the_document_is_right() -> None:
    """Its example works as it stands, and it explains every key and every placeholder."""
    text = (ROOT / "docs" / "topologies.md").read_text(encoding="utf-8")
    example = text.partition("```toml\n")[2].partition("```")[0]
    launches = planned(tomllib.loads(example), ["0", "1", "2", "3", "4"])

    assert ["prefill", "decode", "router"] == [launch.name for launch in launches]
    assert ["0,1,2,3", "4", ""] == [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in launches]
    assert [] == [key for key in EXPECTED if f"`{key}`" not in text]
    assert [] == [name for name in ("port", *BUILT_IN) if f"`{{{name}}}`" not in text]


@pytest.mark.parametrize("path", sorted((ROOT / "fixtures" / "topologies").glob("*.toml")), ids=lambda path: path.stem)
def test_what_is_shipped_can_be_planned(path: Path) -> None:
    """Every topology that comes with the project fits four GPUs, and the reference takes the flags of its servers."""
    topology = read(path)
    ports = {worker.name: dict.fromkeys(worker.port_names, 5) for worker in topology.workers}
    launches = plan(topology, ports, Path("/logs"), ["0", "1", "2", "3"])
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    serve_cli.add_arguments(parser)
    commands = [list(launch.command) for launch in launches]
    served = [command[4:] for command in commands if command[1:4] == ["-m", "harness.cli", "serve"]]
    foreign = [command for command in commands if command[1:4] != ["-m", "harness.cli", "serve"]]

    assert [] == [extra for command in served for extra in parser.parse_known_args(command)[1]]
    assert len(topology.workers) == len(served) + len(foreign)
    assert [] == [command for command in foreign if not any("launch" in word or "serve" in word for word in command)]


def test_a_setting_leaves_the_document_alone() -> None:
    """It makes a new one."""
    document = one(env={"A": "1"})
    changed = with_setting(document, "a.env.A=2")

    assert ("1", 2) == (document["worker"][0]["env"]["A"], changed["worker"][0]["env"]["A"])


def gpus(*asked: Any) -> Topology:
    workers = [{"name": f"w{at}", "command": ["x"], "gpus": one} for at, one in enumerate(asked)]
    return parse({"worker": workers, "entry": {"worker": "w0"}})


def test_counts_get_what_no_list_has() -> None:
    """Two counts never share a GPU; lists may, and name what they like; 0 hides all."""
    found = assigned(gpus(2, ["1"], [1, 2], 1, 0), ("0", "1", "2", "3", "GPU-x"))
    assert {"w0": "0,3", "w1": "1", "w2": "1,2", "w3": "GPU-x", "w4": ""} == found


def test_without_the_key_nothing_is_set() -> None:
    """CUDA_VISIBLE_DEVICES is then what this process has."""
    assert {} == planned(one(), ["0"])[0].environment
    assert {"CUDA_VISIBLE_DEVICES": ""} == planned(one(gpus=0), ["0"])[0].environment


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((2, 2), "worker 'w1': gpus = 2, but 1 of 3 are left; ask for fewer, or let workers share with lists"),
        (([7],), "worker 'w0': gpus names '7', but this machine shows 0, 1, 2; choose from these"),
    ],
)
def test_too_few_gpus(asked: tuple[Any, ...], said: str) -> None:
    """It is told who asked, for what, and what there is."""
    with pytest.raises(TopologyError) as caught:
        assigned(gpus(*asked), ("0", "1", "2"))
    assert said in str(caught.value)


def test_visible_gpus_are_those_of_the_environment() -> None:
    """CUDA_VISIBLE_DEVICES has the first word, also when it hides all."""
    texts = ("3, GPU-x", "", "-1")
    assert [("3", "GPU-x"), (), ()] == [visible_gpus({"CUDA_VISIBLE_DEVICES": text}) for text in texts]

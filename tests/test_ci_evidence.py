"""What is left of a failure: enough to run it again, within a size, and without secrets."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci.evidence import FILE_BYTES_MAX, Bundles, replay, shown
from ci.nvml import gpu_state
from ci.plan import Entry
from ci.redact import Redactor
from ci.register import register_cpu_ci
from ci.result import Attempt, Counts, FileResult, Verdict
from tests.test_ci_plan import registered
from tests.test_ci_run import Rig

register_cpu_ci(est_time=20, stage="commit")

SECRET = "correct horse battery"
ENVIRONMENT = {"SITE_TOKEN": SECRET, "KVSHARD_WORD": "seen", "HOME_ADDRESS": "unseen", "KVSHARD_API_KEY": "unseen"}
# prints the secret, writes a trace, and fails
FAILS = """
import os
from pathlib import Path
def test_fails():
    print("the token is", os.environ["SITE_TOKEN"])
    Path("kvshard-traces").mkdir()
    Path("kvshard-traces/one.jsonl").write_text(os.environ["SITE_TOKEN"] + " trace")
    assert os.environ["KVSHARD_WORD"] == os.environ["SITE_TOKEN"]
"""


def everything(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def entry(name: str = "tests/test_a.py", **changes: Any) -> Entry:
    return replace(Entry(registered(name), 1.0), **changes)


def failed(log: Path, *tests: str) -> FileResult:
    made = Attempt(
        verdict=Verdict.FAIL,
        reason="why",
        seconds=1.0,
        timeout_seconds=2.0,
        code=1,
        counts=Counts(),
        failed=tests,
        log=str(log),
    )
    return FileResult(
        file="tests/test_a.py",
        stage="commit",
        runner="r",
        part="1/1",
        verdict=Verdict.FAIL,
        reason="why",
        seconds=1.0,
        est_time=1.0,
        gate=False,
        line=1,
        commit="abc",
        started="now",
        attempts=(made,),
    )


def test_failed_file(tmp_path: Path) -> None:
    """The folder of a failed file has its log, its trace, the machine, and a command that fails again; no secret."""
    rig = Rig(tmp_path)
    rig.write("tests/test_a.py", FAILS)
    rig.write("tests/test_b.py", "def test_b(): ...")
    assert 1 == rig.run(keep_going=True, environment=ENVIRONMENT)
    (place,) = (rig.out / "evidence").iterdir()
    about = json.loads((place / "evidence.json").read_text())
    assert ("tests/test_a.py", "fail", "abc", []) == tuple(
        about[key] for key in ("file", "verdict", "commit", "left_out")
    )
    assert ("seen", None) == (about["environment"]["KVSHARD_WORD"], about["environment"].get("HOME_ADDRESS"))
    assert any(package.startswith("pytest==") for package in about["packages"])
    assert "the token is ***" in (place / "tests.test_a.py-1.log").read_text()
    assert "*** trace" == (place / "traces" / "one.jsonl").read_text()
    for text in (everything(rig.out / "evidence"), (rig.out / "results.jsonl").read_text(), "\n".join(rig.said)):
        assert SECRET not in text
        assert "unseen" not in text
    words = shlex.split(about["replay"])
    assert ["python", "-m", "pytest", "tests/test_a.py::test_fails"] == words[-4:]
    again = [sys.executable if word == "python" else word for word in words]
    environment = {**os.environ, **ENVIRONMENT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    assert 1 == subprocess.run(again, cwd=tmp_path, env=environment, check=False, capture_output=True).returncode


def test_size(tmp_path: Path) -> None:
    """Of a long log the end is kept; what does not fit into a run is left out and told."""
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * FILE_BYTES_MAX + b"the end")
    bundles = Bundles(tmp_path / "evidence", tmp_path, {}, left=FILE_BYTES_MAX + 1000)
    first = bundles.collect(entry(), failed(log), 0)
    assert b"xthe end" == (first / "a.log").read_bytes()[-8:]
    assert ["a.log: the first 7 of 4194311 bytes"] == json.loads((first / "evidence.json").read_text())["left_out"]
    second = bundles.collect(entry("tests/test_b.py"), failed(log), 0)
    assert ["evidence.json"] == [path.name for path in second.iterdir()]
    assert ["a.log: 4194311 bytes, and there was no room"] == json.loads((second / "evidence.json").read_text())[
        "left_out"
    ]


def test_traces_of_this_file_only(tmp_path: Path) -> None:
    """A trace that was there before is not of this failure."""
    (tmp_path / "kvshard-traces").mkdir()
    for name, time in (("old", 100), ("new", 300)):
        (tmp_path / "kvshard-traces" / name).touch()
        os.utime(tmp_path / "kvshard-traces" / name, (time, time))
    place = Bundles(tmp_path / "evidence", tmp_path, {}).collect(entry(), failed(tmp_path / "none.log"), 200)
    assert ["new"] == [path.name for path in (place / "traces").iterdir()]


@pytest.mark.parametrize(
    ("made", "tests", "command"),
    [
        (entry(), (), "python -m pytest tests/test_a.py"),
        (entry(), ("tests/test_a.py::test_b[x y]",), "python -m pytest 'tests/test_a.py::test_b[x y]'"),
        (entry(), tuple(f"tests/test_a.py::t{n}" for n in range(6)), "python -m pytest tests/test_a.py"),
        (entry(node="T::test_b"), ("collection of tests/test_a.py",), "python -m pytest tests/test_a.py::T::test_b"),
        (entry(registration=registered("tests/test_a.py", is_script=True)), (), "python tests/test_a.py -f"),
    ],
)
def test_replay(made: Entry, tests: tuple[str, ...], command: str) -> None:
    """The command names what failed, or the whole file where that is too much, and the variables that matter."""
    assert command == replay(made, failed(Path("a.log"), *tests), {})
    environment = {"KVSHARD_FAULT": "a b", "KVSHARD_TOKEN": "x", "LANG": "C"}
    assert f"env 'KVSHARD_FAULT=a b' {command}" == replay(made, failed(Path("a.log"), *tests), environment)


def test_shown() -> None:
    """Variables are shown by name alone; one that is named like a secret is not, whatever else it is named like."""
    names = ["CUDA_VISIBLE_DEVICES", "GITHUB_SHA", "GITHUB_TOKEN", "KVSHARD_HUB_TOKEN", "NCCL_DEBUG", "USER"]
    assert ["CUDA_VISIBLE_DEVICES", "GITHUB_SHA", "NCCL_DEBUG"] == list(shown(dict.fromkeys(names, "x")))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"a {SECRET} b", "a *** b"),
        ("line\\nbreak", "***"),  # as JSON writes it
        ("line\nbreak", "***"),
        ("https://user:word@host/x", "https://***@host/x"),
        ('{"at":"http://host","port":"x@y"}', '{"at":"http://host","port":"x@y"}'),
        ("ghp_abcdefghijklmnopqrst", "***"),
        ("1 and no", "1 and no"),
    ],
)
def test_redactor(text: str, wanted: str) -> None:
    """Values of secrets, tokens and passwords in URLs are replaced, as they are and as JSON; short values are not."""
    redactor = Redactor({"A_TOKEN": SECRET, "SECRET_B": "line\nbreak", "KEY_AUTH": "1", "NAME": "and no"})
    assert wanted == redactor.text(text)


def test_gpu_state() -> None:
    """What the driver tells of each GPU is there, what it does not tell is left out, and nothing of it fails."""

    class DriverError(Exception):
        pass

    def refuses(*_: object) -> None:
        raise DriverError("no such thing")

    names = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetName")
    library = SimpleNamespace(
        NVMLError=DriverError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda at: at,
        nvmlDeviceGetUUID=lambda _: b"GPU-a",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=2, total=3),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=7, usedGpuMemory=1)],
        **dict.fromkeys(names, refuses),
    )
    processes = [{"pid": 7, "used_bytes": 1}]
    assert [{"uuid": "GPU-a", "used_bytes": 2, "total_bytes": 3, "processes": processes}] == gpu_state(library)
    library.nvmlInit = refuses
    assert "not known: no such thing" == gpu_state(library)

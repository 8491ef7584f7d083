"""The arms of sglang's server: the switch of each, what it is asked, and how it must end. No server is started."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.launch.topology import read

register_cpu_ci(est_time=10, stage="commit")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "ci" / "sglang_arms.sh"
ARMS = re.findall(r"^    ([\w| ]+)\)", SCRIPT.read_text().partition("case $1 in")[2].partition("esac")[0], re.MULTILINE)
NAMES = [name.strip() for names in ARMS for name in names.split("|")]
PLANTED = {"no_load_wait", "early_send", "owner_filter", "no_gather_wait"}
STUB = '#!/bin/bash\nprintf "%s\\n" "$@" >>"$STUB_SAID"; echo "FLOOD=$FLOOD ONLY=$ONLY" >>"$STUB_SAID"\n{}\n'


def run(folder: Path, stub: str, *arms: str, **more: str) -> tuple[int, list[str], list[str]]:
    """Exit code, the lines of the table, and the words that `kvshard up` was given."""
    (folder / "python3").write_text(STUB.format(stub))
    (folder / "python3").chmod(0o755)
    (folder / "model").mkdir(exist_ok=True)
    said = folder / "said"
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "STUB_SAID": str(said), **more}
    words = [str(folder), str(folder / "out"), "1", *(f"{arm}:{folder}/model" for arm in arms)]
    done = subprocess.run(["bash", str(SCRIPT), *words], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), said.read_text().splitlines() if said.exists() else []


def settings(words: list[str]) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == "--set"]


@pytest.mark.parametrize("name", NAMES)
def test_switches(tmp_path: Path, name: str) -> None:
    """The topology takes what an arm sets, for the pair and sharded."""
    for topology in ("p1d1_gqa", "p2d2_mla"):
        code, _, words = run(tmp_path, 'echo "3 pass  0 fail"', f"{name}:{topology.removesuffix('_gqa')}")

        read(ROOT / "fixtures" / "topologies" / f"sglang_{topology}.toml", settings(words))
        assert (name in PLANTED) == bool(code)  # which must be seen, and this one passes
        assert (name in {"plain", "flood"}) == (not settings(words))


def test_one_server(tmp_path: Path) -> None:
    """For one server the switch goes to that."""
    _, _, words = run(tmp_path, "", "h2d_delay:p1")

    assert ["server.env.SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES=100000000"] == settings(words)


def test_one_gpu(tmp_path: Path) -> None:
    """All workers and their ranks see the first GPU alone, and the arm's own switch comes after."""
    code, _, words = run(tmp_path, 'echo "3 pass  1 fail"; exit 1', "owner_filter:p2d2_mla", ONE_GPU="1")
    topology = read(ROOT / "fixtures" / "topologies" / "sglang_p2d2_mla.toml", settings(words))
    its = [worker.env for worker in topology.workers]

    assert 0 == code
    assert [("0",)] * len(its) == [worker.gpus for worker in topology.workers]
    assert [(1, "ci.sglang_planted", 1)] * len(its) == [
        (env["SGLANG_ONE_GPU"], env["SGLANG_SERVER"], env["NCCL_MULTI_RANK_GPU_ENABLE"]) for env in its
    ]
    assert {"prefill": "owner_filter"} == {
        worker.name: worker.env["SGLANG_PLANTED"] for worker in topology.workers if worker.env.get("SGLANG_PLANTED")
    }


def test_flood(tmp_path: Path) -> None:
    """Arms with errors are asked by the flood, which may not go without one."""
    _, _, words = run(tmp_path, "", "failures:p1d1")

    assert "FLOOD=--errors 0.95 --rounds 12 --at-once 16 ONLY=" in words


def test_table(tmp_path: Path) -> None:
    """A line for each: whether it ended as it must, and the last verdict; a planted fault must fail."""
    assert (0, "ok") == outcome(tmp_path, 'echo "17 pass  0 fail"', "checks:p1d1")
    assert (0, "ok") == outcome(tmp_path, 'echo "16 pass  1 fail"; exit 1', "early_send:p1d1")
    assert (123, "NOT AS WANTED (exit 1)") == outcome(tmp_path, 'echo "16 pass  1 fail"; exit 1', "checks:p1d1")
    assert (123, "NOT AS WANTED (exit 0)") == outcome(tmp_path, 'echo "17 pass  0 fail"', "early_send:p1d1")


def outcome(folder: Path, stub: str, arm: str) -> tuple[int, str]:
    code, (line,), _ = run(folder, stub, arm)
    told, name, _, said = line.split("\t")
    assert name == f"{arm.replace(':', '-')}-model"
    assert re.match(r"\d+ pass  \d fail", said)
    return code, told


def test_no_such_arm(tmp_path: Path) -> None:
    """A name that is none is told."""
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [str(tmp_path), str(tmp_path / "out"), "1", "h2d:p1:model"]
    done = subprocess.run(["bash", str(SCRIPT), *words], env=env, capture_output=True, text=True, check=False)

    assert (123, True) == (done.returncode, "no arm h2d; expected one of" in done.stderr)

"""The test file for sglang's CI: read by our registry, and run as that CI runs it, on the reference's servers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from ci.registry import registrations

register_cpu_ci(est_time=90, stage="commit")

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "sglang" / "test_kv_sharding_e2e.py"
STANDINS = {  # what the file imports of sglang, which is not in this environment
    "sglang/test/ci/ci_register.py": "def register_cuda_ci(**keywords): pass\n",
    "sglang/test/test_utils.py": "import unittest\n\n\nclass CustomTestCase(unittest.TestCase): pass\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with the example in place, and stand-ins of what it imports."""
    for name, text in STANDINS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    folder = tmp_path / "test" / "registered" / "kv_sharding"
    folder.mkdir(parents=True)
    shutil.copy(EXAMPLE, folder)
    return tmp_path


def run(tree: Path, topology: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tree), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "KV_SHARDING_TOPOLOGY": str(topology), "KV_SHARDING_PROMISES": ""}
    file = tree / "test" / "registered" / "kv_sharding" / EXAMPLE.name
    asked = [sys.executable, str(file), "-f", *words]
    return subprocess.run(asked, env=env, cwd=tree, capture_output=True, text=True, check=False, timeout=300)


def test_it_is_registered() -> None:
    """The registry finds the marker, and that the file runs its tests when it is started."""
    (found,) = registrations(EXAMPLE)

    assert ("extra-b", "4-gpu-h100", True) == (found.stage, found.runner, found.is_script)


def test_it_passes_on_the_reference(tree: Path) -> None:
    """Started as a script it brings the servers up, runs cases on them and takes them down."""
    done = run(tree, ROOT / "fixtures/topologies/p1d1_small.toml", "TestKvShardingEndToEnd.test_parity")

    assert (0, True) == (done.returncode, "Ran 1 test" in done.stderr), done.stdout + done.stderr
    assert "3 pass  0 fail" in done.stdout, done.stdout
    assert done.stderr.count(" stopped: http://") == 3


def test_it_fails_with_the_servers(tree: Path) -> None:
    """A server whose rows are wrong fails the first test, and the others are not begun."""
    text = (ROOT / "fixtures/topologies/p1d1_small.toml").read_text()
    topology = tree / "planted.toml"
    topology.write_text(
        text.replace(
            'role = "prefill"', 'role = "prefill"\nenv = { KVSHARD_FAULT = "runner.partial-page-not-persisted" }'
        )
    )
    done = run(tree, topology)

    assert 1 == done.returncode, done.stdout + done.stderr
    assert "FAILED (failures=1)" in done.stderr
    assert "Ran 1 test" in done.stderr


def test_a_topology_that_is_not_there_is_told(tree: Path) -> None:
    """Without servers nothing passes."""
    done = run(tree, tree / "nowhere.toml")

    assert 1 == done.returncode
    assert "nowhere.toml: No such file or directory; expected a topology file" in done.stderr

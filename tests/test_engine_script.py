"""`ci/engine.sh`: a server's environment is kept by the hash of its lock, and an install that fails is an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.register import register_cpu_ci

register_cpu_ci(est_time=5, stage="commit")

CI = Path(__file__).parent.parent / "ci"
# `PYTHON -m venv FOLDER` and the interpreter of the folder, in which the packages are those files that were installed
PYTHON = f"""#!/usr/bin/env bash
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit; fi
PYTHONPATH="$(dirname "$0")/../packages" exec {sys.executable} "$@"
"""
INSTALL = """set -e
echo installed >>installs
grep -q good ci/llamacpp.lock || { echo "the pinned packages did not install" >&2; exit 1; }
mkdir -p .venv-llamacpp/packages
touch .venv-llamacpp/packages/xllamacpp.py .venv-llamacpp/packages/gguf.py
"""


class Place:
    """A clone that has only the script, with a Python and an installer that write down what they do."""

    def __init__(self, root: Path) -> None:
        self.root, self.lock, self.own = root, root / "ci" / "llamacpp.lock", root / ".venv-llamacpp"
        (root / "ci").mkdir()
        shutil.copy(CI / "engine.sh", root / "ci")
        (root / "ci" / "install_llamacpp.sh").write_text(INSTALL)
        self.lock.write_text("good==1\n")
        for name, text in (("python", PYTHON), ("kvshard", "#!/bin/sh\n")):
            (root / name).write_text(text)
            (root / name).chmod(0o755)

    def install(self, name: str = "llamacpp") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "ci/engine.sh", name, "--install-only"],
            cwd=self.root,
            env={"PATH": f"{self.root}:/usr/bin:/bin", "PYTHON": str(self.root / "python")},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def installs(self) -> int:
        return len((self.root / "installs").read_text().splitlines())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_an_environment_is_kept_as_long_as_its_lock(place: Place) -> None:
    """The same lock installs once, another one anew."""
    codes = [place.install().returncode, place.install().returncode]
    same = place.installs
    place.lock.write_text("good==2\n")

    assert [0, 0, 0] == [*codes, place.install().returncode]
    assert (1, 2) == (same, place.installs)


def test_a_failed_install_is_an_error_each_time(place: Place) -> None:
    """Nothing is kept of it: the next call tries again, and says again what is wrong."""
    place.lock.write_text("bad==1\n")
    done = [place.install(), place.install()]

    assert [1, 1] == [each.returncode for each in done]
    assert ["the pinned packages did not install\n"] * 2 == [each.stderr for each in done]
    assert (2, False) == (place.installs, (place.own / "lock").exists())


def test_half_an_install_is_not_kept(place: Place) -> None:
    """What an interrupted call has left, or an environment that has lost a package, is made anew."""
    place.own.mkdir()
    (place.own / "left").touch()
    first = place.install().returncode
    (place.own / "packages" / "gguf.py").unlink()

    assert (0, 0) == (first, place.install().returncode)
    assert (2, False) == (place.installs, (place.own / "left").exists())
    assert (place.own / "packages" / "gguf.py").exists()


def test_no_lock_is_an_error(place: Place) -> None:
    """It is not taken for one that lists nothing."""
    place.lock.unlink()
    done = place.install()

    assert 1 == done.returncode
    assert "llamacpp.lock: No such file" in done.stderr


def test_another_name_is_an_error(place: Place) -> None:
    """With the names that there are, each with a topology."""
    done = place.install("vlm")
    names = done.stderr.rpartition("expected ")[2].replace(" or ", ", ").strip().split(", ")

    assert 2 == done.returncode
    assert names == [name for name in names if (CI.parent / "fixtures" / "topologies" / f"{name}.toml").is_file()]
    assert 6 == len(names)

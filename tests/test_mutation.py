"""ci/mutation.py: what counts as a change, and what becomes of a mutant."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ci.mutation import Mutant, file_of, seen
from ci.register import register_cpu_ci

register_cpu_ci(est_time=15, stage="commit")

ROOT = Path(__file__).parent.parent
SPLIT = file_of("kvshard_ref.split").read_text()
RUN = [sys.executable, str(ROOT / "ci" / "mutation.py")]


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ('"""Other."""\n\ndef f(a: int) -> int:\n    """Doc."""\n    return a + 1\n', True),
        ('"""Doc."""\n\ndef f(a: str) -> list[int]:\n    """Doc."""\n    return a + 1\n', True),
        ('"""Doc."""\n\ndef f(a: int) -> int:\n    """Doc."""\n    return a - 1\n', False),
        ('"""Doc."""\n\ndef f(a: int = 2) -> int:\n    """Doc."""\n    return a + 1\n', False),
    ],
)
def test_what_is_a_change(changed: str, *, same: bool) -> None:
    """Annotations and docstrings are not seen, a default and an operator are."""
    source = '"""Doc."""\n\ndef f(a: int) -> int:\n    """Doc."""\n    return a + 1\n'

    assert same == (seen(source) == seen(changed))


def test_fates(tmp_path: Path) -> None:
    """A mutant that unit tests notice is killed by one, another survives; the file itself is as it was."""
    wrong = Mutant("kvshard_ref.split", "wrong", 19, "", SPLIT.replace("- mine.shape[-2]", "- mine.shape[-2] + 1"))
    right = Mutant("kvshard_ref.split", "right", 19, "", SPLIT + "\nUNUSED = 1\n")
    assert SPLIT != wrong.source
    (tmp_path / "mutants").write_text("".join(json.dumps(asdict(each)) + "\n" for each in (wrong, right)))
    words = ["--mutants", str(tmp_path / "mutants"), "--budget", "--tests", "--record", str(tmp_path / "record")]

    done = subprocess.run([*RUN, *words], capture_output=True, text=True, cwd=ROOT, check=True)

    fates = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert {"wrong": "killed", "right": "survived"} == {each["operator"]: each["outcome"] for each in fates}
    assert [True] == [each["case"].startswith("tests/test_split.py::") for each in fates if each["operator"] == "wrong"]
    assert done.stdout.splitlines()[-1].startswith("2 mutants: ")
    assert SPLIT == file_of("kvshard_ref.split").read_text()


def test_a_module_that_is_not_there() -> None:
    """A wrong name is one line of usage that shows what there is."""
    done = subprocess.run([*RUN, "nosuch"], capture_output=True, text=True, cwd=ROOT, check=False)

    assert 2 == done.returncode
    assert "no module nosuch in kvshard_ref; expected admission, " in done.stderr

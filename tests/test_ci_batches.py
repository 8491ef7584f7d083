"""Files that share a process: each is judged by its own tests, and one that breaks the process breaks no other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.batches import batches, each
from ci.plan import Entry
from ci.register import register_cpu_ci
from tests.test_ci_plan import entries, registered
from tests.test_ci_run import GUARD, UNIT, Rig

register_cpu_ci(est_time=30, stage="commit")

PASSES = "def test_a(): ...\ndef test_b(): ..."


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def verdicts(rig: Rig, **options: Any) -> dict[str, tuple[str, int]]:
    """Verdict and number of executed tests of each file."""
    rig.run(keep_going=True, together_seconds=100.0, **options)
    return {
        Path(line["file"]).stem: (line["verdict"], line["attempts"][-1]["counts"]["executed"]) for line in rig.lines()
    }


def logs(rig: Rig) -> list[str]:
    return sorted(path.name for path in (rig.out / "logs").glob("*.log") if path.name != "guardian.log")


def test_each_by_its_own_tests(rig: Rig) -> None:
    """In one process a file passes, fails, is empty, all skipped, below its floor or no Python, as it would alone."""
    rig.write("tests/test_a.py", PASSES)
    rig.write("tests/test_fails.py", "def test_a(): ...\ndef test_b(): assert 0")
    rig.write("tests/test_empty.py", "")
    rig.write("tests/test_skipped.py", "import pytest\ndef test_a(): pytest.skip('later')")
    rig.write("tests/test_floor.py", PASSES, ", min_tests=3")
    rig.write("tests/test_import.py", "raise ValueError('no import')")
    rig.write("tests/test_z.py", PASSES)
    assert {
        "test_a": ("pass", 2),
        "test_fails": ("fail", 2),
        "test_empty": ("vacuous", 0),
        "test_skipped": ("vacuous", 0),
        "test_floor": ("vacuous", 2),
        "test_import": ("fail", 0),
        "test_z": ("pass", 2),
    } == verdicts(rig)
    assert ["together-0.log"] == logs(rig)
    shown = [text for text in rig.said if "together-0.log" in text]
    assert [True, False, False, False, False] == [": the end of " in text for text in shown]  # the log once for all
    (failed,) = [line["attempts"][0]["failed"] for line in rig.lines() if line["file"] == "tests/test_fails.py"]
    assert ["tests/test_fails.py::test_b"] == failed
    assert [
        "skipped: later: tests/test_skipped.py (1)",
        "tests: 7 passed, 2 failed, 1 skipped, in 7 files",
    ] == rig.said[-2:]


def test_death(rig: Rig) -> None:
    """A file that kills the process fails; those before it have passed, those behind it run alone."""
    rig.write("tests/test_a.py", PASSES)
    rig.write("tests/test_b.py", "import os\ndef test_a(): ...\ndef test_b(): os.kill(os.getpid(), 9)")
    rig.write("tests/test_c.py", PASSES)
    assert {"test_a": ("pass", 2), "test_b": ("fail", 1), "test_c": ("pass", 2)} == verdicts(rig)
    assert ["tests.test_c.py-1.log", "together-0.log"] == logs(rig)
    (reason,) = [line["reason"] for line in rig.lines() if line["verdict"] == "fail"]
    assert "signal SIGKILL after 1 tests, none of which failed" == reason


@pytest.mark.parametrize("ends", ["import os\ndef test_b(): os._exit(0)", "def test_b(): pytest.exit('done', 0)"])
def test_exit_with_code_0(rig: Rig, ends: str) -> None:
    """A process that ends early without a failure has not run what it did not come to."""
    rig.write("tests/test_a.py", PASSES)
    rig.write("tests/test_b.py", f"import pytest\ndef test_a(): ...\n{ends}")
    rig.write("tests/test_c.py", "def test_a(): assert 0")
    assert {"test_a": ("pass", 2), "test_b": ("fail", 1), "test_c": ("fail", 1)} == verdicts(rig)


def test_scripts_and_gates_are_alone(rig: Rig) -> None:
    """A script has another way to run, and a gate is not disturbed."""
    rig.write("tests/test_a.py", UNIT.format("pass") + GUARD.format("unittest.main()"))
    rig.write("tests/test_b.py", PASSES, ", gate=True")
    assert {"test_a": ("pass", 1), "test_b": ("pass", 2)} == verdicts(rig)
    assert ["tests.test_a.py-1.log", "tests.test_b.py-1.log"] == logs(rig)


def test_two_at_a_time(rig: Rig) -> None:
    """Two processes run at the same time: each file waits for the mark of the other."""
    text = "import pathlib, time\ndef test_a():\n    pathlib.Path('{}').touch()\n"
    text += "    for _ in range(1200):\n        if pathlib.Path('{}').exists():\n            return\n"
    text += "        time.sleep(0.05)\n    assert False\n"
    rig.write("tests/test_a.py", text.format("a", "b"), est_time=60)
    rig.write("tests/test_b.py", text.format("b", "a"), est_time=60)
    assert {"test_a": ("pass", 1), "test_b": ("pass", 1)} == verdicts(rig, jobs=2)


def test_first_failure_ends_the_others(rig: Rig) -> None:
    """Without --continue a failure ends what runs beside it, which counts as not run."""
    text = "import pathlib, time\ndef test_a():\n    pathlib.Path('begun').touch()\n    time.sleep(300)"
    fails = "import pathlib, time\ndef test_a():\n    while not pathlib.Path('begun').exists(): time.sleep(0.05)\n"
    rig.write("tests/test_a.py", text, est_time=9)
    rig.write("tests/test_b.py", f"{fails}    assert 0")
    assert 1 == rig.run(jobs=2)
    assert (["tests/test_b.py"], [["tests/test_a.py"]]) == (
        [line["file"] for line in rig.lines()],
        [line["not_run"] for line in rig.lines("end")],
    )


def sums(found: Sequence[Sequence[Entry]]) -> list[float]:
    return [sum(entry.seconds for entry in batch) for batch in found]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60).map(float), max_size=20), st.integers(0, 90).map(float))
def test_batches(seconds: list[float], most: float) -> None:
    """Every file is in one batch, those together fit, and no two batches could be one."""
    made = entries(seconds)
    found = batches(made, most)
    assert sorted(entry.file for entry in made) == sorted(entry.file for batch in found for entry in batch)
    assert all(load <= most for load, batch in zip(sums(found), found, strict=True) if len(batch) > 1)
    assert all(one + other > most for one, other in itertools.combinations(sums(found), 2))


def test_alone() -> None:
    """A script, a gate and a part of a file share no process."""
    plain = [Entry(registered(f"tests/test_{name}.py"), 1.0) for name in "ab"]
    script, gate = (Entry(registered("tests/test_s.py", **{name: True}), 1.0) for name in ("is_script", "gate"))
    part = Entry(registered("tests/test_n.py"), 1.0, node="test_a")
    assert [(plain[0], plain[1]), (script,), (gate,), (part,)] == batches([plain[0], script, gate, part, plain[1]], 99)


def test_stop_is_called_for_what_runs() -> None:
    """Who asks for no more results waits for what was started, after it was told to stop; nothing else is started."""
    stopped, started = threading.Event(), []

    def work(number: int) -> int:
        started.append(number)
        assert number == 0 or stopped.wait(60)
        return number

    found = each([()] * 5, work, 2, stopped.set)
    assert 0 == next(found)
    found.close()
    assert [0, 1] == sorted(started)

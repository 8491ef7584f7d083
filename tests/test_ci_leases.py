"""GPU leases: nobody holds a GPU that another holds, whoever dies, and nobody waits for ever."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ci.leases import Lease, LeaseError, holders, lease, shared_folder, visible
from ci.nvml import NvmlProbe
from ci.register import register_cpu_ci
from tests.launch_rig import environment

register_cpu_ci(est_time=40, stage="commit")

ROOT = Path(__file__).parent.parent
GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


class Fake:
    """GPUs of which each look at one reads the next of these numbers; the last one stays."""

    def __init__(self, gpus: Sequence[str] = GPUS, used: Sequence[int] = (0,)) -> None:
        self._gpus = gpus
        self._used = list(used)

    def gpus(self) -> Sequence[str]:
        return self._gpus

    def used_bytes(self, gpu: str) -> int:
        return self._used.pop(0) if len(self._used) > 1 else self._used[0]


def take(folder: Path, count: int, wait: float = 0.0, gpus: Sequence[str] = GPUS) -> Lease:
    return lease(count, Fake(gpus), f"test of {count}", wait_seconds=wait, folder=folder)


# Leases some GPUs again and again, and tells when it has them and when it is about to give them back.
FIGHTER = """
import json, os, random, sys, time
from pathlib import Path
from ci.leases import lease
folder, log, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
class Fake:
    def gpus(self):
        return ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    def used_bytes(self, gpu):
        return 0
draw = random.Random(seed)
out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def tell(what, gpus):
    os.write(out, (json.dumps([time.monotonic(), os.getpid(), what, gpus]) + "\\n").encode())
while True:
    with lease(draw.choice((1, 1, 2, 3, 4)), Fake(), "fight", wait_seconds=60, folder=folder) as held:
        tell("has", held.gpus)
        time.sleep(draw.uniform(0, 0.05))
        tell("gives", held.gpus)
"""


def fight(folder: Path, seconds: float, fighters: int = 8) -> tuple[list[list[Any]], dict[int, float]]:
    """What the fighters told, and when each was killed; a killed one is replaced."""
    log, draw, seeds = folder / "log", random.Random(7), itertools.count()
    killed: dict[int, float] = {}

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", FIGHTER, str(folder), str(log), str(next(seeds))]
        return subprocess.Popen(command, env=environment(), cwd=ROOT)

    alive = [start() for _ in range(fighters)]
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            time.sleep(draw.uniform(0.1, 0.4))
            at = draw.randrange(fighters)
            killed[alive[at].pid] = time.monotonic()  # before the signal: it may hold GPUs for longer, never for less
            alive[at].kill()
            assert -signal.SIGKILL == alive[at].wait()  # it did not end by itself, of an error
            alive[at] = start()
    finally:
        for process in alive:
            killed.setdefault(process.pid, time.monotonic())
            process.kill()
            process.wait()
    return [json.loads(line) for line in log.read_text().splitlines()], killed


def spans(told: list[list[Any]], killed: dict[int, float]) -> list[tuple[str, float, float]]:
    """Each GPU with times between which a process had it for certain."""
    found: list[tuple[str, float, float]] = []
    open_since: dict[tuple[int, str], float] = {}
    for at, pid, what, gpus in told:
        for gpu in gpus:
            if what == "has":
                open_since[pid, gpu] = at
            else:
                found.append((gpu, open_since.pop((pid, gpu)), at))
    found += [(gpu, since, killed[pid]) for (pid, gpu), since in open_since.items()]
    return sorted(found)


@pytest.mark.parametrize("seconds", [10.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_fight(tmp_path: Path, seconds: float) -> None:
    """Eight processes fight for four GPUs and get killed: none is held twice or stays locked, and all go on."""
    told, killed = fight(tmp_path, seconds)
    found = spans(told, killed)
    overlaps = [(one, two) for one, two in itertools.pairwise(found) if one[0] == two[0] and two[1] < one[2]]
    assert [] == overlaps
    had = [entry for entry in told if entry[2] == "has"]
    assert {1, 2, 3, 4} == {len(entry[3]) for entry in had}
    assert len(had) > seconds  # no deadlock: they went on all the time
    assert max(entry[0] for entry in had) > max(killed.values()) - 5
    died_holding = {pid for gpu, _, end in found for pid, at in killed.items() if end == at}
    assert died_holding  # else the kills prove nothing
    with take(tmp_path, 4) as held:  # at once
        assert GPUS == held.gpus


def test_spans_see_an_overlap() -> None:
    """The judge of the fight sees a GPU that two had at once, also when the first was killed."""
    told = [[1.0, 1, "has", ["a"]], [2.0, 2, "has", ["a"]], [3.0, 1, "gives", ["a"]]]
    assert [("a", 1.0, 3.0), ("a", 2.0, 9.0)] == spans(told, {1: 9.0, 2: 9.0})
    assert [("a", 1.0, 1.5), ("a", 2.0, 9.0)] == spans(told[:2], {1: 1.5, 2: 9.0})


def test_first_that_are_free(tmp_path: Path) -> None:
    """A lease is of the first free GPUs in order, and they are free again once it is closed, twice or not."""
    first = take(tmp_path, 1)
    second = take(tmp_path, 2)
    assert (("GPU-a",), ("GPU-b", "GPU-c")) == (first.gpus, second.gpus)
    first.close()
    first.close()
    with take(tmp_path, 2) as third:
        assert ("GPU-a", "GPU-d") == third.gpus
    second.close()


def test_all_or_nothing(tmp_path: Path) -> None:
    """A request that cannot be met holds nothing, and is told who holds what."""
    with take(tmp_path, 2), pytest.raises(LeaseError) as caught:
        take(tmp_path, 3, wait=0.2)
    told = str(caught.value)
    assert told.startswith(f"3 of 4 GPUs are not free: GPU-a by pid {os.getpid()} since ")
    assert "(test of 2); GPU-b by pid" in told
    assert "expected them within 0.2 s" in told
    assert [] == holders(tmp_path, GPUS)
    with take(tmp_path, 4) as held:
        assert GPUS == held.gpus


def test_waits(tmp_path: Path) -> None:
    """Who waits gets the GPUs as soon as their holder is dead, and has said meanwhile for whom it waits."""
    hold = "print(1, flush=True); time.sleep(99)"
    code = f"import sys, time; from tests.test_ci_leases import *; held = take(Path(sys.argv[1]), 4); {hold}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert b"1\n" == process.stdout.readline()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        process.kill()

    with lease(1, Fake(), "next", wait_seconds=30, folder=tmp_path, say=say) as held:
        assert ("GPU-a",) == held.gpus
    process.stdout.close()
    process.wait()
    assert 1 == len(said)
    assert said[0].startswith(f"waiting for 1 of 4 GPUs are not free: GPU-a by pid {process.pid}")


@pytest.mark.parametrize(("count", "gpus"), [(5, GPUS), (0, GPUS), (1, ())])
def test_impossible(tmp_path: Path, count: int, gpus: tuple[str, ...]) -> None:
    """More GPUs than there are is an error at once."""
    with pytest.raises(LeaseError, match="use another runner"):
        take(tmp_path, count, wait=60, gpus=gpus)


def test_idle(tmp_path: Path) -> None:
    """GPUs are waited for until their memory is free, for so long, and what holds it is told."""
    with lease(2, Fake(used=[8 << 30, 8 << 30, 3 << 30, 0, 0]), "x", wait_seconds=0, folder=tmp_path) as held:
        held.wait_idle(10)
    with lease(2, Fake(used=[8 << 30]), "x", wait_seconds=0, folder=tmp_path) as held:
        with pytest.raises(
            LeaseError, match=r"GPU-a has 8\.0 GiB in use, GPU-b has 8\.0 GiB in use; expected at most 2"
        ):
            held.wait_idle(0.1)
        held.wait_idle(0, idle_bytes=8 << 30)


def test_children_do_not_keep_it(tmp_path: Path) -> None:
    """A child that outlives the lease does not keep the GPUs locked."""
    held = take(tmp_path, 4)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=list(held._locks.values())
    )
    held.close()
    take(tmp_path, 4).close()
    child.communicate(b"\n")


def test_folder_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock files can be opened by every user of the machine, whatever the umask; a link in their place is refused."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(0o077)
    try:
        folder = shared_folder()
        take(folder, 1).close()
    finally:
        os.umask(before)
    assert (0o1777, 0o666) == (folder.stat().st_mode & 0o7777, (folder / "GPU-a.lock").stat().st_mode & 0o7777)
    (folder / "GPU-b.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LeaseError, match="GPU-b"):
        take(folder, 2)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, GPUS),
        ("", ()),
        ("2,0", ("GPU-c", "GPU-a")),
        ("GPU-b, 3", ("GPU-b", "GPU-d")),
        ("0,9,1", ("GPU-a",)),
        ("-1", ()),
        ("GPU-", ()),
    ],
)
def test_visible(listed: str | None, expected: tuple[str, ...]) -> None:
    """CUDA_VISIBLE_DEVICES is read as CUDA reads it: up to the first entry that names no one GPU."""
    assert expected == tuple(visible(GPUS, listed))


class Nvml:
    """A driver with two GPUs."""

    class NVMLError(Exception):
        """As in the library."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def nvmlInit(self) -> None:  # noqa: N802  # the library's name
        if self._error:
            raise self.NVMLError(self._error)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802  # the same
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802  # the same
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:  # noqa: N802  # the same
        return ("GPU-1", b"GPU-0")[handle]  # old versions give bytes

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802  # the same
        return type("Memory", (), {"used": 100 + handle})


def test_nvml() -> None:
    """GPUs are known by UUID, in the driver's order for every process, whichever way they are listed."""
    assert ("GPU-1", "GPU-0") == NvmlProbe({}, Nvml()).gpus()
    assert ("GPU-1", "GPU-0") == NvmlProbe({"CUDA_VISIBLE_DEVICES": "1,0"}, Nvml()).gpus()
    assert ("GPU-0",) == NvmlProbe({"CUDA_VISIBLE_DEVICES": "GPU-0"}, Nvml()).gpus()
    assert 101 == NvmlProbe({}, Nvml()).used_bytes("GPU-0")
    with pytest.raises(LeaseError, match="NVML: no driver"):
        NvmlProbe({}, Nvml("no driver"))

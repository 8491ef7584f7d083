"""Reserved ports: nobody else gets one, and nobody keeps one that is dead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.launch.ports import PortError, Ports, candidates, runtime_folder
from tests.launch_rig import environment

register_cpu_ci(est_time=10, stage="commit")

FEW = range(21_000, 21_060)
HOLD = """
import sys, time
from pathlib import Path
from harness.launch.ports import Ports
with Ports(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3]))) as ports:
    for _ in range(int(sys.argv[4])):
        port = ports.reserve()
        ports.release(port)
        print(port, flush=True)
    print("all", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path, among: range, count: int) -> subprocess.Popen[str]:
    """A process that reserves so many ports, lets servers bind them, and holds them until its input ends."""
    words = [str(folder), str(among.start), str(among.stop), str(count)]
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", HOLD, *words], env=environment(), stdin=pipe, stdout=pipe, text=True)


def held(process: subprocess.Popen[str]) -> list[int]:
    """The ports that it has, once it has all."""
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "all\n")
    return [int(line) for line in lines if line]


def can_bind(port: int, *, reuse: bool = False) -> bool:
    with socket.socket() as probe:
        if reuse:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_a_reserved_port_cannot_be_bound(tmp_path: Path) -> None:
    """Not even by a socket with SO_REUSEADDR, until the port is released."""
    with Ports(tmp_path) as ports:
        port = ports.reserve()
        before = [can_bind(port), can_bind(port, reuse=True)]
        ports.release(port)
        ports.release(port)

        assert ([False, False], True) == (before, can_bind(port))


@pytest.fixture
def one() -> Iterator[range]:
    """A port that nobody else takes meanwhile, as the only one of a range."""
    with Ports() as ports:
        port = ports.reserve()
        ports.release(port)
        yield range(port, port + 1)


def test_a_released_port_is_still_reserved(tmp_path: Path, one: range) -> None:
    """Another reservation passes over it, although it could be bound, until the holder gives it back."""
    with Ports(tmp_path, one) as first, Ports(tmp_path, one) as second:
        port = first.reserve()
        first.release(port)
        with pytest.raises(PortError, match=f"no port of {port} to {port} is free"):
            second.reserve()
        first.close()

        assert port == second.reserve()


def test_a_port_with_a_server_is_passed_over(tmp_path: Path, one: range) -> None:
    """Whether or not the server has reserved it."""
    with socket.socket() as server, Ports(tmp_path, one) as ports:
        server.bind(("0.0.0.0", one.start))  # noqa: S104  # a server of somebody else, on all addresses
        server.listen()
        with pytest.raises(PortError):
            ports.reserve()


def test_two_processes_never_choose_the_same(tmp_path: Path) -> None:
    """20 ports each at the same time, from 60, none held by a socket: 40 different ones."""
    processes = [holder(tmp_path, FEW, 20) for _ in range(2)]
    found = [held(process) for process in processes]
    for process in processes:
        process.communicate()

    assert ([20, 20], 40) == ([len(ports) for ports in found], len({port for ports in found for port in ports}))


def test_a_dead_holder_holds_nothing(tmp_path: Path, one: range) -> None:
    """After SIGKILL its port can be reserved at once."""
    process = holder(tmp_path, one, 1)
    ports_of_it = held(process)
    with Ports(tmp_path, one) as ports:
        with pytest.raises(PortError):
            ports.reserve()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()

        assert ports_of_it == [ports.reserve()]


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("32768\t60999\n", range(16_384, 32_768)),
        ("49152 65535", range(20_000, 49_152)),
        ("1024 60999", range(61_000, 65_536)),
        ("1024 65535", range(20_000, 32_768)),
        ("", range(20_000, 32_768)),
    ],
)
def test_ports_are_not_ephemeral(tmp_path: Path, text: str, ports: range) -> None:
    """They are below the range of clients' sockets, else above it, and in it only when there is nothing else."""
    (tmp_path / "range").write_text(text, encoding="ascii")
    assert ports == candidates(tmp_path / "range")


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made with access for nobody else; a link to somewhere else is refused."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = runtime_folder()
    assert (tmp_path / f"kvshard-ports-{os.getuid()}", 0o40700) == (folder, folder.stat().st_mode)
    folder.rmdir()
    (tmp_path / "other").mkdir()
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(PortError, match="expected a folder of your own"):
        runtime_folder()

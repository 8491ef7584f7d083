"""`kvshard up`: the servers of a topology file, started in order, watched, and taken down together.

FILE says which processes there are; docs/topologies.md explains it. Once all are ready one line of JSON on stdout tells
the entry and all URLs; the table on stderr shows how they come up. SIGINT or SIGTERM takes all down.

With `-- COMMAND ..` that command runs once all are ready, with {entry}, {url:NAME}, {log_dir} and so on filled in.
When it ends, all is taken down. Meanwhile `kvshard tell {log_dir} ..` ends and restarts workers.

Exit codes: 0 ended by SIGINT or SIGTERM and all is down (or --print-only), 1 a worker ended or never became ready,
2 a file or an option that cannot work; with a COMMAND its own, if it came to that.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from harness.launch.control import Control
from harness.launch.deployment import Deployment, Interrupted, Status
from harness.launch.plan import Launch, filled, prepared
from harness.launch.ports import PortError, Ports
from harness.launch.processes import LaunchError
from harness.launch.topology import Topology, TopologyError, read
from harness.render import console_for

EXIT_DOWN = 0
EXIT_FAILED = 1
EXIT_UNUSABLE = 2
TAKES_COMMAND = True  # what follows `--`
SIGNALLED = 128  # a shell's exit code of a command that a signal has ended is this and its number
LOOK_SECONDS = 0.1
LOG_DIR = "kvshard-logs"


class Stop:
    """Whether a signal has asked for the end. A flag, as an exception could strike in the middle of a start."""

    def __init__(self) -> None:
        self._is_asked = False

    def is_asked(self) -> bool:
        """Whether it is time to take all down."""
        return self._is_asked

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The handler; a further signal changes nothing, as the end is under way."""
        self._is_asked = True

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM meanwhile."""
        before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard up`."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a topology file (TOML)")
    add("--log-dir", type=Path, metavar="DIR", help=f"a log of each process (default {LOG_DIR}/NAME OF THE FILE)")
    setting = "over the file, e.g. decode.gpus=1 or defaults.ready_seconds=30; may be given several times"
    add("--set", action="append", default=[], dest="settings", metavar="NAME.key=value", help=setting)
    add("--print-only", action="store_true", help="show the commands with all values filled in, and start nothing")
    parser.usage = "kvshard up FILE [options] [-- COMMAND ..]"
    parser.set_defaults(command=[])


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    stop = Stop()
    try:
        topology = read(args.file, args.settings)
        log_dir = (args.log_dir or Path(LOG_DIR) / args.file.stem).absolute()
        if args.print_only:
            return _show(topology, log_dir)
        dummy = {worker.name: dict.fromkeys(worker.port_names, 0) for worker in topology.workers}
        filled(args.command, topology, dummy, log_dir, "COMMAND")  # a typo is told before anything starts
        with stop.on_signals():
            return _keep(topology, log_dir, stop, args.command)
    except (TopologyError, PortError) as error:
        sys.stderr.write(f"kvshard up: {error}\n")
        return EXIT_UNUSABLE
    except LaunchError as error:
        sys.stderr.write(f"kvshard up: {error}\n")
        return EXIT_FAILED


def _keep(topology: Topology, log_dir: Path, stop: Stop, command: Sequence[str]) -> int:
    """Up, until `stop` or until the command ends; its exit code. Raises `LaunchError`."""
    with (
        _shown_on(console_for(sys.stderr)) as show,
        contextlib.suppress(Interrupted),
        Deployment(topology, log_dir, is_called_off=stop.is_asked, on_change=show) as up,
    ):
        if command:
            with Control(up):
                return _run(up.filled(command), up, stop)
        _tell(up)
        up.wait()
    return EXIT_DOWN


def _run(command: Sequence[str], up: Deployment, stop: Stop) -> int:
    """The command's exit code. When a worker ends, or a signal comes, the command is ended first."""
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        raise TopologyError(f"COMMAND {shlex.join(command)} cannot be started: {error.strerror}") from error
    try:
        while child.poll() is None and not stop.is_asked():
            up.check()
            time.sleep(LOOK_SECONDS)
    finally:
        if child.poll() is None:
            child.terminate()
        code = child.wait()
    return code if code >= 0 else SIGNALLED - code


@contextlib.contextmanager
def _shown_on(console: Console) -> Iterator[Callable[[Sequence[Status]], None]]:
    """A table that is kept up to date, or, where there is no terminal, a line for every change."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda statuses: live.update(_table(statuses), refresh=True)
        return
    before: list[Status] = []

    def show(statuses: Sequence[Status]) -> None:
        for status in statuses:
            if status not in before and status.state != "waiting":
                pid = "" if status.pid is None else f", pid {status.pid}"
                # Not through rich: when stderr is closed it sends stdout, with the line for programs, to nowhere.
                sys.stderr.write(f"{status.name} ({status.role}) {status.state}: {status.url}{pid}\n")
        sys.stderr.flush()
        before[:] = statuses

    yield show


def _tell(up: Deployment) -> None:
    """The one line for programs."""
    statuses = up.statuses
    told = {
        "entry": up.entry,
        "urls": {status.name: status.url for status in statuses},
        "pids": {status.name: status.pid for status in statuses},
        "log_dir": str(up.log_dir),
    }
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    sys.stdout.flush()


def _table(statuses: Sequence[Status]) -> Table:
    table = Table("name", "role", "pid", "url", "state")
    for status in statuses:
        pid = "-" if status.pid is None else str(status.pid)
        table.add_row(status.name, status.role, pid, status.url, status.state)
    return table


def _show(topology: Topology, log_dir: Path) -> int:
    """What would be run, as commands for a shell."""
    with Ports() as ports:
        launches = prepared(topology, ports, log_dir)
    for launch in launches:
        sys.stdout.write(_shown(launch, is_entry=launch.name == topology.entry))
    return EXIT_DOWN


def _shown(launch: Launch, *, is_entry: bool) -> str:
    ports = " ".join(f"{name}={port}" for name, port in launch.ports.items())
    after = f" after {', '.join(launch.worker.after)}" if launch.worker.after else ""
    entry = ", the entry" if is_entry else ""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in launch.environment.items())
    line = " ".join(filter(None, [variables, shlex.join(launch.command)]))
    return f"# {launch.name} ({launch.worker.role}{entry}){after}: {ports}\n{line}\n"

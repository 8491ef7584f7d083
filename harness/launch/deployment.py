"""A topology that runs: started in order, watched while it is used, taken down with everything that it started.

with Deployment(topology, log_dir) as up:
    ask(up.entry)
    up.kill("decode")
    up.restart("decode")
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from harness.launch.families import newest_child
from harness.launch.health import Probe
from harness.launch.plan import Launch, filled, prepared
from harness.launch.ports import HOST, Ports
from harness.launch.processes import TAIL_LINES, Guardian, LaunchError, Process, tail, told
from harness.launch.topology import Topology

LOOK_SECONDS = 0.03
SETTLE_SECONDS = 0.1  # a client sees its connection break before the kernel tells that the server has ended
GUARDIAN_LOG = "_guardian.log"  # a name that no worker can have


class Interrupted(Exception):  # noqa: N818  # asked for, no error
    """The start was called off."""


class Status(NamedTuple):
    """One line of the table."""

    name: str
    role: str
    pid: int | None
    url: str
    state: str  # waiting, starting, ready, ending (it has lost a process), killed, failed, stopped


class Member:
    """A worker of a running topology: its plan, its process, its state."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.process: Process | None = None
        self.probe: Probe | None = None
        self.state = "waiting"
        self.deadline = 0.0
        self.is_restarted = False  # then it waits for nobody

    @property
    def status(self) -> Status:
        """As it is now."""
        is_there = self.state in {"starting", "ready", "ending"}
        pid = self.process.pid if self.process is not None and is_there else None
        return Status(self.launch.name, self.launch.worker.role, pid, self.launch.url, self.state)

    def ask_no_more(self) -> None:
        """Ends the probe."""
        if self.probe is not None:
            self.probe.stop()
            self.probe = None


class Deployment:
    """The processes of a topology, as a context manager.

    A thread starts and watches them. A worker that ends unasked takes all down; whoever uses the deployment then gets
    a `LaunchError` with the end of that worker's log.
    """

    def __init__(
        self,
        topology: Topology,
        log_dir: Path | str,
        *,
        is_called_off: Callable[[], bool] = lambda: False,
        on_change: Callable[[Sequence[Status]], None] = lambda _: None,
    ) -> None:
        self.topology = topology
        self.log_dir = Path(log_dir).absolute()
        self._is_called_off = is_called_off
        self._on_change = on_change
        self._mark = uuid.uuid4().hex
        self._ports = Ports()
        self._lock = threading.RLock()
        self._members: dict[str, Member] = {}  # in the order of the start
        self._guardian: Guardian | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._is_closing = threading.Event()
        self._failure: LaunchError | None = None

    def __enter__(self) -> Self:
        try:
            launches = prepared(self.topology, self._ports, self.log_dir)
            self._members = {launch.name: Member(launch) for launch in launches}
            self._guardian = Guardian(self._mark, self.log_dir / GUARDIAN_LOG)
            self._supervisor.start()
            self._wait_until_ready(list(self._members))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            time.sleep(SETTLE_SECONDS)
        try:
            self._look_once_more()
        finally:
            self.close()
        if self._failure is not None and error is not self._failure:
            if error is None:
                raise self._failure
            error.add_note(str(self._failure))

    @property
    def entry(self) -> str:
        """The URL of the whole."""
        return self.url(self.topology.entry)

    @property
    def statuses(self) -> list[Status]:
        """All workers in the order of their start."""
        with self._lock:
            return [member.status for member in self._members.values()]

    @property
    def guardian_pid(self) -> int | None:
        """The process that cleans up should this one be killed."""
        return self._guardian.pid if self._guardian is not None else None

    def url(self, name: str) -> str:
        """Where the worker answers."""
        self.check()
        return self._member(name).launch.url

    def port(self, name: str, which: str = "port") -> int:
        """One of the worker's ports."""
        return self._member(name).launch.ports[which]

    def filled(self, texts: Sequence[str]) -> list[str]:
        """A command line with `{url:NAME}`, `{entry}` and the like filled in. Raises `TopologyError`."""
        ports = {name: member.launch.ports for name, member in self._members.items()}
        return filled(texts, self.topology, ports, self.log_dir, "command")

    def pid(self, name: str) -> int:
        """The worker's process, which leads a session of that id. Raises `LaunchError` when it does not run."""
        self.check()
        pid = self._member(name).status.pid
        if pid is None:
            raise LaunchError(f"worker {name!r} does not run: it is {self._member(name).state}; restart it first")
        return pid

    def log(self, name: str) -> str:
        """What the worker has written, its process before a restart first."""
        return self.log_path(name).read_text(encoding="utf-8", errors="replace")

    def log_path(self, name: str) -> Path:
        """Where it writes; the logs of earlier deployments are beside it, with a number."""
        return self.log_dir / f"{self._member(name).launch.name}.log"

    def check(self) -> None:
        """Raises the `LaunchError` of a worker that ended unasked."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Until it is called off. Raises the `LaunchError` of a worker that ended unasked."""
        while not self._is_called_off():
            self.check()
            time.sleep(LOOK_SECONDS)

    def kill(self, name: str) -> None:
        """SIGKILL to the worker and all its descendants; the others go on."""
        member = self._member(name)
        with self._lock:
            self.check()
            self._end(member, 0, "killed")

    def kill_rank(self, name: str) -> None:
        """SIGKILL to the newest child of the worker's process: where each rank is one, the last rank.

        What the worker does then is its own affair: it may end, or go on until it is killed or restarted. Raises
        `LaunchError` when it is not ready, or has no child.
        """
        member = self._member(name)
        with self._lock:
            child = newest_child(self.pid(name)) if member.state == "ready" else None
            if child is None:
                lacks = "has no child process; kill the worker" if member.state == "ready" else "is not ready"
                raise LaunchError(f"worker {name!r} {lacks}")
            self._set(member, "ending")
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself meanwhile
                child.kill()

    def restart(self, name: str) -> None:
        """Ends the worker where it runs, starts it again at the same ports, and waits until it is ready.

        It starts whether or not those behind its `after` are up.
        """
        member = self._member(name)
        with self._lock:
            self.check()
            self._end(member, member.launch.worker.stop_seconds, "waiting")
            member.is_restarted = True
        self._wait_until_ready([name])

    def close(self) -> None:
        """Takes all down, the last started first; a second call does nothing.

        Raises `LaunchError` when something cannot be ended.
        """
        self._is_closing.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        try:
            self._take_down()
        finally:
            self._ports.close()
            guardian, self._guardian = self._guardian, None
            if guardian is not None:
                guardian.dismiss()

    def _member(self, name: str) -> Member:
        return self._members[self.topology.worker(name).name]

    def _wait_until_ready(self, names: Sequence[str]) -> None:
        while any(self._members[name].state != "ready" for name in names):
            self.check()
            if self._is_closing.is_set():
                raise LaunchError("the deployment is closed; start another")
            if self._is_called_off():
                raise Interrupted
            time.sleep(LOOK_SECONDS)

    def _supervise(self) -> None:
        """The thread: starts what is due, sees what is ready, and ends all when one fails."""
        while not self._is_closing.wait(LOOK_SECONDS):
            with self._lock:
                try:
                    for member in self._members.values():
                        self._look(member)
                    if self._guardian is not None and not self._guardian.alive:
                        raise LaunchError(f"the guardian has ended; see {self.log_dir / GUARDIAN_LOG}")
                except LaunchError as error:
                    self._fail(error)
                    return
                except Exception as error:  # noqa: BLE001  # whatever it is: nobody else sees this thread fail
                    self._fail(LaunchError(f"{type(error).__name__}: {error}"))
                    return

    def _look_once_more(self) -> None:
        """What has died since the last look is told too."""
        with self._lock:
            try:
                for member in self._members.values():
                    if member.state == "ready" and self._failure is None:
                        self._look(member)
            except LaunchError as error:
                self._failure = error

    def _fail(self, error: LaunchError) -> None:
        self._failure = error
        try:
            self._take_down()
        except LaunchError as problem:
            self._failure = LaunchError(f"{error}\n{problem}")

    def _look(self, member: Member) -> None:
        """One look at one worker. Raises `LaunchError` when it has failed."""
        waits_for = [self._members[name].state for name in member.launch.worker.after]
        if member.state == "waiting" and (member.is_restarted or all(state == "ready" for state in waits_for)):
            self._start(member)
        if member.state not in {"starting", "ready", "ending"} or member.process is None:
            return
        code = member.process.code
        if member.state == "ending":
            if code is not None:
                self._set(member, "killed")
            return
        if code is not None:
            when = "before it was ready" if member.state == "starting" else "while it was in use"
            raise self._failed(member, f"ended with {told(code)} {when}")
        if member.state == "starting" and member.probe is not None:
            if member.probe.ready:
                member.ask_no_more()
                self._set(member, "ready")
            elif time.monotonic() > member.deadline:
                worker = member.launch.worker
                where = f"{member.launch.url}{worker.health}"
                what = f"was not ready within {worker.ready_seconds:g} s"
                raise self._failed(member, f"{what}; {where} should answer 200, last seen: {member.probe.last}")

    def _start(self, member: Member) -> None:
        launch = member.launch
        for port in launch.ports.values():
            self._ports.release(port)
        mark = f"{self._mark}:{launch.name}"
        try:
            log, again = self.log_path(launch.name), member.is_restarted
            member.process = Process(launch.command, launch.environment, mark, log, again=again)
        except LaunchError as error:
            self._set(member, "failed")
            raise LaunchError(f"worker {launch.name!r}: {error}") from error
        if self._guardian is not None:
            self._guardian.watch(member.process, launch.worker.stop_seconds)
        member.deadline = time.monotonic() + launch.worker.ready_seconds
        member.probe = Probe(HOST, launch.port, launch.worker.health)
        self._set(member, "starting")

    def _failed(self, member: Member, what: str) -> LaunchError:
        self._set(member, "failed")
        log = self.log_path(member.launch.name)
        lines = tail(log) or "(nothing)"
        return LaunchError(f"worker {member.launch.name!r} {what}\nlast {TAIL_LINES} lines of {log}:\n{lines}")

    def _set(self, member: Member, state: str) -> None:
        member.state = state
        with contextlib.suppress(Exception, SystemExit):  # such as a closed terminal: no reason to leave workers behind
            self._on_change(self.statuses)

    def _end(self, member: Member, stop_seconds: float, state: str) -> None:
        """Ends the worker's processes, if any. Raises `LaunchError` when some cannot be ended."""
        process, member.process = member.process, None
        if process is not None:
            left = process.end(stop_seconds)
            member.ask_no_more()
            if left:
                raise LaunchError(f"worker {member.launch.name!r}: SIGKILL did not end {left}; look at them by hand")
            if self._guardian is not None:
                self._guardian.forget(process)
        self._set(member, state)

    def _take_down(self) -> None:
        problems = []
        with self._lock:
            for member in reversed(self._members.values()):
                state = member.state if member.state == "failed" else "stopped"
                try:
                    self._end(member, member.launch.worker.stop_seconds, state)
                except LaunchError as error:
                    problems.append(str(error))
        if problems:
            raise LaunchError("; ".join(problems))

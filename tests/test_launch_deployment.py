"""A deployment starts in order, tells what fails, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ci.register import register_cpu_ci
from harness.launch.deployment import Deployment, Interrupted, Status
from harness.launch.families import MARK, Leader, end, family, leader_of
from harness.launch.processes import LOGS_KEPT, STARTED_AGAIN, LaunchError, rotate, tail, told
from harness.launch.topology import TopologyError, parse
from tests.launch_rig import KINDS, Rig, guardians_of, until

register_cpu_ci(est_time=20, stage="commit")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Whatever a test did, no process of it is left, nor a guardian."""
    made = Rig(tmp_path)
    yield made
    left = [made.processes(), guardians_of(os.getpid())]
    for pid in left[0]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert [[], []] == left


def deployment(rig: Rig, *workers: dict[str, Any], **options: Any) -> Deployment:
    return Deployment(parse(rig.document(*workers)), rig.log_dir, **options)


def answer(url: str, path: str = "/") -> str:
    with urllib.request.urlopen(f"{url}{path}", timeout=10) as reply:  # noqa: S310  # of the server above
        return str(reply.read().decode())


@contextlib.contextmanager
def failing(up: Deployment, said: str) -> Iterator[Deployment]:
    """It comes up, and the use of it ends in a `LaunchError`."""
    with pytest.raises(LaunchError, match=said), up:
        yield up


def failure(rig: Rig, *workers: dict[str, Any]) -> str:
    with pytest.raises(LaunchError) as caught, deployment(rig, *workers):
        pytest.fail("it came up")
    return str(caught.value)


def test_up(rig: Rig) -> None:
    """All answer where they are said to, with their environment, in sessions of their own; logs are kept apart."""
    a, b = rig.worker("a", env={"WORD": "{name} at {port:b}"}), rig.worker("b", "hello", ports=["extra"])
    with deployment(rig, a, b) as up:
        assert up.url("b") == up.entry
        assert [repr(f"a at {up.port('b')}"), "None"] == [answer(up.url("a")), answer(up.entry)]
        assert [up.pid("a"), up.pid("b")] == [os.getsid(up.pid("a")), os.getsid(up.pid("b"))]
        assert ("words\n", "words hello\n") == (up.log("a"), up.log("b"))
        assert 3 == len({up.port("a"), up.port("b"), up.port("b", "extra")})
        with pytest.raises(TopologyError, match="has no worker 'c'"):
            up.url("c")
    assert ["stopped", "stopped"] == [status.state for status in up.statuses]
    assert "" == (rig.log_dir / "_guardian.log").read_text()  # it had nothing to do


def test_order(rig: Rig) -> None:
    """A worker starts when those behind `after` are ready, and ends before them."""
    seen: list[tuple[str, str]] = []

    def changed(statuses: list[Status]) -> None:
        now = [(status.name, status.state) for status in statuses if status.state != "waiting"]
        seen.extend(one for one in now if one not in seen)

    workers = [rig.worker("c", after=["a", "b"]), rig.worker("b", after=["a"]), rig.worker("a")]
    with deployment(rig, *workers, on_change=changed):
        pass
    up = [(name, state) for name in "abc" for state in ("starting", "ready")]
    assert [*up, ("c", "stopped"), ("b", "stopped"), ("a", "stopped")] == seen


def test_without_order_all_start_at_once(rig: Rig) -> None:
    """One that is never ready does not keep another from being started."""
    said = failure(rig, rig.worker("a", "unready", ready_seconds=1), rig.worker("b", "here"))

    assert "worker 'a' was not ready within 1 s" in said
    assert "words here" in (rig.log_dir / "b.log").read_text()


def test_death_before_ready(rig: Rig) -> None:
    """The wait ends at once, with exit code and the last 30 lines; those that were up are taken down."""
    began = time.monotonic()
    said = failure(rig, rig.worker("a"), rig.worker("b", "dies", after=["a"], ready_seconds=60))

    head, *lines = said.splitlines()
    assert "worker 'b' ended with exit code 7 before it was ready" == head
    assert [f"last 30 lines of {rig.log_dir / 'b.log'}:", *(f"line {n}" for n in range(20, 50))] == lines
    assert "words\nterm\n" == (rig.log_dir / "a.log").read_text()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("word", "seen"), [("unready", "HTTP 503"), ("hangs", "no answer for ")])
def test_never_ready(rig: Rig, word: str, seen: str) -> None:
    """The message says what was asked, what should have come, what came, and shows the log."""
    said = failure(rig, rig.worker("a", word, ready_seconds=1, health="/h?x=1")).splitlines()

    assert said[0].startswith("worker 'a' was not ready within 1 s; http://127.0.0.1:")
    assert f"/h?x=1 should answer 200, last seen: {seen}" in said[0]
    assert f"words {word}" in said


def test_no_such_program(rig: Rig) -> None:
    """It is told with the command."""
    said = failure(rig, {**rig.worker("a"), "command": ["/no/such/program", "{port}"]})
    assert "worker 'a': /no/such/program PORT cannot be started: No such file or directory; expected a program; " in (
        re.sub(r"\d{5}", "PORT", said)
    )


def test_death_in_use(rig: Rig) -> None:
    """All others are taken down, and whoever asks next is told who died, how, and what it wrote last."""
    said = "worker 'a' ended with exit code 9 while it was in use\nlast 30 lines of .*a.log:\nwords"
    with failing(deployment(rig, rig.worker("a"), rig.worker("b")), said) as up:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            answer(up.url("a"), "/die")
        assert until(lambda: rig.processes() == [])
        assert ["failed", "stopped"] == [status.state for status in up.statuses]
        with pytest.raises(LaunchError, match=said):
            up.url("b")
        with pytest.raises(LaunchError, match=said):
            up.wait()


def test_an_error_of_the_user_is_not_lost(rig: Rig) -> None:
    """When a worker has died and the caller's own code raises for it, both are told."""

    def use() -> None:
        with deployment(rig, rig.worker("a")) as up:
            os.kill(up.pid("a"), signal.SIGKILL)
            assert until(lambda: rig.processes() == [])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        use()
    assert ["worker 'a' ended with signal SIGKILL while it was in use"] == [
        note.splitlines()[0] for note in caught.value.__notes__
    ]


def test_kill_and_restart(rig: Rig) -> None:
    """Killed with all its children while the others go on; restarted at the same port, and the log goes on as well."""
    with deployment(rig, rig.worker("a"), rig.worker("b", *KINDS, stop_seconds=0.8)) as up:
        others, url, pids = up.pid("a"), up.url("b"), [up.pid("b")]
        up.kill("b")
        assert [others] == rig.processes()
        assert "killed" == up.statuses[1].state
        with pytest.raises(LaunchError, match="worker 'b' does not run: it is killed; restart it first"):
            up.pid("b")
        time.sleep(0.2)  # the watcher looks, and does not mind
        up.restart("b")
        pids.append(up.pid("b"))
        up.restart("b")

        assert (url, "None") == (up.url("b"), answer(url))
        assert 3 == len({*pids, up.pid("b")})
        words = " ".join(["words", *KINDS])
        again = STARTED_AGAIN.decode()
        assert f"{words}\n{again}{words}\nterm\n{again}{words}\n" == up.log("b")


def test_kill_rank(rig: Rig) -> None:
    """The newest child alone is killed; whether the worker ends or stays, the others go on, and it can restart."""
    with deployment(rig, rig.worker("a", "child", "setsid"), rig.worker("b")) as up:
        leader = psutil.Process(up.pid("a"))
        older, newest = sorted(leader.children(), key=lambda child: (child.create_time(), child.pid))
        up.kill_rank("a")
        assert until(lambda: newest.pid not in rig.processes())
        assert (True, "ending") == ({leader.pid, older.pid} < set(rig.processes()), up.statuses[0].state)
        with pytest.raises(LaunchError, match="worker 'a' is not ready"):
            up.kill_rank("a")
        with pytest.raises(LaunchError, match="worker 'b' has no child process; kill the worker"):
            up.kill_rank("b")
        leader.kill()
        assert until(lambda: up.statuses[0].state == "killed")
        up.restart("a")
        assert "None" == answer(up.url("a"))


def test_restart_waits_for_nobody(rig: Rig) -> None:
    """A worker comes back although the one that it waited for at first is killed; not in a closed deployment."""
    with deployment(rig, rig.worker("a"), rig.worker("b", after=["a"])) as up:
        up.kill("a")
        up.restart("b")
        assert ["killed", "ready"] == [status.state for status in up.statuses]
    with pytest.raises(LaunchError, match="the deployment is closed"):
        up.restart("b")


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_who_looks_on_cannot_disturb(rig: Rig, error: type[BaseException]) -> None:
    """An `on_change` that raises, as one that writes to a closed terminal does, keeps nothing from coming or going."""

    def raises(statuses: object) -> None:
        raise error

    with deployment(rig, rig.worker("a"), on_change=raises) as up:
        assert "ready" == up.statuses[0].state


def test_restart_that_fails(rig: Rig) -> None:
    """It raises, and all is taken down."""
    with failing(deployment(rig, rig.worker("a")), "ended with exit code 2 before") as up:
        (rig.folder / "server.py").unlink()
        up.restart("a")


def test_no_child_is_left(rig: Rig) -> None:
    """Not one that left the group, nor one without the mark, nor one whose parent has ended; all ignore SIGTERM."""
    with deployment(rig, rig.worker("a", *KINDS)) as up:
        assert until(lambda: len(rig.processes()) == 1 + len(KINDS))
        assert up.pid("a") in rig.processes()
    assert [] == rig.processes()


@pytest.mark.parametrize("kinds", [("child", "setsid", "orphan"), ("clean",)])
def test_children_of_a_dead_worker_are_found(rig: Rig, kinds: tuple[str, ...]) -> None:
    """A worker that died leaves children: those that carry its mark, and those of its session, go too."""
    with failing(deployment(rig, rig.worker("a", *kinds)), "signal SIGKILL") as up:
        assert until(lambda: len(rig.processes()) == 1 + len(kinds))
        os.kill(up.pid("a"), signal.SIGKILL)
        up.wait()
    assert [] == rig.processes()


def test_a_death_in_the_last_moment_is_told(rig: Rig) -> None:
    """Also when the caller is done before the watcher has looked."""
    with failing(deployment(rig, rig.worker("a")), "worker 'a' ended with signal SIGKILL") as up:
        pid = up.pid("a")
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_one_that_ignores_sigterm_is_killed(rig: Rig) -> None:
    """After `stop_seconds`, not before."""
    with deployment(rig, rig.worker("a", "stubborn", stop_seconds=1)):
        began = time.monotonic()
    assert 1 <= time.monotonic() - began < 5


def test_an_exception_takes_all_down(rig: Rig) -> None:
    """In the body of the with, and half way through the start."""
    with pytest.raises(KeyboardInterrupt), deployment(rig, rig.worker("a")):
        raise KeyboardInterrupt
    assert [] == rig.processes()

    def called_off() -> bool:
        return len(rig.processes()) > 0

    workers = [rig.worker("a"), rig.worker("b", "unready")]
    with pytest.raises(Interrupted), deployment(rig, *workers, is_called_off=called_off):
        pytest.fail("it came up")


def test_a_dead_guardian_ends_all(rig: Rig) -> None:
    """Without it nobody would clean up after a SIGKILL, so that is a failure."""
    with failing(deployment(rig, rig.worker("a")), "the guardian has ended") as up:
        assert up.guardian_pid is not None
        os.kill(up.guardian_pid, signal.SIGKILL)
        up.wait()


def test_workers_hold_nothing_of_the_parent(rig: Rig) -> None:
    """No worker has the guardian's pipe or a lock of a port: its open files are its own."""
    with deployment(rig, rig.worker("a")) as up:
        folder = Path(f"/proc/{up.pid('a')}/fd")
        files = {str(link.readlink()) for link in folder.iterdir()}
        assert {"/dev/null", str(up.log_path("a"))} == {name for name in files if not name.startswith("socket:")}
        assert 1 == len([name for name in files if name.startswith("socket:")])


def test_nothing_is_left_open(rig: Rig) -> None:
    """Neither descriptors nor threads remain in this process."""
    before = (psutil.Process().num_fds(), threading.active_count())
    with deployment(rig, rig.worker("a")) as up:
        up.close()
    assert before == (psutil.Process().num_fds(), threading.active_count())


def test_logs_are_rotated(tmp_path: Path) -> None:
    """The newest older log is .1; a few are kept."""
    log = tmp_path / "a.log"
    for number in range(LOGS_KEPT + 3):
        rotate(log)
        log.write_text(str(number), encoding="utf-8")
    assert ["a.log 5", "a.log.1 4", "a.log.2 3", "a.log.3 2"] == [
        f"{path.name} {path.read_text()}" for path in sorted(tmp_path.iterdir())
    ]


def test_tail(tmp_path: Path) -> None:
    """The last lines, of a long log and of one that is no text."""
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 100_000 + b"\nb\xff\nc\n")
    assert ["b\ufffd\nc", "(no log: No such file or directory)"] == [tail(log, 2), tail(tmp_path / "b.log")]


def test_ends_in_words() -> None:
    """An exit code or the name of a signal."""
    assert ["exit code 0", "exit code 3", "signal SIGSEGV", "signal 99"] == [told(n) for n in (0, 3, -11, -99)]


def test_a_reused_id_is_left_alone(rig: Rig) -> None:
    """A leader that started at another time is another process: nothing happens to it."""
    with deployment(rig, rig.worker("a")) as up:
        leader = leader_of(up.pid("a"))
        other = Leader(leader.pid, leader.started - 100)

        assert [leader.pid] == [process.pid for process in family(leader, "no mark")]
        assert [] == family(other, "no mark")
        assert [] == end(other, "no mark", 0, int)
        assert [leader.pid] == rig.processes()


def test_marks_are_whole_words(rig: Rig) -> None:
    """The mark of a worker is not that of one whose name goes on; the mark of all is the part before the colon."""
    with deployment(rig, rig.worker("a"), rig.worker("a-b")) as up:
        pids = [up.pid("a"), up.pid("a-b")]
        mark = psutil.Process(pids[0]).environ()[MARK]

        assert mark.endswith(":a")
        assert pids[:1] == [process.pid for process in family(None, mark)]
        assert sorted(pids) == [process.pid for process in family(None, mark.removesuffix(":a"))]

"""`kvshard tell`: the command of a `kvshard up` ends and restarts its workers; no process is left all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.launch.control import LIST, SOCKET, Control, ControlError, tell
from harness.launch.deployment import Deployment
from harness.launch.processes import LaunchError
from harness.launch.topology import parse
from harness.usage import UserError
from tests.launch_rig import KINDS, Rig, environment, guardians_of, kvshard, until

register_cpu_ci(est_time=20, stage="commit")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Whatever ended it, no process of the test is left."""
    made = Rig(tmp_path)
    yield made
    until(lambda: not made.processes())
    left = made.processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert [] == left


@contextlib.contextmanager
def controlled(rig: Rig, *words: str) -> Iterator[Deployment]:
    """Two workers, the first one started with these words, and their control."""
    topology = parse(rig.document(rig.worker("a", *words), rig.worker("b")))
    with Deployment(topology, rig.log_dir) as up, Control(up):
        yield up


def states(log_dir: Path) -> dict[str, str]:
    return {each.name: each.state for each in tell(log_dir, LIST)}


def test_ended_and_restarted(rig: Rig) -> None:
    """Each verb does what it says to that worker alone; `list` tells names, URLs and states."""
    with controlled(rig, "child") as up:
        assert {"a": up.url("a"), "b": up.url("b")} == {each.name: each.url for each in tell(rig.log_dir, LIST)}
        other, pid = up.pid("b"), up.pid("a")
        tell(rig.log_dir, "kill-rank", "a")
        assert {"a": "ending", "b": "ready"} == states(rig.log_dir)
        assert pid == up.pid("a")
        tell(rig.log_dir, "kill", "a")
        assert ({"a": "killed", "b": "ready"}, [other]) == (states(rig.log_dir), rig.processes())
        tell(rig.log_dir, "restart", "a")
        assert {"a": "ready", "b": "ready"} == states(rig.log_dir)
        assert pid != up.pid("a")


def test_what_cannot_be_done(rig: Rig) -> None:
    """A wrong request is the caller's error, one that the workers' state forbids is not; nothing has changed."""
    with controlled(rig) as up:
        for verb, worker, said in (("kil", "a", "verb 'kil'; did you mean 'kill'"), ("kill", "c", "no worker 'c'")):
            with pytest.raises(UserError, match=said):
                tell(rig.log_dir, verb, worker)
        with pytest.raises(ControlError, match="worker 'a' has no child process"):
            tell(rig.log_dir, "kill-rank", "a")
        assert {"a": "ready", "b": "ready"} == states(rig.log_dir)
        up.kill("a")
        for verb, said in (("kill", "does not run: it is killed; restart it first"), ("kill-rank", "is not ready")):
            with pytest.raises(ControlError, match=f"worker 'a' {said}"):
                tell(rig.log_dir, verb, "a")


def test_a_restart_that_fails(rig: Rig) -> None:
    """It is told to who asked, and takes all down."""
    said = "worker 'a' ended with exit code 2 before it was ready"

    def use() -> None:
        with controlled(rig):
            (rig.folder / "server.py").unlink()
            with pytest.raises(ControlError, match=said):
                tell(rig.log_dir, "restart", "a")

    with pytest.raises(LaunchError, match=said):
        use()


def test_the_socket(rig: Rig) -> None:
    """It is the owner's alone, in a folder of any length, replaces one that was left, and is gone in the end."""
    rig.log_dir = rig.folder / ("long" * 30) / "logs"
    rig.log_dir.mkdir(parents=True)
    (rig.log_dir / SOCKET).write_text("of one that was killed")
    with controlled(rig):
        mode = (rig.log_dir / SOCKET).stat().st_mode
        assert (True, 0o600) == (stat.S_ISSOCK(mode), stat.S_IMODE(mode))
        assert {"a": "ready", "b": "ready"} == states(rig.log_dir)
    assert not (rig.log_dir / SOCKET).exists()
    for nowhere in (rig.log_dir, rig.folder / "none"):
        with pytest.raises(UserError, match=r"nothing is controlled there \(No such file or directory\); expected"):
            tell(nowhere, LIST)


TELLS = "for verb in kill restart kill-rank kill restart; do kvshard tell {log_dir} $verb a || exit 9; done"


def up(rig: Rig, script: str) -> subprocess.Popen[str]:
    """`kvshard up` with a shell as its command, in which `kvshard` is one."""
    shell = f'kvshard() {{ {" ".join(kvshard())} "$@"; }}; {script}'
    command = kvshard("up", str(rig.file(rig.worker("a", *KINDS))), "--log-dir", str(rig.log_dir), "--", "bash", "-c")
    return subprocess.Popen([*command, shell], env=environment(), stdout=subprocess.PIPE, text=True)


def test_the_command_ends_workers(rig: Rig) -> None:
    """`kvshard up` goes on, and its exit code is the command's; the log holds what each process has written."""
    process = up(rig, f"{TELLS}; cat {{log_dir}}/a.log")
    out, _ = process.communicate(timeout=120)

    assert (0, 3) == (process.returncode, out.count("words"))
    assert ([], []) == (rig.processes(), guardians_of(process.pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_restarted_process_is_left(rig: Rig, number: signal.Signals) -> None:
    """Whatever ends `kvshard up`, what was restarted goes too, with all that it has started."""
    process = up(rig, "kvshard tell {log_dir} restart a && echo $$ && exec sleep 300")
    assert process.stdout is not None
    command = int(process.stdout.readline())
    assert until(lambda: len(rig.processes()) == 1 + len(KINDS))
    process.send_signal(number)
    process.wait(60)
    process.stdout.close()

    assert until(lambda: rig.processes() == [])
    assert until(lambda: guardians_of(process.pid) == [])
    with contextlib.suppress(ProcessLookupError):  # it is no worker, so nobody ends it when SIGKILL has come
        os.kill(command, signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["tell", "nowhere", "kill", "a"], 2, "kvshard: nowhere: nothing is controlled there (No such file"),
        (["tell", "nowhere", "stop", "a"], 2, "argument VERB: invalid choice: 'stop'"),
    ],
)
def test_wrong_usage(words: list[str], code: int, said: str, tmp_path: Path) -> None:
    """One line on stderr."""
    pipe = subprocess.PIPE
    done = subprocess.run(
        kvshard(*words), cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True, check=False
    )

    assert (code, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert said in done.stderr

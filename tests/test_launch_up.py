"""`kvshard up`: one line when all is ready, exit codes, and no process left, whatever ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ci.register import register_cpu_ci
from tests.launch_rig import KINDS, Rig, environment, guardians_of, kvshard, until, words_of

register_cpu_ci(est_time=40, stage="commit")

Start = Callable[..., "subprocess.Popen[str]"]


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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `kvshard up` in a session of its own, as a terminal would; the guardian is gone in the end."""
    started: list[subprocess.Popen[str]] = []

    def call(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                kvshard("up", *words), cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True
            )
        )
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate()
        assert until(lambda pid=process.pid: guardians_of(pid) == [])  # type: ignore[misc]  # bound, not inferred


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the one line says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    told: dict[str, Any] = json.loads(line)
    return told


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_ready(rig: Rig, start: Start) -> None:
    """One line of JSON with the entry and all URLs, which answer; the logs are where it says."""
    process = start(str(rig.file(rig.worker("a"), rig.worker("b", after=["a"]))))
    told = ready(process)

    assert (["a", "b"], told["urls"]["b"]) == (list(told["urls"]), told["entry"])
    for url in told["urls"].values():
        with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310  # of the server above
            assert 200 == reply.status
    assert sorted(told["pids"].values()) == rig.processes()
    assert told["log_dir"] == str(rig.folder / "kvshard-logs" / "set")
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert (0, "") == (code, out)
    states = [line.partition(":")[0] for line in err.splitlines()]
    began = ["a (plain) starting", "a (plain) ready", "b (plain) starting", "b (plain) ready"]
    assert [*began, "b (plain) stopped", "a (plain) stopped"] == states


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(rig: Rig, start: Start, number: signal.Signals) -> None:
    """SIGINT and SIGTERM end it with 0, all workers and whatever these started, and the guardian."""
    process = start(str(rig.file(rig.worker("a", *KINDS), rig.worker("b", "setsid"))))
    ready(process)
    assert until(lambda: len(rig.processes()) == len(KINDS) + 3)
    process.send_signal(number)

    assert (0, "") == ended(process)[:2]
    assert ([], []) == (rig.processes(), guardians_of(process.pid))


def test_sigkill_leaves_nothing(rig: Rig, start: Start) -> None:
    """The guardian ends all workers and whatever these started, then itself."""
    process = start(str(rig.file(rig.worker("a", *KINDS), rig.worker("b", "setsid", "stubborn"))))
    ready(process)
    assert until(lambda: len(rig.processes()) == len(KINDS) + 3)
    assert 1 == len(guardians_of(process.pid))
    process.kill()

    assert until(lambda: rig.processes() == [])
    assert until(lambda: guardians_of(process.pid) == [])


def test_sigkill_while_it_starts(rig: Rig, start: Start) -> None:
    """Before all are ready it is the same."""
    process = start(str(rig.file(rig.worker("a", "unready", "setsid"))))
    assert until(lambda: len(rig.processes()) == 2)
    process.kill()

    assert until(lambda: rig.processes() == [])
    assert until(lambda: guardians_of(process.pid) == [])


def test_sigkill_with_a_fork_of_the_parent(rig: Rig, tmp_path: Path) -> None:
    """A child that the parent forked without exec holds the pipe as well; the guardian acts all the same."""
    (tmp_path / "forks.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom harness.launch.deployment import Deployment\n"
        "from harness.launch.topology import read\n"
        "with Deployment(read(Path(sys.argv[1])), sys.argv[2]):\n"
        "    if os.fork() == 0:\n        time.sleep(300)\n"
        "    print('up', flush=True)\n    time.sleep(300)\n",
        encoding="utf-8",
    )
    file = rig.file(rig.worker("a"))
    command = [*kvshard()[:1], "-W", "ignore", str(tmp_path / "forks.py"), str(file), str(rig.log_dir)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    forked = [child for child in psutil.Process(process.pid).children() if "forks.py" in " ".join(child.cmdline())]
    process.kill()
    is_clean = until(lambda: rig.processes() == [])
    for child in forked:
        child.kill()
    process.communicate()

    assert (True, 1) == (is_clean, len(forked))


def test_the_terminal_is_closed(rig: Rig, start: Start) -> None:
    """SIGHUP ends `kvshard up` itself; the guardian does the rest."""
    process = start(str(rig.file(rig.worker("a", "child"))))
    ready(process)
    process.send_signal(signal.SIGHUP)

    assert -signal.SIGHUP == ended(process)[0]
    assert until(lambda: rig.processes() == [])


def test_signals_do_not_end_the_guardian(rig: Rig, start: Start) -> None:
    """It has a session of its own and ignores what a cleaner may send; only SIGKILL ends it, and that ends all."""
    process = start(str(rig.file(rig.worker("a"))))
    ready(process)
    (guardian,) = guardians_of(process.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(guardian, number)
    time.sleep(0.2)
    assert ([guardian], guardian) == (guardians_of(process.pid), os.getsid(guardian))
    os.kill(guardian, signal.SIGKILL)

    code, _, err = ended(process)
    assert 1 == code
    assert "kvshard up: the guardian has ended; see " in err


def test_nobody_reads_stderr(rig: Rig, start: Start) -> None:
    """A closed stderr changes neither the line nor the end."""
    process = start(str(rig.file(rig.worker("a"), rig.worker("b"))))
    assert process.stderr is not None
    process.stderr.close()
    told = ready(process)
    assert sorted(told["pids"].values()) == rig.processes()
    process.send_signal(signal.SIGTERM)

    assert 0 == process.wait(60)
    assert [] == rig.processes()


def test_interrupted_while_it_starts(rig: Rig, start: Start) -> None:
    """It ends with 0 and says nothing on stdout; a second signal changes nothing."""
    process = start(str(rig.file(rig.worker("a", "unready", "stubborn", "setsid"))))
    assert until(lambda: len(rig.processes()) == 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)

    assert (0, "") == ended(process)[:2]
    assert [] == rig.processes()


def test_a_worker_that_dies_in_use(rig: Rig, start: Start) -> None:
    """All go down, with 1 and the reason."""
    process = start(str(rig.file(rig.worker("a", "setsid"), rig.worker("b"))))
    told = ready(process)
    with contextlib.suppress(OSError):  # it dies instead of an answer
        urllib.request.urlopen(f"{told['urls']['a']}/die", timeout=10).close()  # noqa: S310  # of the server above

    code, _, err = ended(process)
    assert 1 == code
    assert "kvshard up: worker 'a' ended with exit code 9 while it was in use\nlast 30 lines of " in err
    assert [] == rig.processes()


@pytest.mark.parametrize(
    ("word", "said"), [("dies", "ended with exit code 7 before it was ready"), ("unready", "was not ready within 1 s;")]
)
def test_a_worker_that_is_never_ready(rig: Rig, start: Start, word: str, said: str) -> None:
    """1 with the reason and the end of its log; nothing on stdout."""
    process = start(str(rig.file(rig.worker("a"), rig.worker("b", word))), "--set", "b.ready_seconds=1")

    code, out, err = ended(process)
    assert (1, "") == (code, out)
    assert f"kvshard up: worker 'b' {said}" in err
    assert f"b.log:\n{'line 20' if word == 'dies' else 'words unready'}\n" in err


def test_two_at_the_same_time(rig: Rig, start: Start) -> None:
    """They share no port; the end of one does not touch the other."""
    file = str(rig.file(rig.worker("a"), rig.worker("b")))
    processes = [start(file, "--log-dir", str(rig.folder / name)) for name in ("one", "two")]
    told = [ready(process) for process in processes]
    assert 4 == len({url for one in told for url in one["urls"].values()})
    processes[0].send_signal(signal.SIGINT)

    assert 0 == ended(processes[0])[0]
    assert sorted(told[1]["pids"].values()) == rig.processes()
    processes[1].send_signal(signal.SIGINT)
    assert 0 == ended(processes[1])[0]


def test_print_only(rig: Rig, start: Start) -> None:
    """Commands, variables and ports with all values filled in; nothing is started, no log is made."""
    file = rig.file(rig.worker("a", "{ports}", ports=["x"]), rig.worker("b", "{url:a}", after=["a"]))
    code, out, err = ended(start(str(file), "--print-only", "--set", "a.gpus=0", "--set", 'a.env.WORD="x y"'))

    assert (0, "") == (code, err)
    first, a, second, b = out.splitlines()
    port, extra = first.removeprefix("# a (plain): port=").split(" x=")
    assert a.startswith("WORD='x y' CUDA_VISIBLE_DEVICES='' /")
    assert a.endswith(f"server.py {port} {rig.tag} {port},{extra}")
    assert second.startswith("# b (plain, the entry) after a: port=")
    assert b.endswith(f" http://127.0.0.1:{port}")
    assert not (rig.folder / "kvshard-logs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.toml"], "kvshard up: nowhere.toml: No such file or directory; expected a topology file"),
        (["set.toml", "--set", "c.gpus=1"], "kvshard up: --set c.gpus=1: there is no 'c'"),
        (["set.toml", "--set", "a.health=x"], "worker 'a': health = 'x'; expected a path that begins with /"),
        (["set.toml", "--print-olny"], "kvshard: unknown argument --print-olny; did you mean '--print-only'?"),
        ([], "kvshard: the following arguments are required: FILE"),
    ],
)
def test_what_cannot_work(rig: Rig, start: Start, words: list[str], said: str) -> None:
    """2 and one line, for a file, a setting and an option alike."""
    rig.file(rig.worker("a"))
    code, out, err = ended(start(*words))

    assert (2, "", 1) == (code, out, len(err.splitlines()))
    assert said in err


def test_help(start: Start) -> None:
    """It tells the exit codes."""
    code, out, _ = ended(start("--help"))
    assert 0 == code
    assert "Exit codes: 0 ended by SIGINT or SIGTERM and all is down (or --print-only), 1 a worker ended" in out


ASKS = (
    "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).status, sys.argv[2] == sys.argv[1]);"
    " sys.exit(int(sys.argv[3]))"
)


@pytest.mark.parametrize("code", [0, 5])
def test_a_command_runs_in_between(rig: Rig, start: Start, code: int) -> None:
    """It runs once all are ready, gets the URLs, and its exit code is that of the whole; then all is down."""
    file = str(rig.file(rig.worker("a"), rig.worker("b", after=["a"])))
    process = start(file, "--log-dir", "logs", "--", "python3", "-c", ASKS, "{entry}", "{url:b}", str(code))

    found, out, _ = ended(process)
    assert (code, "200 True\n") == (found, out)
    assert ([], []) == (rig.processes(), guardians_of(process.pid))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["echo", "{url:c}"], "COMMAND has the unknown placeholder {url:c}; did you mean 'url:b'"),
        (["no-such-program"], "COMMAND no-such-program cannot be started: No such file or directory"),
    ],
)
def test_a_command_that_cannot_work(rig: Rig, start: Start, words: list[str], says: str) -> None:
    """An unknown placeholder is told before anything starts, an unknown program with all down again; the code is 2."""
    code, out, err = ended(start(str(rig.file(rig.worker("a"), rig.worker("b"))), "--", *words))

    assert (2, "") == (code, out)
    assert says in err
    assert ("starting" in err) == (words[0] != "echo")


def test_a_worker_that_dies_ends_the_command(rig: Rig, start: Start) -> None:
    """The command is ended first, the code is 1, and the end of the worker's log is told."""
    dies = (
        "import sys, time, urllib.request\ntry: urllib.request.urlopen(sys.argv[1] + '/die')\nfinally: time.sleep(60)"
    )
    process = start(str(rig.file(rig.worker("a"))), "--", "python3", "-c", dies, "{url:a}", rig.tag)

    code, _, err = ended(process)
    assert 1 == code
    assert "worker 'a' ended with exit code 9" in err
    assert [] == rig.processes()


def test_a_signal_ends_the_command(rig: Rig, start: Start) -> None:
    """The command gets SIGTERM, and the code is a shell's for that."""
    process = start(str(rig.file(rig.worker("a"))), "--", "sleep", "300")
    assert until(lambda: any(words_of(child)[:1] == ["sleep"] for child in psutil.Process(process.pid).children()))
    process.send_signal(signal.SIGINT)

    assert 128 + signal.SIGTERM == ended(process)[0]
    assert ([], []) == (rig.processes(), guardians_of(process.pid))

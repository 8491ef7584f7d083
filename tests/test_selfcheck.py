"""`kvshard selfcheck`: what becomes of each fault, every exit code, what is written, and nobody left behind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness import selfcheck
from harness.cli import main
from harness.fault import Fault
from harness.fault_files import Library
from harness.hunted import Hunted, Outcome
from tests.test_kill_table import header

register_cpu_ci(est_time=55, stage="commit")

ROOT = Path(__file__).parent.parent
RUN = [sys.executable, "-m", "harness.cli", "selfcheck"]
WORDS = ["--faults", "tests.hunt_faults", "--suite", "tests.hunt_cases", "--budget", "smoke", "--seed", "5"]
WORDS += ["--engine", "py:tests.miniature:correct"]


def environment() -> dict[str, str]:
    names = ("CI", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    return {name: value for name, value in os.environ.items() if name not in names}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """A fresh process, from the project's root, so that the engine's module is importable by name."""
    return subprocess.run(
        [*RUN, *WORDS, *words], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def outcomes(shown: str) -> dict[str, str]:
    """What the lines of a run without a terminal say: id -> outcome."""
    lines = [line.split() for line in shown.splitlines()]
    return {line[1]: line[0] for line in lines if line[0] in set(Outcome)}


def test_all_killed(tmp_path: Path) -> None:
    """Exit code 0 when every fault of a file outside the project dies with every seed; all files are written."""
    faults = tmp_path / "mine.py"
    faults.write_text(
        "from tests.hunt_faults import FAULTS as all_of_them, VARIANTS as all_right\n"
        "FAULTS = all_of_them[:2]\nVARIANTS = all_right[:1]\n"
    )
    files = {option: tmp_path / f"out.{option}" for option in ("record", "markdown", "html")}
    words = [word for option, path in files.items() for word in (f"--{option}", str(path))]

    done = command("--faults", str(faults), "--seeds", "2", "--jobs", "2", *words)

    assert (0, "") == (done.returncode, done.stderr), done.stdout
    names = ["canary.garbled", "canary.hollow", "canary.liar", "killed.frees_often", "killed.reads_first"]
    assert [*names, "passes.last_page_first"] == sorted(outcomes(done.stdout))
    assert "2 of 2 faults killed with every seed, 4 of 4 hunts" in done.stdout
    assert "1 of 1 right variants pass with every seed\n3 of 3 canaries seen failing\n" in done.stdout
    first, *results, last = [json.loads(line) for line in files["record"].read_text().splitlines()]
    assert ("miniature", 5, "given", "smoke") == tuple(
        first[name] for name in ("engine", "seed", "seed_origin", "budget")
    )
    assert ("2", str(faults)) == (first["options"]["seeds"], first["options"]["faults"])
    assert "py:" not in json.dumps(first)  # a record names the engine, not how it was reached
    assert {(name, seed) for name in outcomes(done.stdout) for seed in (5, 6)} == {
        (each["id"], each["seed"]) for each in results
    }
    assert (0, 10, 2) == (last["exit_code"], last["counts"]["killed"], last["counts"]["passed"])
    assert "| `killed.reads_first` | It is killed.reads_first. |" in files["markdown"].read_text()
    assert "<td>killed 2/2<td>sample.reads_what_was_written" in files["html"].read_text()
    assert {"mine.py", *(path.name for path in files.values())} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("words", "code", "expected", "part"),
    [
        (["-k", "idle.", "--only", "faults"], 2, {"idle.evicts": "idle"}, "nothing that it changes was run"),
        (["-k", "dies."], 3, {"dies.at_once": "error"}, "its process ended with 7"),
        (
            ["--jobs", "2"],
            1,
            {
                "canary.garbled": "killed",
                "canary.liar": "killed",
                "canary.hollow": "killed",
                "passes.last_page_first": "passed",
                "passes.misuse": "passed",
                "refused.reads_first": "refused",
                "idle.aborts": "idle",
                "killed.reads_first": "killed",
                "killed.frees_often": "killed",
                "killed.raises": "killed",
                "survives.keeps_none": "survived",
                "idle.evicts": "idle",
                "error.takes_none": "error",
                "dies.at_once": "error",
            },
            "3 of 7 faults killed with every seed",
        ),
    ],
)
def test_exit_codes(words: list[str], code: int, expected: dict[str, str], part: str) -> None:
    """What is not run is 2, an error 3, a survivor or a refused variant 1 whatever else there is; each has its line."""
    done = command(*words)

    assert (code, "") == (done.returncode, done.stderr), done.stdout
    assert expected == outcomes(done.stdout)
    assert part in done.stdout


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([], 2),
        ([Outcome.KILLED, Outcome.PASSED], 0),
        ([Outcome.KILLED, Outcome.IDLE], 2),
        ([Outcome.IDLE, Outcome.ERROR], 3),
        ([Outcome.ERROR, Outcome.SURVIVED, Outcome.IDLE], 1),
        ([Outcome.REFUSED, Outcome.KILLED, Outcome.ERROR], 1),
    ],
)
def test_what_outweighs_what(found: list[Outcome], code: int) -> None:
    """What lives outweighs an error, an error what was not run; nothing at all is no pass."""
    check = selfcheck.Check([], Library(), header())
    check.done += [Hunted(id="a", seed=1, outcome=outcome) for outcome in found]

    assert code == check.exit_code


def asked(*words: str) -> list[tuple[str, int]]:
    """Ids and seeds that a command would hunt."""
    parser = argparse.ArgumentParser()
    selfcheck.add_arguments(parser)
    return [(hunt.id, hunt.seed) for hunt in selfcheck.planned(parser.parse_args([*WORDS, *words])).hunts]


def ids(*words: str) -> list[str]:
    return [name for name, _ in asked(*words)]


def test_a_sample_is_drawn_by_the_seed() -> None:
    """The same seed draws the same faults, another seed others; a tenth as many variants, and all canaries."""
    draws = [ids("--sample", "3", "--seed", str(seed)) for seed in range(4)]

    assert draws[1:3] == [ids("--sample", "3", "--seed", str(seed)) for seed in (1, 2)]
    assert len({tuple(draw) for draw in draws}) > 2
    assert {3 + 1 + 3} == {len(draw) for draw in draws}
    assert all(3 == sum(name.startswith("canary.") for name in draw) for draw in draws)
    every = ids()
    assert all(draw == [name for name in every if name in draw] for draw in draws)
    assert every == ids("--sample", "100")


def test_a_sample_stays_when_a_fault_comes() -> None:
    """Names are drawn each for itself, so a sample changes by the new fault or not at all."""
    args = argparse.Namespace(pattern="", only="faults", sample=20)

    def drawn(count: int, seed: int) -> set[str]:
        fault = Fault(id="any", does="", kind="", like="", breaks=(), changes=())
        faults = {f"fault.{number}": fault for number in range(count)}
        return set(selfcheck._chosen(args, Library(faults=faults, variants={}), seed))

    changes = [drawn(41, seed) - drawn(40, seed) for seed in range(20)]
    assert {frozenset(), frozenset({"fault.40"})} == set(map(frozenset, changes))


def test_what_is_asked_for() -> None:
    """`--only` takes one kind, `-k` what has the text in its id; `--seeds` tries all, one seed after another."""
    kinds = {kind: ids("--only", kind) for kind in ("canaries", "variants", "faults")}

    assert ["canary.garbled", "canary.hollow", "canary.liar"] == sorted(kinds["canaries"])
    assert (4, 7) == (len(kinds["variants"]), len(kinds["faults"]))
    assert [*kinds["canaries"], *kinds["variants"], *kinds["faults"]] == ids()
    assert ["refused.reads_first", "killed.reads_first"] == ids("-k", "reads_first")
    assert ["killed.reads_first"] == ids("-k", "reads_first", "--only", "faults")
    names = ("idle.aborts", "idle.evicts")
    assert [(name, seed) for seed in (5, 6, 7) for name in names] == asked("-k", "idle", "--seeds", "3")


def test_which_seeds_are_shrunk() -> None:
    """`--shrink` names the seeds whose counterexamples are shrunk: all, the first, or none."""
    parser = argparse.ArgumentParser()
    selfcheck.add_arguments(parser)

    def told(*words: str) -> list[bool]:
        words = (*WORDS, "-k", "killed.raises", "--seeds", "3", *words)
        return [hunt.shrinks for hunt in selfcheck.planned(parser.parse_args(words)).hunts]

    assert told() == told("--shrink", "all") == [True] * 3
    assert [True, False, False] == told("--shrink", "first")
    assert [False] * 3 == told("--shrink", "none")


def test_a_fault_may_ask_for_its_engine(tmp_path: Path) -> None:
    """A fault is hunted at the address that it asks for, unless another one is given."""
    faults = tmp_path / "asking.py"
    faults.write_text(
        "from dataclasses import replace\nfrom tests.hunt_faults import FAULTS as those\n"
        "FAULTS = (those[0], replace(those[1], engine='py:tests.miniature:slow'))\n"
    )
    parser = argparse.ArgumentParser()
    selfcheck.add_arguments(parser)
    words = ["--faults", str(faults), "--suite", "tests.hunt_cases", "-k", "frees_often"]

    own = selfcheck.planned(parser.parse_args(words)).hunts
    given = selfcheck.planned(parser.parse_args([*words, "--engine", "py:tests.miniature:correct"])).hunts

    assert [["py:tests.miniature:slow"], ["py:tests.miniature:correct"]] == [
        [hunt.engine for hunt in hunts] for hunts in (own, given)
    ]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--faults", "none.py"], "none.py: there is no Python file none.py"),
        (["--faults", "suites.selfchek"], "suites.selfchek cannot be imported"),
        (["--faults", "tests.hunt_cases"], "no FAULTS and no VARIANTS in any module there"),
        (
            ["-k", "killed.read_frist"],
            "-k 'killed.read_frist': no faults in tests.hunt_faults; did you mean 'killed.read",
        ),
        (["--only", "variants", "-k", "killed"], "-k 'killed': no variants in tests.hunt_faults"),
        (["--only", "fault"], "argument --only: invalid choice: 'fault'"),
        (["--jobs", "0"], "--jobs 0: expected at least 1"),
        (["--seeds", "0"], "--seeds 0: expected at least 1"),
        (["--sample", "0"], "--sample 0: expected at least 1"),
        (["--sample", "few"], "argument --sample: invalid int value: 'few'"),
        (["--engine", "reff"], "no engine is named 'reff'; did you mean 'ref'?"),
        (["--engine", "py:tests.miniature:corect"], "tests.miniature has no 'corect'; did you mean 'correct'?"),
        (["--suite", "suites.invariant"], "did you mean 'suites.invariants'?"),
        (["--budget", "comit"], "invalid choice: 'comit'"),
        (["--record", "no/such/file"], "--record no/such/file: expected a file in a folder that exists"),
        (["--html", "tests"], "--html tests: expected a file in a folder that exists"),
        (["--wohle"], "unknown argument --wohle; did you mean '--whole'?"),
        (["stale"], "unknown argument stale"),
    ],
)
def test_wrong_usage_is_one_line(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is one line on stderr with what was expected, and exit code 3, before anything is hunted."""
    code = main(["selfcheck", *WORDS, *words])

    shown = capsys.readouterr()
    assert code == 3
    assert part in shown.err
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)


def test_a_stale_fault_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault whose text is no longer in its function is told, on one line, before anything is hunted."""
    faults = tmp_path / "stale.py"
    faults.write_text(
        "from harness.fault import Edit\nfrom tests.hunt_faults import fault\n"
        "FAULTS = (fault('stale', Edit('tests.miniature:correct', 'gone', 'x')),)\n"
    )

    code = main(["selfcheck", *WORDS, "--faults", str(faults)])

    shown = capsys.readouterr()
    assert (3, "") == (code, shown.out)
    assert "kvshard: fault 'stale': tests.miniature:correct: found 0 times, expected once: 'gone'\n" == shown.err


def members(session: int) -> list[str]:
    """The processes of a session that still run."""
    shown = subprocess.run(["ps", "-eo", "pid=,sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 3) for line in shown.splitlines()]
    return [line[3] for line in lines if line[1] == str(session) and not line[2].startswith("Z")]


def until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_ended_run_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Ctrl-C or SIGKILL while faults are hunted: no process stays, no file either."""
    words = ["--engine", "py:tests.miniature:slow", "--budget", "commit", "-k", "survives", "--seeds", "9"]
    words += ["--jobs", "2", "--record", str(tmp_path / "r.jsonl")]
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen(
            [*RUN, *WORDS, *words], cwd=ROOT, env=environment(), stdout=out, stderr=out, start_new_session=True
        )
    try:
        # itself, what forks, what cleans up after it, and two jobs
        until(lambda: len(members(run.pid)) == 5, 60)
        time.sleep(0.3)

        run.send_signal(number)

        assert run.wait(timeout=30) == code, (tmp_path / "out").read_text()
        until(lambda: not members(run.pid), 10)
    finally:
        if members(run.pid):
            os.killpg(run.pid, signal.SIGKILL)
    assert ["out"] == [file.name for file in tmp_path.iterdir()]
    assert ("kvshard: interrupted\n" if number == signal.SIGINT else "") == (tmp_path / "out").read_text()


def test_an_interrupted_run_keeps_what_was_done(tmp_path: Path) -> None:
    """Ctrl-C when one job has ended: the record holds that job and says 130."""
    words = ["--budget", "commit", "--seeds", "500", "--jobs", "1", "--record", str(tmp_path / "r.jsonl")]
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen([*RUN, *WORDS, *words], cwd=ROOT, env=environment(), stdout=out, stderr=out)
    try:
        until(lambda: "killed" in (tmp_path / "out").read_text(), 60)

        run.send_signal(signal.SIGINT)

        assert run.wait(timeout=30) == 130, (tmp_path / "out").read_text()
    finally:
        run.kill()
    _, *jobs, footer = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert 130 == footer["exit_code"]
    assert [True] == [*{0 < len(jobs) == sum(footer["counts"].values())}]

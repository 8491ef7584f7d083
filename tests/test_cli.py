"""The command line: every command, every exit code, and nothing left behind when it is ended."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ci.register import register_cpu_ci
from harness.cli import COMMANDS, main
from harness.record import read
from harness.types import Verdict

register_cpu_ci(est_time=30, stage="commit")

HERE = Path(__file__).parent
ROOT = HERE.parent
CASES = str(HERE / "sample_cases.py")
RUN = [sys.executable, "-m", "harness.cli"]


def engine(name: str) -> str:
    return f"py:{HERE / 'miniature.py'}:{name}"


@pytest.fixture
def environment() -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    }
    return {**kept, "PYTHONPATH": str(ROOT)}


Kvshard = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def kvshard(tmp_path: Path, environment: dict[str, str]) -> Kvshard:
    """Runs a command in a fresh process, in an empty folder."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*RUN, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return call


def run_words(name: str, *words: str, jobs: int = 0) -> list[str]:
    return ["run", engine(name), "--suite", CASES, "--budget", "smoke", "--jobs", str(jobs), "--seed", "5", *words]


def test_a_right_engine_passes(kvshard: Kvshard, tmp_path: Path) -> None:
    """Exit code 0 when all selected cases pass; no file is left, and the project around it has no say."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError\n")

    done = kvshard(*run_words("correct", "-k", "sample.reads or sample.free"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("engine       miniature 1.0")
    assert "seed         5 (given); --seed 5 repeats the run" in done.stdout
    assert "2 pass  0 fail  0 unknown  0 skip  0 error" in done.stdout
    assert done.stderr == ""
    assert {file.name for file in tmp_path.iterdir()} == {"pytest.ini", "conftest.py"}


def test_a_wrong_engine_fails_and_replays(kvshard: Kvshard, tmp_path: Path) -> None:
    """Exit code 1 with the five parts and all reports; the printed command shows the violation in a new process."""
    files = ["--record", "r.jsonl", "--junit", "j.xml", "--markdown", "m.md"]

    done = kvshard(*run_words("wrong", *files, jobs=2))

    assert done.returncode == 1, done.stdout + done.stderr
    record = read(tmp_path / "r.jsonl")
    by_case = {result.case: result for result in record.results}
    assert [result.verdict for result in record.results] == [Verdict.PASS, Verdict.SKIP, Verdict.UNKNOWN, Verdict.FAIL]
    failure = by_case["sample.reads_what_was_written"].failure
    assert failure is not None
    assert f"replay    {failure.replay}" in done.stdout
    assert (record.footer.exit_code, record.header.options["jobs"]) == (1, "2")
    assert len(ET.parse(tmp_path / "j.xml").findall(".//failure")) == 1  # noqa: S314  # written by this test
    assert "1 fail" in (tmp_path / "m.md").read_text()

    again = kvshard(*failure.replay.split()[1:])
    other = kvshard(*failure.replay.split()[1:], "--engine", engine("correct"))

    assert again.returncode == 1, again.stderr
    assert again.stdout.splitlines()[1:5] == [
        "  1. open r0 tokens 7,7,7 (3)",
        "     ok 0 cached",
        "  2. extend r0 by 3",
        "     ok [0, 3) computed, [0, 3) read",
    ]
    assert again.stdout.splitlines()[-1] == "reproduced"
    assert "seen      1 distinct rows" in again.stdout
    assert (other.returncode, other.stdout.splitlines()[-1]) == (
        0,
        "not reproduced: sample.reads_what_was_written holds over all 2 ops",
    )


@pytest.mark.parametrize(
    ("name", "words", "code", "part"),
    [
        ("correct", ["-k", "sample.never_met"], 2, "saw 0 times 'restored', needs 1"),
        ("modest", [], 2, "4 skip"),
        ("correct", ["-k", "nothing_at_all"], 2, "matches 'nothing_at_all'"),
        ("refuses", ["-k", "sample.reads"], 3, "unsupported: not built yet"),
    ],
)
def test_nothing_passes_by_absence(kvshard: Kvshard, name: str, words: list[str], code: int, part: str) -> None:
    """Vacuous, all skipped, nothing collected: 2. A broken claim: 3."""
    done = kvshard(*run_words(name, *words))

    assert done.returncode == code, done.stdout + done.stderr
    assert part in done.stdout


def test_a_worker_that_dies_is_an_error(kvshard: Kvshard, tmp_path: Path) -> None:
    """A crash is told for the case that ran, the other cases still run, and the exit code is 3."""
    done = kvshard(*run_words("dies", "-k", "sample.reads or locate", "--record", "r.jsonl", jobs=1))

    assert done.returncode == 3, done.stdout + done.stderr
    verdicts = {result.case: result.verdict for result in read(tmp_path / "r.jsonl").results}
    assert verdicts == {"sample.reads_what_was_written": Verdict.ERROR, "sample.needs_locate": Verdict.SKIP}
    assert "the process died while this case ran" in done.stdout


def test_a_suite_that_cannot_be_collected_is_an_error(kvshard: Kvshard, tmp_path: Path) -> None:
    """Exit code 3 with the reason, although the other file's cases pass."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_broken.py").write_text("import no_such_module\n")
    (tmp_path / "suite" / "test_cases.py").write_text(Path(CASES).read_text())

    done = kvshard(
        "run",
        engine("correct"),
        "--suite",
        "suite/",
        "--budget",
        "smoke",
        "--jobs",
        "0",
        "-k",
        "sample.reads or broken",
    )

    assert done.returncode == 3
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stdout
    assert "1 pass  0 fail  0 unknown  0 skip  1 error" in done.stdout


def test_a_plain_test_that_fails_is_an_error(kvshard: Kvshard, tmp_path: Path) -> None:
    """A failing test of a suite that is no case does not hide behind cases that pass."""
    (tmp_path / "test_mixed.py").write_text(Path(CASES).read_text() + "\n\ndef test_zebra():\n    assert 1 == 2\n")

    done = kvshard(
        "run",
        engine("correct"),
        "--suite",
        "test_mixed.py",
        "--budget",
        "smoke",
        "--jobs",
        "0",
        "-k",
        "never_met or zebra",
    )

    assert done.returncode == 3, done.stdout


def members(session: int) -> list[str]:
    """The processes of a session that still run."""
    shown = subprocess.run(["ps", "-eo", "pid=,sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 3) for line in shown.splitlines()]
    return [line[3] for line in lines if line[1] == str(session) and not line[2].startswith("Z")]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_ended_run_leaves_nothing(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals, code: int
) -> None:
    """Ctrl-C, SIGTERM or SIGKILL of the run: no process stays, no file either, and the code says how it ended."""
    words = ["run", engine("slow"), "--suite", CASES, "--budget", "commit", "--jobs", "2", "--record", "r.jsonl"]
    words += ["-k", "sample.reads or sample.free", "--traces", "traces"]
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen(
            [*RUN, *words], cwd=tmp_path, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        _until(lambda: len(members(run.pid)) == 3 and "environment" in (tmp_path / "out").read_text(), 60)
        time.sleep(1.0)

        run.send_signal(number)

        assert run.wait(timeout=30) == code, (tmp_path / "out").read_text()
        _until(lambda: not members(run.pid), 10)
    finally:
        if members(run.pid):
            os.killpg(run.pid, signal.SIGKILL)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert ("interrupted" in (tmp_path / "out").read_text()) == (number == signal.SIGINT)


def _until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["rnu"], "there is no command 'rnu'; did you mean 'run'?"),
        (["run"], "the following arguments are required: ENGINE; see kvshard run --help"),
        (["run", "ref", "--jbos", "3"], "unknown argument --jbos 3; did you mean '--jobs'?"),
        (["run", "ref", "--budget", "comit"], "invalid choice: 'comit' (choose from"),
        (["run", "ref", "--jobs", "-1"], "--jobs -1: expected at least 1, or 0"),
        (["run", "ref", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["run", "ref", "-k", "a and ("], "-k 'a and ('"),
        (["run", "ref", "--suite", "suites.invariant"], "did you mean 'suites.invariants'?"),
        (
            ["run", "ref", "--junit", f"{HERE / 'conftest.py'}/folder.xml"],
            "conftest.py/folder.xml: expected a file; ",
        ),
        (["list", "--engine", "reff"], "no engine is named 'reff'; did you mean 'ref'?"),
        (["describe", "sample.never", "--suite", CASES], "'sample.never' is no case of"),
        (["describe", "--markdown", "ref"], "--markdown is for all cases"),
        (["smoke", "py:none:x"], "none cannot be imported: ModuleNotFoundError"),
        (["replay", "none.jsonl"], "none.jsonl: cannot be read: No such file or directory"),
    ],
)
def test_wrong_usage_is_one_line(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is one line on stderr with what was expected, and exit code 3."""
    code = main(words)

    shown = capsys.readouterr()
    assert code == 3
    assert part in shown.err
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)


def test_a_wrong_address_of_a_run_is_one_line(kvshard: Kvshard) -> None:
    """The same for what only pytest finds out."""
    done = kvshard(*run_words("corect"))

    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (f"kvshard: {engine('corect')}: miniature.py has no 'corect'; did you mean 'correct'?\n")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Help names every command and is 0; no command at all is wrong usage."""
    codes = [main(["--help"]), main(["run", "--help"]), main(["--version"]), main([])]

    shown = capsys.readouterr().out
    assert codes == [0, 0, 0, 3]
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert "Exit codes: 0 all proven, 1 a counterexample" in shown
    assert "kvshard 0." in shown


def test_help_is_quick() -> None:
    """Neither torch nor Hypothesis nor pytest is imported before a command needs it."""
    code = (
        "import sys; from harness import cli; cli.main(['--help']); "
        "print({'torch', 'hypothesis', 'pytest'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "set()"


def test_every_command_is_a_module() -> None:
    """Each has `add_arguments` and `run`."""
    for command in COMMANDS.values():
        module = importlib.import_module(command.module)
        assert callable(module.add_arguments)
        assert callable(module.run)


def test_list_shows_engines_and_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """With an engine, the cases it can run and what it lacks for the others."""
    codes = [main(["list", "--suite", CASES]), main(["list", "--suite", CASES, "--engine", engine("correct")])]

    shown = capsys.readouterr().out
    assert codes == [0, 0]
    assert "ref     built in" in shown
    assert "A chunk reads distinct rows for distinct tokens." in shown
    assert "lacks op.locate" in shown
    assert shown.splitlines()[-1] == "miniature 1.0 can run 3 of 4 cases"


def test_describe_tells_cases_and_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """A case with claim, reason, needs and conditions; an engine with what it claims and what not; all as Markdown."""
    case = main(["describe", "sample.reads_what_was_written", "--suite", CASES])
    told = capsys.readouterr().out
    codes = [case, main(["describe", engine("correct")]), main(["describe", "--suite", CASES])]
    shown = capsys.readouterr().out
    codes.append(main(["describe", "--markdown", "--suite", CASES]))

    assert codes == [0, 0, 0, 0]
    assert "claim          A chunk reads distinct rows for distinct tokens." in told
    assert "must have met  extended at least 3 times, hit at least 1 times" in told
    assert "shards 1; page sizes 2, 4; layouts sharded" in shown
    assert "not claimed: reserve, send, receive, release, lose, locate" in shown
    assert "sample.never_met\n" in shown
    assert capsys.readouterr().out.startswith("# Invariants\n")


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("correct", 0, "miniature 1.0: 22 pass"),
        ("boastful", 3, "op.locate error claimed, yet unsupported: MiniatureSession has no do_locate"),
        ("refuses", 3, "op.extend error claimed, yet unsupported: not built yet"),
        ("hides", 3, "snapshot.free error is None at the start on rank 0"),
        ("raises", 3, "op.finish error raised RuntimeError: finish is broken at"),
        ("modest", 2, "op.evict note works, yet is not claimed"),
        ("modest", 2, "snapshot.free note is shown, yet not claimed"),
        ("modest", 2, "ops unknown the manifest claims no op"),
    ],
)
def test_smoke_tries_every_claim(name: str, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is claimed works, or it is an error; what works and is not claimed is a note."""
    assert main(["smoke", engine(name)]) == code
    assert line in " ".join(capsys.readouterr().out.split())


def test_the_reference_holds_its_claims(capsys: pytest.CaptureFixture[str]) -> None:
    """The smoke test finds nothing at the reference."""
    assert main(["smoke", "ref"]) == 0
    assert "error" not in capsys.readouterr().out

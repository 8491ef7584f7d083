"""The pytest plugin turns verdicts into outcomes, in one process and in several, and leaves other runs alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import harness.judge  # noqa: F401  # stays loaded from one run to the next
from ci.register import register_cpu_ci
from harness.plugin import plugin_arguments
from harness.record import read
from harness.types import Verdict

register_cpu_ci(est_time=10, stage="commit")

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
ROOT = HERE.parent
# The configuration of this project is not that of the runs below.
CASES = ["-c", "tox.ini", "--rootdir", ".", str(HERE / "sample_cases.py")]
NAMES = {"test_free_pages_are_counted", "test_never_met", "test_reads_what_was_written"}


def engine(name: str) -> list[str]:
    return [*plugin_arguments(), "--engine", f"py:{HERE / 'miniature.py'}:{name}", "--budget", "smoke"]


@pytest.fixture
def inside(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A pytester whose runs start as they do for a user outside of CI."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider\n")
    return pytester


def test_verdicts_become_outcomes(inside: pytest.Pytester) -> None:
    """Pass passes, skip skips with its reason, unknown fails with its sentence; engine, budget and seed are shown."""
    result = inside.runpytest_inprocess(*engine("correct"), "--kvshard-seed", "5", "-rs", *CASES)

    result.assert_outcomes(passed=2, skipped=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "kvshard: engine miniature 1.0, budget smoke, seed 5 (given)",
            "unknown: saw 0 times 'restored', needs 1",
            "SKIPPED*miniature does not claim op.locate",
        ]
    )


def test_a_failure_has_five_parts_and_no_traceback(inside: pytest.Pytester) -> None:
    """The message is claim, seen, expected, ops and the replay command; the trace lies where it says."""
    result = inside.runpytest_inprocess(*engine("wrong"), "--kvshard-seed", "5", "-k", "sample.reads", *CASES)

    result.assert_outcomes(failed=1, deselected=3)
    result.stdout.fnmatch_lines(
        [
            "claim     A chunk reads distinct rows for distinct tokens.",
            "seen      1 distinct rows",
            "expected  3 distinct rows",
            "          because every token has its own stamp",
            "ops       2 on *",
            "          1. open r0 tokens 7,7,7 (3)",
            "          2. extend r0 by 3",
            "replay    kvshard replay kvshard-traces/wrong-sample.reads*-5.jsonl --suite *sample_cases.py",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*harness/*.py:*")
    assert [file.name for file in (inside.path / "kvshard-traces").iterdir()] == [
        "wrong-sample.reads_what_was_written-5.jsonl"
    ]


def test_no_failure_no_folder(inside: pytest.Pytester) -> None:
    """Traces are written for counterexamples only."""
    inside.runpytest_inprocess(*engine("correct"), *CASES)

    assert not (inside.path / "kvshard-traces").exists()


def test_an_adapter_that_contradicts_its_manifest_fails(inside: pytest.Pytester) -> None:
    """An error is a failure of the test as well, with the claim of adapters as its claim."""
    result = inside.runpytest_inprocess(*engine("refuses"), "-k", "sample.reads", *CASES)

    result.assert_outcomes(failed=1, deselected=3)
    result.stdout.fnmatch_lines(
        ["claim     An adapter does what its manifest claims.", "seen      unsupported: not built yet"]
    )


def test_without_an_engine_the_test_says_so(inside: pytest.Pytester) -> None:
    """A case that runs without --engine is one clear error, never a skip."""
    result = inside.runpytest_inprocess(*plugin_arguments(), "-k", "sample.reads", *CASES)

    result.assert_outcomes(errors=1, deselected=3)
    result.stdout.fnmatch_lines(["this test judges an engine: say which, with --engine ref or KVSHARD_ENGINE=ref"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_the_engine_of_the_environment_is_for_suites_alone(
    inside: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVSHARD_ENGINE names the engine for files of suites/, which runners of CI start, and for no other test."""
    monkeypatch.setenv("KVSHARD_ENGINE", "ref")
    mine = inside.makepyfile("def test_a(request): assert request.config.getoption('engine') is None")
    inside.runpytest_inprocess(*plugin_arguments(), mine).assert_outcomes(passed=1)
    suite = Path(__file__).parent.parent / "suites" / "invariants" / "test_misuse.py"
    inside.runpytest_inprocess(*plugin_arguments(), "--budget", "smoke", suite).assert_outcomes(passed=1)


def test_a_wrong_address_is_a_usage_error(inside: pytest.Pytester) -> None:
    """A typo in the address is one line for the whole run."""
    result = inside.runpytest_inprocess(*engine("corect"), *CASES)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *miniature.py has no 'corect'; did you mean 'correct'?"])


def test_the_seed_is_random_or_the_commit(inside: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of CI the seed is random, in CI it is the commit; both are shown."""
    arguments = [*engine("correct"), "-k", "nothing", *CASES]
    inside.runpytest_inprocess(*arguments).stdout.fnmatch_lines(["kvshard: * seed * (random)"])
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(inside.path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setenv("CI", "true")

    result = inside.runpytest_inprocess(*arguments)

    result.stdout.fnmatch_lines([f"kvshard: * seed {int(head[:8], 16)} (from commit {head[:12]})"])


def test_results_and_progress_cross_processes(inside: pytest.Pytester) -> None:
    """With xdist the record, JUnit XML and the terminal are those of one process, also while progress is told."""
    inside.makepyfile(
        spy="""
        import os, pathlib
        def pytest_runtest_logreport(report):
            if report.when == "progress" and "PYTEST_XDIST_WORKER" not in os.environ:
                with pathlib.Path("told").open("a") as file:
                    file.write(report.nodeid + os.linesep)
        """
    )
    common = ["-p", "spy", "--kvshard-seed", "5", "--kvshard-live", "-k", "not locate", *CASES]
    reports = {}
    for jobs in ("0", "2"):
        files = ["--kvshard-record", f"r{jobs}.jsonl", f"--junitxml=j{jobs}.xml"]
        result = inside.runpytest_subprocess(*engine("wrong"), *files, "-n", jobs, *common)
        result.assert_outcomes(passed=1, failed=2, deselected=int(jobs == "0"))
        reports[jobs] = read(inside.path / f"r{jobs}.jsonl")
        told = (inside.path / "told").read_text().split()
        (inside.path / "told").unlink()
        assert {nodeid.rpartition("::")[2] for nodeid in told} == NAMES
        cases = ET.parse(inside.path / f"j{jobs}.xml").findall(".//testcase")  # noqa: S314  # written by this test
        assert sorted(case.get("name") or "" for case in cases) == sorted(NAMES)
        assert [len(case.findall("properties")) for case in cases] == [0, 0, 0]

    one, two = reports["0"], reports["2"]
    assert [(result.case, result.verdict, result.ops, result.seen) for result in one.results] == [
        (result.case, result.verdict, result.ops, result.seen) for result in two.results
    ]
    assert one.footer.counts == {"pass": 1, "fail": 1, "known": 0, "unknown": 1, "skip": 0, "error": 0}
    assert (one.footer.exit_code, one.header.seed, two.header.seed, two.header.options["jobs"]) == (1, 5, 5, "2")
    assert "miniature.py" not in (inside.path / "r2.jsonl").read_text().splitlines()[0]


def test_an_engine_is_connected_once_and_closed(inside: pytest.Pytester) -> None:
    """All cases of a process share one engine; it is closed once, also when no case asked for it."""
    inside.makepyfile(
        counting=f"""
        import sys
        sys.path.append({str(HERE)!r})
        from miniature import Miniature
        class Counting(Miniature):
            def __init__(self):
                super().__init__()
                print("CONNECTED", file=sys.stderr)
            def close(self):
                print("CLOSED", file=sys.stderr)
        """
    )
    for selected in ("sample", "nothing"):
        arguments = [*plugin_arguments(), "--engine", "py:counting:Counting", "--budget", "smoke", "-s", "-k", selected]
        result = inside.runpytest_subprocess(*arguments, *CASES)

        assert [line for line in result.stderr.lines if line.isupper()] == ["CONNECTED", "CLOSED"]


def test_broken_items_are_in_the_record(inside: pytest.Pytester) -> None:
    """A file that cannot be imported and a close that raises are errors of the run, beside the results."""
    inside.makepyfile(test_broken="import no_such_module\n")
    inside.makepyfile(
        unclosable=f"""
        import sys
        sys.path.append({str(HERE)!r})
        from miniature import Miniature
        class Unclosable(Miniature):
            def close(self):
                raise OSError("does not stop")
        """
    )
    arguments = ["--engine", "py:unclosable:Unclosable", "--budget", "smoke", "--kvshard-record", "r.jsonl"]
    arguments += ["--continue-on-collection-errors", "-k", "sample.free or broken"]

    inside.runpytest_inprocess(*plugin_arguments(), *arguments, "test_broken.py", *CASES)

    found = read(inside.path / "r.jsonl")
    verdicts = {result.case: result.verdict for result in found.results}
    assert set(verdicts.values()) == {Verdict.PASS, Verdict.ERROR}
    assert verdicts["sample.free_pages_are_counted"] == Verdict.PASS
    assert sorted(case.rpartition("::")[2] for case, verdict in verdicts.items() if verdict == Verdict.ERROR) == [
        "test_broken.py",
        "test_free_pages_are_counted (teardown)",
    ]
    assert found.footer.exit_code == 3


@pytest.fixture
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is installed, as far as pytest can tell: metadata with its entry point."""
    site = tmp_path_factory.mktemp("site")
    info = site / "kvshard-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvshard\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nkvshard = harness.plugin\n")
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "CI": ""}


def test_a_foreign_repository_judges_its_engine(tmp_path: Path, installed: dict[str, str]) -> None:
    """With nothing but the package installed, another project runs the suites on its own engine, over xdist."""
    (tmp_path / "their_engine.py").write_text(
        f"import sys\nsys.path.append({str(HERE)!r})\nfrom miniature import correct\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "--pyargs", "suites.invariants"]
    command += [
        "--engine",
        "py:their_engine:correct",
        "--budget",
        "smoke",
        "-k",
        "reads.every_row or placement.bijection",
    ]

    done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True, check=False)

    assert "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "kvshard: engine miniature 1.0, budget smoke, seed " in done.stdout
    assert done.returncode == 0


def test_other_runs_are_left_alone(tmp_path: Path, installed: dict[str, str]) -> None:
    """A pytest run that judges no engine imports nothing of the harness but the plugin, and shows nothing of it."""
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n"
        "def test_theirs():\n"
        "    assert 'harness.plugin' in sys.modules\n"
        "    assert {'harness.judge', 'harness.trial', 'msgspec', 'torch', 'rich'} & set(sys.modules) == set()\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "test_theirs.py"]

    done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True, check=False)

    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "kvshard:" not in done.stdout
    assert {file.name for file in tmp_path.iterdir()} - {"__pycache__"} == {"test_theirs.py"}

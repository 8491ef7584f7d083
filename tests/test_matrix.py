"""Engines beside each other: one table, from one run or from several, that says what each came to and why."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace

from ci.register import register_cpu_ci
from harness import matrix, matrix_table, record, render
from harness.cli import main
from harness.matrix import Asked, Column, Matrix, MatrixError
from harness.record import MissingFooter, Record, WrongFooter
from harness.result import CaseResult
from harness.types import Verdict
from tests.test_record import FAILURE, sample

register_cpu_ci(est_time=30, stage="commit")

HERE = Path(__file__).parent
ROOT = HERE.parent
CASES = str(HERE / "sample_cases.py")
SUITE = {"suite": "some"}
ASKED = Asked(kvshard="0.1.0", suite="some", keyword="", budget="smoke")
PASS = CaseResult(case="a.one", verdict=Verdict.PASS)
FAIL = CaseResult(case="a.two", verdict=Verdict.FAIL, why="3", failure=FAILURE)
SKIPS = tuple(
    CaseResult(case=f"a.{name}", verdict=Verdict.SKIP, why="mini does not claim op.locate") for name in ("three", "two")
)


def engine(name: str) -> str:
    return f"py:{HERE / 'miniature.py'}:{name}"


def made(*results: CaseResult, **changed: object) -> Record:
    found = sample(results)
    header = replace(found.header, engine_options={}, options={"suite": "some", "keyword": "", "jobs": "1"}, **changed)
    return replace(found, header=header)


def column(engine: str, *results: CaseResult) -> Column:
    return matrix.column_of(made(*results, engine=engine), 0)


def shown(found: Matrix) -> str:
    out = io.StringIO()
    render.console_for(out, 100).print(matrix_table.terminal(found), crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


WHOLE = Matrix(
    asked=ASKED,
    columns=(
        column("mini", PASS, *SKIPS),
        column("maxi", PASS, FAIL),
        Column(engine="none?a=b", record=None, exit_code=3, why="not connected: no engine is named 'none'"),
    ),
)


class TestTable:
    def test_terminal(self) -> None:
        """Verdicts by case and engine; a note says the missing capability once; an engine without a record says why."""
        assert shown(WHOLE).splitlines() == [
            "case     mini 1.0  maxi 1.0  none?a=b [1]",
            "a.one    pass      pass      -",
            "a.three  skip [2]  -         -",
            "a.two    skip [2]  fail [3]  -",
            "",
            "[1] none?a=b: not connected: no engine is named 'none'",
            "[2] mini, skip: does not claim op.locate",
            "[3] maxi, fail: 3",
            "",
            "mini 1.0: 1 pass  0 fail  0 unknown  2 skip  0 error  in 1.5 s, seed 7",
            "maxi 1.0: 1 pass  1 fail  0 unknown  0 skip  0 error  in 1.5 s, seed 7",
            "none?a=b: no verdict",
        ]

    def test_markdown(self) -> None:
        """The same as Markdown, with counts, and with the counterexample folded away."""
        text = matrix_table.markdown(WHOLE)
        assert [
            "| case | mini 1.0 | maxi 1.0 | none?a=b [1] |",
            "|---|---|---|---|",
            "| `a.one` | pass | pass | - |",
            "| `a.three` | skip [2] | - | - |",
            "| `a.two` | skip [2] | fail [3] | - |",
            "| all | 1 pass, 2 skip | 1 pass, 1 fail | - |",
        ] == [line for line in text.splitlines() if line.startswith("|")]
        assert "\n2. mini, skip: does not claim op.locate\n" in text
        assert "Suite `some`, budget smoke, seed 7, kvshard 0.1.0." in text
        assert "<summary>maxi 1.0: a.two</summary>" in text

    def test_options_tell_engines_apart(self) -> None:
        """The same engine with other options is another column; version and options are as in the opening of a run."""
        one = matrix.column_of(replace(made(PASS), header=replace(made(PASS).header, engine_options={"a": "b"})))
        assert ("mini a=b", "mini 1.0 a=b") == (one.engine, one.title)

    def test_nothing_steers_a_terminal_or_a_page(self) -> None:
        """Text of engines and reasons is shown as it is."""
        odd = Column(engine="\x1b[31m|<b>", record=None, exit_code=3, why="[bold] `x`")
        found = Matrix(asked=ASKED, columns=(odd,))
        assert "\x1b" not in shown(found)
        assert "[1] \N{REPLACEMENT CHARACTER}[31m|<b>: [bold] `x`" in shown(found)
        assert "1. \x1b[31m\\|&lt;b&gt;: [bold] \\`x\\`" in matrix_table.markdown(found)


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 2), 2), ((2, 3), 3), ((3, 1, 0), 1), ((1, 130), 130), ((130, 143, 1), 143), ((0, 0), 0)]
)
def test_the_worst_code(codes: tuple[int, ...], code: int) -> None:
    """An end from outside outweighs a counterexample, that an error, that what is not proven."""
    assert code == matrix.worst(codes)


class TestFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        """What is written is read again; a record alone is one column."""
        matrix.write(tmp_path / "m.jsonl", WHOLE)
        record.write(tmp_path / "r.jsonl", made(PASS, FAIL))
        one = matrix.read(tmp_path / "r.jsonl")
        assert WHOLE == matrix.read(tmp_path / "m.jsonl")
        assert (ASKED, [("mini", 1)]) == (one.asked, [(each.engine, each.exit_code) for each in one.columns])

    @pytest.mark.parametrize(
        ("change", "error", "part"),
        [
            (lambda lines: lines[:-1], MatrixError, ":10: no footer after 3 columns"),
            (lambda lines: lines[:5], MissingFooter, ":5: the last line is no footer"),
            (lambda lines: [*lines[:3], *lines[4:]], MissingFooter, ":6: the last line is no footer"),
            (lambda lines: [*lines[:3], lines[3].replace(b"skip", b"pass"), *lines[4:]], WrongFooter, ":6: the footer"),
            (lambda lines: [lines[0].replace(b'matrix":1', b'matrix":9'), *lines[1:]], MatrixError, "matrix format 9"),
            (lambda lines: [*lines, lines[-1]], MatrixError, ":12: no footer after 3 columns"),
        ],
    )
    def test_what_is_no_matrix(
        self, tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], error: type[Exception], part: str
    ) -> None:
        """A file that was cut, changed or is of another format says where and what."""
        path = tmp_path / "m.jsonl"
        matrix.write(path, WHOLE)
        path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())) + b"\n")
        with pytest.raises(error, match=part):
            matrix.read(path)


class TestBeside:
    def test_records_of_separate_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """`kvshard matrix` makes the table of one run, tells failures, and ends with the worst code."""
        paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        record.write(paths[0], replace(made(PASS, *SKIPS), footer=replace(made(PASS, *SKIPS).footer, exit_code=0)))
        record.write(paths[1], made(PASS, FAIL, engine="maxi"))
        code = main(["matrix", *map(str, paths), "--markdown", str(tmp_path / "m.md"), "--record", str(tmp_path / "m")])
        out = capsys.readouterr().out
        assert 1 == code
        assert "a.two    skip [1]  fail [2]" in "\n".join(line.rstrip() for line in out.splitlines())
        assert FAILURE.replay in out
        assert "| `a.two` | skip [1] | fail [2] |" in (tmp_path / "m.md").read_text()
        assert matrix.beside(paths) == matrix.read(tmp_path / "m")

    def test_other_choices_of_cases(self, tmp_path: Path) -> None:
        """Cases that an engine was not asked stay empty, and the head of its column says what it was asked."""
        few = made(PASS, engine="maxi")
        record.write(tmp_path / "a.jsonl", made(PASS, *SKIPS))
        record.write(
            tmp_path / "b.jsonl", replace(few, header=replace(few.header, options={**SUITE, "keyword": "one"}))
        )
        found = matrix.beside([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
        matrix.write(tmp_path / "m.jsonl", found)

        assert ("", ["", "only the cases of -k 'one'"]) == (found.asked.keyword, [each.why for each in found.columns])
        told = [
            "case     mini 1.0  maxi 1.0 [1]",
            "a.one    pass      pass",
            "a.three  skip [2]  -",
            "a.two    skip [2]  -",
        ]
        assert told == shown(found).splitlines()[:4]
        assert "[1] maxi: only the cases of -k 'one'" in shown(found)
        assert found == matrix.read(tmp_path / "m.jsonl") == matrix.beside([tmp_path / "m.jsonl"])

    def test_one_choice_of_cases_is_told_once(self, tmp_path: Path) -> None:
        """Where all were asked the same cases, those are a fact of the table and of no column."""
        for name, engine in (("a", "mini"), ("b", "maxi")):
            few = made(PASS, engine=engine)
            few = replace(few, header=replace(few.header, options={**SUITE, "keyword": "one"}))
            record.write(tmp_path / f"{name}.jsonl", few)
        found = matrix.beside([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])

        assert ("one", ["", ""]) == (found.asked.keyword, [each.why for each in found.columns])

    def test_names_tell_one_engine_apart(self, tmp_path: Path) -> None:
        """NAME=FILE names a column in place of the engine's options: in its title, in its notes and in a file."""
        path = tmp_path / "a=b.jsonl"
        record.write(path, made(PASS, *SKIPS))
        found = matrix.beside([path, f"two={path}"])
        matrix.write(tmp_path / "m.jsonl", found)

        assert ["mini 1.0", "two (mini 1.0)"] == [each.title for each in found.columns]
        assert "[2] two, skip: does not claim op.locate" in shown(found)
        assert found == matrix.read(tmp_path / "m.jsonl")
        with pytest.raises(
            MatrixError, match=r"two=.*m\.jsonl: 2 engines; expected NAME=FILE with a name and a file of one"
        ):
            matrix.beside([f"two={tmp_path / 'm.jsonl'}"])

    @pytest.mark.parametrize(
        ("other", "part"),
        [
            (made(PASS, engine="maxi", budget="commit"), "has budget 'smoke', .* has budget 'commit'"),
            (made(PASS, engine="maxi", kvshard="0.2.0"), "has kvshard '0.1.0', .* has kvshard '0.2.0'"),
            (
                replace(made(PASS), header=replace(made(PASS).header, engine="maxi", options={"suite": "other"})),
                "has suite 'some', .* has suite 'other'",
            ),
            (made(PASS), "'mini 1.0' is in .*a.jsonl and in .*b.jsonl; expected each engine once, or NAME=FILE"),
        ],
    )
    def test_what_does_not_stand_beside(self, tmp_path: Path, other: Record, part: str) -> None:
        """Another budget, version or suite, or the same engine again, is refused with both values."""
        record.write(tmp_path / "a.jsonl", made(PASS))
        record.write(tmp_path / "b.jsonl", other)
        with pytest.raises(MatrixError, match=part):
            matrix.beside([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    asked = ["--suite", CASES, "--budget", "smoke", "--jobs", "0", "--seed", "5", *words]
    command = [sys.executable, "-m", "harness.cli", "run", *asked]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_run_of_several_engines(tmp_path: Path) -> None:
    """Each is judged with the same seed; one that cannot be connected says why; all files tell the same."""
    files = ["--record", "m.jsonl", "--junit", "j.xml", "--markdown", "m.md"]
    done = run(tmp_path, engine("correct"), engine("nosuch"), engine("wrong"), *files)
    found = matrix.read(tmp_path / "m.jsonl")
    reads = [each.results.get("sample.reads_what_was_written") for each in found.columns]
    suites = ET.parse(tmp_path / "j.xml").getroot()  # noqa: S314  # written by this test
    assert (1, "") == (done.returncode, done.stderr)
    assert [2, 3, 1] == [each.exit_code for each in found.columns]
    assert ["not connected: miniature.py has no 'nosuch'; did you mean 'os'?"] == [
        each.why for each in found.columns if not each.record
    ]
    assert [Verdict.PASS, None, Verdict.FAIL] == [result and result.verdict for result in reads]
    assert [5, 5] == [each.record.header.seed for each in found.columns if each.record]
    assert ["0", "0", "1"] == [suite.get("failures") for suite in suites]
    assert matrix_table.markdown(found) == (tmp_path / "m.md").read_text()
    assert shown(found).splitlines()[-3:] == [line.rstrip() for line in done.stdout.splitlines()[-3:]]
    failed = reads[2]
    assert failed is not None
    assert failed.failure is not None
    assert (failed.failure.trace or "").startswith("kvshard-traces/3-py_")


def test_one_engine_is_as_ever(tmp_path: Path) -> None:
    """A run of one engine has a record of its own kind, in a folder that is made, and no table of several."""
    done = run(tmp_path, engine("correct"), "--record", "new/folder/r.jsonl", "-k", "reads")
    assert (0, 1) == (done.returncode, len(record.read(tmp_path / "new" / "folder" / "r.jsonl").results))
    assert "1 of" not in done.stdout


def test_several_suites_at_once(tmp_path: Path) -> None:
    """An engine is asked the cases of all of them; those of servers it skips with what it does not claim."""
    words = ["--suite", f"{CASES},e2e", "-k", "reads_what or orphan", "--record", "r.jsonl"]
    done = run(tmp_path, engine("correct"), *words)
    found = {result.case: result.verdict for result in record.read(tmp_path / "r.jsonl").results}

    assert 0 == done.returncode
    assert {"sample.reads_what_was_written": Verdict.PASS, "orphan.ends_in_time": Verdict.SKIP} == found


@pytest.mark.parametrize("jobs", [0, 1])
def test_an_interrupted_run_keeps_what_was_done(tmp_path: Path, jobs: int) -> None:
    """After Ctrl-C the engines that have ended are whole, the one that ran is told as cut, others as not begun."""
    words = ["run", engine("correct"), engine("slow"), engine("wrong"), "--suite", CASES, "--budget", "commit"]
    words += ["--jobs", str(jobs), "--seed", "5", "-k", "reads", "--record", "m.jsonl", "--markdown", "m.md"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "out").open("w") as out:
        going = subprocess.Popen(
            [sys.executable, "-m", "harness.cli", *words], cwd=tmp_path, env=environment, stdout=out, stderr=out
        )
    try:
        end = time.monotonic() + 60
        while (tmp_path / "out").read_text().count("environment ") < 2 and time.monotonic() < end:
            time.sleep(0.1)  # until the second engine is connected
        time.sleep(1.0)
        going.send_signal(signal.SIGINT)
        code = going.wait(timeout=30)
    finally:
        going.kill()
    found = matrix.read(tmp_path / "m.jsonl")
    assert (130, [0, 130, 130]) == (code, [each.exit_code for each in found.columns]), (tmp_path / "out").read_text()
    assert ["", "interrupted after 0 cases", "not begun"] == [each.why for each in found.columns]
    assert (tmp_path / "out").read_text().splitlines()[-1] == "interrupted"
    assert "not begun" in (tmp_path / "m.md").read_text()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["run", "ref", "ref"], "engine ref is named twice; expected each once"),
        (["run", "ref", "sglang", "--known", "x.toml"], "such a file is about one engine"),
        (["matrix"], "the following arguments are required: RECORD"),
        (["matrix", "none.jsonl"], "none.jsonl: cannot be read"),
        (["run", "ref", "--suite", f"{CASES},none"], "suite 'none' is no module"),
        (["matrix", "x=none.jsonl"], "none.jsonl: cannot be read"),
        (["matrix", "none.jsonl", "--html", str(HERE)], f"--html {HERE}: expected a file; {HERE} is in the way"),
        (["run", "ref", "--record", f"{CASES}/a/b"], f"--record {CASES}/a/b: expected a file; {CASES} is in the way"),
    ],
)
def test_wrong_usage_is_one_line(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is one line on stderr, and exit code 3."""
    code = main(words)
    told = capsys.readouterr()
    assert (3, "", 1) == (code, told.out, len(told.err.splitlines()))
    assert part in told.err


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    """The first line has what was asked and the columns, so that no reader needs to count."""
    matrix.write(tmp_path / "m.jsonl", WHOLE)
    first = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])
    assert (1, [3, 2, None]) == (first["kvshard_matrix"], [listed["cases"] for listed in first["columns"]])

"""A run is readable on a terminal of 80 columns, without colours, without a terminal, and in every report."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from ci.register import register_cpu_ci
from harness import junit, markdown, render
from harness.case import cases_in
from harness.record import Record
from harness.result import CaseResult, Failure, Progress
from harness.standing import Standing
from harness.types import Verdict
from tests import sample_cases
from tests.test_record import FAILURE, sample

register_cpu_ci(est_time=10, stage="commit")

LONG = "allocator.a_case_with_quite_a_long_name_indeed"
ODD = Failure(
    claim="Rows [red]differ[/red].",
    seen="a|b <b>`x`</b> \x00 ```",
    expected="*c*",
    why="[bold]",
    config="N=2",
    ops=("open a",),
    replay="kvshard replay kvshard-traces/engine-allocator.a_case_with_quite_a_long_name-1234567890.jsonl",
)
RESULTS = (
    CaseResult(
        case="a.passes", verdict=Verdict.PASS, examples=3, ops=9, seconds=0.5, seen={"hit": 2, "cold": 7, "no": 0}
    ),
    CaseResult(case=LONG, verdict=Verdict.FAIL, why=ODD.seen, examples=250, ops=123456, seconds=1234.5, failure=ODD),
    CaseResult(case="a.unknown", verdict=Verdict.UNKNOWN, why="saw 0 times 'hit', needs 1"),
    CaseResult(case="a.skips", verdict=Verdict.SKIP, why="mini does not claim op.locate"),
    CaseResult(case="b.skips", verdict=Verdict.SKIP, why="mini does not claim op.locate"),
    CaseResult(
        case="test_x.py",
        verdict=Verdict.ERROR,
        why="test_x.py:1: in <module>\n    import nothing\nE   ModuleNotFoundError: no",
    ),
)


def text_of(renderable: object, width: int = 80, **settings: object) -> str:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, markup=False, **settings).print(renderable, crop=False)  # type: ignore[arg-type]  # keyword options
    return file.getvalue()


def test_the_opening_says_how_to_repeat_the_run() -> None:
    """Engine with its options, seed, commit, budget, options, versions and environment are in the first block."""
    text = text_of(render.opening(sample().header))

    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "engine mini 1.0 shards=4",
        "seed 7 (given); --seed 7 repeats the run",
        "commit none: not in a git checkout",
        "budget smoke",
        "options jobs=2",
        "versions kvshard 0.1.0, python 3.11",
        "environment CI=1",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_final_table_fits(width: int) -> None:
    """Tables stay within the terminal; only the five parts of a failure keep long lines whole, to be copied."""
    lines = text_of(render.final(sample(RESULTS), width), width).splitlines()

    long = [line for line in lines if len(line) > width]
    assert all(line.startswith(("replay ", "claim ", "seen ")) for line in long)
    assert f"replay    {ODD.replay}" in lines
    for result in RESULTS:
        assert any(line.startswith(result.case[:20]) and f" {result.verdict} " in line for line in lines)


def test_the_final_table_says_what_was_seen() -> None:
    """A pass shows its events, most frequent first and none that never happened; others show why."""
    wide = text_of(render.final(sample(RESULTS), 140), 140)
    narrow = text_of(render.final(sample(RESULTS), 80), 80)

    for text in (wide, narrow):
        assert "cold 7, hit 2" in text
        assert "no 0" not in text
        assert "saw 0 times 'hit', needs 1" in text
        assert "ModuleNotFoundError: no" in text
        assert "skip  2: mini does not claim op.locate: a.skips, b.skips" in text.replace("\n", " ")
        assert "1 pass  1 fail  1 unknown  2 skip  1 error  in 1.5 s, seed 7" in text


def test_text_of_engines_is_no_markup() -> None:
    """Brackets in messages are shown as they are, and nothing in them steers the terminal."""
    text = text_of(render.final(sample(RESULTS), 120), 120)

    assert "seen      a|b <b>`x`</b> \N{REPLACEMENT CHARACTER} ```" in text
    assert "claim     Rows [red]differ[/red]." in text
    assert "because [bold]" in text


def test_colours_are_left_out_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR takes the colours from a terminal."""
    coloured = text_of(render.final(sample(RESULTS), 80), 80, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = text_of(render.final(sample(RESULTS), 80), 80, force_terminal=True, color_system="standard")

    assert "\x1b[32m" in coloured
    assert "\x1b[32m" not in plain


def test_the_width_of_a_file_is_that_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal, COLUMNS counts, and a wide page without it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = render.console_for(io.StringIO()).width
    monkeypatch.setenv("COLUMNS", "77")

    assert (wide, render.console_for(io.StringIO()).width) == (render.FILE_WIDTH, 77)


def test_a_plain_line_per_case() -> None:
    """Without a terminal a case that ends is one line."""
    lines = [render.plain_line(result) for result in RESULTS]

    assert lines[0].split() == ["pass", "a.passes", "3", "examples", "0.5", "s"]
    assert lines[5].endswith("ModuleNotFoundError: no")
    assert not any("\n" in line for line in lines)


def standing() -> Standing:
    clock = itertools.count(0.0, 10.0)
    found = Standing(examples_each=100, total=4, clock=lambda: next(clock))
    found.progress(Progress(case="a.runs", examples=50, examples_max=200))
    found.ended(RESULTS[0])
    return found


def test_work_is_counted_in_examples() -> None:
    """One of four cases ended, one is at a quarter: five sixteenths are done after ten seconds, so 22 are left."""
    found = standing()

    assert found.fraction() == pytest.approx(5 / 16)
    assert found.seconds_left() == pytest.approx(22.0)
    assert found.counts()["pass"] == 1


def test_nothing_is_estimated_before_the_first_example() -> None:
    """Without cases or progress there is no fraction and no time."""
    found = Standing(examples_each=100)

    assert (found.fraction(), found.seconds_left()) == (0.0, None)
    assert "0/? cases  collecting" in text_of(render.live(found, 20))


def test_work_is_never_more_than_done() -> None:
    """Shrinking runs beyond the budget's examples, and does not push the bar past its end."""
    found = Standing(examples_each=100, total=1)
    found.progress(Progress(case="a", examples=900, examples_max=100, shrinking=True))

    assert found.fraction() == 1.0
    assert "shrinks a" in " ".join(text_of(render.live(found, 20)).split())


def test_the_live_table_shows_what_runs_and_what_failed() -> None:
    """A row per running case and per problem, none for a pass; it fits the terminal's height and width."""
    found = standing()
    for result in RESULTS[1:]:
        found.ended(result)

    tall, low = text_of(render.live(found, 20)).splitlines(), text_of(render.live(found, 5)).splitlines()

    assert [line.split()[0] for line in tall[:-1]] == ["fail", "unknown", "error", "runs"]
    assert "6/4 cases" in tall[-1]
    assert [line.split()[0] for line in low[:-1]] == ["2", "error", "runs"]
    assert all(len(line) <= 80 for line in tall + low)


def test_times_are_short() -> None:
    """Seconds, minutes and hours."""
    assert [render.duration(seconds) for seconds in (4.4, 89.0, 600.0, 9000.0)] == ["4 s", "89 s", "10 min", "2.5 h"]


def test_junit_never_counts_the_unproven_as_passed() -> None:
    """Fail is a failure, unknown and error are errors, skip is skipped; what XML forbids is replaced."""
    suite = ET.fromstring(ET.tostring(junit.tree(sample(RESULTS)), encoding="utf-8")).find("testsuite")  # noqa: S314  # written by this test

    assert suite is not None
    numbers = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert numbers == {"tests": "6", "failures": "1", "errors": "2", "skipped": "2"}
    kinds = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
    assert kinds == {
        "a.passes": [],
        LONG: ["failure"],
        "a.unknown": ["error"],
        "a.skips": ["skipped"],
        "b.skips": ["skipped"],
        "test_x.py": ["error"],
    }
    told = suite.find(".//failure")
    assert told is not None
    assert ODD.replay in (told.text or "")
    assert {item.get("name"): item.get("value") for item in suite.iter("property")}["engine.shards"] == "4"


def test_the_summary_is_safe_markdown() -> None:
    """Text of engines breaks no table and no fence; what is not proven is listed, what is skipped folded away."""
    text = markdown.summary(sample(RESULTS))

    assert text.startswith("### kvshard: mini 1.0: 1 pass, 1 fail, 1 unknown, 2 skip, 1 error\n")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == ["| verdict", "| fail", "| unknown", "| error"]
    assert "a\\|b &lt;b&gt;\\`x\\`&lt;/b&gt;" in rows[1]
    assert "\n````text\nclaim     Rows [red]differ[/red].\n" in text
    assert "- mini does not claim op.locate: `a.skips`, `b.skips`" in text


def test_a_summary_without_cases_says_so() -> None:
    """A run in which no case ran is told as such."""
    assert markdown.summary(sample(())).startswith("### kvshard: mini 1.0: no case ran\n")


def test_a_summary_has_a_limit() -> None:
    """Many counterexamples are counted, not all told."""
    many = tuple(CaseResult(case=f"a.c{number}", verdict=Verdict.FAIL, failure=FAILURE) for number in range(14))

    text = markdown.summary(sample(many))

    assert text.count("<details>") == markdown.SHOWN_MAX
    assert "4 more are in the record of the run." in text


def test_the_page_of_invariants_is_made_of_the_cases() -> None:
    """Every case is a row below the file it is written in, with claim, reason, invariants, needs and conditions."""
    cases = cases_in([sample_cases])

    text = markdown.invariants(cases)

    assert "## tests.sample_cases\n" in text
    assert (
        "| `sample.reads_what_was_written` | A chunk reads distinct rows for distinct tokens. "
        "| A gather that reads one row for all tokens. | I01 | `op.open`, `op.extend`, `op.finish` "
        "| extended 3, hit 1 |"
    ) in text
    assert len([line for line in text.splitlines() if line.startswith("| `")]) == len(cases)


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A folder in the way is a named error for JUnit and Markdown."""
    for write in (junit.write, markdown.write):
        with pytest.raises(ValueError, match="cannot be written: Is a directory"):
            write(tmp_path, sample())


def test_records_of_tests_are_records() -> None:
    """The sample above is a record as a run makes it."""
    assert isinstance(sample(RESULTS), Record)

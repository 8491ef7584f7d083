"""`kvshard gate` on the command line: verdicts and their exit codes, results as JSON, one-line errors, and the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom  # type: ignore[import-untyped]  # scipy ships no types

from ci.register import register_cpu_ci
from harness import gate_run
from harness.cli import main
from harness.gate_table import simulation_markdown
from harness.samples import Sample, write
from harness.stats import Pairs
from harness.stats_gate import Outcome, Terms, judge_pairs, judge_score
from harness.stats_power import plan, repeats_needed
from harness.stats_simulate import Setting, cell, simulate

register_cpu_ci(est_time=50, stage="commit")

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "gates.md").read_text()
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are whole, also in a test process that is told the width of a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


def arms(folder: Path, lost: int, gained: int, n: int = 500, **fault: Any) -> list[str]:
    """Two files: the first items lost, the next gained, the rest right; the candidate's last three with the fault."""
    paths = []
    for name in ("baseline", "candidate"):
        rows = []
        for at in range(n):
            right = not (at < lost if name == "candidate" else lost <= at < lost + gained)
            others = fault if name == "candidate" and at >= n - 3 else {}
            rows.append(Sample(item=f"item{at}", correct=right, answer=f"{at if right else -1}", **others))
        write(folder / f"{name}.jsonl", rows)
        paths.append(str(folder / f"{name}.jsonl"))
    return paths


@pytest.mark.parametrize(
    ("lost", "gained", "outcome", "code"),
    [(3, 5, "pass", 0), (27, 9, "fail", 1), (10, 7, "inconclusive", 3), (0, 0, "pass", 0)],
)
def test_compare(tmp_path: Path, capsys: Capture, lost: int, gained: int, outcome: str, code: int) -> None:
    """The verdict is the exit code, the first line and the JSON, with all its numbers."""
    assert code == main(["gate", "compare", *arms(tmp_path, lost, gained), "--json", str(tmp_path / "r.json")])
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{outcome}: ")
    assert shown.err == ""
    result = json.loads((tmp_path / "r.json").read_text())
    expected = judge_pairs(Pairs(500 - lost - gained, lost, gained, 0), Terms(margin=0.02))
    assert (outcome, lost, gained, 500) == (result["outcome"], result["lost"], result["gained"], result["n"])
    assert (expected.said, expected.items_needed) == (result["said"], result["items_needed"])
    assert list(expected.interval_points) == pytest.approx(result["interval_points"])
    named = ("p_loss", "p_noninferior", "power_at_margin", "detectable_points", "flip_rate", "alpha", "margin_points")
    assert {name: getattr(expected, name) for name in named} == pytest.approx({name: result[name] for name in named})
    assert {"name": "candidate.jsonl", "samples": 500, "errors": 0, "truncated": 0} == result["unjudged"][1]


@pytest.mark.parametrize("fault", [{"error": "timeout"}, {"finish_reason": "length"}])
def test_an_invalid_run_is_no_fail(tmp_path: Path, capsys: Capture, fault: dict[str, str]) -> None:
    """Too many failed requests are exit code 2 and an outcome of their own; with more allowed the rest is judged."""
    words = ["gate", "compare", *arms(tmp_path, 0, 0, 100, **fault), "--json", str(tmp_path / "r.json")]
    assert main(words) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "candidate.jsonl: 3 of 100" in shown.err
    assert "invalid" == json.loads((tmp_path / "r.json").read_text())["outcome"]
    assert main([*words, "--unjudged-max", "3", "--margin", "5"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["n"] == 97


def test_a_loss_does_not_hide_behind_cut_off_answers(tmp_path: Path, capsys: Capture) -> None:
    """What is lost among the answers that ended fails; behind failed requests, and without a loss, it is invalid."""
    words = arms(tmp_path, 10, 0, 100, finish_reason="length")
    assert main(["gate", "compare", *words]) == 1
    assert "10 lost and 0 gained" in (said := " ".join(capsys.readouterr().out.split()))
    assert "Cut off and left out: 0 of 100 and 3 of 100 answers." in said
    assert main(["gate", "compare", *arms(tmp_path, 2, 0, 100, finish_reason="length")]) == 2
    assert main(["gate", "compare", *arms(tmp_path, 10, 0, 100, error="timeout")]) == 2


def test_cut_off_answers_are_told(tmp_path: Path, capsys: Capture) -> None:
    """Answers that are cut off in the candidate alone, more than luck explains, are pointed at."""
    words = arms(tmp_path, 0, 0, 500)
    rows = [Sample(item=f"item{at}", correct=True, finish_reason="length" if at < 5 else "stop") for at in range(500)]
    write(tmp_path / "candidate.jsonl", rows)
    assert main(["gate", "compare", *words]) == 0
    assert "note: 5 answers are cut off in the candidate alone (p = 0.031)" in capsys.readouterr().out


def test_options_of_compare(tmp_path: Path, capsys: Capture) -> None:
    """Margin and alpha change the verdict; items that differ are refused unless the common ones are asked for."""
    files = arms(tmp_path, 10, 7)
    assert main(["gate", "compare", *files, "--margin", "2.5"]) == 0
    assert main(["gate", "compare", *files, "--alpha", "0.4"]) == 0
    assert main(["gate", "compare", *files, "--alpha", "0.4", "--margin", "0.1"]) == 1
    (tmp_path / "candidate.jsonl").write_text(
        "".join((tmp_path / "candidate.jsonl").read_text().splitlines(keepends=True)[1:])
    )
    capsys.readouterr()
    assert main(["gate", "compare", *files]) == 2
    assert "of 500 and 499 items only baseline.jsonl has 1 (item0)" in capsys.readouterr().err
    assert main(["gate", "compare", *files, "--common-only"]) == 0
    assert "1 only in the baseline, 0 only in the candidate" in capsys.readouterr().out


def test_against_a_score(tmp_path: Path, capsys: Capture) -> None:
    """With a score alone nothing is paired and the first line says less; a flaw of the candidate is still found."""
    _, candidate = arms(tmp_path, 30, 0)
    assert main(["gate", "compare", candidate, "--reference", "94", "--reference-n", "500"]) == 3
    assert "not paired, against a score of 500 items" in capsys.readouterr().out
    assert main(["gate", "compare", candidate, "--reference", "99.5"]) == 1
    assert main(["gate", "compare", candidate, candidate, "--reference", "99.5"]) == 2
    assert main(["gate", "compare", candidate]) == 2


def repeated(folder: Path, name: str, right: list[int], repeats: int) -> str:
    rows = [
        Sample(item=f"item{at}", repeat=repeat, correct=repeat < count)
        for at, count in enumerate(right)
        for repeat in range(repeats)
    ]
    write(folder / name, rows)
    return str(folder / name)


def test_repeats(tmp_path: Path, capsys: Capture) -> None:
    """Repeats are averaged per item; repeats that are copies count once, however many there are."""
    baseline = repeated(tmp_path, "a.jsonl", [8] * 20 + [5] * 10, 8)
    candidate = repeated(tmp_path, "b.jsonl", [8] * 20 + [3] * 10, 8)
    assert main(["gate", "compare", baseline, candidate]) == 1
    assert "on 30 items, 10 lost and 0 gained" in capsys.readouterr().out
    copies = [repeated(tmp_path, f"{name}.jsonl", [8] * 30, 8) for name in "cd"]
    assert main(["gate", "compare", *copies]) == 3
    assert "exact McNemar" in capsys.readouterr().out
    assert main(["gate", "compare", baseline, "--reference", "90"]) == 2


def test_plan(tmp_path: Path, capsys: Capture) -> None:
    """Items per flip rate, and repeats for a small set."""
    words = ["gate", "plan", "--loss", "5", "--flip-rate", "10", "--items", "30", "--json", str(tmp_path / "p.json")]
    assert main(words) == 0
    made, told = plan(0.05, 0.1, 0.05, 0.8, 0.94), json.loads((tmp_path / "p.json").read_text())
    assert (made.items_to_fail, made.items_to_pass, made.items) == tuple(
        told["plans"][0][name] for name in ("items_to_fail", "items_to_pass", "items")
    )
    assert {"0.1": 9} == told["repeats"]
    assert "30 items at 10 % flips: 9 repeats" in capsys.readouterr().out


def test_calibrate(tmp_path: Path, capsys: Capture) -> None:
    """The flip rate of several runs with its interval; that two runs differ more than luck allows is seen."""
    words = [*arms(tmp_path, 4, 6), "--json", str(tmp_path / "c.json")]
    assert main(["gate", "calibrate", *words]) == 0
    told = json.loads((tmp_path / "c.json").read_text())
    assert (2, 500, 0.02, 10) == (told["runs"], told["n"], told["flip_rate"], len(told["flipped"]))
    assert 1 == pytest.approx(told["p_smallest_adjusted"], abs=0.3)
    assert "flip rate" in capsys.readouterr().out
    assert main(["gate", "calibrate", *arms(tmp_path, 40, 6), "--json", str(tmp_path / "c.json")]) == 0
    assert json.loads((tmp_path / "c.json").read_text())["p_smallest_adjusted"] < 1e-4
    assert main(["gate", "calibrate", words[0]]) == 2


def test_explain(tmp_path: Path, capsys: Capture) -> None:
    """Each answer that differs with both texts, lost ones first, unanswered ones last; all of them in the JSON."""
    words = [*arms(tmp_path, 2, 1, 400, error="timeout"), "--top", "2", "--json", str(tmp_path / "e.json")]
    assert main(["gate", "explain", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("6 answers differ: 2 lost, 1 gained, 3 not judged\n")
    assert "4 more: --top 6, or --json FILE" in shown
    flips = json.loads((tmp_path / "e.json").read_text())["flips"]
    assert ["lost"] * 2 + ["gained"] + ["not judged"] * 3 == [flip["what"] for flip in flips]
    assert {"what": "lost", "item": "item0", "about": "", "repeat": 0, "baseline": "0", "candidate": "-1"} == flips[0]
    assert "[error] timeout" == flips[-1]["candidate"]


def test_what_a_task_says_of_its_items(tmp_path: Path, capsys: Capture) -> None:
    """The page that an item asks for stands beside it, and accept lengths of items answered alike below the verdict."""
    for name, right, accepted in (("a", 3, 3.0), ("b", 2, 2.0)):
        rows = [
            Sample(
                item=f"item{at}", correct=at < right, answer=str(at < right), accept_length=accepted, about=f"page {at}"
            )
            for at in range(3)
        ]
        write(tmp_path / f"{name}.jsonl", rows)
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main(["gate", "explain", *files]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert ["what", "item", "about", "repeat", "baseline", "candidate"] == shown[1].split()
    assert ["lost", "item2", "page", "2", "0", "True", "False"] == shown[2].split()
    assert main(["gate", "compare", *files, "--json", str(tmp_path / "c.json")]) == 3
    told = "drafts: accept length 3.00 and 2.00 on 2 items answered alike, 2 of them shorter, 0 longer"
    assert told in capsys.readouterr().out
    assert 2.0 == json.loads((tmp_path / "c.json").read_text())["drafts"]["candidate"]


def test_simulate(tmp_path: Path, capsys: Capture) -> None:
    """The table, the Markdown, the JSON and the picture are of the same cells."""
    words = ["gate", "simulate", "--items", "200", "--flip-rates", "3.4", "--runs", "300", "--seed", "4"]
    assert main([*words, "--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png")]) == 0
    assert "paired gate: % of runs" in capsys.readouterr().out
    setting = Setting(items=(200,), flip_rates=(0.034,), runs=300, seed=4)
    found = json.loads((tmp_path / "s.json").read_text())["cells"]
    assert [cell(setting, 200, 0.034).healthy.failed] == [each["healthy"]["failed"] for each in found]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert main([*words, "--markdown"]) == 0
    assert simulation_markdown(setting, list(simulate(setting))) == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["comprae"], "invalid choice: 'comprae'"),
        (["compare", "absent", "absent"], "absent: cannot be read"),
        (["compare", "a", "b", "--margin", "0"], "--margin: '0': expected a number above 0 to below 100"),
        (["compare", "a", "b", "--alpha", "0.5"], "--alpha: '0.5'"),
        (["compare", "a", "b", "--alpha", "nan"], "--alpha: 'nan'"),
        (["compare", "a", "b", "--unjudged-max", "x"], "--unjudged-max: 'x': expected a number from 0 to below 100"),
        (["compare", "a", "b", "--margn", "1"], "unknown argument --margn"),
        (["plan"], "the following arguments are required: --loss"),
        (["plan", "--loss", "1", "--items", "1"], "--items: '1': expected a whole number of at least 2"),
        (["plan", "--loss", "60", "--flip-rate", "50"], "at most 1 together"),
        (["simulate", "--flip-rates", "45"], "take more items"),
        (["simulate", "--runs", "0"], "--runs: '0'"),
    ],
)
def test_bad_input_is_two(words: list[str], reason: str, capsys: Capture) -> None:
    """Wrong usage is one line on stderr and exit code 2, never that of a verdict."""
    assert main(["gate", *words]) == 2
    shown = capsys.readouterr()
    assert reason in shown.err
    assert (1, "") == (shown.err.count("\n"), shown.out)


def test_help_has_the_exit_codes(capsys: Capture) -> None:
    """--help of the command and of compare say what the codes mean."""
    assert main(["gate", "--help"]) == 0
    assert "0 pass, 1 fail (a loss is shown), 3 inconclusive, 2 bad input or invalid run" in capsys.readouterr().out
    assert main(["gate", "compare", "--help"]) == 0
    assert "exit codes: 0 pass, 1 fail, 3 inconclusive, 2 bad input or invalid run" in capsys.readouterr().out


def test_a_crash_is_no_fail(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's exit code for a traceback is 1; here 1 is kept for a loss that is shown."""
    monkeypatch.setattr(gate_run, "judge", lambda *_: 1 / 0)
    assert main(["gate", "compare", *arms(tmp_path, 0, 0)]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_unread_verdict_is_no_verdict(tmp_path: Path) -> None:
    """Where nobody reads the output the code is neither pass nor fail."""
    command = [sys.executable, "-m", "harness.cli", "gate", "compare", *arms(tmp_path, 27, 9)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 2


def test_without_the_extra(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without scipy the command says what to install, with exit code 2."""
    monkeypatch.delitem(sys.modules, "harness.gate_run")
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    for name in [name for name in sys.modules if name.startswith(("harness.stats", "harness.gate_"))]:
        if name != "harness.gate_cli":
            monkeypatch.delitem(sys.modules, name)
    assert main(["gate", "compare", *arms(tmp_path, 0, 0)]) == 2
    assert "pip install 'kvshard[gate]'" in capsys.readouterr().err


def test_verdict_codes() -> None:
    """Each outcome has one exit code of its own."""
    assert {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INVALID: 2, Outcome.INCONCLUSIVE: 3} == dict(gate_run.EXIT_OF)


def between() -> str:
    """What the page shows of the simulation."""
    return PAGE.partition("<!-- simulated: begin -->\n")[2].partition("<!-- simulated: end -->")[0]


def test_the_page_shows_the_simulation() -> None:
    """The rows of one cell, simulated again, stand in the page."""
    setting = Setting(items=(200,), flip_rates=(0.034,))
    rows = [
        line for line in simulation_markdown(setting, list(simulate(setting))).splitlines() if line.startswith("| 200 ")
    ]
    assert 2 == len(rows)
    assert [] == [row for row in rows if row not in between().splitlines()]


@pytest.mark.slow
def test_the_page_shows_the_whole_simulation(capsys: Capture) -> None:
    """The part between the marks is what the command that the page names prints."""
    (command,) = re.findall(r"`kvshard (gate simulate --markdown[^`]*)`", PAGE)
    assert main(command.split()) == 0
    assert between() == capsys.readouterr().out


@pytest.mark.parametrize(
    ("lost", "gained", "p", "flips", "interval"),
    [
        (11, 1, ".003", "0.92 %", None),
        (27, 17, ".087", "3.4 %", "-1.65 to +0.08 points"),
        (37, 27, ".13", "4.9 %", "-1.82 to +0.25 points"),
    ],
)
def test_the_page_works_the_two_scores(lost: int, gained: int, p: str, flips: str, interval: str | None) -> None:
    """The paired rows of 0.9346 and 0.9423 are what the tests say."""
    pairs = Pairs(1224 - lost, lost, gained, 1299 - 1224 - gained)
    assert ("0.9423", "0.9346") == (f"{pairs.baseline:.4f}", f"{pairs.candidate:.4f}")
    result = judge_pairs(pairs, Terms(margin=0.02))
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| paired, {lost} lost and {gained} gained |")]
    assert f"p = {p} " in row
    assert float(f"0{p}") == pytest.approx(result.p_loss, abs=10.0 ** -len(p[1:]) / 2)
    assert f"flip rate {flips}" in row
    assert float(flips.removesuffix(" %")) == pytest.approx(100 * pairs.flip_rate, abs=0.05)
    assert interval is None or interval == "{:+.2f} to {:+.2f} points".format(*result.interval_points)
    assert interval is None or interval in row
    assert Outcome.PASS == result.outcome
    needed = judge_pairs(pairs, Terms(margin=0.01)).items_needed
    assert {11: None, 27: 3700, 37: 5400}[lost] == (needed and pytest.approx(needed, abs=50))
    assert needed is None or f"{round(needed, -2):,}" in PAGE


def test_the_page_works_the_other_judges() -> None:
    """The threshold and the two-sample test of the two scores, and what a retry hides, are as the page says."""
    assert (1214 / 1299 < 0.935 <= 1215 / 1299, "0.9353") == (True, f"{1215 / 1299:.4f}")
    result = judge_score(1214, 1299, 1224 / 1299, 1299, Terms(margin=0.02))
    assert (Outcome.INCONCLUSIVE, "0.21") == (result.outcome, f"{result.p_loss:.2f}")
    assert "{:+.2f} to {:+.2f} points".format(*result.interval_points) in PAGE
    assert "2.4" == f"{result.detectable_points:.1f}"
    tossed, sure = round(2 * 0.034 * 1299), round(0.93845 * 1299 - 0.034 * 1299)  # as `gate simulate` draws runs
    same, worse = (float(binom.cdf(1214 - sure + fewer, tossed, 0.5)) for fewer in (0, round(0.005 * 1299)))
    assert ("17", "3", "63", "39") == tuple(f"{100 * share:.0f}" for share in (same, same**2, worse, worse**2))


def test_the_page_plans() -> None:
    """Rows of the planning table are what the plan says."""
    rows = re.findall(r"^\| (\d) \| ([\d.]+) % \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert 7 == len(rows)
    for loss, flips, *numbers in (rows[0], rows[4], rows[6]):
        made = plan(int(loss) / 100, float(flips) / 100, 0.05, 0.8, 0.94)
        assert numbers == [f"{each:,}" for each in (made.items_to_fail, made.items_to_pass, made.items_unpaired)]
    assert 18 == repeats_needed(30, 0.05, 0.2, 0.05, 0.8)

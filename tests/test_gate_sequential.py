"""`kvshard gate sequential`: stated error rates over several runs, and no retry behind a decision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ci.register import register_cpu_ci
from harness.cli import main
from harness.samples import Sample, write
from harness.stats import mcnemar_p
from harness.stats_gate import Outcome
from harness.stats_looks import alpha_of, looks, pooled_loss_p

register_cpu_ci(est_time=15, stage="commit")

N = 400
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")


def files(folder: Path, *wrong: tuple[int, ...], **fault: Any) -> list[str]:
    """A file for each run, with these items wrong; the last one has the fault in its first items."""
    paths = []
    for number, each in enumerate(wrong):
        rows = [
            Sample(item=f"item{at}", correct=at not in each, **(fault if at < 20 and number else {})) for at in range(N)
        ]
        paths.append(str(folder / f"run{number}.jsonl"))
        write(Path(paths[-1]), rows)
    return paths


def gate(folder: Path, paths: list[str], *words: str) -> tuple[int, dict[str, Any]]:
    out = folder / "out.json"
    code = main(["gate", "sequential", *paths, "--json", str(out), *words])
    return code, json.loads(out.read_text()) if out.exists() else {}


def every(step: int, start: int = 0, count: int = N) -> tuple[int, ...]:
    return tuple(range(start, N, step))[:count]


def test_a_loss_stops_it_early(tmp_path: Path, capsys: Capture) -> None:
    """A tenth of the items lost is shown by a part of the first run, and a right second run does not undo it."""
    paths = files(tmp_path, (), every(10), ())
    code, told = gate(tmp_path, paths)

    assert (1, 1, 0.025) == (code, len(told["looks"]), told["looks"][0]["alpha"])
    items = told["looks"][0]["items"]
    assert items < N // 2
    said = f"fail: The candidate is worse: shown after {items} of 400 items of its first run, tested at 0.025 of 0.05 "
    assert f"{said}(-10.00 points). 1 later run cannot change that and did not enter." in (
        out := capsys.readouterr().out
    )
    assert "not looked at" in out


def test_no_loss_stops_it_early(tmp_path: Path) -> None:
    """Without any flip a loss of 5 points is excluded before the last item, and a bad second run does not undo it."""
    code, told = gate(tmp_path, files(tmp_path, (3,), (3,), every(5)), "--margin", "5")
    assert (0, 1, True) == (code, len(told["looks"]), told["looks"][0]["items"] < N)


def test_a_second_run_is_new_evidence(tmp_path: Path) -> None:
    """What is open after one run is judged again with both, at a quarter of alpha: shown, or still open."""
    first = every(50, 1, 5)
    code, told = gate(tmp_path, files(tmp_path, (), first), "--margin", "2")
    assert (3, "a further run would be tested at 0.0125." in told["said"]) == (code, True)
    code, told = gate(tmp_path, files(tmp_path, (), first, (*first, 2), first), "--margin", "2")
    assert [(1, "inconclusive", 0.025), (2, "fail", 0.0125)] == [
        (each["runs"], each["outcome"], each["alpha"]) for each in told["looks"]
    ]
    assert (1, round((1 / 3) ** 5 * (2 / 3), 9)) == (code, round(told["looks"][1]["p_loss"], 9))
    assert "shown by 2 runs of 400 items together, tested at 0.0125 of 0.05 (-1.38 points)" in told["said"]


def test_pooled_runs_without_a_change() -> None:
    """With one run it is McNemar's test; three equal runs say nothing; the mean of p is not below a half."""
    source = np.random.default_rng(1)
    baseline, one = source.random((2, 60)) < 0.7
    lost, gained = int((baseline & ~one).sum()), int((~baseline & one).sum())
    assert round(mcnemar_p(lost, gained), 12) == round(pooled_loss_p(baseline, [one]), 12)
    assert 1.0 == pooled_loss_p(baseline, [baseline, baseline])


def test_error_rates_of_going_on() -> None:
    """A candidate without a loss that gets up to three runs, as long as nothing is shown, fails in at most alpha."""
    source, failed, n = np.random.default_rng(5), 0, 150
    for _ in range(80):
        chance = np.where(source.random(n) < 0.1, 0.5, source.random(n) < 0.9)  # flips on 5 % of the items
        runs = source.random((4, n)) < chance
        found = looks(runs[0], list(runs[1:]), 0.005, 0.05, 0.05)  # a margin that is too small to pass soon
        failed += found[-1].outcome is Outcome.FAIL
    # 9 or more of 80 have a chance of 2 % at a rate of 5 %; by spending the rate is well below
    assert failed < 9
    assert 0.05 == pytest.approx(sum(alpha_of(look, 0.05) for look in range(1, 60)))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run0.jsonl", "run1.jsonl", "run1.jsonl"), "run1.jsonl: is given twice; expected runs that differ"),
        (("run0.jsonl",), "the following arguments are required: CAND"),
        (("run0.jsonl", "no.jsonl"), "no.jsonl: cannot be read"),
        (("run0.jsonl", "empty.jsonl"), "empty.jsonl: holds no samples"),
        (("run0.jsonl", "twice.jsonl"), "twice.jsonl: has repeats; expected one answer for each item"),
        (("run0.jsonl", "run1.jsonl"), "20 of 400 requests failed (5.0 %); at most 1 % may"),
    ],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: tuple[str, ...], says: str
) -> None:
    """One paragraph, code 2."""
    monkeypatch.chdir(tmp_path)
    files(tmp_path, (), (), error="HTTP 500")
    Path("empty.jsonl").write_text("")
    write(Path("twice.jsonl"), [Sample(item="item0", repeat=at, correct=True) for at in range(2)])
    assert 2 == main(["gate", "sequential", *words])
    assert (True, 1) == (says in (said := capsys.readouterr().err), said.count("\n"))

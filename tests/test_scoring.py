"""GSM8K scoring: the rules of lm-eval's task, and four models' published answers with the publisher's own scores."""

from __future__ import annotations

import json
import os
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import mcnemar  # type: ignore[import-untyped]  # statsmodels ships no types

from ci.register import register_cpu_ci
from harness.scoring import INVALID, Filter, extracted, is_correct, normalised
from harness.stats import Pairs, mcnemar_p, pairs_of

register_cpu_ci(est_time=10, stage="commit")

DATA = "gsm8k_example_model_solutions.jsonl"
RIGHT = {"6b_finetuning": 286, "6b_verification": 515, "175b_finetuning": 458, "175b_verification": 742}


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3 + 4 = 7\n#### 7", "7", "7"),
        ("#### 1,234.50 dollars", "1,234.50", "1,234.50"),
        ("#### 7 or rather\n#### 8", "7", "8"),
        ("#### -5.", "-5.", "-5."),
        ("#### $18", INVALID, "$18"),
        ("####18", INVALID, "18"),
        ("The answer is $1,800.", INVALID, "$1,800."),
        ("I think 5", INVALID, "5"),
        ("none", INVALID, INVALID),
        ("", INVALID, INVALID),
    ],
)
def test_answers_are_found(text: str, strict: str, flexible: str) -> None:
    """The first marked number, the last number of all, or neither."""
    assert [strict, flexible] == [extracted(text, by) for by in (Filter.STRICT, Filter.FLEXIBLE)]


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("1,234", "1234"),
        ("$18", "18"),
        ("18.", "18"),
        ("18..", "18."),
        ("18.5", "18.5"),
        ("two steps\n#### 1,000", "1000"),
        ("#### 1\n#### 2", "2"),
        (INVALID, INVALID),
        ("X", "x"),
    ],
)
def test_normalisation(answer: str, plain: str) -> None:
    """Commas, dollar signs, what is before the mark, one full stop at the end, and case do not count."""
    assert plain == normalised(answer)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("it is\n#### 1800", True, True),
        ("it is $1,800.", False, True),
        ("#### 1800.0", False, False),  # texts are compared
        ("#### 1800 which is 3 times 600", True, False),
        ("nothing", False, False),
    ],
)
def test_right_and_wrong(text: str, strict: bool, flexible: bool) -> None:  # noqa: FBT001  # what each filter says
    """Each filter judges by what it finds."""
    target = "900 * 2 = <<900*2=1800>>1,800\n#### 1,800"
    assert [strict, flexible] == [is_correct(text, target, by) for by in (Filter.STRICT, Filter.FLEXIBLE)]


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9), st.text(st.characters(exclude_characters="0123456789.,$-"), max_size=20))
def test_a_marked_number_is_found_by_both(number: int, text: str) -> None:
    """Whatever stands before it, "#### number" at the end is that number."""
    for shown in (f"{number}", f"{number:,}"):
        assert is_correct(f"{text}\n#### {shown}", f"#### {number}", Filter.STRICT)
        assert is_correct(f"{text}\n#### {shown}", f"#### {number}", Filter.FLEXIBLE)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The published answers; their last line is "A: 26", in the data set it would be "#### 26"."""
    folder = os.environ.get("KVSHARD_DATA")
    if not folder or not (Path(folder) / DATA).is_file():
        pytest.skip(f"KVSHARD_DATA names no folder with {DATA}: scores and pairs of real answers are not checked")
    return [json.loads(line) for line in (Path(folder) / DATA).read_text(encoding="utf-8").splitlines()]


def scores(rows: list[dict[str, Any]], model: str, by: Filter) -> list[bool]:
    return [is_correct(marked(row[model]["solution"]), marked(row["ground_truth"]), by) for row in rows]


def marked(text: str) -> str:
    return text.replace("\nA: ", "\n#### ")


@pytest.mark.parametrize("by", list(Filter))
@pytest.mark.parametrize("model", RIGHT)
def test_published_scores(rows: list[dict[str, Any]], model: str, by: Filter) -> None:
    """Both filters agree with the publisher's score on every one of 1,319 answers of each model: no difference."""
    published = [row[model]["is_correct"] for row in rows]
    found = scores(rows, model, by)
    differing = [at for at, (ours, theirs) in enumerate(zip(found, published, strict=True)) if ours != theirs]
    assert (1319, RIGHT[model], []) == (len(rows), sum(found), differing)


@pytest.mark.parametrize(("baseline", "candidate"), list(permutations(RIGHT, 2)))
def test_pairs_of_real_models(rows: list[dict[str, Any]], baseline: str, candidate: str) -> None:
    """All six pairs, both ways: the exact McNemar value is statsmodels' two-sided one, halved where losses prevail."""
    pairs: Pairs = pairs_of(*(scores(rows, model, Filter.FLEXIBLE) for model in (baseline, candidate)))
    table = [[pairs.both_right, pairs.lost], [pairs.gained, pairs.both_wrong]]
    two_sided = float(mcnemar(table, exact=True).pvalue)
    ours = mcnemar_p(pairs.lost, pairs.gained)
    assert RIGHT[candidate] - RIGHT[baseline] == pairs.gained - pairs.lost
    if pairs.lost > pairs.gained:
        assert two_sided / 2 == pytest.approx(ours, rel=1e-9)
    else:
        assert two_sided / 2 == pytest.approx(mcnemar_p(pairs.gained, pairs.lost), rel=1e-9)
        assert ours > 0.5

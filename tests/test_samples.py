"""Sample files of three clients, told apart by content; bad ones are named by line; arms that differ are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.samples import Sample, Samples, SamplesError, State, item_key, read, write
from harness.samples_pairs import InvalidRun, matched, runs

register_cpu_ci(est_time=15, stage="commit")


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lm_eval(doc: int, right: float, by: str = "strict-match", **others: Any) -> dict[str, Any]:
    return {
        "doc_id": doc,
        "doc": {"question": f"q{doc}"},
        "target": "#### 1",
        "arguments": [],
        "resps": [["so\n#### 1"]],
        "filtered_resps": ["1"],
        "filter": by,
        "metrics": ["exact_match"],
        "doc_hash": f"{doc:064x}"[::-1],
        "prompt_hash": "p",
        "target_hash": "t",
        "exact_match": right,
        **others,
    }


def sgl_eval(name: str, *, right: bool, finish: str = "stop", **others: Any) -> dict[str, Any]:
    return {
        "generation": "so 1",
        "id": name,
        "expected_answer": "1",
        "num_generated_tokens": 12,
        "finish_reason": finish,
        "problem": f"problem {name}",
        "predicted_answer": "1" if right else None,
        "symbolic_correct": right,
        **others,
    }


def arm(name: str, *samples: Sample) -> Samples:
    answers: dict[str, dict[int, Sample]] = {}
    for sample in samples:
        answers.setdefault(sample.item, {})[sample.repeat] = sample
    return Samples(name=name, client="kvshard", answers=answers)


def sample(item: str, correct: int = 1, repeat: int = 0, **others: Any) -> Sample:
    return Sample(item=item, correct=bool(correct), repeat=repeat, **others)


def test_own_form_round_trip(tmp_path: Path) -> None:
    """What is written is read again, every field of it."""
    given_samples = [
        sample("a", answer="18", finish_reason="stop", tokens=7),
        sample("a", 0, repeat=1, finish_reason="length"),
        sample("b", 0, error="timeout"),
    ]
    write(tmp_path / "s.jsonl", given_samples)
    found = read(tmp_path / "s.jsonl")
    assert (given_samples, "kvshard", "s.jsonl") == (found.all, found.client, found.name)
    assert [State.ANSWERED, State.TRUNCATED, State.ERROR] == [each.state for each in found.all]
    assert [1, 1, 1] == [found.count(state) for state in State]


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.integers(), max_size=4))
def test_item_key_is_of_the_content(document: dict[str, int]) -> None:
    """The order of a document's fields does not matter, its content does."""
    assert item_key(document) == item_key(dict(reversed(document.items())))
    assert item_key(document) != item_key({**document, "more": 0})


def test_lm_eval_one_filter(tmp_path: Path) -> None:
    """Rows are keyed by doc_hash; the metric is right or wrong, the filtered answer is shown."""
    path = lines(tmp_path / "samples_gsm8k_1.jsonl", [lm_eval(1, 1.0), lm_eval(0, 0.0)])
    for found in (read(path), read(tmp_path), read(path, "strict-match")):
        assert ("lm-eval", "strict-match") == (found.client, found.filter)
        assert [("0" * 16, 0, False, "1"), ("1" + "0" * 15, 0, True, "1")] == [
            (each.item, each.repeat, each.correct, each.answer) for each in found.all
        ]


def test_lm_eval_several_filters(tmp_path: Path) -> None:
    """Two filters must be chosen between; a wrong name is told with the nearest; each has its own scores."""
    rows = [
        lm_eval(n, float(by == "flexible-extract"), by) for n in range(3) for by in ("strict-match", "flexible-extract")
    ]
    path = lines(tmp_path / "s.jsonl", rows)
    with pytest.raises(
        SamplesError, match=r"s\.jsonl: scored by the filters flexible-extract, strict-match; choose one with"
    ):
        read(path)
    with pytest.raises(SamplesError, match=r"no filter 'strict'; did you mean 'strict-match'\?"):
        read(path, "strict")
    assert [3, 0] == [sum(each.correct for each in read(path, by).all) for by in ("flexible-extract", "strict-match")]


def test_lm_eval_empty_responses(tmp_path: Path) -> None:
    """An empty response is an error, not a wrong answer: that is what a request that failed looks like there."""
    found = read(lines(tmp_path / "s.jsonl", [lm_eval(1, 0.0, resps=[[""]]), lm_eval(2, 0.0)]))
    assert [State.ERROR, State.ANSWERED] == [each.state for each in found.all]


def test_equal_documents_are_items_of_their_own(tmp_path: Path) -> None:
    """A document that stands twice in a data set is two items, in the order of ids, however the file is ordered."""
    same = {"doc_hash": "f" * 64}
    first = read(lines(tmp_path / "a.jsonl", [lm_eval(3, 1.0, **same), lm_eval(10, 0.0, **same)]))
    second = read(lines(tmp_path / "b.jsonl", [lm_eval(10, 0.0, **same), lm_eval(3, 1.0, **same)]))
    assert first.answers == second.answers
    assert {"f" * 16: True, "f" * 16 + "#2": False} == {item: each[0].correct for item, each in first.answers.items()}


def test_sgl_eval_repeats(tmp_path: Path) -> None:
    """A run's folder holds a file per repeat; errors and cut-off answers are told apart; a file alone is one repeat."""
    for repeat in (0, 2, 10):
        rows = [
            sgl_eval("x", right=repeat > 0),
            sgl_eval("y", right=False, finish=("stop", "error", "length")[repeat % 3]),
        ]
        lines(tmp_path / f"output-rs{repeat}.jsonl", rows)
    (tmp_path / "metrics.json").write_text("{}")
    found = read(tmp_path)
    key_x, key_y = (item_key([f"problem {name}", "1"]) for name in "xy")
    assert ("sgl-eval", {key_x, key_y}) == (found.client, set(found.answers))
    assert [(0, False), (2, True), (10, True)] == [
        (each.repeat, each.correct) for each in found.answers[key_x].values()
    ]
    assert [State.ANSWERED, State.TRUNCATED, State.ERROR] == [each.state for each in found.answers[key_y].values()]
    assert (12, "1") == (found.answers[key_x][2].tokens, found.answers[key_x][2].answer)
    assert 2 == len(read(tmp_path / "output-rs10.jsonl").all)


def test_sgl_eval_without_problem_text(tmp_path: Path) -> None:
    """Where the client keeps no problem, the id stands for it."""
    found = read(lines(tmp_path / "output-rs0.jsonl", [sgl_eval(n, right=True, problem="") for n in "xy"]))
    assert {item_key([name, "1"]) for name in "xy"} == set(found.answers)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no samples; expected a line of kvshard"),
        ("{}\n", "a line has the fields none; expected a line of kvshard"),
        ('{"question": 1}\n', "a line has the fields question; expected"),
        ("[1]\n", ":1: is a list; expected"),
        (
            '{"item": "a", "correct": true}\n\n{"item": "b", "corr',
            r":3: is no JSON .*was the run cut off\? Run it again",
        ),
        (
            '{"item": "a", "correct": "yes"}\n',
            r":1: Expected `bool`, got `str` - at `\$.correct`; expected a sample of kvshard",
        ),
        ('{"item": "a", "correct": true, "answr": ""}\n', ":1: Object contains unknown field `answr`"),
        ('{"item": "a", "correct": true}\n' * 2, ":2: item a has repeat 0 already; expected each once"),
        (json.dumps(lm_eval(1, 0.5)), ":1: exact_match is 0.5, expected 0 or 1"),
        (json.dumps({"doc_hash": "a", "filter": "f", "bleu": 1}), ":1: none of the metrics exact_match, acc, pass@1"),
        (json.dumps(lm_eval(1, 1.0)) + "\n" + json.dumps(lm_eval(1, 1.0)), ":2: doc_id 1 is there twice"),
        (json.dumps({"expected_answer": "1", "id": "x"}), ":1: no field 'symbolic_correct'; expected"),
        (
            json.dumps(sgl_eval("x", right=True)) + "\n" + json.dumps(sgl_eval("x", right=True)),
            ":2: id x is there twice",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, reason: str) -> None:
    """The message has the file, the line, what was expected and, where there is one, the next step."""
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(SamplesError, match=reason) as raised:
        read(path)
    assert str(path) in str(raised.value)


def test_bad_paths_are_named(tmp_path: Path) -> None:
    """No file, no text, a folder without samples or with several, a filter where there is none."""
    with pytest.raises(SamplesError, match="absent: cannot be read: No such file or directory"):
        read(tmp_path / "absent")
    with pytest.raises(SamplesError, match=r"a folder with 0 files of samples \(none\)"):
        read(tmp_path)
    (tmp_path / "samples_a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(SamplesError, match="is no UTF-8 text"):
        read(tmp_path)
    write(tmp_path / "samples_b.jsonl", [sample("a")])
    with pytest.raises(SamplesError, match=r"a folder with 2 files of samples \(samples_a.jsonl, samples_b.jsonl\)"):
        read(tmp_path)
    with pytest.raises(SamplesError, match="--filter 'f' is for files of lm-eval, this is of kvshard"):
        read(tmp_path / "samples_b.jsonl", "f")


def test_arms_are_paired_by_item() -> None:
    """Items are matched whatever their order; right answers and repeats are counted per item."""
    baseline = arm("A", sample("a"), sample("b"), sample("c", 0))
    candidate = arm("B", sample("c", 1), sample("a", 0), sample("b"))
    pairs = matched(baseline, candidate)
    assert (["a", "b", "c"], [1, 1, 0], [0, 1, 1], [1, 1, 1]) == (
        pairs.items,
        pairs.right_baseline,
        pairs.right_candidate,
        pairs.repeats,
    )
    assert (0, 0, 0, 1) == (pairs.dropped, pairs.only_baseline, pairs.only_candidate, pairs.repeats_max)


def test_different_items_are_an_error() -> None:
    """It says how many and which; only --common-only compares the common ones, and counts what it left out."""
    baseline = arm("A", sample("a"), sample("b"), sample("d"))
    candidate = arm("B", sample("a"), *(sample(f"x{n}") for n in range(7)))
    told = (
        r"of 3 and 8 items only A has 2 \(b, d\), only B has 7 \(x0, x1, x2, x3, x4, \.\.\)\. Run both .* --common-only"
    )
    with pytest.raises(SamplesError, match=told):
        matched(baseline, candidate)
    pairs = matched(baseline, candidate, common_only=True)
    assert (["a"], 2, 7) == (pairs.items, pairs.only_baseline, pairs.only_candidate)
    with pytest.raises(SamplesError, match="A and C have no item in common"):
        matched(baseline, arm("C", sample("z")), common_only=True)


def test_different_repeats_are_an_error() -> None:
    """Arms with other numbers of repeats are told so; the common repeats can be asked for."""
    baseline, candidate = arm("A", sample("a"), sample("a", 0, repeat=1)), arm("B", sample("a"))
    with pytest.raises(SamplesError, match=r"the repeats differ on 1 items \(a; the first has 2 and 1\)"):
        matched(baseline, candidate)
    assert [1] == matched(baseline, candidate, common_only=True).repeats


def test_errors_are_not_wrong_answers() -> None:
    """A repeat that failed or was cut off in one arm is left out of both; an item without repeats is dropped."""
    baseline = arm("A", sample("a"), sample("a", 1, repeat=1), sample("b"), sample("c"))
    candidate = arm(
        "B",
        sample("a", 0, error="500"),
        sample("a", 1, repeat=1),
        sample("b", 0, finish_reason="length"),
        sample("c", 0),
    )
    pairs = matched(baseline, candidate, share_max=0.5)
    assert (["a", "c"], [1, 1], [1, 0], [1, 1], 1) == (
        pairs.items,
        pairs.right_baseline,
        pairs.right_candidate,
        pairs.repeats,
        pairs.dropped,
    )
    assert (4, 1, 1) == (pairs.unjudged[1].samples, pairs.unjudged[1].errors, pairs.unjudged[1].truncated)
    assert (1, 0) == (pairs.truncated_lost, pairs.truncated_gained)


@pytest.mark.parametrize(
    ("fault", "what"), [({"error": "500"}, "requests failed"), ({"finish_reason": "length"}, "answers were cut off")]
)
def test_too_many_make_a_run_invalid(fault: dict[str, Any], what: str) -> None:
    """More than the stated share is an outcome of its own, with the numbers; the share itself is still allowed."""
    good = arm("A", *(sample(f"{n}") for n in range(100)))
    bad = arm("B", *(sample(f"{n}", 0, **(fault if n < 2 else {})) for n in range(100)))
    for arms in ((good, bad), (bad, good)):
        with pytest.raises(InvalidRun, match=rf"B: 2 of 100 {what} \(2\.0 %\); at most 1 % may"):
            matched(*arms)
        assert 98 == len(matched(*arms, share_max=0.02).items)


def test_nothing_answered_is_an_error() -> None:
    """Arms without any pair of answers cannot be compared."""
    with pytest.raises(SamplesError, match="no item was answered by both"):
        matched(arm("A", sample("a", error="x")), arm("B", sample("a")), share_max=1.0)


def test_other_filters_are_not_compared() -> None:
    """A score by one filter is not paired with a score by another."""
    strict = Samples(name="A", client="lm-eval", filter="strict-match", answers={"a": {0: sample("a")}})
    loose = Samples(name="B", client="lm-eval", filter="flexible-extract", answers={"a": {0: sample("a")}})
    with pytest.raises(SamplesError, match="A is scored by strict-match, B by flexible-extract"):
        matched(strict, loose)


def test_runs_of_one_engine() -> None:
    """Each repeat of each file is a run; items that one of them did not answer are left out."""
    first = arm("A", sample("a"), sample("a", 0, repeat=1), sample("b"), sample("b", repeat=1))
    second = arm("B", sample("a"), sample("b", error="500"))
    assert (["a"], [[True], [False], [True]]) == runs([first, second], share_max=0.5)
    with pytest.raises(SamplesError, match="B: one run; expected two or more runs"):
        runs([second], share_max=0.5)
    with pytest.raises(SamplesError, match="the item sets differ"):
        runs([first, arm("C", sample("a"))])
    with pytest.raises(InvalidRun, match="B: 1 of 2 requests failed"):
        runs([first, second])
    with pytest.raises(SamplesError, match="no item was answered in every run"):
        runs([arm("A", sample("a", error="x")), arm("B", sample("a"))], share_max=1.0)

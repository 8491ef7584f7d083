"""`kvshard gate arms` on a fake server: each arm passes where it is right, fails where its own condition is wrong, and
is invalid where its condition did not hold."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness import gate_arms
from harness.cli import main
from harness.gate_family import Member, exit_code, judged
from harness.samples import Sample, read, write
from harness.stats import Pairs
from harness.stats_gate import Outcome, Terms, judge_pairs
from tests.gate_arms_rig import knowing
from tests.gate_run_rig import successors

register_cpu_ci(est_time=25, stage="commit")
register_cpu_ci(est_time=25, stage="commit", runner="ubuntu-lm-eval")

ITEMS = 40
ALL = ("--warm", "--restored", "--load", "8")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that needs no lm-eval."""
    monkeypatch.setattr(gate_arms, "load", lambda wanted: successors(wanted.limit or ITEMS))
    monkeypatch.setenv("COLUMNS", "2000")


def arms(folder: Path, engine: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Code and members by name."""
    out = folder / "out.json"
    given = ["gate", "arms", "--engine", engine, "--task", "successors", "--margin", "20", "--json", str(out)]
    code = main([*given, *words])
    told = json.loads(out.read_text())["members"] if out.exists() else []
    return code, {each["name"]: each for each in told}


def test_a_right_engine(tmp_path: Path, capsys: Capture) -> None:
    """All arms pass, and each says how it is known that its condition held; runs are kept where that is asked for."""
    with knowing("load is slow") as (engine, known), knowing() as (other, replicated):
        words = ("--replicated", other, "--plain", other, "--out", str(tmp_path / "runs"))
        code, told = arms(tmp_path, engine, *ALL, *words)

    assert (0, {"pass"}) == (code, {each["outcome"] for each in told.values()})
    assert ["replicated", "plain", "warm", "restored", "load"] == list(told)
    assert (3, 2) == (known.flushed, replicated.flushed)
    assert told["warm"]["evidence"].startswith("40 of 40 items had a page from the device, 320 tokens by the counters")
    assert told["restored"]["evidence"].startswith("40 of 40 items had a page from the host, 320 tokens by the ")
    assert "1 and 8 requests in flight; " in told["load"]["evidence"]
    assert (40, 0, 0, 1.0) == tuple(told["warm"]["result"][name] for name in ("n", "lost", "gained", "p_loss"))
    said = capsys.readouterr().out
    assert all(f"{name}: The candidate is not 20 points worse" in said for name in told)
    assert 40 == len(read(tmp_path / "runs" / "restored-candidate.jsonl").all)


@pytest.mark.parametrize(
    ("fault", "words", "failing"),
    [
        ("wrong from the host", ("--warm", "--restored"), {"restored"}),
        ("wrong from the device", ("--warm", "--restored"), {"warm"}),
        ("wrong under load", ALL, {"load"}),
    ],
)
def test_a_wrong_condition(tmp_path: Path, fault: str, words: tuple[str, ...], failing: set[str]) -> None:
    """The one arm fails that runs on it, with half of the items lost."""
    with knowing(fault) as (engine, _):
        code, told = arms(tmp_path, engine, *words, "--concurrency", "2")
    assert (1, failing) == (code, {name for name, each in told.items() if each["outcome"] == "fail"})
    result = told[min(failing)]["result"]
    assert (True, 0) == (12 <= result["lost"] <= 20, result["gained"])
    assert told[min(failing)]["p_adjusted"] >= result["p_loss"]


def test_a_wrong_engine_beside_a_right_one(tmp_path: Path) -> None:
    """Sharded against replicated: the candidate is the engine."""
    with knowing("wrong") as (engine, _), knowing() as (other, _):
        code, told = arms(tmp_path, engine, "--replicated", other)
        assert (1, 20) == (code, told["replicated"]["result"]["lost"])
        code, told = arms(tmp_path, other, "--replicated", engine)
    assert (0, 20) == (code, told["replicated"]["result"]["gained"])


@pytest.mark.parametrize(
    ("faults", "words", "says"),
    [
        (
            ("has no host",),
            ("--restored",),
            "The host tier was not used: 0 of 40 items had a page from the host, 0 tok",
        ),
        ((), ("--restored", "--pressure", "0.1"), "The host tier was not used: 0 of 40 items had a page"),
        (("tells nothing of hits", "tells nothing"), ("--warm",), "The device tier was not used: 0 of 40 items had a"),
        ((), ("--load", "64"), "The load was not reached: 1 and "),
        (("fails",), ("--warm",), "cold: 10 of 40 requests failed (25.0 %); at most 1 % may"),
    ],
)
def test_a_condition_that_did_not_hold(
    tmp_path: Path, faults: tuple[str, ...], words: tuple[str, ...], says: str
) -> None:
    """Invalid, with what was seen: an arm that passes because nothing happened would be worth nothing."""
    with knowing(*faults) as (engine, _):
        code, told = arms(tmp_path, engine, *words)
    (member,) = told.values()
    assert (2, "invalid", None) == (code, member["outcome"], member["result"])
    assert says in member["said"]


def test_hits_that_only_the_counters_tell(tmp_path: Path) -> None:
    """Behind a router answers tell nothing of the cache; then the workers' counters are the evidence."""
    with knowing("tells nothing of hits") as (engine, _):
        code, told = arms(tmp_path, engine, "--warm", "--restored", "--workers", engine)
    assert (0, True) == (code, "0 of 40 items had a page from the host, 320 tokens" in told["restored"]["evidence"])


def test_a_context_that_items_share(tmp_path: Path) -> None:
    """The first item brings it back and the others find it on the device: their rows came from the host as well."""
    with knowing("shares a context") as (engine, _):
        code, told = arms(tmp_path, engine, "--restored", "--concurrency", "1")
        found = "1 of 40 items had a page from the host, 8 tokens by the counters, 100% of the tokens that were not on"
        assert (0, True) == (code, told["restored"]["evidence"].startswith(found))
    with knowing("shares a context", "has no host") as (engine, _):
        code, told = arms(tmp_path, engine, "--restored", "--concurrency", "1")
    assert (2, "invalid") == (code, told["restored"]["outcome"])


def test_drafts(tmp_path: Path) -> None:
    """Accept lengths are told where the engine tells them, and judged where that is asked for."""
    with knowing("drafts badly from the host") as (engine, _):
        code, told = arms(tmp_path, engine, "--restored")
        assert (0, ["restored"]) == (code, list(told))
        lengths = "accept length 3.00 and 1.50 on 40 items answered alike, 40 of them shorter, 0 longer"
        assert told["restored"]["evidence"].endswith(f"; {lengths}")
        code, told = arms(tmp_path, engine, "--warm", "--restored", "--draft-margin", "20")
    outcomes = {name: each["outcome"] for name, each in told.items()}
    assert {"warm": "pass", "warm drafts": "pass", "restored": "pass", "restored drafts": "fail"} == outcomes
    assert (1, True) == (
        code,
        f"Drafts: {lengths}: net 100.0 % of the items are shorter" in told["restored drafts"]["said"],
    )
    with knowing("does not draft") as (engine, _):
        code, told = arms(tmp_path, engine, "--warm", "--draft-margin", "20")
    assert (2, "pass", "invalid") == (code, *(each["outcome"] for each in told.values()))
    assert "accept length" not in told["warm"]["evidence"]


def test_bad_input(tmp_path: Path, capsys: Capture) -> None:
    """No arm, a server that does not flush, one that is not there."""
    with knowing("does not flush") as (engine, _):
        for words, says in (
            ((), "no arm; expected one or more of --replicated, --plain, --warm, --restored, --load"),
            (("--warm",), "does not drop its cache by /flush_cache or /reset_prefix_cache (HTTP 404: no such path)"),
            (("--replicated", "http://127.0.0.1:9"), "is it up?"),
        ):
            assert (2, {}) == arms(tmp_path, engine, *words)
            assert (True, 1) == (says in (said := capsys.readouterr().err), said.count("\n"))


def result_of(lost: int, gained: int) -> Member:
    found = judge_pairs(Pairs(200, lost, gained, 5), Terms(margin=0.03))
    return Member(name=f"{lost}-{gained}", said=found.said, result=found)


def test_a_family_pays_for_its_size() -> None:
    """A loss that is shown alone is not shown as one of ten; one that is clear is, and so is what passes."""
    alone = judged([result_of(5, 0)], 0.05)
    assert (Outcome.FAIL, 1) == (alone[0].outcome, exit_code(alone))
    many = judged([result_of(5, 0), *[result_of(0, 0)] * 9], 0.05)
    assert (Outcome.INCONCLUSIVE, 0.3125, 3) == (many[0].outcome, many[0].p_adjusted, exit_code(many))
    assert "among all comparisons it is not (adjusted p = 0.31)" in many[0].said
    clear = judged([result_of(12, 0), *[result_of(0, 0)] * 9], 0.05)
    assert (Outcome.FAIL, Outcome.PASS) == (clear[0].outcome, clear[1].outcome)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [(("pass", "pass"), 0), (("pass", "inconclusive"), 3), (("inconclusive", "invalid"), 2), (("invalid", "fail"), 1)],
)
def test_the_worst_is_the_code(outcomes: tuple[str, ...], code: int) -> None:
    """A shown loss comes before a comparison that could not be made, and that before an open one."""
    assert code == exit_code([Member(name="a", said="", outcome=Outcome(each)) for each in outcomes])


def test_a_family_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Pairs of sample files beside the table; their names are relative to it."""
    for name, wrong in (("a", 0), ("b", 0), ("c", 30)):
        write(tmp_path / f"{name}.jsonl", [Sample(item=f"i{at}", correct=at >= wrong) for at in range(300)])
    pair = '[[pair]]\nname = "{0}"\nbaseline = "a.jsonl"\ncandidate = "{0}.jsonl"\n'
    table = tmp_path / "family.toml"
    table.write_text(pair.format("b") + pair.format("c"))
    assert 1 == main(["gate", "family", str(table), "--json", str(tmp_path / "out.json")])
    told = {each["name"]: each["outcome"] for each in json.loads((tmp_path / "out.json").read_text())["members"]}
    assert {"b": "pass", "c": "fail"} == told
    assert "b: The candidate is not 2 points worse" in capsys.readouterr().out
    for text, says in (
        ("", "has nothing; expected [[pair]] tables"),
        ("[[pair]", "is no TOML"),
        ('[[pair]]\nname = "a"\n', "pair 1: no baseline, candidate; expected"),
        (pair.format("b") + "margn = 1\n", "pair 1 has 'margn'; did you mean 'margin'?"),
        (pair.format("b") + "margin = 0\n", "pair 1: margin 0; expected"),
        (pair.format("b") * 2, "names are there twice: b, b"),
    ):
        table.write_text(text)
        assert 2 == main(["gate", "family", str(table)])
        assert (True, 1) == (says in (said := capsys.readouterr().err), said.count("\n"))


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs pip install 'kvshard[lm-eval]'")
def test_with_a_task_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command; the fake server knows no facts, so all answers are wrong, alike in both arms."""
    monkeypatch.undo()
    tasks = Path(__file__).parent.parent / "fixtures" / "tasks"
    with knowing() as (engine, _):
        words = ["--task", str(tasks / "arithmetic.yaml"), "--limit", "5", "--margin", "50", "--warm"]
        assert 0 == main(["gate", "arms", "--engine", engine, *words])

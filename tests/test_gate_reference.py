"""`pytest suites/accuracy`: the verdict of a gate is the outcome of a test, and what is absent never passes."""

from __future__ import annotations

import hashlib
import json
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import harness.judge  # noqa: F401  # stays loaded from one run to the next
from ci.register import register_cpu_ci
from harness import gate_reference
from harness.gate_reference import Reference, fitting, references
from harness.gate_tasks import Wanted, load
from harness.plugin import plugin_arguments
from harness.samples import Sample, read, write
from harness.usage import UserError
from tests.gate_arms_rig import knowing
from tests.gate_run_rig import successors

register_cpu_ci(est_time=15, stage="commit")
register_cpu_ci(est_time=15, stage="commit", runner="ubuntu-lm-eval")

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures"
N = 60


@pytest.fixture
def loaded() -> None:
    """lm-eval, before pytester remembers what is loaded and drops the rest: it cannot be loaded twice in a process."""
    load(Wanted(str(FIXTURES / "tasks" / "arithmetic.yaml")))


@pytest.fixture
def inside(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Runs as a user starts them, with a task that needs no lm-eval."""
    monkeypatch.setattr(gate_reference, "load", lambda wanted: successors(wanted.limit or N))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider\n")
    write(pytester.path / "kept.jsonl", [Sample(item=f"item{at}", correct=True) for at in range(N)])
    return pytester


def reference(**changes: object) -> str:
    fields: dict[str, object] = {
        "engine": "somebody", "model": "fake", "revision": "r1", "task": "successors", "filter": "none", "shots": 0,
        "n": N, "score": 100.0, "margin": 10.0, "samples": "kept.jsonl", **changes,
    }  # fmt: skip
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items() if value is not None]
    return "\n".join(["[[reference]]", "date = 2026-01-02", *lines, ""])


def run(inside: pytest.Pytester, table: str, *words: str) -> pytest.RunResult:
    path = inside.path / "references.toml"
    path.write_text(table)
    given = ["-c", "tox.ini", "--rootdir", ".", str(ROOT / "suites" / "accuracy"), "--kvshard-references", str(path)]
    return inside.runpytest_inprocess(*plugin_arguments(), *given, *words)


@pytest.mark.parametrize(("samples", "score"), [("kept.jsonl", 100.0), (None, 98.0)])
def test_right_and_wrong(inside: pytest.Pytester, samples: str | None, score: float) -> None:
    """A right engine passes and a wrong one fails with sentence and evidence, with the kept answers or the score."""
    table = reference(samples=samples, score=score)
    with knowing() as (engine, _):
        result = run(inside, table, "--engine", engine)
        result.assert_outcomes(passed=1)
    with knowing("wrong") as (engine, _):
        result = run(inside, table, "--engine", engine)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"fail: The candidate is worse: {50 - score:.2f} points*",
            f"reference: somebody with fake (r1), 2026-01-02: {score:.2f} % of 60, compared "
            + ("item by item" if samples else "by its score alone"),
            "task: successors, filter none, 0 shots",
            "requests: 0 failed, 0 cut off of 60",
        ]
    )


def test_what_is_not_shown_is_no_pass(inside: pytest.Pytester) -> None:
    """Inconclusive, invalid, and a task that is not that of the reference: each fails with a message of its own."""
    with knowing() as (engine, _):
        result = run(inside, reference(margin=1.0), "--engine", engine)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["inconclusive: Neither a loss nor the absence of one of 1 points is shown*"])
        result = run(inside, reference(n=50), "--engine", engine)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["no verdict: reference of successors: 50 items with 0 shots; the task has 60*"])
    with knowing("fails") as (engine, _):
        result = run(inside, reference(), "--engine", engine)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "invalid: candidate: 15 of 60 requests failed*",
            "requests: 15 failed, *the last error: HTTP 500: out of memory",
        ]
    )


def test_no_reference_is_no_pass(inside: pytest.Pytester) -> None:
    """Without one that fits the test fails, and says how to record one; so it does for each task that is asked for."""
    with knowing() as (engine, _):
        for table, words in (
            ("", ()),
            (reference(model="other"), ()),
            (reference(), ("--kvshard-task", "gsm8k")),
        ):
            result = run(inside, table, "--engine", engine, *words)
            result.assert_outcomes(failed=1)
            result.stdout.fnmatch_lines(
                [
                    "no verdict: *references.toml: no reference of engine 'somebody' with model 'fake'*",
                    f"  kvshard gate run --engine {engine} --task TASK --out *",
                    '  engine = "somebody"',
                ]
            )
    result = run(inside, reference())
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["no verdict: an accuracy gate asks a running server: say which, with --engine*"])


def test_workers_behind_a_router(inside: pytest.Pytester) -> None:
    """They say what engine it is: the address of the router names them, as that of a pair does."""
    with knowing() as (engine, _), knowing("is a router") as (router, _):
        run(inside, reference(), "--engine", router).assert_outcomes(failed=1)
        run(inside, reference(), "--engine", f"{router}?prefill={engine}&decode={engine}").assert_outcomes(passed=1)


def test_references_that_cannot_be_read(tmp_path: Path) -> None:
    """One paragraph each."""
    for name, text, says in (
        ("none", None, "cannot be read: No such file"),
        ("text", "[[", "is no TOML"),
        ("short", '[[reference]]\nengine = "a"\n', "missing required field"),
        ("more", reference(colour="red"), "unknown field `colour`"),
    ):
        path = tmp_path / f"{name}.toml"
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=says):
            references(path)


def test_what_is_recorded() -> None:
    """Every reference has a margin that its size can show, and per-item files say what it says."""
    found = references(FIXTURES / "references.toml")
    assert found
    for each in found:
        assert fitting(found, each.engine, each.model, [each.task])
        if each.samples is not None:
            kept = read(FIXTURES / each.samples)
            right = sum(sample.correct for sample in kept.all)
            assert (each.n, round(100 * right / each.n, 2)) == (len(kept.all), each.score)


def test_what_is_recorded_is_of_the_weights_that_are_here() -> None:
    """Other weights need other references: this fails once they change."""
    digest = hashlib.sha256((FIXTURES / "model" / "model.safetensors").read_bytes()).hexdigest()
    found = [each for each in references(FIXTURES / "references.toml") if each.model == "fixtures/model"]
    assert found
    assert [] == [each.task for each in found if not each.revision.endswith(digest)]


def test_a_model_that_is_named_by_its_folder() -> None:
    """The folder may lie anywhere; a model of another name does not fit."""
    found = references(FIXTURES / "references.toml")
    tasks = ["tasks/recall.yaml"]
    assert [1, 1, 0, 0] == [
        len(fitting(found, "kvshard", model, tasks))
        for model in ("fixtures/model", "/anywhere/fixtures/model", "other", "myfixtures/model")
    ]


def test_the_stanza_that_is_asked_for() -> None:
    """What the error tells to write down is a reference once it is filled in."""
    told = gate_reference.missing(Path("f/references.toml"), "e", "http://h:1", "m")
    filled = told[told.index("  [[reference]]") :].replace("ITEMS", "10").replace("PERCENT", "50.0")
    (row,) = tomllib.loads(filled)["reference"]
    assert ("e", "m", 10) == (row["engine"], row["model"], row["n"])
    assert set(row) <= set(Reference.__struct_fields__)


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs pip install 'kvshard[lm-eval]'")
@pytest.mark.usefixtures("loaded", "inside")
def test_with_a_task_of_lm_eval(inside: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's file, and a server that knows no fact: as wrong as its reference, which is no pass by itself."""
    monkeypatch.setattr(gate_reference, "load", load)
    write(inside.path / "kept.jsonl", [Sample(item="another", correct=False)])
    table = reference(task=str(FIXTURES / "tasks" / "arithmetic.yaml"), limit=5, n=5, score=0.0)
    with knowing() as (engine, _):
        result = run(inside, table, "--engine", engine)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["no verdict: the item sets differ: of 1 and 5 items*"])

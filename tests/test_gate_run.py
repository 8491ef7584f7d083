"""`kvshard gate run` against a server that is right, wrong, broken, slow or gone, and runs that are interrupted."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.cli import main
from harness.gate_runner import again
from harness.gate_tasks import Scored
from harness.samples import State, read
from harness.usage import UserError
from tests.fake_openai import Fake, Said, serving, until
from tests.gate_arms_rig import knowing
from tests.gate_run_rig import arguments, number_of, right, run, successors

register_cpu_ci(est_time=20, stage="commit")

ROOT = Path(__file__).parent.parent
Capture = pytest.CaptureFixture[str]
FAULTS = {
    1: Said("7"),
    2: Said(status=500, raw='{"error": {"message": "out of memory"}}'),
    3: Said(""),
    4: Said("5 and so", "length"),
    5: Said("6\nand", "stop"),
    6: Said("7", "abort"),
}


def with_faults(body: dict[str, Any]) -> Said:
    return FAULTS.get(number_of(body), right(body))


def test_right_answers(tmp_path: Path, capsys: Capture) -> None:
    """All are asked once, scored and kept; the headline says task, filter, shots, items and score."""
    with serving(right) as fake:
        assert 0 == run(successors(20), fake.url, tmp_path / "a.jsonl", "--json", str(tmp_path / "r.json"))
    shown = capsys.readouterr()
    headline = "successors, filter none, 0 shots, 20 items: 20 of 20 right (100.0 %), 0 cut off, 0 failed, "
    assert headline == shown.out[: len(headline)]
    assert [f"{done} of 20: {done} of {done} right (100.0 %), 0 cut off, 0 failed" for done in range(2, 21, 2)] == (
        shown.err.splitlines()
    )
    assert {(f"{at} + 1 = ", 0): 1 for at in range(20)} == fake.asked
    assert {"model": "fake", "prompt": "0 + 1 = ", "max_tokens": 8, "temperature": 0.0, "stop": ["\n"], "seed": 0} == (
        next(body for body in fake.bodies if number_of(body) == 0)
    )
    samples = read(tmp_path / "a.jsonl")
    assert {f"item{at}": str(at + 1) for at in range(20)} == {each.item: each.answer for each in samples.all}
    result = json.loads((tmp_path / "r.json").read_text())
    assert (20, 0, 0, 0, 20) == tuple(result[name] for name in ("right", "wrong", "truncated", "errors", "total"))


def test_answers_of_generate(tmp_path: Path) -> None:
    """They tell what their drafts came to; another dialect is another run, and a chat has no such endpoint."""
    with knowing() as (engine, _):
        assert 0 == run(successors(5), engine, tmp_path / "a.jsonl", "--native")
        assert [(True, 3.0)] * 5 == [(each.correct, each.accept_length) for each in read(tmp_path / "a.jsonl").all]
        with pytest.raises(UserError, match="dialect: generate there, completions now"):
            run(successors(5), engine, tmp_path / "a.jsonl")
        assert 2 == main(["gate", "run", "--engine", engine, "--task", "t.yaml", "--native", "--chat"])


def test_what_is_no_answer_is_no_wrong_answer(tmp_path: Path, capsys: Capture) -> None:
    """500, empty, aborted and cut off are told apart from wrong; too many failed requests are exit code 2."""
    with serving(with_faults) as fake:
        with pytest.raises(UserError) as error:
            run(successors(10), fake.url, tmp_path / "a.jsonl", "--concurrency", "1")
        assert "3 of 10 requests failed (30.0 %); at most 1 % may; the last one: finish_reason 'abort'; 7 of 10" in str(
            error.value
        )
        assert 0 == run(successors(10), fake.url, tmp_path / "a.jsonl", "--unjudged-max", "30")
    assert "5 of 6 right (83.3 %), 1 cut off, 3 failed (7 were there)" in capsys.readouterr().out
    samples = read(tmp_path / "a.jsonl").all
    assert {""} == {each.answer for each in samples if each.state is State.ERROR}
    states = {each.item: (each.state, each.correct, each.error) for each in samples}
    assert {
        "item0": (State.ANSWERED, True, None),
        "item1": (State.ANSWERED, False, None),
        "item2": (State.ERROR, False, "HTTP 500: out of memory"),
        "item3": (State.ERROR, False, "empty answer, finish_reason 'stop'"),
        "item4": (State.TRUNCATED, False, None),
        "item5": (State.ANSWERED, True, None),
        "item6": (State.ERROR, False, "finish_reason 'abort'"),
    } == {item: state for item, state in states.items() if int(item[4:]) < 7}
    assert {f"{at} + 1 = ": 2 if at in {2, 3, 6} else 1 for at in range(10)} == {
        prompt: count for (prompt, _), count in fake.asked.items()
    }


def test_a_server_that_hangs_once(tmp_path: Path) -> None:
    """The time limit makes a failed request of it, and the others go on."""
    with serving(lambda body: right(body)._replace(seconds=60 if number_of(body) == 3 else 0)) as fake:
        began = time.monotonic()
        assert 0 == run(successors(10), fake.url, tmp_path / "a.jsonl", "--timeout", "4", "--unjudged-max", "10")
    assert 4 < time.monotonic() - began < 30
    (failed,) = [each for each in read(tmp_path / "a.jsonl").all if each.state is State.ERROR]
    assert ("item3", f"{fake.url}/v1/completions did not answer within 4 s") == (failed.item, failed.error)


@pytest.mark.parametrize("concurrency", [1, 12])
def test_a_server_that_is_gone_is_not_asked_all(tmp_path: Path, concurrency: int) -> None:
    """After so many failed requests in a row the run gives up; what was answered is kept, and the way on is told."""
    gone = Said(status=503, raw="no rank left", seconds=0.05)
    row = max(8, concurrency)
    with serving(lambda body: right(body) if number_of(body) < 5 else gone) as fake:
        with pytest.raises(UserError) as error:
            run(successors(200), fake.url, tmp_path / "a.jsonl", "--concurrency", str(concurrency))
        assert 5 + row <= len(fake.bodies) <= 5 + row + 2 * concurrency
    told = f"{fake.url}: {row} requests in a row failed, the last one: HTTP 503: no rank left; 5 of 200 are answered"
    assert told == str(error.value)[: len(told)]
    assert f"Go on with: kvshard gate run --engine {fake.url} --task successors" in str(error.value)


def test_a_server_that_fails_now_and_then(tmp_path: Path) -> None:
    """Failed requests that are not in a row, however many, do not end a run."""
    with serving(lambda body: right(body) if number_of(body) % 3 else Said(status=503)) as fake:
        assert 0 == run(successors(60), fake.url, tmp_path / "a.jsonl", "--concurrency", "1", "--unjudged-max", "40")
    assert (60, 20) == (len(fake.bodies), read(tmp_path / "a.jsonl").count(State.ERROR))


def test_a_server_that_fails_at_once(tmp_path: Path) -> None:
    """Requests do not run ahead of who counts the failures."""
    with serving(lambda _: Said(status=503)) as fake:
        with pytest.raises(UserError, match="8 requests in a row failed"):
            run(successors(500), fake.url, tmp_path / "a.jsonl", "--concurrency", "4")
        assert 8 <= len(fake.bodies) <= 8 + 4 * 3


def test_repeats(tmp_path: Path, capsys: Capture) -> None:
    """Each repeat of an item has its number as its seed, and is a repeat in the sample file."""
    task = successors(5, generation={"max_tokens": 8, "temperature": 0.6})
    with serving(lambda body: right(body) if body["seed"] != 1 else Said("7")) as fake:
        assert 0 == run(task, fake.url, tmp_path / "a.jsonl", "--repeats", "3")
    assert {(f"{at} + 1 = ", seed): 1 for at in range(5) for seed in range(3)} == fake.asked
    assert {0.6} == {body["temperature"] for body in fake.bodies}
    samples = read(tmp_path / "a.jsonl").answers
    assert {f"item{at}": [True, False, True] for at in range(5)} == {
        item: [repeats[repeat].correct for repeat in range(3)] for item, repeats in samples.items()
    }
    assert "5 items x 3: 10 of 15 right" in capsys.readouterr().out


def test_going_on_with_repeats(tmp_path: Path) -> None:
    """What is asked again is the repeat that failed, not the item's others."""
    task = successors(5, generation={"max_tokens": 8, "temperature": 0.6})
    words = ["--repeats", "3", "--unjudged-max", "10"]
    with serving(lambda body: Said("") if (number_of(body), body["seed"]) == (2, 1) else right(body)) as fake:
        assert 0 == run(task, fake.url, tmp_path / "a.jsonl", *words)
        fake.answer = right
        assert 0 == run(task, fake.url, tmp_path / "a.jsonl", *words)
    assert {("2 + 1 = ", 1): 2} == {asked: count for asked, count in fake.asked.items() if count > 1}
    assert 15 == sum(each.correct for each in read(tmp_path / "a.jsonl").all)


def test_repeats_without_luck(tmp_path: Path) -> None:
    """At temperature 0 repeats are refused before anything is asked."""
    with serving(right) as fake, pytest.raises(UserError, match="--repeats 2: successors asks at temperature 0"):
        run(successors(5), fake.url, tmp_path / "a.jsonl", "--repeats", "2")
    assert ([], []) == (fake.bodies, list(tmp_path.iterdir()))


def test_a_chat(tmp_path: Path) -> None:
    """The same answers come from the chat endpoint."""
    with serving(right) as fake:
        assert 0 == run(successors(5), fake.url, tmp_path / "a.jsonl", "--chat")
    assert {"/v1/chat/completions"} == set(fake.paths)
    assert 5 == sum(each.correct for each in read(tmp_path / "a.jsonl").all)


def test_nothing_left_to_ask(tmp_path: Path, capsys: Capture) -> None:
    """A run that is complete asks nothing and says the same score."""
    with serving(right) as fake:
        for _ in range(2):
            assert 0 == run(successors(5), fake.url, tmp_path / "a.jsonl")
        assert 5 == len(fake.bodies)
    assert "5 items: 5 of 5 right (100.0 %), 0 cut off, 0 failed (5 were there)" in capsys.readouterr().out


def test_another_setting_is_another_run(tmp_path: Path) -> None:
    """A file of another task, definition, model, data or setting is refused before anything is asked."""
    changes: list[dict[str, Any]] = [
        {"name": "other"},
        {"definition": "d2"},
        {"filter": "strict"},
        {"shots": 1},
        {"data": "other"},
        {"items": successors(6).items[1:]},
        {"generation": {"max_tokens": 9, "temperature": 0.0}},
    ]
    with serving(right) as fake:
        run(successors(5), fake.url, tmp_path / "a.jsonl")
        for change in changes:
            (field,) = change
            name = {"name": "task", "items": "prompts"}.get(field, field)
            with pytest.raises(UserError, match=f"is of another run: .*{name}: "):
                run(successors(5)._replace(**change), fake.url, tmp_path / "a.jsonl")
        assert 5 == len(fake.bodies)


def started(fake: Fake, out: Path, items: int = 40) -> subprocess.Popen[str]:
    words = [str(items), "--engine", fake.url, "--out", str(out), "--concurrency", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "gate_run_rig.py"), *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def slow_then_hanging(body: dict[str, Any]) -> Said:
    return right(body)._replace(seconds=60 if number_of(body) >= 12 else 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    """What was answered is kept, the way on is told, and the next run asks only what is not answered."""
    out = tmp_path / "a.jsonl"
    with serving(slow_then_hanging) as fake:
        with started(fake, out) as process:
            until(lambda: len(fake.bodies) == 15 and out.exists() and out.read_bytes().count(b"\n") == 12, 60)
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=20)
        kept = {each.item for each in read(out).all}
        assert {f"item{at}" for at in range(12)} == kept
        fake.answer = right
        assert 0 == run(successors(40), fake.url, out)
        asked = {prompt: count for (prompt, _), count in fake.asked.items()}
    assert {f"{at} + 1 = ": 2 if 12 <= at < 15 else 1 for at in range(40)} == asked
    assert [True] * 40 == [each.correct for each in read(out).all]
    if number == signal.SIGKILL:
        assert -signal.SIGKILL == process.returncode
        return
    assert (130, "") == (process.returncode, stdout)
    command = f"kvshard gate run --engine {fake.url} --task successors --repeats 1 --concurrency 3 --timeout 600 "
    told = f"interrupted: 12 of 40 are answered and kept in {out}. Go on with: {command}--unjudged-max 1 --out {out}\n"
    assert f"kvshard gate run: {told}" == stderr.splitlines(keepends=True)[-1]
    assert "Traceback" not in stderr


def test_the_command_that_goes_on(tmp_path: Path) -> None:
    """It is the same run: with all its settings, and with the file's name where none was given."""
    words = [
        *("--engine", "http://h:1", "--model", "a b", "--chat", "--data", "d.jsonl", "--shots-data", "s.jsonl"),
        *("--shots", "0", "--limit", "7", "--repeats", "4", "--filter", "strict-match", "--max-tokens", "9"),
        *("--temperature", "0", "--concurrency", "2", "--timeout", "1.5", "--unjudged-max", "0"),
    ]
    args = arguments(*words)
    given = again(args, Path("out.jsonl"))
    assert given.startswith("kvshard gate run --engine http://h:1 --task successors --model 'a b' --chat")
    assert {**vars(args), "out": Path("out.jsonl")} == vars(arguments(*shlex.split(given)[3:]))


def arm(folder: Path, name: str, items: int, wrong: range) -> str:
    def answer(body: dict[str, Any]) -> Said:
        return Said("x") if number_of(body) in wrong else right(body)

    with serving(answer) as fake:
        assert 0 == run(successors(items), fake.url, folder / f"{name}.jsonl", "--concurrency", "4")
    return str(folder / f"{name}.jsonl")


@pytest.mark.parametrize(
    ("wrong", "outcome", "code"),
    [(range(3, 5), "pass", 0), (range(3, 20), "fail", 1), (range(3, 9), "inconclusive", 3)],
)
def test_two_arms_compared(tmp_path: Path, capsys: Capture, wrong: range, outcome: str, code: int) -> None:
    """Sample files of two servers are what `gate compare` judges: by what was lost, with three verdicts."""
    pytest.importorskip("scipy", reason="gate compare needs the extra `gate`")
    baseline, candidate = arm(tmp_path, "baseline", 150, range(3)), arm(tmp_path, "candidate", 150, wrong)
    capsys.readouterr()
    assert code == main(["gate", "compare", baseline, candidate, "--margin", "4"])
    assert capsys.readouterr().out.startswith(f"{outcome}: ")


def test_a_scorer_that_breaks_loses_nothing(tmp_path: Path) -> None:
    """Answers before the one that cannot be scored are kept."""

    def score(at: int, text: str) -> Scored:
        if at == 3:
            raise UserError("a metric of 0.5")
        return Scored(correct=True, answer=text)

    with serving(right) as fake, pytest.raises(UserError, match=r"a metric of 0\.5"):
        run(successors(5, score=score), fake.url, tmp_path / "a.jsonl", "--concurrency", "1")
    assert ["item0", "item1", "item2"] == [each.item for each in read(tmp_path / "a.jsonl").all]

"""Tasks of lm-eval for `kvshard gate run`: its prompts, filters and scores, local data, and what is no task."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness import gate_tasks
from harness.cli import main
from harness.gate_tasks import Wanted, load
from harness.samples import read
from harness.scoring import Filter, is_correct
from harness.usage import UserError
from tests.fake_openai import Said, prompt_of, serving

register_cpu_ci(est_time=30, stage="commit")
register_cpu_ci(est_time=30, stage="commit", runner="ubuntu-lm-eval")

ROOT = Path(__file__).parent.parent
TASKS = ROOT / "fixtures" / "tasks"
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs pip install 'kvshard[lm-eval]'")
Capture = pytest.CaptureFixture[str]

# made up, in the form of GSM8K
TRAIN = [{"question": f"Ann has {at} hats and buys {at}. How many?", "answer": f"#### {2 * at}"} for at in range(3, 9)]
TEST = [
    {"question": "Bob has 1,100 nails and loses 100. How many?", "answer": "1,100 - 100 = 1,000\n#### 1,000"},
    {"question": "A pen costs $2. What do 9 cost?", "answer": "9 * 2 = $18\n#### 18"},
]
TEXTS = ["#### 1,000", "#### 1000.", "so $1,000.00", "it is 1,000", "#### 18 or 1000", "18.", "none", "-18", "1,000 18"]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gsm8k(folder: Path) -> Path:
    lines(folder / "my_train.jsonl", TRAIN)
    return lines(folder / "my_test.jsonl", TEST)


@needs_lm_eval
def test_prompts_and_keys(tmp_path: Path) -> None:
    """Local files go into the stock prompt with its examples; keys are the hashes in lm-eval's sample files."""
    task = load(Wanted("gsm8k", data=gsm8k(tmp_path)))
    assert ("gsm8k", 5, "strict-match") == (task.name, task.shots, task.filter)
    assert ("strict-match", "flexible-extract") == task.filters
    assert {"max_tokens": 256, "temperature": 0.0, "stop": ["Question:", "</s>", "<|im_end|>"]} == task.generation
    shots = {f"Question: {row['question']}\nAnswer: {row['answer']}" for row in TRAIN}
    drawn = [row["answer"] for row in random.Random(1234).sample(TRAIN, 5)]  # with lm-eval's default seed
    assert drawn == re.findall("#### .*", task.items[0].prompt)
    for item, row in zip(task.items, TEST, strict=True):
        *examples, asked = item.prompt.split("\n\n")
        assert (5, set()) == (len(examples), set(examples) - shots)
        assert f"Question: {row['question']}\nAnswer:" == asked
        assert hashlib.sha256(json.dumps(row, indent=2, ensure_ascii=False).encode()).hexdigest()[:16] == item.key


@needs_lm_eval
@pytest.mark.parametrize("name", list(Filter))
def test_scores_of_gsm8k(tmp_path: Path, name: Filter) -> None:
    """Both filters score as `harness.scoring`, which was compared with published scores."""
    task = load(Wanted("gsm8k", data=gsm8k(tmp_path), shots=0, filter=name))
    expected = [[is_correct(text, row["answer"], name) for text in TEXTS] for row in TEST]
    assert {True, False} == {each for row in expected for each in row}
    assert expected == [[task.score(at, text).correct for text in TEXTS] for at in range(len(TEST))]


@needs_lm_eval
def test_settings_over_those_of_the_task(tmp_path: Path) -> None:
    """Shots, limit, tokens and temperature; another setting is no other definition, other data are other data."""
    data = gsm8k(tmp_path)
    task = load(Wanted("gsm8k", data=data, shots=2, limit=1, max_tokens=7, temperature=0.5))
    assert (1, 2, 7, 0.5) == (
        len(task.items),
        task.shots,
        task.generation["max_tokens"],
        task.generation["temperature"],
    )
    assert 3 == task.items[0].prompt.count("Question:")
    plain = load(Wanted("gsm8k", data=data))
    assert (plain.definition, plain.data) == (task.definition, task.data)
    other = load(
        Wanted("gsm8k", data=lines(tmp_path / "b_test.jsonl", TEST[:1]), shots_data=tmp_path / "my_train.jsonl")
    )
    assert (True, False) == (plain.definition == other.definition, plain.data == other.data)


@needs_lm_eval
def test_a_document_that_is_there_twice(tmp_path: Path) -> None:
    """It is two items, as in the sample files of lm-eval."""
    task = load(Wanted("gsm8k", data=lines(tmp_path / "d.jsonl", [TEST[0], TEST[1], TEST[0]]), shots=0))
    assert [task.items[0].key, task.items[1].key, f"{task.items[0].key}#2"] == [item.key for item in task.items]


@needs_lm_eval
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{204}", "204"),
        (r"\boxed{ 073 } and 5 more", "73"),
        (r"\boxed{5} no, \boxed{204}. Done in 3 steps.", "204"),
        (r"\boxed{000}", "0"),
        ("the answer is 204.", "204"),
        ("first 3, then 073", "73"),
        ("0", "0"),
        ("204 or so, 3.5 to be exact", "204"),
        ("204 of 1,000", "204"),
        (r"\boxed{x} 17", "17"),
        (r"17 is \boxed{-204}", "17"),
        (r"\boxed{2^3}", "3"),
        (r"\boxed{5}" + "\n" * 3 + "7 " * 20_000, "5"),
        ("nothing", "[invalid]"),
    ],
)
def test_answers_to_aime(tmp_path: Path, text: str, answer: str) -> None:
    """The last boxed integer, else the last integer, without zeros in front; no mathematics is done."""
    rows = [
        {"id": "a", "problem": "What?", "expected_answer": "073"},
        {"id": "b", "problem": "?", "expected_answer": "5"},
    ]
    task = load(Wanted("aime26", data=lines(tmp_path / "aime.jsonl", rows)))
    assert ("aime26", "boxed-or-last", 0.6, 32768) == (
        task.name, task.filter, task.generation["temperature"], task.generation["max_tokens"]
    )  # fmt: skip
    assert task.items[0].prompt.startswith("What?\n\n")
    assert (answer == "73", answer) == task.score(0, text)
    assert (answer == "5", answer) == task.score(1, text)


@needs_lm_eval
@pytest.mark.parametrize("name", ["arithmetic", "recall"])
def test_the_tiny_model_s_tasks(tmp_path: Path, capsys: Capture, name: str) -> None:
    """The whole command: a server that knows all answers has 100 %, one that knows every second has half of them."""
    rows = [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()]
    answers = {row["prompt"]: row["answer"] for row in rows}
    odd = set(list(answers)[::2])
    for wrong, share in ((set[str](), "100.0"), (odd, "50.0")):

        def answer(body: dict[str, Any], wrong: set[str] = wrong) -> Said:
            prompt = prompt_of(body)
            return Said(("no" if prompt in wrong else answers[prompt]) + ";")

        out = tmp_path / f"{share}.jsonl"
        with serving(answer) as fake:
            words = ["gate", "run", "--engine", fake.url, "--task", str(TASKS / f"{name}.yaml"), "--out", str(out)]
            assert 0 == main(words)
        assert f"kvshard_{name}, filter none, 0 shots, {len(rows)} items: " in (said := capsys.readouterr().out)
        assert f"({share} %)" in said
        assert (len(rows), len(rows)) == (len(answers), len(read(out).all))


@needs_lm_eval
def test_what_is_no_task(tmp_path: Path) -> None:
    """Every mistake is told with the value, what was expected and what to do."""
    data = gsm8k(tmp_path)
    (tmp_path / "text.yaml").write_text("just: text")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "broken.yaml").write_text("task: [")
    base = "task: t\ndataset_path: json\ntest_split: test\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
    (tmp_path / "choice.yaml").write_text(base + "output_type: multiple_choice\n")
    (tmp_path / "vote.yaml").write_text(base + "output_type: generate_until\nrepeats: 4\n")
    (tmp_path / "field.yaml").write_text(base.replace("question", "problem") + "output_type: generate_until\n")
    (tmp_path / "odd.jsonl").write_text('{"a": 1}\n{"b": 1}\n')
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "text.jsonl").write_text("hello\n")
    mistakes = [
        (Wanted("gsm8j"), "--task 'gsm8j': lm-eval has no such task; did you mean 'gsm8k'? A file TASK.yaml may"),
        (Wanted("mmlu"), "--task 'mmlu' is a group of tasks; expected one task"),
        (Wanted("hellaswag"), "hellaswag.yaml: output_type is multiple_choice; expected generate_until"),
        (Wanted("aime26"), "--task aime26: lm-eval has no data of it; give a file with --data"),
        (Wanted("no.yaml"), "--task no.yaml: is no file; expected a task of lm-eval in YAML"),
        (Wanted(str(tmp_path / "text.yaml")), "text.yaml: is no task of lm-eval: no task, doc_to_text, doc_to_target;"),
        (Wanted(str(tmp_path / "list.yaml")), "list.yaml: is no task of lm-eval: ValueError: Expected YAML dict"),
        (Wanted(str(tmp_path / "broken.yaml")), "broken.yaml: is no task of lm-eval: ParserError"),
        (Wanted(str(tmp_path / "choice.yaml")), "choice.yaml: output_type is multiple_choice; expected generate_until"),
        (Wanted(str(tmp_path / "vote.yaml")), "vote.yaml: repeats is 4, a vote; expected 1"),
        (Wanted(str(tmp_path / "field.yaml"), data=data), "'problem' is undefined; does the file fit the task?"),
        (Wanted("gsm8k", data=tmp_path / "no"), f"{tmp_path}/no: is no file; expected JSON lines"),
        (Wanted("gsm8k", data=tmp_path), f"{tmp_path}: is no file; expected JSON lines"),
        (
            Wanted("gsm8k", data=tmp_path / "odd.jsonl", shots=0),
            "odd.jsonl:2: expected a JSON object with a, as the first",
        ),
        (Wanted("gsm8k", data=tmp_path / "none.jsonl", shots=0), "none.jsonl: holds no document; expected JSON lines"),
        (Wanted("gsm8k", data=tmp_path / "text.jsonl", shots=0), "text.jsonl:1: is no JSON"),
        (Wanted("gsm8k", data=tmp_path / "odd.jsonl"), "odd.jsonl does not say 'test'; give --shots-data FILE"),
        (
            Wanted("gsm8k", data=data, filter="strict"),
            "--filter 'strict': gsm8k has no such filter; did you mean 'strict-",
        ),
        (Wanted("aime25", data=data, shots=5), "--shots 5: aime.yaml says num_fewshot 0, so it has no examples"),
        (Wanted("aime25", data=data), "'problem' is undefined; does the file fit the task?"),
    ]
    for wanted, says in mistakes:
        with pytest.raises(UserError) as error:
            load(wanted)
        assert says in str(error.value)
        assert "\n" not in str(error.value)


@needs_lm_eval
def test_data_that_cannot_be_fetched(tmp_path: Path) -> None:
    """One line, exit code 2 and the way out, from a process of its own, without a network."""
    with serving(lambda _: Said("1")) as fake:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "harness.cli", "gate", "run", "--engine", fake.url, "--task", "gsm8k"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (2, "", 1) == (done.returncode, done.stdout, done.stderr.count("\n"))
    assert "kvshard: --task gsm8k: no prompts come of openai/gsm8k/main: ConnectionError" in done.stderr
    assert "give a local file with --data" in done.stderr
    assert [] == fake.bodies


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The command says how to install it, on one line, with exit code 2."""
    monkeypatch.setattr(gate_tasks, "find_spec", lambda _: None)
    with serving(lambda _: Said("1")) as fake:
        assert 2 == main(["gate", "run", "--engine", fake.url, "--task", "gsm8k"])
    says = "kvshard: gate run takes its tasks from lm-eval, which is not installed; install it with: "
    assert ("", f"{says}pip install 'kvshard[lm-eval]'\n") == capsys.readouterr()

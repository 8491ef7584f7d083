"""The sample file of a run: what it keeps, how a run goes on with it, and which runs may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ci.register import register_cpu_ci
from harness.gate_journal import Journal, RunOf
from harness.samples import Sample, State, read
from harness.usage import UserError

register_cpu_ci(est_time=10, stage="commit")

RUN = RunOf(
    engine="http://127.0.0.1:1",
    model="tiny",
    dialect="completions",
    task="gsm8k",
    definition="d1",
    filter="strict-match",
    shots=5,
    data="local 1",
    prompts="p1",
    items=3,
    repeats=1,
    generation={"max_tokens": 8, "temperature": 0.0},
    lm_eval="0.4.13",
)
SAMPLES = [
    Sample(item="a", correct=True, answer="18", finish_reason="stop", tokens=3),
    Sample(item="b", correct=False, error="HTTP 500"),
    Sample(item="c", correct=False, answer="1", finish_reason="length"),
]


def written(path: Path) -> bytes:
    with Journal(path, RUN) as journal:
        for sample in SAMPLES:
            journal.add(sample, sample.answer and f"it is {sample.answer}\n")
    return path.read_bytes()


def test_every_answer_is_on_the_disk_at_once(tmp_path: Path) -> None:
    """`gate compare` can read the file while it grows; whole answers are beside it."""
    path = tmp_path / "folder" / "a.jsonl"
    with Journal(path, RUN) as journal:
        for count, sample in enumerate(SAMPLES, 1):
            journal.add(sample, f"text {count}")
            assert SAMPLES[:count] == read(path).all
    texts = [json.loads(line) for line in (tmp_path / "folder" / "a.jsonl.texts").read_text().splitlines()]
    assert [{"item": item, "repeat": 0, "text": f"text {at}"} for at, item in enumerate("abc", 1)] == texts
    assert msgspec.to_builtins(RUN) == json.loads((tmp_path / "folder" / "a.jsonl.run").read_text())


def test_the_folder_of_a_run_is_a_run(tmp_path: Path) -> None:
    """What lies beside the samples is not taken for samples."""
    written(tmp_path / "a.jsonl")
    assert SAMPLES == read(tmp_path).all


def test_going_on(tmp_path: Path) -> None:
    """Answers stay, also those cut off; failed requests are dropped, so that each item is in the file once."""
    path = tmp_path / "a.jsonl"
    written(path)
    with Journal(path, RUN) as journal:
        assert {("a", 0): SAMPLES[0], ("c", 0): SAMPLES[2]} == journal.answered
        assert 1 == journal.dropped
        journal.add(Sample(item="b", correct=True), "now")
    assert ["a", "c", "b"] == list(read(path).answers)
    assert 0 == read(path).count(State.ERROR)


@pytest.mark.parametrize("kept", range(1, 40, 6))
def test_a_torn_line(tmp_path: Path, kept: int) -> None:
    """A writer that was killed in the middle of a line loses that line and no other."""
    path = tmp_path / "a.jsonl"
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2][:kept])
    with Journal(path, RUN) as journal:
        assert [SAMPLES[0]] == list(journal.answered.values())
        journal.add(SAMPLES[2], "")
    assert lines[0] + lines[2] == path.read_bytes()


def test_a_line_that_is_no_sample(tmp_path: Path) -> None:
    """In the middle of the file it is no torn line: nothing is overwritten."""
    path = tmp_path / "a.jsonl"
    broken = written(path).replace(b'"item":"b"', b'"item":7')
    path.write_bytes(broken)
    with pytest.raises(UserError, match=r"a\.jsonl:2: .*expected a sample of kvshard; choose another --out"):
        Journal(path, RUN).__enter__()
    assert broken == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "GLM"}, "model: tiny there, GLM now; choose another --out"),
        ({"task": "aime25", "shots": 0}, "task: gsm8k there, aime25 now; shots: 5 there, 0 now; choose another --out"),
        ({"data": "local 2"}, "data: local 1 there, local 2 now; choose another --out"),
        ({"prompts": "p2"}, "prompts: p1 there, p2 now; choose another --out"),
        ({"filter": "flexible-extract"}, "filter: strict-match there, flexible-extract now; choose another --out"),
        ({"repeats": 4}, "repeats: 1 there, 4 now; choose another --out"),
        (
            {"generation": {"max_tokens": 9}},
            'generation: {"max_tokens":8,"temperature":0.0} there, {"max_tokens":9} now; choose another --out',
        ),
        (
            {"engine": "http://there:2"},
            (
                "engine: http://127.0.0.1:1 there, http://there:2 now; choose another --out, or say --moved if it is "
                "the same server at another address"
            ),
        ),
        ({"lm_eval": "0.4.14"}, "lm_eval: 0.4.13 there, 0.4.14 now; choose another --out"),
    ],
)
def test_another_run(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """It is refused, in what it differs is said, and nothing is touched."""
    path = tmp_path / "a.jsonl"
    before = written(path)
    with pytest.raises(UserError) as error:
        Journal(path, msgspec.structs.replace(RUN, **change)).__enter__()
    assert f"{path}: is of another run: {says}" == str(error.value)
    assert before == path.read_bytes()
    assert msgspec.to_builtins(RUN) == json.loads((tmp_path / "a.jsonl.run").read_text())


def test_a_server_that_has_moved(tmp_path: Path) -> None:
    """Said so, another address is no other run; another model still is."""
    path = tmp_path / "a.jsonl"
    written(path)
    there = msgspec.structs.replace(RUN, engine="http://there:2")
    with pytest.raises(UserError, match=r"model: tiny there, GLM now; choose another --out$"):
        Journal(path, msgspec.structs.replace(there, model="GLM"), has_moved=True).__enter__()
    with Journal(path, there, has_moved=True) as journal:
        assert 2 == len(journal.answered)
    assert "http://there:2" == json.loads((tmp_path / "a.jsonl.run").read_text())["engine"]


def test_samples_of_unknown_origin(tmp_path: Path) -> None:
    """Samples without the file that says of what run are refused; so is such a file that cannot be read."""
    path = tmp_path / "a.jsonl"
    before = written(path)
    (tmp_path / "a.jsonl.run").write_text("{}")
    with pytest.raises(UserError, match="expected what `kvshard gate run` wrote; choose another --out"):
        Journal(path, RUN).__enter__()
    (tmp_path / "a.jsonl.run").unlink()
    with pytest.raises(UserError, match=r"holds 3 samples, and no a\.jsonl\.run says of what run; choose another"):
        Journal(path, RUN).__enter__()
    assert before == path.read_bytes()


def test_two_runs_at_once(tmp_path: Path) -> None:
    """A file that is being written is not opened a second time; afterwards it is."""
    path = tmp_path / "a.jsonl"
    expected = "another run is writing it; wait for it, or choose another --out"
    with Journal(path, RUN), pytest.raises(UserError, match=expected):
        Journal(path, RUN).__enter__()
    with Journal(path, RUN):
        pass


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder, or a place below a file, is told as such."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "a.jsonl"):
        with pytest.raises(UserError, match=r"cannot be written: .*; choose another --out"):
            Journal(path, RUN).__enter__()

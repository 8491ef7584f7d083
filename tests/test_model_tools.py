"""What trains and asks the tiny model: tasks are fair, questions stand alone, training works, the weights answer."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ci.model_eval import Exam, ask, evaluate, lose, losses, moved, prefill
from ci.model_page import text
from ci.model_tasks import SIGNS, Tasks, held_out_sums, questions_of
from ci.register import register_cpu_ci
from ci.train_model import TINY, main, write_tokenizer
from kvshard_ref.model import TinyModel, load

register_cpu_ci(est_time=40, stage="commit")

SPARSE = replace(TINY, top_k=9)
ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures" / "model"


def test_held_out_sums_are_in_no_training_document() -> None:
    """One in ten sums is never trained; those asked are of these."""
    tasks, rng = Tasks(4), random.Random(1)
    held = {each.prompt.decode() for each in held_out_sums()}
    text = " ".join(bytes(tasks.document(rng, 2000).text).decode() for _ in range(20))

    assert 250 < len(held) < 420
    assert not [each for each in held if f"; {each}" in text or text.startswith(each)]
    assert text.count(" is ") > 100
    assert all(each.prompt.decode() in held for each in tasks.sums(rng, 20))


def test_no_document_asks_twice() -> None:
    """Else the answer could be copied from the first time. A question comes behind its fact, of the same sign."""
    tasks, rng = Tasks(4), random.Random(2)
    for _ in range(20):
        text = bytes(tasks.document(rng, 2000).text)
        asked = questions_of(text)
        assert len(asked) == len(set(asked)) > 10
        assert all(text.index(each) < text.index(b"\n?" + each) for each in asked)


def test_one_question_per_page_and_kind() -> None:
    """Each fact lies within the page that its question names, and is asked once."""
    text, questions = Tasks(4).context(random.Random(3), pages=8)

    assert 8 * 64 == len(text)
    assert [(page, kind) for page in range(8) for kind in range(4)] == [(each.page, each.layer) for each in questions]
    for each in questions:
        assert each.prompt.removeprefix(b"\n?") + each.answer in text[each.page * 64 : (each.page + 1) * 64]
        assert 1 == text.count(each.prompt.removeprefix(b"\n?"))


def test_a_batch_is_its_seed() -> None:
    """The same seed, the same documents; answers weigh most, and what nobody can know nothing."""
    batch = Tasks(4).batch("1", 8, 256, 1.0)
    again, free = Tasks(4).batch("1", 8, 256, 1.0), Tasks(4).batch("1", 8, 256, 0.0)

    assert np.array_equal(batch.tokens, again.tokens)
    assert np.array_equal(batch.tokens, free.tokens)
    assert {-1} == set(free.far_layers.flatten())
    assert {-1, 0, 1, 2, 3} == set(batch.far_layers.flatten())
    assert {0.0, np.float32(0.2), 1.0} == set(batch.weights.flatten())
    asked = [(each, at) for each, at in np.argwhere(batch.tokens == ord("?")) if at + 4 < 256]
    assert len(asked) > 8
    assert all(SIGNS[batch.far_layers[place]] == chr(batch.tokens[place[0], place[1] + 4]) for place in asked)


def test_each_kind_needs_a_sign() -> None:
    with pytest.raises(ValueError, match="kinds is 10, expected 1 to 8"):
        Tasks(10)


def test_questions_are_asked_apart() -> None:
    """Answers do not depend on the other questions of the batch, and a loss is of the page that it is about."""
    model, tasks = TinyModel(replace(SPARSE, layers=4), 3).requires_grad_(requires_grad=False), Tasks(4)
    text, questions = tasks.context(random.Random(4), pages=2)
    cache = prefill(model, text)

    together = ask(model, cache.copies(8), questions)
    apart = [ask(model, cache, [each])[0] for each in questions]

    assert [each[:2] for each in apart] == [each[:2] for each in together]
    for one, other in zip(apart, together, strict=True):
        assert pytest.approx(one.scores, abs=1e-5) == other.scores
        assert not moved(one.scores, other.scores)
    for loss in losses(4):
        hit = lose(loss, cache.copies(8), questions, prefill(model, text[::-1]))
        changed = [
            {at // 64 for at in (mine != its).any(dim=-1)[question].nonzero().flatten().tolist()}
            for question in range(8)
            for rows, before in zip([*hit.rows, hit.draft], [*cache.rows, cache.draft], strict=True)
            if rows is not None and before is not None
            for mine, its in zip(rows, before.__class__(*(each.expand(8, -1, -1) for each in before)), strict=True)
        ]
        pages = {frozenset(each) for each in changed if each}
        expected = {frozenset({0}), frozenset({1})} if not loss.whole else {frozenset({0, 1})}
        assert pages == (set() if loss.name == "nothing" else expected)


def test_every_kind_of_loss_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of an untrained model is complete: every loss with every kind of question."""
    model = TinyModel(replace(SPARSE, layers=2))
    exam = Exam.of(model, kinds=2, contexts=2, pages=2, seed=1, device="cpu")

    results = evaluate(exam, 1)

    assert (8, len(held_out_sums())) == (results["questions"], results["sums"])
    assert [each.name for each in losses(2)] == list(results["losses"])
    assert {4} == {each["questions"] for each in results["losses"].values()}
    assert 1 <= results["accept_length_uncut"] <= 4
    assert len(losses(2)) == len(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    "scores",
    [[0.0] * 11, [0.019] + [0.0] * 10, [2e-4] * 2 + [0.0] * 18, [5e-5] * 11],
    ids=["same", "tie", "ties", "near"],
)
def test_scores_that_rounding_explains_have_not_moved(scores: list[float]) -> None:
    """One score in ten may be further away than rounding explains, but not far."""
    assert not moved(scores, [0.0] * len(scores))


@pytest.mark.parametrize("scores", [[0.021] + [0.0] * 10, [2e-4] * 2 + [0.0] * 9], ids=["far", "many"])
def test_scores_of_other_rows_have_moved(scores: list[float]) -> None:
    """One far score will do, or more than one in ten that are not near."""
    assert moved(scores, [0.0] * len(scores))


def test_the_trained_model_answers_from_its_cache() -> None:
    """It knows every fact of a context; it loses one with that page's rows; drafts need rows of their own."""
    model = load(FIXTURES / "model.safetensors")
    exam = Exam.of(model, kinds=1, contexts=1, pages=8, seed=5, device="cpu")
    by_name = {each.name: each for each in losses(4)}
    with torch.no_grad():
        whole = exam.answers(by_name["nothing"], 1)
        lost = exam.answers(by_name["KV of own page zero, target only"], 1)
        draft = exam.answers(by_name["draft KV of own page zero"], 1)
        cache = exam.caches[0].copies(8)
        for rows in cache.rows:
            rows.latent[:, 3 * 64 : 4 * 64] = 0
        page = ask(model, cache, exam.contexts[0][1])

    assert [True] * 8 == [said.right for _, said in whole]
    assert [False] * 8 == [said.right for _, said in lost]
    assert [3] == [question.page for question, said in zip(exam.contexts[0][1], page, strict=True) if not said.right]
    assert [True] * 8 == [said.right for _, said in draft]
    assert sum(said.accepted for _, said in whole) > 2 * sum(said.accepted for _, said in draft)


def test_the_tokenizer_is_the_one_of_the_function(tmp_path: Path) -> None:
    """The files in fixtures/ are what the function writes: a token per byte, specials behind."""
    write_tokenizer(tmp_path)

    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (FIXTURES / name).read_bytes() == (tmp_path / name).read_bytes()
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())
    assert list(range(256)) == sorted(vocab["model"]["vocab"].values())
    assert [256, 257, 258, 259] == [each["id"] for each in vocab["added_tokens"]]


def test_the_tokenizer_is_one() -> None:
    """The package that reads such files makes bytes of text, and text of bytes."""
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(FIXTURES / "tokenizer.json"))
    text = "a b\n?é\0ü 漢"

    assert list(text.encode()) == tokenizer.encode(text).ids
    assert text == tokenizer.decode(list(text.encode()))
    assert [97, 257] == tokenizer.encode("a<|eos|>").ids


@pytest.mark.slow
def test_training_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of a small model: the loss falls, weights and record are there."""
    assert 0 == main(["--tiny", "--out", str(tmp_path)])

    assert capsys.readouterr().out.splitlines()[-1].endswith("40 steps: falls")
    record = json.loads((tmp_path / "model.json").read_text())
    assert {"plan", "kinds", "geometry", "versions", "records", "before"} == set(record)
    parts = ("target", "draft", "index")
    assert all(record["records"][-1][part] < record["records"][0][part] for part in parts)
    weights = tmp_path / "model.safetensors"
    main(["--tiny", "--refine", str(weights), "--out", str(tmp_path / "more")])
    more = json.loads((tmp_path / "more" / "model.json").read_text())
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == more["plan"]["refines"]
    assert [record["plan"]] == [each["plan"] for each in more["before"]]
    assert more["records"][0]["target"] < record["records"][0]["target"]
    assert TINY == load(tmp_path / "model.safetensors").geometry


def test_weights_to_refine_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is told with the file that lacks, before anything is trained."""
    weights = tmp_path / "model.safetensors"
    for lacks in (weights, tmp_path / "model.json"):
        with pytest.raises(SystemExit) as caught:
            main(["--tiny", "--refine", str(weights)])
        assert 2 == caught.value.code
        assert f"no file {lacks}; expected weights and, beside them, their record" in capsys.readouterr().err
        weights.touch()


def test_the_page_is_that_of_the_record() -> None:
    """docs/model.md is what the program makes of the record beside the weights."""
    assert text() == (ROOT / "docs" / "model.md").read_text(encoding="utf-8")

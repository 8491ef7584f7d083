"""The data of the tiny model's own tasks are what the script writes, and what it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ci import eval_tasks
from ci.model_tasks import is_held_out, number
from ci.register import register_cpu_ci

register_cpu_ci(est_time=20, stage="commit")

FOLDER = Path(__file__).parent.parent / "fixtures" / "tasks"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["arithmetic", "recall"])
def test_what_is_kept_is_what_is_written(tmp_path: Path, name: str) -> None:
    """The same bytes, whenever it is run."""
    assert f"{name}.jsonl" in [path.name for path in eval_tasks.write(tmp_path)]
    assert (FOLDER / f"{name}.jsonl").read_bytes() == (tmp_path / f"{name}.jsonl").read_bytes()


def test_sums_are_right_and_new_to_the_model() -> None:
    """Each sum is there once, is right, and is held out of training."""
    values = {number(value): value for value in range(50)}
    made = rows("arithmetic")
    for row in made:
        first, second, third = (values[word] for word in row["prompt"].removesuffix(" is ").split(" plus "))
        assert number(first + second + third) == row["answer"]
        assert is_held_out((first, second, third))
    assert len(made) == len({row["prompt"] for row in made})


def test_facts_are_in_their_context_once() -> None:
    """Every page of every context is asked once, for what stands there, and there alone, with the answer behind it."""
    pages: dict[int, list[int]] = {}
    texts: dict[int, set[str]] = {}
    for row in rows("recall"):
        context, _, asked = row["prompt"].rpartition("\n?")
        fact = f"{asked}{row['answer']}; "
        assert (1, 1) == (context.count(asked), context.count(fact))
        assert row["page"] == context.index(fact) // eval_tasks.PAGE_SIZE
        pages.setdefault(row["context"], []).append(row["page"])
        texts.setdefault(row["context"], set()).add(context)
    assert {number: list(range(eval_tasks.PAGES)) for number in range(eval_tasks.CONTEXTS)} == pages
    assert [1] * eval_tasks.CONTEXTS == [len(each) for each in texts.values()]

"""Comments of all kinds, and what they come to."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ci.comment_plan import ARGUMENT
from ci.comment_tree import Tree
from ci.register import register_cpu_ci
from tests.comment_rig import event, play, sample_github, sample_tree

register_cpu_ci(est_time=10, stage="commit")

CORPUS = tomllib.loads((Path(__file__).parent / "comment_corpus.toml").read_text())["comment"]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return sample_tree()


@pytest.mark.parametrize("case", CORPUS, ids=[case["name"] for case in CORPUS])
def test_corpus(case: dict[str, Any], tree: Tree) -> None:
    """A comment runs what it should on each runner, and what is refused says why."""
    github = sample_github()
    github.files = [{"filename": name, "status": "modified"} for name in case.get("changed", ())]
    each = " ".join(case.get("each", "").format(number) for number in range(case.get("count", 0)))
    outcome = play(github, event(case["text"].replace("{each}", each), case.get("user", "writer")), tree)
    told = {"runs", "runs_count", "labels", "refused", "notes"} & set(case)
    assert bool(told) == (outcome.reply is not None) == bool(github.replies)
    if outcome.reply is None:
        return
    runs: dict[str, list[str]] = {}
    for action in outcome.reply.actions:
        for command in action.commands:
            runs.setdefault(action.title, []).append(" ".join(command).removeprefix("python3 -m pytest -x "))
    if "runs_count" in case:
        assert case["runs_count"] == sum(map(len, runs.values()))
    else:
        assert case.get("runs", {}) == runs
    refused = [[what, why[:110]] for what, why, _ in outcome.reply.refusals]
    assert case.get("refused", []) == refused
    assert all(advice for _, _, advice in outcome.reply.refusals)
    assert case.get("notes", []) == outcome.reply.notes
    assert case.get("labels", "").split() == github.labels
    lines = [argument for action in outcome.reply.actions for command in action.commands for argument in command]
    assert [] == [argument for argument in lines if not ARGUMENT.fullmatch(argument)]


def test_the_corpus_is_large() -> None:
    """At least 60 comments, each with a name of its own."""
    assert 60 <= len({case["name"] for case in CORPUS}) == len(CORPUS)

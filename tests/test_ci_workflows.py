"""The workflows keep their rules, and each rule catches a workflow that breaks it."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ci import cli, runners
from ci.comment_rights import TABLE, read_table
from ci.register import register_cpu_ci
from ci.workflows import DISPATCHED, FOLDER, main, problems

register_cpu_ci(est_time=10, stage="commit")

ROOT = Path(__file__).parent.parent
LOCAL = (".ci/run", "docs/ci.md")
FILES = sorted(FOLDER.glob("*.yml"))
RUNNERS = runners.read()
CHECKOUT = "actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2"
GOOD = f"""
name: Sample
on: pull_request
permissions: {{}}
concurrency:
  group: sample
  cancel-in-progress: true
jobs:
  test:
    runs-on: ubuntu-latest
    timeout-minutes: 5
    permissions:
      contents: read
    steps:
      - uses: {CHECKOUT}
        with:
          persist-credentials: false
      - run: echo "$TITLE"
        env:
          TITLE: ${{{{ github.event.pull_request.title }}}}
"""


def told(text: str, name: str = "sample.yml") -> list[str]:
    return [f"{problem.value}; {problem.expected}" for problem in problems(Path(name), text, RUNNERS)]


def loaded(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def test_own_workflows(capsys: pytest.CaptureFixture[str]) -> None:
    """No workflow of this project breaks a rule."""
    assert {"comment.yml", "gpu.yml", "nightly.yml", "pull-request.yml", DISPATCHED} <= {path.name for path in FILES}
    assert (0, "") == (main([]), capsys.readouterr().out)


def test_good() -> None:
    """A workflow that keeps all rules has no problem."""
    assert [] == told(GOOD)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("permissions: {}", "permissions: write-all", "permissions 'write-all' of the workflow"),
        ("permissions: {}\n", "", "permissions None of the workflow"),
        ("    permissions:\n      contents: read\n", "", "permissions None of job test"),
        ("contents: read", "contents: write", "job test may write contents"),
        ("contents: read", "issues: write", "job test may write issues"),
        ("@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2", "@v4.2.2", "uses actions/checkout@v4.2.2"),
        ("c9af683", "c9af68", "40 hex digits"),
        (" # v4.2.2", "", "a comment such as # v4.2.2"),
        ('"$TITLE"', '"${{ github.event.pull_request.title }}"', "an expression in a shell step"),
        ('"$TITLE"', '"${{ inputs.key }}"', "an expression in a shell step"),
        ("persist-credentials: false", "persist-credentials: true", "leaves its token behind"),
        ("        with:\n          persist-credentials: false\n", "", "leaves its token behind"),
        ("runs-on: ubuntu-latest", "runs-on: ubuntu-20.04", "job test runs on 'ubuntu-20.04'"),
        ("runs-on: ubuntu-latest", "runs-on: [self-hosted, linux]", "labels of one runner"),
        ("runs-on: ubuntu-latest", "runs-on: ${{ inputs.where }}", "labels of one runner"),
        ("    timeout-minutes: 5\n", "", "without timeout-minutes"),
        ("  group: sample\n", "", "concurrency"),
        ("jobs:", "jobs: [", "no YAML"),
    ],
)
def test_broken(old: str, new: str, says: str) -> None:
    """A workflow with one mistake has one problem, which tells it."""
    assert old in GOOD
    (found,) = told(GOOD.replace(old, new))
    assert says in found


def test_labels_of_the_table() -> None:
    """The labels of any runner of the table will do, all of them and in its order."""
    for runner in RUNNERS.values():
        assert [] == told(GOOD.replace("runs-on: ubuntu-latest", f"runs-on: {list(runner.labels)}"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("      head_sha:", "      sha:", "commands, head_sha, key, labels, pull, timeout_minutes"),
        ("        required: true\n", "", "type: string and required: true"),
        ("type: string", "type: number", "type: string and required: true"),
        ("name: Rerun test\n", "name: Rerun\n", "name: Rerun; Rerun test"),
        ("${{ inputs.key }}\n\n", "${{ inputs.pull }}\n\n", "run-name: rerun ${{ inputs.pull }}"),
    ],
)
def test_broken_dispatch(old: str, new: str, says: str) -> None:
    """What the handler dispatches must take its inputs and show its key."""
    text = (FOLDER / DISPATCHED).read_text()
    assert old in text
    assert says in " ".join(told(text.replace(old, new, 1), DISPATCHED))


def test_dispatched_name() -> None:
    """The handler dispatches the workflow that is there, and follows it by its name."""
    assert DISPATCHED == read_table(TABLE.read_text()).workflow
    assert [loaded(DISPATCHED)["name"]] == loaded("comment.yml")[True]["workflow_run"]["workflows"]


def test_labels_that_start_gpus() -> None:
    """GPU tests start with the labels that the commands add, and no job on a GPU starts without."""
    table, workflow = read_table(TABLE.read_text()), loaded("gpu.yml")
    plan = workflow["jobs"].pop("plan")
    assert [f"contains(github.event.pull_request.labels.*.name, '{label}')" in plan["if"] for label in table.labels]
    assert all(label in workflow["env"]["NIGHTLY"] for label in table.labels_extra)
    assert ["plan"] == [job["needs"] for job in workflow["jobs"].values()]


def of_text(text: str) -> Iterator[list[str]]:
    """Every `kvshard ci` of shell text, with its arguments; variables are the values that a matrix gives."""
    values = {"PART": "1/2", "GITHUB_EVENT_PATH": "event.json", "LABELS": "[]", "COMMANDS": "[]"}
    text = re.sub(r"\$\{\w+:\+(--\w+)\}", r"\1", text.replace("\\\n", " ").replace('"$@"', ""))
    text = re.sub(r"\$(\w+)", lambda found: values.get(found[1], found[1]), text)
    for found in re.finditer(r"(?<!`)(?:kvshard|harness\.cli) ci ([^\n)]*)", text):
        yield shlex.split(found[1].partition(";")[0], comments=True)


def of_workflow(name: str) -> Iterator[list[str]]:
    for job in loaded(name)["jobs"].values():
        for step in job["steps"]:
            yield from of_text(str(step.get("run", "")))


def test_commands() -> None:
    """The commands of the workflows, of the local CI and of its page have arguments that exist."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    cli.add_arguments(parser)
    texts = {name: list(of_text((ROOT / name).read_text())) for name in LOCAL}
    seen = {path.name: list(of_workflow(path.name)) for path in FILES} | texts
    assert {"plan", "run", "rerun", "lint"} == {words[0] for found in seen.values() for words in found}
    for name, found in seen.items():
        for words in found:
            more = [] if "--stage" in words or words[0] in {"rerun", "lint"} else ["--stage", "commit"]
            assert callable(parser.parse_args([*words, *more]).function), name


def test_local_ci_runs_what_pull_requests_run() -> None:
    """Stage, runners and choice of tests of the local CI are those of pull requests; it goes on after a failure."""
    local = (ROOT / LOCAL[0]).read_text()
    runs = [words for words in of_text(local) if words[0] == "run"]
    planned = next(words for words in of_workflow("pull-request.yml") if words[0] == "plan")
    ours = {name for words in runs for name in after("--runner", words)}
    assert set(after("--runner", planned)) == {*ours, "ubuntu-lm-eval"}  # which the local CI says it leaves out
    assert {"commit"} == {name for words in (planned, *runs) for name in after("--stage", words)}
    assert [] == [words for words in runs if "--continue" not in words]
    (test,) = (step for step in loaded("pull-request.yml")["jobs"]["test"]["steps"] if step.get("name") == "Test")
    assert "ubuntu-latest' && '-m \"not slow\"'" in test["env"]["PYTEST_ADDOPTS"]
    assert "PYTEST_ADDOPTS=\"-m 'not slow'\" kvshard ci run --stage commit --runner ubuntu-latest" in local


def after(option: str, words: list[str]) -> list[str]:
    return [value for name, value in itertools.pairwise(words) if name == option]

"""Rules that the workflows of this project keep: `python -m ci.workflows [FOLDER]` tells each one that is broken.

Rights are stated for each job and are as few as can be; actions are pinned by commit; no expression stands in a shell
step, since what it expands to may be anybody's text; runners are those of the table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ci import runners as runner_table
from ci.comment_reply import Action, Reply
from ci.comment_send import inputs
from ci.registration import Problem
from ci.runners import Runners

FOLDER = Path(__file__).parent.parent / ".github" / "workflows"
DISPATCHED = "rerun-test.yml"
# The jobs that may write, and what; every other one reads.
MAY_WRITE: Mapping[tuple[str, str], frozenset[str]] = MappingProxyType(
    {("comment.yml", "answer"): frozenset({"actions", "issues", "pull-requests"})}
)
LABELS_FROM = ("${{ matrix.labels }}", "${{ fromJSON(inputs.labels) }}")  # both come from the table of runners
_PIN = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
_USES = re.compile(r"^\s*(?:- )?uses: (?P<action>\S+)(?P<rest>.*)$", re.MULTILINE)
_VERSION = re.compile(r" # v\d+\.\d+\.\d+")


def problems(path: Path, text: str, runners: Runners) -> list[Problem]:
    """Every rule that a workflow with this text breaks."""
    try:
        workflow = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [Problem(path, 1, f"no YAML: {error}", "a workflow", "correct it")]
    found = [*_head(path, workflow), *_pins(path, text)]
    for name, job in workflow.get("jobs", {}).items():
        found += [*_rights(path, name, job), *_job(path, name, job, runners)]
        for step in job.get("steps", ()):
            found += _step(path, name, step)
    if path.name == DISPATCHED:
        found += _dispatched(path, workflow)
    return found


def _head(path: Path, workflow: Mapping[Any, Any]) -> Iterator[Problem]:
    if workflow.get("permissions") != {}:
        value = f"permissions {workflow.get('permissions')!r} of the workflow"
        yield Problem(path, 1, value, "permissions: {}", "state rights at each job instead")
    group = workflow.get("concurrency")
    if not (isinstance(group, dict) and group.get("group") and "cancel-in-progress" in group):
        yield Problem(path, 1, f"concurrency {group!r}", "group and cancel-in-progress", "say what ends what")


def _pins(path: Path, text: str) -> Iterator[Problem]:
    """Read from the text, since YAML drops the comment that tells the version."""
    for found in _USES.finditer(text):
        action, line = found["action"], text.count("\n", 0, found.start()) + 1
        if not _PIN.fullmatch(action):
            yield Problem(path, line, f"uses {action}", "OWNER/NAME@ and 40 hex digits", "pin the commit of a release")
        elif not _VERSION.fullmatch(found["rest"]):
            yield Problem(path, line, f"uses {action}{found['rest']}", "a comment such as # v4.2.2", "tell the version")


def _rights(path: Path, name: str, job: Mapping[str, Any]) -> Iterator[Problem]:
    rights = job.get("permissions")
    if not isinstance(rights, dict):
        yield Problem(path, 1, f"permissions {rights!r} of job {name}", "rights by name", "state those that it needs")
        return
    written = {right for right, level in rights.items() if level == "write"}
    more = written - MAY_WRITE.get((path.name, name), frozenset())
    if more:
        value = f"job {name} may write {', '.join(sorted(more))}"
        yield Problem(path, 1, value, "rights to read", "do without, or add it to MAY_WRITE of ci/workflows.py")


def _job(path: Path, name: str, job: Mapping[str, Any], runners: Runners) -> Iterator[Problem]:
    labels = job.get("runs-on")
    known = [list(runner.labels) for runner in runners.values()]
    if labels not in LABELS_FROM and ([labels] if isinstance(labels, str) else labels) not in known:
        step = f"take those of a runner of {runners.source.name}, or matrix.labels"
        yield Problem(path, 1, f"job {name} runs on {labels!r}", "labels of one runner", step)
    if "timeout-minutes" not in job:
        yield Problem(path, 1, f"job {name} without timeout-minutes", "a limit", "state one")


def _step(path: Path, name: str, step: Mapping[str, Any]) -> Iterator[Problem]:
    if "${{" in str(step.get("run", "")):
        value = f"an expression in a shell step of job {name}: {step['run'].strip()[:80]}"
        yield Problem(path, 1, value, "none", "hand it over as a variable under env, and quote that")
    is_checkout = str(step.get("uses", "")).startswith("actions/checkout@")
    if is_checkout and step.get("with", {}).get("persist-credentials") is not False:
        value = f"a checkout of job {name} that leaves its token behind"
        yield Problem(path, 1, value, "persist-credentials: false", "add it")


def _dispatched(path: Path, workflow: Mapping[Any, Any]) -> Iterator[Problem]:
    """It takes what the comment handler sends, and shows the key by which the handler finds the run."""
    events = workflow.get(True, workflow.get("on")) or {}  # YAML 1.1 reads `on` as a truth value
    taken = (events.get("workflow_dispatch") or {}).get("inputs") or {}
    sent = set(inputs(Reply(0, 0, "", ""), Action("dispatch", "", "")))
    if set(taken) != sent:
        value = f"inputs {', '.join(sorted(taken))}"
        yield Problem(path, 1, value, ", ".join(sorted(sent)), "take what ci/comment_send.py sends")
    for name, one in taken.items():
        if one.get("type") != "string" or one.get("required") is not True:
            yield Problem(path, 1, f"input {name}: {one!r}", "type: string and required: true", "correct it")
    named = {"name": "Rerun test", "run-name": "rerun ${{ inputs.key }}"}
    for key, wanted in named.items():
        if workflow.get(key) != wanted:
            yield Problem(path, 1, f"{key}: {workflow.get(key)}", wanted, "the handler looks for it")


def main(arguments: Sequence[str]) -> int:
    """Prints the problems of a folder; returns the exit code."""
    folder = Path(arguments[0]) if arguments else FOLDER
    table = runner_table.read()
    found = [
        problem
        for path in sorted(folder.glob("*.y*ml"))
        for problem in problems(path, path.read_text(encoding="utf-8"), table)
    ]
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

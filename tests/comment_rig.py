"""A pull request, rights, runners and a clock to try the comment handler with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ci.comment_handle import Handler, Outcome
from ci.comment_rights import Table, read_table
from ci.comment_tree import Tree, tree_of
from ci.github import Answer, Client, GitHubError, NotFoundError, Repository
from tests.fake_github import NAME, START, FakeGitHub

SHA = "abcdef0123456789abcdef0123456789abcdef01"
PULL, COMMENT = 41, 1002
TOKEN = "token-that-must-not-be-seen"
EVENTS = Path(__file__).parent / "comment_events"
FOLDERS = ("suites", "tests")
MANY = 3000

TABLE = """
bot = "github-actions[bot]"
workflow = "rerun-test.yml"
folders = ["suites", "tests"]
cooldown_minutes = 120
[labels]
ci = ["run-ci"]
extra = ["run-ci-extra"]
[users.tester]
may = ["test", "failed", "tag"]
cooldown_minutes = 30
[users.trusted]
may = ["test", "failed", "tag", "extra"]
cooldown_minutes = 0
forks = true
[groups]
unit = ["suites/unit/test_a.py", "suites/unit/test_b.py"]
"""


class RunnerStub(NamedTuple):
    """What a plan needs to know of a runner."""

    labels: tuple[str, ...]
    file_seconds: float = 1200.0
    job_seconds: float = 1200.0
    max_parts: int = 4


RUNNERS: Mapping[str, RunnerStub] = {
    "ubuntu-latest": RunnerStub(("ubuntu-latest",)),
    "4-gpu-gb300": RunnerStub(("self-hosted", "4-gpu-gb300")),
}


def cpu(seconds: float = 60, more: str = "") -> str:
    return f'register_cpu_ci(est_time={seconds}, stage="commit"{more})\n'


def gpu(seconds: float = 300, runner: str = "4-gpu-gb300") -> str:
    return f'register_gpu_ci(est_time={seconds}, stage="commit", runner="{runner}")\n'


GUARD = 'if __name__ == "__main__":\n    {}.main()\n'
CASES = (
    "class TestCache:\n    def test_hit(self): ...\n    def help(self): ...\ndef helps(): ...\n"
    "class TestMore(Base): ...\ndef test_alone(): ...\n"
)
DISABLED = ', disabled={"reason": "flaky `x`", "issue": "https://example.com/1", "until": "2027-01-31"}'
FILES: Mapping[str, str] = {
    "suites/e2e/helper.py": "",
    "suites/e2e/test_cache.py": cpu() + CASES,
    "suites/e2e/test_gather.py": gpu() + CASES,
    "suites/e2e/test_both.py": cpu() + gpu(),
    "suites/e2e/test_same.py": cpu(),
    "tests/test_same.py": cpu(),
    "suites/e2e/test_unregistered.py": "def test_alone(): ...\n",
    "suites/e2e/test_disabled.py": cpu(60, DISABLED),
    "suites/e2e/test_partly.py": cpu(60, DISABLED) + gpu(),
    "suites/e2e/test_twice.py": cpu() + cpu(),
    "suites/e2e/test_broken.py": "def test(:\n",
    "suites/e2e/test_long.py": cpu(5000),
    "suites/e2e/test_elsewhere.py": gpu(60, "9-gpu-x"),
    "suites/e2e/test_computed.py": "register_cpu_ci(est_time=60 * 2, stage='commit')\n",
    "suites/e2e/test_$(id).py": cpu(),
    "suites/e2e/test_a b.py": cpu(),
    "tests/folder/test_deep.py": cpu(),
    "tests/folder/test_script.py": "import unittest\n" + cpu() + CASES + GUARD.format("unittest"),
    "tests/folder/test_guarded.py": "import pytest\n" + cpu() + CASES + GUARD.format("pytest"),
    **{f"suites/unit/test_{letter}.py": cpu(100) for letter in "abcdef"},
    **{f"suites/many/test_{number:04}.py": cpu(1) for number in range(MANY)},
}
SIX = [f"suites/unit/test_{letter}.py" for letter in "abcdef"]


def sample_tree() -> Tree:
    return tree_of(FILES, FOLDERS)


def sample_table() -> Table:
    return read_table(TABLE)


def event(text: str, user: str = "writer", **values: Any) -> dict[str, Any]:
    """A comment on the pull request, as GitHub tells it."""
    comment = {
        "id": COMMENT,
        "user": {"login": user, "type": "User"},
        "body": text,
        "created_at": f"{START:%Y-%m-%dT%H:%M:%SZ}",
        "author_association": "NONE",
    }
    issue = {"number": PULL, "pull_request": {"url": f"https://api.example/repos/{NAME}/pulls/{PULL}"}}
    return {
        "action": "created",
        "comment": comment | values,
        "issue": issue,
        "repository": {"full_name": NAME},
        "sender": comment["user"],
    }


def recorded(name: str) -> dict[str, Any]:
    """A recorded event."""
    return dict(json.loads((EVENTS / f"{name}.json").read_text()))


@dataclass
class Clock:
    """Time that passes by sleeping alone."""

    github: FakeGitHub
    start: datetime = START + timedelta(minutes=1)
    slept_s: float = 0.0

    def monotonic(self) -> float:
        return self.slept_s

    def now(self) -> datetime:
        return self.start + timedelta(seconds=self.slept_s)

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.github.now = self.now()


def sample_github() -> FakeGitHub:
    """A pull request of the repository's own branch, and a commenter `writer` with write access."""
    github = FakeGitHub()
    repo = {"full_name": NAME, "default_branch": "main", "pushed_at": "2026-05-31T00:00:00Z"}
    github.pulls[PULL] = {
        "state": "open",
        "user": {"login": "author"},
        "head": {"sha": SHA, "repo": dict(repo)},
        "base": {"repo": repo},
    }
    github.permissions = {"writer": "write", "author": "read", "tester": "read", "trusted": "read", "reader": "read"}
    return github


class Direct:
    """Calls a fake GitHub without HTTP."""

    def __init__(self, github: FakeGitHub) -> None:
        self.github = github

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        answer = self.github.answer(method, path, None if body is None else json.loads(json.dumps(body)))
        assert answer is not None
        if answer[0] >= 400:
            raise (NotFoundError if answer[0] == 404 else GitHubError)(f"{method} {path}: {answer[0]}", answer[0])
        return Answer(answer[0], answer[2])


def play(github: FakeGitHub, told: dict[str, Any], tree: Tree) -> Outcome:
    """One delivery without HTTP."""
    clock = Clock(github)
    handler = Handler(
        repository=Repository(Direct(github), NAME),
        table=sample_table(),
        runners=RUNNERS,
        tree_at=lambda _: tree,
        delivery="direct",
        now=clock.now,
        sleep=clock.sleep,
        open_reserve=lambda: None,
    )
    return handler.handle(told)


class Rig:
    """A handler in front of a fake GitHub; each delivery is a process of its own, as far as state goes."""

    def __init__(self, github: FakeGitHub, *, timeout_s: float = 5.0, budget_s: float = 300.0) -> None:
        self.github = github
        self.clock = Clock(github)
        self.timeout_s, self.budget_s = timeout_s, budget_s
        self.deliveries = 0

    def client(self) -> Client:
        return Client(
            TOKEN,
            self.github.url,
            budget_s=self.budget_s,
            timeout_s=self.timeout_s,
            clock=self.clock.monotonic,
            wall=lambda: self.clock.now().timestamp(),
            sleep=self.clock.sleep,
        )

    def handler(self, tree: Tree | None = None) -> Handler:
        self.deliveries += 1
        client = self.client()
        return Handler(
            repository=Repository(client, NAME),
            table=sample_table(),
            runners=RUNNERS,
            tree_at=lambda _: tree or sample_tree(),
            delivery=f"delivery-{self.deliveries}",
            now=self.clock.now,
            sleep=self.clock.sleep,
            open_reserve=client.open_reserve,
        )

    def deliver(self, text: str, user: str = "writer", **values: Any) -> Outcome:
        return self.handler().handle(event(text, user, **values))

    @property
    def reply(self) -> str:
        """The one reply."""
        assert 1 == len(self.github.replies), self.github.replies
        return str(self.github.replies[0])

    @property
    def commands(self) -> dict[str, int]:
        """How often each command line was dispatched."""
        lines: dict[str, int] = {}
        for dispatch in self.github.dispatches:
            for command in json.loads(dispatch["inputs"]["commands"]):
                lines[" ".join(command)] = lines.get(" ".join(command), 0) + 1
        return lines

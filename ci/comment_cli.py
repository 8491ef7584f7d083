"""`kvshard ci comment`: handle a recorded or live event of GitHub.

`--dry-run` plays an event offline: nothing is sent, and the plan and the reply are printed. What the API would tell is
taken from the key `recorded` of the event file: `pull`, `files` (changed), `permission`, `runs`; each may be left out.
`python -m ci.comment_cli` is the same command without the rest of the project.

Exit codes: 0 done, 1 cut off or no reply could be written (the same event again goes on), 3 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from ci import runners
from ci.comment_handle import Handler, Outcome
from ci.comment_parse import Bad
from ci.comment_reply import body
from ci.comment_rights import TABLE, Table, read_table
from ci.comment_tree import Tree, tree_in
from ci.github import API, Answer, Client, GitHubError, NotFoundError, Repository

EXIT_USAGE = 3
EVENT_BYTES_MAX = 30_000_000
NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
NO_COMMIT = "0" * 40
WRITERS = frozenset({"OWNER", "MEMBER", "COLLABORATOR"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard ci comment`."""
    add = parser.add_argument
    add("--event", type=Path, required=True, metavar="FILE", help="the event as GitHub gives it to a workflow (JSON)")
    add("--tree", type=Path, metavar="DIR", help="a checkout of the pull request, read as data (default: .)")
    add("--dry-run", action="store_true", help="send nothing; print the plan and the reply")
    add("--api", default=API, metavar="URL", help=f"the REST API (default: {API}); the token is GITHUB_TOKEN")
    add(
        "--permissions", type=Path, default=TABLE, metavar="FILE", help="who may do what (default: ci/permissions.toml)"
    )
    add("--runners", type=Path, default=runners.DEFAULT_FILE, metavar="FILE", help="the table of runners")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    try:
        event = read_event(args.event)
        table = read_table(args.permissions.read_text(encoding="utf-8"))
        known = runners.read(args.runners)
        name = str(event.get("repository", {}).get("full_name", ""))
        if not NAME.fullmatch(name):
            raise ValueError(f"{args.event}: no event of a repository; expected `repository.full_name`")
        root = args.tree or Path()
        if args.dry_run:
            return dry_run(event, table, known, root, name)
        client = Client(os.environ.get("GITHUB_TOKEN", ""), args.api)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        print(f"kvshard ci comment: {error}", file=sys.stderr)
        return EXIT_USAGE
    handler = Handler(
        repository=Repository(client, name),
        table=table,
        runners=known,
        tree_at=lambda sha: tree_at(root, table, sha),
        delivery=delivery(),
        now=lambda: datetime.now(UTC),
        sleep=time.sleep,
        open_reserve=client.open_reserve,
    )
    try:
        outcome = handler.handle(event)
    except GitHubError as error:
        print(f"kvshard ci comment: {error}", file=sys.stderr)
        return 1
    print(outcome.what)
    return outcome.exit_code


def read_event(file: Path) -> dict[str, Any]:
    """The event; raises `OSError`, `ValueError`."""
    if file.stat().st_size > EVENT_BYTES_MAX:
        raise ValueError(f"{file}: more than {EVENT_BYTES_MAX} bytes, no event of GitHub")
    event = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(event, dict):
        raise TypeError(f"{file}: no JSON object; expected an event of GitHub")
    return event


def delivery() -> str:
    """A name of this attempt, so that another one sees whose reply it found."""
    run_id, attempt = os.environ.get("GITHUB_RUN_ID", ""), os.environ.get("GITHUB_RUN_ATTEMPT", "")
    return f"{run_id}-{attempt}" if run_id else uuid.uuid4().hex


def tree_at(root: Path, table: Table, sha: str) -> Tree:
    """The tree below `root`, which must be a checkout of that commit; raises `Bad`."""
    try:
        found = (root / ".git" / "HEAD").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if found != sha:
        why = "the pull request has got new commits since the comment was picked up"
        raise Bad(why, "look at what is new, then write the command again")
    return tree_in(root, table.folders)


def dry_run(event: dict[str, Any], table: Table, known: runners.Runners, root: Path, name: str) -> int:
    """Play an event offline and print what would be done."""
    recorded = Recorded(event, table, name)
    handler = Handler(
        repository=Repository(recorded, name),
        table=table,
        runners=known,
        tree_at=lambda _: tree_in(root, table.folders),
        delivery="dry-run",
        now=recorded.now,
        sleep=lambda _: None,
        open_reserve=lambda: None,
    )
    outcome = handler.handle(event)
    print(told(outcome))
    return outcome.exit_code


def told(outcome: Outcome) -> str:
    """Plan and reply, for a terminal."""
    parts = [f"outcome: {outcome.what}"]
    if outcome.plan:
        parts += ["plan:", json.dumps(outcome.plan, indent=2)]
    if outcome.reply is not None:
        lines = body(outcome.reply).split("\n")
        parts += ["reply:", *(line for line in lines if not line.startswith("<!-- "))]
    return "\n".join(parts)


class Recorded:
    """Answers calls from an event file; writes go nowhere."""

    def __init__(self, event: Mapping[str, Any], table: Table, name: str) -> None:
        self._recorded = event.get("recorded", {})
        self._comment = event.get("comment", {})
        self._table, self._name = table, name
        self._ids = iter(range(1, 1_000_000))

    def now(self) -> datetime:
        """The moment of the comment."""
        return datetime.fromisoformat(str(self._comment.get("created_at", "2026-01-01T00:00:00Z")))

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """The recorded answer."""
        where = path.partition("?")[0].removeprefix(f"/repos/{self._name}")
        if method != "GET":
            return Answer(200, {"id": next(self._ids), "body": (body or {}).get("body", "")})
        if where.startswith("/pulls/"):
            return Answer(200, self._recorded.get("files", []) if where.endswith("/files") else self.pull())
        if where.startswith("/actions/"):
            return Answer(200, self.runs(where))
        if where.endswith("/permission"):
            writes = self._comment.get("author_association") in WRITERS
            return Answer(200, {"permission": self._recorded.get("permission", "write" if writes else "none")})
        if where.endswith("/comments"):
            return Answer(200, [])
        raise NotFoundError(f"{method} {where}: not recorded", 404)

    def runs(self, where: str) -> Any:
        """The recorded runs, or one of them; nothing was ever dispatched."""
        runs = self._recorded.get("runs", [])
        if where.endswith("/runs"):
            return {"workflow_runs": runs if where == "/actions/runs" else []}
        same = [run for run in runs if str(run["id"]) == where.rpartition("/")[2]]
        return same[0] if same else {"status": "queued", "run_attempt": 1}

    def pull(self) -> Any:
        """The recorded pull request, or one of the repository itself."""
        repo = {"full_name": self._name, "default_branch": "main", "pushed_at": ""}
        made = {
            "state": "open",
            "user": {"login": ""},
            "head": {"sha": NO_COMMIT, "repo": repo},
            "base": {"repo": repo},
        }
        return self._recorded.get("pull", made)


class _Parser(argparse.ArgumentParser):
    """One with this project's exit code for wrong usage."""

    def error(self, message: str) -> NoReturn:
        """One line, and the code."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command on its own; returns its exit code."""
    parser = _Parser("python -m ci.comment_cli", description="answer a comment of a pull request")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

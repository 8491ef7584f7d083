"""An event of GitHub -> what is done, and the one reply.

Promised: a comment is answered by one reply; what it asks for is carried out once, however often and whenever its
event is delivered; what was cut off goes on when the event is delivered again. The reply holds how far the work is,
written before the work, and every dispatch carries a key that can be looked up. Two deliveries at the same time both
write a reply; the older one is kept, and the delivery that wrote the other ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ci.comment_parse import Bad, Command, Parsed, Refusal, parse, shown
from ci.comment_plan import TESTED_BY, Planner, RunnerLike
from ci.comment_reply import CLAIMED, DONE, PLANNED, Action, Reply, body, marker, read_reply
from ci.comment_rights import Commenter, Table, check_cooldown, check_rights, cooldown_minutes
from ci.comment_send import Sender
from ci.comment_tree import Tree
from ci.github import GitHubError, Repository, UnavailableError, UnsureError

LEASE_S = 120.0
POLL_S = 10.0
CLAIMS_MAX = 3
LOGIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})")
TITLE = re.compile(r"rerun (?P<pull>\d{1,18})/(?P<comment>\d{1,18})/[A-Za-z0-9-]+/[0-9a-f]{12}", re.ASCII)
SHA = re.compile(r"[0-9a-f]{40}")
NOT_PASSED = frozenset({"failure", "cancelled", "timed_out", "startup_failure"})
FAILED_MAX = 30  # runs that one command runs again


class SupersededError(Exception):
    """Another delivery is at work on the same comment."""


@dataclass(frozen=True, slots=True)
class Request:
    """A comment as its event tells it."""

    comment: int
    pull: int
    user: str
    text: str
    at: str
    is_pull: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an event; exit code 0 done, 1 cut off (the same event again goes on)."""

    what: str
    reply: Reply | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Handler:
    """Handles events of one repository. `tree_at` gives the tree of a commit as data, or raises `Bad`."""

    repository: Repository
    table: Table
    runners: Mapping[str, RunnerLike]
    tree_at: Callable[[str], Tree]
    delivery: str
    now: Callable[[], datetime]
    sleep: Callable[[float], None]
    open_reserve: Callable[[], None]

    def handle(self, event: Mapping[str, Any]) -> Outcome:
        """Do what an event asks for. Raises `GitHubError` only where not even the reply could be written."""
        if "workflow_run" in event:
            return self.follow(event["workflow_run"])
        request = request_of(event)
        if request is None:
            return Outcome("no new comment of a person")
        asked = parse(request.text)
        if not asked.commands and not asked.refusals:
            return Outcome("no command in the comment")
        sender = Sender(self.repository, self.table.workflow, self.sleep)
        reply = self.claim(request, asked)
        if reply is None:
            return Outcome("another delivery of this event answers")
        if reply.phase == DONE:
            if sender.refresh(reply):
                sender.save(reply)
            return Outcome("answered before", reply)
        return self.work(request, asked, reply, sender)

    def work(self, request: Request, asked: Parsed, reply: Reply, sender: Sender) -> Outcome:
        """Decide, write the plan down, carry it out; whatever happens, the reply tells."""
        plan: dict[str, Any] = {}
        reply.notes = [note for note in reply.notes if not note.startswith("cut off")]
        try:
            pull = self.repository.pull(request.pull) if request.is_pull else {}
            if reply.phase == CLAIMED:
                plan = self.decide(request, asked, reply, pull)
                reply.phase = PLANNED
                self.renew(reply)
            if reply.actions:
                ref = str(pull["base"]["repo"]["default_branch"])
                Sender(self.repository, self.table.workflow, self.sleep, ref).carry_out(reply, self.renew)
            if self.is_superseded(reply):
                raise SupersededError
            sender.settle(reply)
        except SupersededError:
            return Outcome("another delivery has gone on with it", reply, plan)
        except (GitHubError, KeyError, TypeError, ValueError, AttributeError) as error:
            is_answer = isinstance(error, GitHubError)
            why = str(error) if is_answer else f"GitHub's answer was not as expected ({type(error).__name__})"
            reply.notes.append(f"cut off: {shown(why, 300)}; running the failed job again goes on, nothing runs twice")
            reply.lease_until = 0.0
            self.open_reserve()
            if not self.is_superseded(reply):
                sender.save(reply)
            return Outcome("cut off", reply, plan, 1)
        return Outcome("answered", reply, plan)

    def renew(self, reply: Reply) -> None:
        """Write the reply, and with it that this delivery is still at work. Raises `SupersededError`."""
        if self.is_superseded(reply):
            raise SupersededError
        reply.lease_until = self.now().timestamp() + LEASE_S
        Sender(self.repository, self.table.workflow, self.sleep).save(reply)

    def is_superseded(self, reply: Reply) -> bool:
        """Whether another delivery has taken over, because this one was silent for too long."""
        try:
            now = read_reply(self.repository.comment(reply.identity))
        except GitHubError:
            return False
        return now is not None and now.owner != self.delivery

    def replies(self, pull: int, comment: int, since: str) -> list[Reply]:
        """The replies of the handler's own account to a comment, the oldest first."""
        rows = self.repository.comments(pull, since)
        first = marker(comment)
        mine = [row for row in rows if is_own(row, self.table.bot) and str(row.get("body") or "").startswith(first)]
        found = [reply for row in mine if (reply := read_reply(row)) is not None and reply.comment == comment]
        return sorted(found, key=lambda reply: reply.identity)

    def claim(self, request: Request, asked: Parsed) -> Reply | None:
        """The reply to work on; None when another delivery does."""
        found = self.replies(request.pull, request.comment, request.at)
        for _ in range(CLAIMS_MAX):
            if found:
                break
            found = self.open_reply(request, asked)
        if not found:
            raise UnavailableError("no reply could be written, so nothing was started")
        first = found[0]
        for other in found[1:]:
            if other.owner == self.delivery and not other.actions:
                self.repository.delete_comment(other.identity)
        if first.owner == self.delivery or first.phase == DONE:
            return first
        return None if any(other.owner == self.delivery for other in found[1:]) else self.take_over(request, first)

    def open_reply(self, request: Request, asked: Parsed) -> list[Reply]:
        """Write a reply and list all there are, since another delivery may have done so at the same moment."""
        reply = Reply(request.comment, request.pull, request.user, request.at, owner=self.delivery)
        reply.lease_until = self.now().timestamp() + LEASE_S
        reply.asked = [shown(command.text) for command in asked.commands]
        mine: list[Reply] = []
        try:
            row = self.repository.write_comment(request.pull, body(reply))
            reply.identity = int(row["id"])
            mine = [reply]
        except UnsureError:
            self.sleep(POLL_S)  # it may have been written, and then appears
        found = self.replies(request.pull, request.comment, request.at)
        known = {other.identity for other in found}
        return sorted([*found, *(r for r in mine if r.identity not in known)], key=lambda r: r.identity)

    def take_over(self, request: Request, reply: Reply) -> Reply | None:
        """Wait until the delivery at work has ended or its lease has run out; then go on in its place."""
        while reply.phase != DONE and self.now().timestamp() < reply.lease_until:
            self.sleep(POLL_S)
            again = read_reply(self.repository.comment(reply.identity))
            if again is None:
                return None
            reply = again
        if reply.phase == DONE:
            return reply
        reply.owner, reply.lease_until = self.delivery, self.now().timestamp() + LEASE_S
        Sender(self.repository, self.table.workflow, self.sleep).save(reply)
        again = read_reply(self.repository.comment(reply.identity))
        return again if again is not None and again.owner == self.delivery else None

    def decide(self, request: Request, asked: Parsed, reply: Reply, pull: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the reply's actions and refusals; returns the plan of the tests."""
        reply.actions, reply.refusals, reply.notes, reply.refusals_more = [], [], [], 0
        reply.refuse(asked.refusals)
        if not asked.commands:
            return {}
        try:
            commands = self.allowed(request, asked.commands, reply, pull)
        except Bad as bad:
            reply.refuse([Refusal(shown(command.text), bad.why, bad.advice) for command in asked.commands])
            return {}
        plan: dict[str, Any] = {}
        reply.actions += self.labels(commands, reply)
        if any(command.name in TESTED_BY for command in commands):
            try:
                plan = self.tests(request, commands, reply, pull)
            except Bad as bad:
                tests = [command for command in commands if command.name in TESTED_BY]
                reply.refuse([Refusal(shown(command.text), bad.why, bad.advice) for command in tests])
        if any(command.name in {"rerun-failed-ci", "tag-and-rerun-ci"} for command in commands):
            reply.actions += self.failed(reply)
        return plan

    def allowed(
        self, request: Request, commands: Iterable[Command], reply: Reply, pull: Mapping[str, Any]
    ) -> list[Command]:
        """The commands that this commenter may give, here and now; raises `Bad` where none can be given."""
        if not request.is_pull:
            raise Bad("this is no pull request", "write the command in the conversation of a pull request")
        if pull["state"] != "open":
            raise Bad("the pull request is closed", "reopen it first")
        if not LOGIN.fullmatch(request.user):
            raise Bad("the account has a name that is none of a person", "a person gives the command")
        reply.head_sha = str(pull["head"]["sha"])
        if not SHA.fullmatch(reply.head_sha):
            raise ValueError("the head is no commit")
        head, base = (pull[side].get("repo") or {} for side in ("head", "base"))
        is_fork = head.get("full_name") != base["full_name"]
        is_author = str(pull["user"]["login"]).lower() == request.user.lower()
        permission = self.repository.permission(request.user)
        who = Commenter(request.user, permission, is_author, is_fork)
        kept = []
        for command in commands:
            try:
                check_rights(self.table, who, command)
                kept.append(command)
            except Bad as bad:
                reply.refuse([Refusal(shown(command.text), bad.why, bad.advice)])
        if is_fork and not head:
            raise Bad("the fork is gone", "its code cannot be reached any more")
        if is_fork and any(c.name in TESTED_BY for c in kept) and str(head.get("pushed_at") or "9") > request.at:
            raise Bad("the fork was pushed to after the comment", "look at what is new, then write the command again")
        if kept and cooldown_minutes(self.table, who):
            check_cooldown(self.table, who, self.used(request, who), self.now())
        return kept

    def used(self, request: Request, who: Commenter) -> list[datetime]:
        """When this user's earlier comments started something: tests anywhere, all else on this pull request."""
        since = f"{self.now() - timedelta(minutes=cooldown_minutes(self.table, who)):%Y-%m-%dT%H:%M:%SZ}"
        times = []
        for run in self.repository.runs_of(self.table.workflow, f">={since}"):
            title = TITLE.fullmatch(str(run.get("display_title", "")))
            if title and title[0].split("/")[2] == who.login and int(title["comment"]) != request.comment:
                times.append(datetime.fromisoformat(run["created_at"]))
        for row in self.repository.comments(request.pull, since):
            reply = read_reply(row) if is_own(row, self.table.bot) else None
            if reply and reply.user == who.login and reply.actions and reply.comment != request.comment:
                times.append(datetime.fromisoformat(reply.at))
        return times

    def labels(self, commands: Iterable[Command], reply: Reply) -> list[Action]:
        """The labels that the commands add."""
        tags = [command for command in commands if command.name.startswith("tag-")]
        labels = list(self.table.labels) if tags else []
        if any("extra" in command.arguments for command in tags):
            labels += self.table.labels_extra
        return [Action("label", f"{reply.comment}/label", " ".join(labels), labels)] if labels else []

    def tests(self, request: Request, commands: list[Command], reply: Reply, pull: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the dispatches; returns the plan. Raises `Bad`."""
        tree = self.tree_at(reply.head_sha)
        changed = self.repository.changed(request.pull) if any(command.changed for command in commands) else []
        plan = Planner(tree, self.runners, self.table, self.now().date()).plan(commands, changed)
        reply.refuse(plan.refusals)
        reply.note(plan.notes)
        start = f"{request.pull}/{request.comment}/{request.user}"
        for job in plan.dispatches:
            made = Action("dispatch", f"{start}/{job.digest}", job.runner, list(job.labels), job.commands)
            made.minutes, made.limit_minutes = job.minutes, job.limit_minutes
            reply.actions.append(made)
        return plan.as_json()

    def failed(self, reply: Reply) -> list[Action]:
        """The newest run of each workflow at the head, where it did not pass; those in flight are left alone."""
        newest: dict[str, dict[str, Any]] = {}
        for run in self.repository.runs_at(reply.head_sha):
            if run.get("event") not in {"workflow_dispatch", "issue_comment", "workflow_run"}:
                last = newest.setdefault(str(run["path"]), run)
                newest[str(run["path"])] = max(last, run, key=lambda run: int(run["id"]))
        runs = [run for run in newest.values() if run.get("conclusion") in NOT_PASSED][:FAILED_MAX]
        if not runs:
            reply.notes.append("no run at this commit has failed")
        if any(run.get("conclusion") == "skipped" for run in newest.values()):
            reply.notes.append(
                "skipped runs are left alone: GitHub would judge them by the labels of their first start"
            )
        return [
            Action("rerun", f"{reply.comment}/{run['id']}", shown(str(run["name"])), run_id=int(run["id"]),
                   attempt=int(run["run_attempt"]), url=str(run["html_url"]))
            for run in runs
        ]  # fmt: skip

    def follow(self, run: Mapping[str, Any]) -> Outcome:
        """A dispatched run goes on: bring the reply up to date that tells of it."""
        title = TITLE.fullmatch(str(run.get("display_title", "")))
        is_ours = str(run.get("path", "")).partition("@")[0].endswith(f"/{self.table.workflow}")
        if title is None or not is_ours or run.get("event") != "workflow_dispatch":
            return Outcome("no run that a comment started")
        since = f"{datetime.fromisoformat(run['created_at']).astimezone(UTC) - timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"
        found = self.replies(int(title["pull"]), int(title["comment"]), since)
        if not found:
            return Outcome("the reply is gone")
        reply = found[0]
        if reply.phase != DONE and self.now().timestamp() < reply.lease_until:
            return Outcome("a delivery is at work, and looks at the runs when it ends", reply)
        sender = Sender(self.repository, self.table.workflow, self.sleep)
        for _ in range(CLAIMS_MAX):  # another event's reply may be written between; both write what they see last
            if not sender.refresh(reply):
                break
            sender.save(reply)
        return Outcome("followed", reply)


def is_own(row: Mapping[str, Any], bot: str) -> bool:
    """Whether the handler's own account wrote a comment; anybody can write one that looks like it."""
    user = row.get("user") or {}
    return user.get("login") == bot and user.get("type") == "Bot"


def request_of(event: Mapping[str, Any]) -> Request | None:
    """The new comment of a person in an event; None for any other event."""
    try:
        comment, issue = event["comment"], event["issue"]
        if event["action"] != "created" or comment["user"]["type"] != "User":
            return None
        text = str(comment.get("body") or "")
        user, at = str(comment["user"]["login"]), str(comment["created_at"])
        return Request(int(comment["id"]), int(issue["number"]), user, text, at, "pull_request" in issue)
    except (KeyError, TypeError, ValueError):
        return None

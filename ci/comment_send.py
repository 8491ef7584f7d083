"""What a reply's actions do at GitHub, once each: dispatch, run again, label; and how they stand.

Every dispatch carries a key that its run shows in its title. Whether an action was carried out already is looked up
there, never remembered alone: the process may have died, or an answer may have been lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ci.comment_reply import DONE, FAILED, LOST, PASSED, RESTARTED, RUNNING, TODO, TOLD, WAITING, Action, Reply, body
from ci.github import GitHubError, NotFoundError, Repository, UnavailableError, UnsureError

LOOKS_S = (2.0, 5.0, 10.0)  # pauses until a run that may exist is seen
SENDS_MAX = 3
JOB_MARGIN = 1.5  # a job may take so much longer than its files are estimated
JOB_START_MINUTES = 10
ENDED = "completed"
IN_FLIGHT = frozenset({"in_progress"})
AGAIN = "GitHub does not answer; run the failed job of the handler again to go on, nothing will start twice"


@dataclass(frozen=True, slots=True)
class Sender:
    """Carries out actions on a repository; `ref` is the branch whose workflow runs."""

    repository: Repository
    workflow: str
    sleep: Callable[[float], None]
    ref: str = "main"

    def save(self, reply: Reply) -> None:
        """Write the reply; anew where somebody has deleted it."""
        try:
            self.repository.change_comment(reply.identity, body(reply))
        except NotFoundError:
            reply.identity = int(self.repository.write_comment(reply.pull, body(reply))["id"])

    def carry_out(self, reply: Reply, renew: Callable[[Reply], None]) -> None:
        """Send what is still to do. Raises `UnavailableError` when something is left, which can be sent later."""
        left = ""
        for action in reply.actions:
            if action.state != TODO:
                continue
            try:
                self.send(reply, action)
                action.why = ""
            except UnavailableError:
                action.why = AGAIN
                raise
            except UnsureError as error:
                action.why, left = AGAIN, str(error)
            except GitHubError as error:
                action.state, action.why = LOST, str(error)
            renew(reply)
        if left:
            raise UnavailableError(left)

    def adopt(self, reply: Reply) -> bool:
        """Fill in the runs that exist by now; whether there was one."""
        missing = {action.key: action for action in reply.actions if action.kind == "dispatch" and not action.run_id}
        if not missing:
            return False
        found = False
        runs = self.repository.runs_of(self.workflow, f">={reply.at}")
        for run in sorted(runs, key=lambda run: int(run["id"])):
            action = missing.pop(str(run.get("display_title", "")).removeprefix("rerun "), None)
            if action is not None:
                action.run_id, action.url, action.why, found = int(run["id"]), str(run["html_url"]), "", True
                action.state = state_of(run)
        return found

    def send(self, reply: Reply, action: Action) -> None:
        """Carry out one action; sent again only when nothing is to be seen of it."""
        how = {"dispatch": self._dispatch, "rerun": self._rerun, "label": self._label}[action.kind]
        for attempt in range(SENDS_MAX):
            try:
                how(reply, action)
                return
            except UnsureError:
                if self._is_seen(reply, action):
                    return
                if attempt == SENDS_MAX - 1:
                    raise

    def _is_seen(self, reply: Reply, action: Action) -> bool:
        """Whether an action without an answer has been carried out after all."""
        for pause in LOOKS_S:
            self.sleep(pause)
            if action.kind == "label":
                return False  # adding it twice is adding it once
            if action.kind == "dispatch":
                self.adopt(reply)
                if action.run_id:
                    return True
            elif int(self.repository.run(action.run_id)["run_attempt"]) > action.attempt:
                action.state = RESTARTED
                return True
        return False

    def _dispatch(self, reply: Reply, action: Action) -> None:
        self.adopt(reply)  # just before, since the process may have been halted while another went on
        if action.run_id:
            return
        details = self.repository.dispatch(self.workflow, self.ref, inputs(reply, action))
        action.state = WAITING
        action.run_id = int(details.get("workflow_run_id") or 0)
        action.url = str(details.get("html_url") or "")
        if not action.run_id:  # a server that does not tell; the run appears within seconds
            self._is_seen(reply, action)

    def _rerun(self, reply: Reply, action: Action) -> None:
        run = self.repository.run(action.run_id)
        if int(run["run_attempt"]) == action.attempt:
            self.repository.rerun_failed(action.run_id)
        action.state = RESTARTED

    def _label(self, reply: Reply, action: Action) -> None:
        self.repository.add_labels(reply.pull, action.labels)
        action.state = TOLD

    def refresh(self, reply: Reply) -> bool:
        """Look how the runs stand; whether anything has changed. What cannot be read stays as it is."""
        before = body(reply)
        try:
            self.adopt(reply)
            for action in reply.actions:
                if action.run_id and action.state in {WAITING, RUNNING}:
                    run = self.repository.run(action.run_id)
                    action.state = state_of(run)
                    action.why = ended(run) if action.state == FAILED else ""
        except GitHubError:
            return before != body(reply)
        return before != body(reply)

    def settle(self, reply: Reply) -> None:
        """Write the end of the work; runs may have gone on while it was written, so look once more."""
        reply.phase, reply.lease_until = DONE, 0.0
        self.save(reply)
        if self.refresh(reply):
            self.save(reply)


def inputs(reply: Reply, action: Action) -> dict[str, str]:
    """All that the dispatched workflow is told; every value is made from the plan and checked there."""
    return {
        "key": action.key,
        "pull": str(reply.pull),
        "head_sha": reply.head_sha,
        "labels": json.dumps(action.labels),
        "commands": json.dumps(action.commands),
        "timeout_minutes": f"{action.limit_minutes * JOB_MARGIN + JOB_START_MINUTES:.0f}",
    }


def state_of(run: dict[str, Any]) -> str:
    """How a run stands, in the words of a reply."""
    if run.get("status") != ENDED:
        return RUNNING if run.get("status") in IN_FLIGHT else WAITING
    return PASSED if run.get("conclusion") == "success" else FAILED


def ended(run: dict[str, Any]) -> str:
    """Why a run that did not pass has ended, where that is not a failure."""
    conclusion = str(run.get("conclusion"))
    return "" if conclusion == "failure" else conclusion.replace("_", " ")

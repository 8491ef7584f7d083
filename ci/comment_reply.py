"""The one reply to a comment: what it says, and the state that it keeps in a hidden block at its end.

The first line names the comment that is answered, the last holds the state. Only replies of the handler's own account
are read, since anybody can write a comment that looks like one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from ci.comment_parse import Refusal, shown

BODY_MAX = 60_000  # GitHub takes 65,536 characters
REFUSALS_MAX = 20  # that are told; the rest is counted
NOTES_MAX = 10
TEXT_MAX = 250  # characters of a reason
COMMANDS_SHOWN = 5  # of a runner, in a reply that would grow too long
STATE = "<!-- kvshard-state "
END = " -->"

CLAIMED, PLANNED, DONE = "claimed", "planned", "done"
TODO, WAITING, RUNNING, PASSED, FAILED, LOST, TOLD = "todo", "waiting", "running", "passed", "failed", "lost", "told"
RESTARTED = "restarted"  # a run that no command dispatched; it is not followed
SIGNS: Mapping[str, str] = MappingProxyType(
    {
        TODO: "⏳ about to start",
        WAITING: "⏳ waiting for a runner",
        RUNNING: "🔄 running",
        PASSED: "✅ passed",
        FAILED: "❌ failed",
        LOST: "⛔ not started",
        TOLD: "✅ done",
        RESTARTED: "🔁 started again",
    }
)


@dataclass(slots=True)
class Action:
    """One thing that is done once: a dispatch, a run that is run again, labels that are added."""

    kind: str  # dispatch, rerun, label
    key: str  # tells it from all others, in this and other comments
    title: str  # runner label, workflow or labels
    labels: list[str] = field(default_factory=list)  # of the runner, or to be added
    commands: list[list[str]] = field(default_factory=list)
    minutes: float = 0.0
    limit_minutes: float = 0.0
    state: str = TODO
    run_id: int = 0
    attempt: int = 0  # of the run before it was run again
    url: str = ""
    why: str = ""


@dataclass(slots=True)
class Reply:
    """All that is known of one comment with commands."""

    comment: int
    pull: int
    user: str
    at: str  # when the comment was written, ISO 8601
    head_sha: str = ""
    phase: str = CLAIMED
    owner: str = ""  # the delivery that is at work
    lease_until: float = 0.0  # seconds since 1970; then another delivery may go on
    asked: list[str] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    refusals: list[tuple[str, str, str]] = field(default_factory=list)
    refusals_more: int = 0
    notes: list[str] = field(default_factory=list)
    identity: int = 0  # of the reply itself; not kept in it

    @property
    def marker(self) -> str:
        """The first line of the reply."""
        return marker(self.comment)

    def refuse(self, refusals: Iterable[Refusal]) -> None:
        """Add what is not done; beyond a number it is only counted."""
        for refusal in refusals:
            if len(self.refusals) < REFUSALS_MAX:
                what, why, advice = (text[:TEXT_MAX] for text in refusal)
                self.refusals.append((what, why, advice))
            else:
                self.refusals_more += 1

    def note(self, notes: Iterable[str]) -> None:
        """Add what else is to be told; beyond a number it is left out."""
        self.notes += [note[:TEXT_MAX] for note in notes]
        del self.notes[NOTES_MAX:]


def marker(comment: int) -> str:
    """The hidden line by which the reply to a comment is found."""
    return f"<!-- kvshard-reply {comment} -->"


def read_reply(comment: Mapping[str, Any]) -> Reply | None:
    """The reply that a comment of the handler's account holds; None when it is no reply or its state is damaged."""
    body = str(comment.get("body") or "").replace("\r\n", "\n").rstrip()
    last = body.rpartition("\n")[2]
    if not body.startswith("<!-- kvshard-reply ") or not (last.startswith(STATE) and last.endswith(END)):
        return None
    try:
        raw = json.loads(last.removeprefix(STATE).removesuffix(END))
        raw["actions"] = [Action(**action) for action in raw["actions"]]
        raw["refusals"] = [(what, why, advice) for what, why, advice in raw["refusals"]]
        reply = Reply(**raw, identity=int(comment["id"]))
    except (ValueError, TypeError, KeyError):
        return None
    return reply if body.startswith(reply.marker) else None


def body(reply: Reply) -> str:
    """The reply as Markdown."""
    text = _body(reply, commands_shown=10_000)
    return text if len(text) <= BODY_MAX else _body(reply, COMMANDS_SHOWN)


def _body(reply: Reply, commands_shown: int) -> str:
    lines = [reply.marker, heading(reply), ""]
    for action in reply.actions:
        lines += action_lines(action, commands_shown)
    for what, why, advice in reply.refusals:
        lines += [f"⛔ `{what}`: {why}", f"  → {advice}", ""]
    if reply.refusals_more:
        lines += [f"⛔ and {reply.refusals_more} more that were refused", ""]
    lines += [f"- {note}" for note in reply.notes]
    return "\n".join([*lines, "", hidden(reply)])


def heading(reply: Reply) -> str:
    """What was asked, by whom, at which commit, and whether it is settled."""
    asked = " ".join(f"`{shown(text)}`" for text in reply.asked) or "the comment"
    commit = f" at `{reply.head_sha[:10]}`" if reply.head_sha else ""
    still = "" if reply.phase == DONE else " is being looked at"
    return f"{asked} of `{shown(reply.user)}`{commit}{still}"


def action_lines(action: Action, commands_shown: int) -> list[str]:
    """What became of one action, with the exact commands."""
    count = len(action.commands)
    tests = f" ({count} {'test' if count == 1 else 'tests'}, about {action.minutes:.0f} min)" if count else ""
    link = f" · [run]({action.url})" if action.url else ""
    why = f": {action.why}" if action.why else ""
    lines = [f"🚀 `{shown(action.title)}`{tests}: {SIGNS.get(action.state, action.state)}{why}{link}"]
    if count:
        lines += ["```", *(" ".join(command) for command in action.commands[:commands_shown]), "```"]
    if count > commands_shown:
        lines.append(f"and {count - commands_shown} more, listed in the run")
    return [*lines, ""]


def hidden(reply: Reply) -> str:
    """The state as one line; a comment of HTML ends at the first `-->`, so no two hyphens stand together."""
    raw = asdict(reply)
    del raw["identity"]
    return STATE + json.dumps(raw, ensure_ascii=False, separators=(",", ":")).replace("--", "-\\u002d") + END

"""Any text at all: no crash, no dispatch without permission, no argument outside the whitelist."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ci.comment_parse import COMMANDS, COMMANDS_MAX, RETIRED, SPECS_MAX, parse
from ci.comment_reply import BODY_MAX, read_reply
from ci.comment_tree import tree_of
from ci.register import register_cpu_ci
from tests.comment_rig import FILES, FOLDERS, event, play, sample_github
from tests.fake_github import FakeGitHub

register_cpu_ci(est_time=10, stage="commit")

SAFE = re.compile(r"[A-Za-z0-9_./:-]+")
FEW = {path: text for path, text in FILES.items() if "/many/" not in path}
TREE = tree_of(FEW, FOLDERS)

odd = st.sampled_from(
    [
        *"$`;&|<>(){}!~'\"\\%#=^*?[]:/.-@\n\r\t ",
        "\u200b",
        "\u202e",
        "\u00a0",
        "\x00",
        "\ud800",
        "```",
        "> ",
        "<!--",
        "-->",
    ]
)
names = st.sampled_from(
    [*FEW, *(path.rpartition("/")[2] for path in FEW), "unit", "suites", "-c", "--changed", "extra"]
)
nodes = st.sampled_from(["::TestCache", "::TestCache.test_hit", "::test_alone", "::x", "::"])
words = st.one_of(names, st.builds("".join, st.lists(st.one_of(names, nodes, odd), max_size=4)), st.text(max_size=8))
lines = st.builds(
    lambda before, word, rest, gap: before + "/" + word + gap + gap.join(rest),
    st.sampled_from(["", "", "", "> ", " ", "\ufeff"]),
    st.one_of(st.sampled_from([*COMMANDS, *RETIRED, "rerun-tset"]), st.text(max_size=5)),
    st.lists(words, max_size=6),
    st.sampled_from([" ", " ", "\t", "\u2003"]),
)
comments = st.one_of(
    st.text(), st.builds("\n".join, st.lists(st.one_of(lines, lines, st.text(max_size=20)), max_size=7))
)
changed = st.lists(st.one_of(names, st.text(max_size=20)), max_size=5)


def played(text: str, user: str, files: list[str]) -> FakeGitHub:
    github = sample_github()
    github.files = [{"filename": name, "status": "modified"} for name in files]
    outcome = play(github, event(text, user), TREE)
    assert 0 == outcome.exit_code
    asked = parse(text)
    assert bool(asked.commands or asked.refusals) == (1 == len(github.replies))
    return github


@given(text=comments, files=changed)
@settings(deadline=None)
@example(text="/rerun-test *", files=[])
@example(text="/rerun-test -c", files=["suites/e2e/test_$(id).py", "suites/e2e/test_a b.py"])
def test_only_whitelisted_arguments_leave(text: str, files: list[str]) -> None:
    """Of one who may do all: each argument that leaves is made of safe characters, each command names a file."""
    github = played(text, "writer", files)
    for dispatch in github.dispatches:
        assert {"key", "pull", "head_sha", "labels", "commands", "timeout_minutes"} == set(dispatch["inputs"])
        for command in json.loads(dispatch["inputs"]["commands"]):
            assert [] == [argument for argument in command if not SAFE.fullmatch(argument)]
            assert [] == [
                argument for argument in command if argument.startswith("-") and argument not in {"-m", "-x", "-f"}
            ]
            assert [] != [argument for argument in command if argument.partition("::")[0] in FEW]
    assert set(github.labels) <= {"run-ci", "run-ci-extra"}


@pytest.mark.parametrize("user", ["stranger", "reader"])
@given(text=comments, files=changed)
@settings(deadline=None)
@example(text="/rerun-test test_cache.py\n/tag-and-rerun-ci extra\n/rerun-group unit", files=[])
def test_nothing_happens_without_permission(user: str, text: str, files: list[str]) -> None:
    """Of one who may do nothing: whatever the text, nothing but the reply is written."""
    github = played(text, user, files)
    writes = {re.sub(r"\d+", "N", call.path) for call in github.calls if call.method != "GET"}
    assert writes <= {"/repos/example/kvshard/issues/N/comments", "/repos/example/kvshard/issues/comments/N"}


@given(text=comments)
@settings(deadline=None)
def test_the_reply_is_read_back(text: str) -> None:
    """The reply fits, and its hidden state is read back, whatever it quotes."""
    github = played(text, "writer", [])
    for row in github.comments.values():
        reply = read_reply(row)
        assert reply is not None
        assert len(row["body"]) <= BODY_MAX
        assert 1 == row["body"].count("<!-- kvshard-state ") - sum(
            why.count("<!-- kvshard-state ") for _, why, _ in reply.refusals
        )
        assert "done" == reply.phase
        row["body"].encode()


@given(text=comments)
def test_parse_is_bounded(text: str) -> None:
    """No comment comes to more commands or arguments than the limits."""
    asked = parse(text)
    assert len(asked.commands) <= COMMANDS_MAX
    assert all(len(command.arguments) <= SPECS_MAX for command in asked.commands)

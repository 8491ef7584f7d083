from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta

import pytest

from ci import runners
from ci.comment_parse import Bad, parse
from ci.comment_plan import Planner
from ci.comment_rights import TABLE, Commenter, check_rights, read_table
from ci.comment_tree import tree_in
from ci.register import register_cpu_ci
from tests.comment_rig import PULL, Rig, event, sample_github, sample_table
from tests.comment_rig import TABLE as TEXT
from tests.fake_github import serving

register_cpu_ci(est_time=10, stage="commit")

ALL = (
    "/rerun-test a.py",
    "/rerun-group a",
    "/rerun-failed-ci",
    "/tag-run-ci-label",
    "/tag-and-rerun-ci",
    "/tag-run-ci-label extra",
)
TEST, GROUP, FAILED, TAG, BOTH, EXTRA = ALL


def may(who: Commenter) -> list[str]:
    """The commands of ALL that this commenter may give."""
    allowed = []
    for text in ALL:
        try:
            check_rights(sample_table(), who, parse(text).commands[0])
            allowed.append(text)
        except Bad as bad:
            assert "no permission" in bad.why  # noqa: PT017 - which of them raise is what is looked at
    return allowed


class TestRights:
    @pytest.mark.parametrize(
        ("who", "expected"),
        [
            (Commenter("anyone", "admin"), list(ALL)),
            (Commenter("anyone", "maintain"), list(ALL)),
            (Commenter("anyone", "write", is_fork=True), list(ALL)),
            (Commenter("anyone", "triage"), []),
            (Commenter("anyone", "read"), []),
            (Commenter("anyone", "none"), []),
            (Commenter("anyone", "WRITE"), []),
            (Commenter("tester"), [TEST, GROUP, FAILED, TAG, BOTH]),
            (Commenter("TESTER"), [TEST, GROUP, FAILED, TAG, BOTH]),
            (Commenter("tester", is_fork=True), []),
            (Commenter("trusted", is_fork=True), list(ALL)),
            (Commenter("anyone", is_author=True), [FAILED]),
            (Commenter("anyone", is_author=True, is_fork=True), []),
            (Commenter("tester", "read", is_author=True), [TEST, GROUP, FAILED, TAG, BOTH]),
        ],
    )
    def test_who_may_what(self, who: Commenter, expected: list[str]) -> None:
        """Write access allows all; else the table, on forks only where it says so; authors their own failed runs."""
        assert expected == may(who)


class TestTable:
    def test_the_project_s_own(self) -> None:
        """The table of the project can be read."""
        assert "rerun-test.yml" == read_table(TABLE.read_text()).workflow

    def test_the_project_s_own_groups(self) -> None:
        """Each group of the project's table can be run as a whole, on the tree of the project."""
        table = read_table(TABLE.read_text())
        tree = tree_in(TABLE.parent.parent, table.folders)
        for name in table.groups:
            planned = Planner(tree, runners.read(), table, date(2026, 12, 1)).plan(
                parse(f"/rerun-group {name}").commands
            )
            assert (name, []) == (name, planned.refusals)
            assert planned.dispatches

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('may = ["tests"]', "tests"),
            ("cooldown_minutes = -1", "-1"),
            ("cooldown_minutes = 999999", "999999"),
            ("fork = true", "fork"),
        ],
    )
    def test_mistakes(self, line: str, said: str) -> None:
        """A wrong entry is an error that names user and value, never a right that is silently there or missing."""
        with pytest.raises(ValueError, match=f"users.x: .*{said}"):
            read_table(TEXT.replace("[groups]", f"[users.x]\n{line}\n[groups]"))

    def test_forks_takes_true_only(self) -> None:
        """`forks` is allowed by `true` and by no text."""
        table = read_table(TEXT.replace("[groups]", '[users.x]\nforks = "yes"\n[groups]'))
        assert not table.users["x"].forks


@pytest.fixture
def rig() -> Iterator[Rig]:
    with serving(sample_github()) as github:
        yield Rig(github)


class TestPull:
    def test_closed(self, rig: Rig) -> None:
        """On a closed pull request nothing is started."""
        rig.github.pulls[PULL]["state"] = "closed"
        rig.deliver("/rerun-test test_cache.py")
        assert [] == rig.github.dispatches
        assert "the pull request is closed" in rig.reply

    def test_fork(self, rig: Rig) -> None:
        """On a fork's pull request the workflow of the default branch runs, and is told the commit."""
        rig.github.pulls[PULL]["head"]["repo"].update(full_name="someone/kvshard")
        rig.deliver("/rerun-test test_cache.py")
        assert ["main"] == [dispatch["ref"] for dispatch in rig.github.dispatches]

    @pytest.mark.parametrize("user", ["tester", "author"])
    def test_fork_and_the_table(self, rig: Rig, user: str) -> None:
        """A fork's code does not run for one who may only test the project's own branches, or for its author."""
        rig.github.pulls[PULL]["head"]["repo"].update(full_name="someone/kvshard")
        rig.deliver("/rerun-test test_cache.py", user)
        assert [] == rig.github.dispatches
        assert "no permission" in rig.reply

    def test_fork_with_new_commits(self, rig: Rig) -> None:
        """Code that was pushed to a fork after the comment was not seen by the commenter, and does not run."""
        rig.github.pulls[PULL]["head"]["repo"].update(full_name="someone/kvshard", pushed_at="2026-06-01T12:00:30Z")
        rig.deliver("/rerun-test test_cache.py")
        assert [] == rig.github.dispatches
        assert "the fork was pushed to after the comment" in rig.reply

    def test_fork_that_is_gone(self, rig: Rig) -> None:
        """A fork that was deleted is told."""
        rig.github.pulls[PULL]["head"]["repo"] = None
        rig.deliver("/rerun-test test_cache.py")
        assert "the fork is gone" in rig.reply

    @pytest.mark.parametrize("kind", ["Bot", "Organization"])
    def test_no_person(self, rig: Rig, kind: str) -> None:
        """Comments of bots, the handler's own among them, are not even looked up."""
        told = event("/rerun-test test_cache.py")
        told["comment"]["user"]["type"] = kind
        rig.handler().handle(told)
        assert [] == rig.github.calls

    def test_edited(self, rig: Rig) -> None:
        """An edited comment does nothing: rights are those of the moment it was written."""
        told = event("/rerun-test -c") | {"action": "edited"}
        rig.handler().handle(told)
        assert [] == rig.github.calls


class TestCooldown:
    def again(self, rig: Rig, user: str, minutes: int, text: str = "/rerun-test test_cache.py") -> int:
        """Jobs in all, after two comments so many minutes apart."""
        rig.deliver(text, user)
        rig.clock.sleep(60 * minutes)
        later = rig.clock.now() - timedelta(seconds=30)
        rig.deliver(text, user, id=1003, created_at=f"{later:%Y-%m-%dT%H:%M:%SZ}")
        return len(rig.github.dispatches)

    def test_too_soon(self, rig: Rig) -> None:
        """A second comment within the cooldown is refused, and told when to come back."""
        assert 1 == self.again(rig, "tester", 10)
        assert "cooldown: one comment with commands in 30 minutes" in rig.github.replies[1]
        assert "write it again in 20 minutes" in rig.github.replies[1]

    def test_late_enough(self, rig: Rig) -> None:
        """After the cooldown it is taken."""
        assert 2 == self.again(rig, "tester", 31)

    @pytest.mark.parametrize("user", ["trusted", "writer"])
    def test_none(self, rig: Rig, user: str) -> None:
        """There is none for those with write access, or with 0 in the table."""
        assert 2 == self.again(rig, user, 0)

    def test_on_another_pull_request(self, rig: Rig) -> None:
        """The cooldown counts jobs that were started on other pull requests."""
        made = rig.github.run(
            "rerun 7/900/tester/0123456789ab", ".github/workflows/rerun-test.yml", event="workflow_dispatch"
        )
        assert made["status"] == "queued"
        rig.deliver("/rerun-test test_cache.py", "tester")
        assert [] == rig.github.dispatches

    def test_labels_count(self, rig: Rig) -> None:
        """A command that starts no job counts on the same pull request."""
        self.again(rig, "tester", 10, "/tag-run-ci-label")
        assert "cooldown" in rig.github.replies[1]

    def test_a_refused_comment_costs_nothing(self, rig: Rig) -> None:
        """A comment that started nothing can be corrected at once."""
        rig.deliver("/rerun-test test_cash.py", "tester")
        rig.deliver("/rerun-test test_cache.py", "tester", id=1003)
        assert 1 == len(rig.github.dispatches)

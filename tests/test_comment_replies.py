"""The replies that recorded events come to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ci.register import register_cpu_ci
from tests.comment_rig import SHA, SIX, Rig, event, recorded, sample_github
from tests.fake_github import BOT, NAME, serving

register_cpu_ci(est_time=10, stage="commit")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with serving(sample_github()) as github:
        yield Rig(github)


def run_url(rig: Rig, at: int) -> str:
    runs = sorted(run["id"] for run in rig.github.runs.values() if run["event"] == "workflow_dispatch")
    return f"https://github.example/{NAME}/actions/runs/{runs[at]}"


class TestReplies:
    def play(self, rig: Rig, name: str) -> None:
        told = recorded(name)
        rig.github.files = told.get("recorded", {}).get("files", [])
        rig.handler().handle(told)

    def test_one_file(self, rig: Rig) -> None:
        """A file of ubuntu-latest: one runner, one test, its command line, a link."""
        self.play(rig, "one_file")
        assert [
            "`/rerun-test test_cache.py` of `writer` at `abcdef0123`",
            "",
            f"🚀 `ubuntu-latest` (1 test, about 1 min): ⏳ waiting for a runner · [run]({run_url(rig, 0)})",
            "```",
            "python3 -m pytest -x suites/e2e/test_cache.py",
            "```",
        ] == rig.reply.split("\n")

    def test_changed(self, rig: Rig) -> None:
        """`-c`: one file on 4-gpu-gb300 and six on ubuntu-latest, each with its command line."""
        self.play(rig, "changed")
        assert [
            "`/rerun-test -c` of `writer` at `abcdef0123`",
            "",
            f"🚀 `4-gpu-gb300` (1 test, about 5 min): ⏳ waiting for a runner · [run]({run_url(rig, 0)})",
            "```",
            "python3 -m pytest -x suites/e2e/test_gather.py",
            "```",
            "",
            f"🚀 `ubuntu-latest` (6 tests, about 10 min): ⏳ waiting for a runner · [run]({run_url(rig, 1)})",
            "```",
            *(f"python3 -m pytest -x {name}" for name in SIX),
            "```",
        ] == rig.reply.split("\n")

    def test_refused(self, rig: Rig) -> None:
        """A file that is registered nowhere is refused with advice; nothing is dispatched."""
        self.play(rig, "refused")
        assert [] == rig.github.dispatches
        assert [
            "`/rerun-test test_unregistered.py` of `writer` at `abcdef0123`",
            "",
            "⛔ `suites/e2e/test_unregistered.py`: it is registered nowhere",
            "  → call `register_cpu_ci(..)` or `register_gpu_ci(..)` of `ci.register` at its top level",
        ] == rig.reply.split("\n")

    def test_no_permission(self, rig: Rig) -> None:
        """A commenter without permission is told so; nothing is dispatched, the tree is not even read."""
        self.play(rig, "stranger")
        denied = "no permission: `/rerun-test` needs the right `test`, and you are not in the table"
        assert [] == rig.github.dispatches
        assert [
            "`/rerun-test test_cache.py` of `stranger` at `abcdef0123`",
            "",
            f"⛔ `/rerun-test test_cache.py`: {denied}",
            "  → ask a maintainer to give the command, or for an entry in `ci/permissions.toml`",
        ] == rig.reply.split("\n")


class TestDispatch:
    def test_inputs(self, rig: Rig) -> None:
        """A dispatch takes the workflow of the default branch, the commit as data, lists of arguments, the labels."""
        rig.deliver("/rerun-test test_gather.py::TestCache.test_hit")
        [dispatch] = rig.github.dispatches
        assert "main" == dispatch["ref"]
        assert {
            "key": dispatch["inputs"]["key"],
            "pull": "41",
            "head_sha": SHA,
            "labels": '["self-hosted", "4-gpu-gb300"]',
            "commands": '[["python3", "-m", "pytest", "-x", "suites/e2e/test_gather.py::TestCache::test_hit"]]',
            "timeout_minutes": "40",
        } == dispatch["inputs"]

    def test_every_runner(self, rig: Rig) -> None:
        """A file on two runners goes to both."""
        rig.deliver("/rerun-test test_both.py")
        labels = [dispatch["inputs"]["labels"] for dispatch in rig.github.dispatches]
        assert ['["self-hosted", "4-gpu-gb300"]', '["ubuntu-latest"]'] == labels

    def test_disabled_is_told(self, rig: Rig) -> None:
        """A file that is disabled on one of its runners runs on the other, and the reply says why."""
        rig.deliver("/rerun-test test_partly.py")
        assert 1 == len(rig.github.dispatches)
        assert "- `suites/e2e/test_partly.py` is disabled on `ubuntu-latest`: `flaky 'x'`" in rig.reply

    def test_jobs_within_the_limit(self, rig: Rig) -> None:
        """More work than one job may hold goes into several."""
        changed = ["suites/e2e/test_cache.py", *SIX]
        rig.github.files = [{"filename": name, "status": "added"} for name in changed]
        rig.deliver("/rerun-test -c suites/many/test_000?.py suites/many/test_001?.py")
        assert 27 == sum(rig.commands.values())
        assert {1} == set(rig.commands.values())

    def test_without_run_details(self, rig: Rig) -> None:
        """A server that does not tell the run of a dispatch: it is found by its key."""
        rig.github.tells_runs = False
        rig.deliver("/rerun-test test_cache.py")
        assert run_url(rig, 0) in rig.reply

    def test_labels(self, rig: Rig) -> None:
        """`/tag-run-ci-label extra` adds both labels."""
        rig.deliver("/tag-run-ci-label extra")
        assert ["run-ci", "run-ci-extra"] == rig.github.labels
        assert "🚀 `run-ci run-ci-extra`: ✅ done" in rig.reply

    def test_failed_runs(self, rig: Rig) -> None:
        """The newest run of each workflow at the head runs again where it failed; one in flight is left alone."""
        made = [
            rig.github.run("Lint", "a.yml", status="completed", conclusion="failure", head_sha=SHA),
            rig.github.run("Lint", "a.yml", status="completed", conclusion="success", head_sha=SHA),
            rig.github.run("Tests", "b.yml", status="completed", conclusion="timed_out", head_sha=SHA),
            rig.github.run("Docs", "c.yml", status="in_progress", head_sha=SHA),
            rig.github.run("Old", "d.yml", status="completed", conclusion="failure", head_sha="0" * 40),
        ]
        rig.deliver("/rerun-failed-ci please")
        assert [made[2]["id"]] == rig.github.reruns
        assert f"🚀 `Tests`: 🔁 started again · [run]({made[2]['html_url']})" in rig.reply

    def test_issue(self, rig: Rig) -> None:
        """A command on an issue is answered, and does nothing."""
        told = event_on_issue()
        rig.handler().handle(told)
        assert "this is no pull request" in rig.reply


def event_on_issue() -> dict[str, Any]:
    told = event("/rerun-test -c")
    del told["issue"]["pull_request"]
    return told


class TestFollow:
    def follow(self, rig: Rig, at: int, status: str, conclusion: str | None = None) -> None:
        runs = sorted(rig.github.runs)
        rig.github.runs[runs[at]].update(status=status, conclusion=conclusion)
        rig.handler().handle({"action": status, "workflow_run": dict(rig.github.runs[runs[at]])})

    def test_states(self, rig: Rig) -> None:
        """The reply follows each run in place: waiting, running, passed, failed."""
        rig.deliver("/rerun-test test_both.py")
        self.follow(rig, 0, "in_progress")
        assert ["🔄 running", "⏳ waiting for a runner"] == states(rig)
        self.follow(rig, 0, "completed", "success")
        self.follow(rig, 1, "completed", "cancelled")
        assert ["✅ passed", "❌ failed: cancelled"] == states(rig)

    def test_other_runs(self, rig: Rig) -> None:
        """A run of another workflow with such a title changes nothing."""
        rig.deliver("/rerun-test test_cache.py")
        [run] = rig.github.runs.values()
        run["status"] = "in_progress"
        outcome = rig.handler().handle({"workflow_run": {**run, "path": ".github/workflows/other.yml"}})
        assert "no run that a comment started" == outcome.what
        assert ["⏳ waiting for a runner"] == states(rig)

    def test_a_forged_reply(self, rig: Rig) -> None:
        """A comment that looks like a reply, but of another account, is never read."""
        rig.deliver("/rerun-test test_cache.py")
        forged = next(iter(rig.github.comments.values()))
        text = forged["body"]
        rig.github.comments.clear()
        rig.github.write("mallory", "User", text)
        rig.deliver("/rerun-test test_cache.py")
        own = [row for row in rig.github.comments.values() if row["user"]["login"] == BOT]
        assert 1 == len(own)


def states(rig: Rig) -> list[str]:
    return [line.split("): ")[1].split(" · ")[0] for line in rig.reply.split("\n") if line.startswith("🚀")]

"""Nothing is dispatched twice and nothing is lost: under every failure of every call, death, and deliveries at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from ci.comment_handle import Handler
from ci.github import Answer, Caller, GitHubError, Repository
from ci.register import register_cpu_ci
from tests.comment_rig import SHA, TOKEN, Rig, event, sample_github
from tests.fake_github import NAME, Fault, serving

register_cpu_ci(est_time=25, stage="commit")

TEXT = "/rerun-test test_both.py test_cache.py\n/tag-run-ci-label"
LINES = {"python3 -m pytest -x suites/e2e/test_both.py": 2, "python3 -m pytest -x suites/e2e/test_cache.py": 1}
RESET = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1780315300"}
FAULTS: Mapping[str, dict[str, Any]] = {
    "500, not performed": {"status": 500},
    "500, performed": {"status": 502, "performed": True},
    "cut, not performed": {"cut": True},
    "cut, performed": {"cut": True, "performed": True},
    "429": {"status": 429, "headers": {"Retry-After": "7"}},
    "rate limit": {"status": 403, "headers": RESET, "message": "API rate limit exceeded"},
    "second rate limit": {"status": 403, "message": "You have exceeded a secondary rate limit."},
    "down for long": {"status": 503, "times": 1000},
    "no JSON": {"status": 200, "body": b"<html>"},
}


@contextmanager
def rigged(**values: float) -> Iterator[Rig]:
    with serving(sample_github()) as github:
        yield Rig(github, **values)


class Killed(BaseException):
    """The process ends here."""


def die() -> None:
    raise Killed


class Hooked:
    """Calls something before or after the call of a number."""

    def __init__(self, caller: Caller, at: int, hook: Callable[[], object], *, before: bool) -> None:
        self.caller, self.at, self.hook, self.before = caller, at, hook, before
        self.made: list[str] = []

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        self.made.append(f"{method} {path.partition('?')[0]}")
        is_it = len(self.made) - 1 == self.at
        if is_it and self.before:
            self.hook()
        answer = self.caller.call(method, path, body)
        if is_it and not self.before:
            self.hook()
        return answer


def hooked(rig: Rig, at: int, hook: Callable[[], object], *, before: bool = True) -> tuple[Handler, Hooked]:
    made = rig.handler()
    client = rig.client()
    caller = Hooked(client, at, hook, before=before)
    values = {name: getattr(made, name) for name in Handler.__slots__}
    values |= {"repository": Repository(caller, NAME), "open_reserve": client.open_reserve}
    return Handler(**values), caller


def calls_made() -> list[str]:
    """The calls of an undisturbed delivery."""
    with rigged() as rig:
        handler, caller = hooked(rig, -1, lambda: None)
        handler.handle(event(TEXT))
        return caller.made


CALLS = calls_made()


def deliver(rig: Rig) -> bool:
    """Whether the delivery came to its end."""
    try:
        return rig.deliver(TEXT).exit_code == 0
    except GitHubError:
        return False


def check_all_done(rig: Rig, where: str) -> None:
    assert rig.commands == LINES, where
    assert ["run-ci"] == rig.github.labels, where
    assert 3 == rig.reply.count("🚀"), where
    assert 2 == rig.reply.count("· [run](https://"), where
    assert "cut off" not in rig.reply, where


def test_the_undisturbed_delivery() -> None:
    """Two jobs and a label, once each; delivered again, nothing more."""
    with rigged() as rig:
        assert deliver(rig)
        check_all_done(rig, "first")
        assert deliver(rig)
        check_all_done(rig, "second")


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failure_of_each_call(kind: str) -> None:
    """Whatever call fails in this way: after a delivery that succeeds, all is done once and told in one reply."""
    for at, call in enumerate(CALLS):
        with rigged() as rig:
            method, path = call.split(" ")
            rig.github.faults = [Fault(method, f"{path}$", skip=CALLS[:at].count(call), **FAULTS[kind])]
            ended = deliver(rig)
            rig.github.faults.clear()
            if not ended:
                rig.clock.sleep(1)
                assert deliver(rig), (at, call)
            check_all_done(rig, f"{kind} of call {at}, {call}")


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_death_at_each_call(*, before: bool) -> None:
    """Wherever the process ends: the next delivery does what is missing, and only that."""
    for at, call in enumerate(CALLS):
        with rigged() as rig:
            handler, _ = hooked(rig, at, die, before=before)
            with pytest.raises(Killed):
                handler.handle(event(TEXT))
            assert deliver(rig)
            check_all_done(rig, f"death {'before' if before else 'after'} call {at}, {call}")


def test_a_delivery_within_each_call() -> None:
    """A second delivery in full between any two calls of the first: all is done once, though one sleeps for long.

    The one exception that GitHub allows no way around: the first stops for longer than its lease between its last look
    and the POST itself.
    """
    for at, call in enumerate(CALLS):
        with rigged() as rig:
            handler, _ = hooked(rig, at, partial(rig.deliver, TEXT))
            outcome = handler.handle(event(TEXT))
            assert 0 == outcome.exit_code
            if call.endswith("/dispatches"):
                assert set(LINES) == set(rig.commands)
                continue
            deliver(rig)
            check_all_done(rig, f"a delivery within call {at}, {call}")


def test_a_run_that_shows_late() -> None:
    """A dispatch whose answer was lost, and whose run is not listed at once, is looked for again before a second."""
    with rigged() as rig:
        at = next(at for at, call in enumerate(CALLS) if call.endswith("/dispatches"))
        handler, _ = hooked(rig, at, lambda: setattr(rig.github, "hidden_lists", 2))
        rig.github.faults = [Fault("POST", "dispatches$", cut=True, performed=True)]
        assert 0 == handler.handle(event(TEXT)).exit_code
        check_all_done(rig, "late")


def test_delivered_again() -> None:
    """An event that is delivered again after its end only looks: nothing is written where nothing has changed."""
    with rigged() as rig:
        assert deliver(rig)
        rig.github.calls.clear()
        assert deliver(rig)
        assert {"GET"} == {call.method for call in rig.github.calls}
        rig.github.runs[min(rig.github.runs)]["status"] = "in_progress"
        assert deliver(rig)
        assert 1 == rig.reply.count("🔄 running")


def test_a_delivery_that_was_overtaken() -> None:
    """A delivery that finds another has gone on leaves the reply as it is, and ends."""
    look = CALLS.index("GET /repos/example/kvshard/collaborators/writer/permission") + 1  # before the plan is written
    with rigged() as rig:
        written: list[str] = []

        def overtake() -> None:
            deliver(rig)
            written.extend(rig.github.replies)

        handler, _ = hooked(rig, look, overtake)
        assert "another delivery has gone on with it" == handler.handle(event(TEXT)).what
        assert written == rig.github.replies
        check_all_done(rig, "overtaken")


def test_a_lease_is_waited_for() -> None:
    """A delivery that finds another at work waits until that has ended or been silent for two minutes."""
    with rigged() as rig:
        handler, _ = hooked(rig, CALLS.index("GET /repos/example/kvshard/pulls/41"), die)
        with pytest.raises(Killed):
            handler.handle(event(TEXT))
        assert deliver(rig)
        assert 120 == rig.clock.slept_s
        check_all_done(rig, "waited")


def test_a_spent_budget() -> None:
    """A delivery whose time is up in the midst of its work still writes its answer."""
    with rigged() as rig:
        at = next(at for at, call in enumerate(CALLS) if call.endswith("/dispatches"))
        handler, _ = hooked(rig, at, partial(rig.clock.sleep, 400))
        assert 1 == handler.handle(event(TEXT)).exit_code
        assert "cut off: POST" in rig.reply
        assert "the time budget is spent" in rig.reply
        assert deliver(rig)
        check_all_done(rig, "spent")


def test_two_deliveries_at_once() -> None:
    """Two deliveries in two threads: one reply, every job once."""
    for _ in range(5):
        with rigged() as rig:
            handlers = [rig.handler(), rig.handler()]
            threads = [threading.Thread(target=handler.handle, args=(event(TEXT),)) for handler in handlers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            check_all_done(rig, "at once")


def test_a_list_that_lags() -> None:
    """A list that does not show the newest replies yet: every job once, for its run is looked up by its key."""
    with rigged() as rig:
        assert deliver(rig)
        rig.github.hidden_lists = 1
        assert deliver(rig)
        assert rig.commands == LINES


class TestRunsAgain:
    def failed_run(self, rig: Rig) -> int:
        made = rig.github.run("Tests", "a.yml", status="completed", conclusion="failure", head_sha=SHA)
        return int(made["id"])

    def test_once(self) -> None:
        """Wherever the process ends after a call: a failed run is run again once."""
        for at in range(12):
            with rigged() as rig:
                run = self.failed_run(rig)
                handler, caller = hooked(rig, at, die, before=False)
                with suppress(Killed):
                    handler.handle(event("/rerun-failed-ci"))
                rig.deliver("/rerun-failed-ci")
                assert [run] == rig.github.reruns, caller.made
                assert "🚀 `Tests`: 🔁 started again · [run](https://" in rig.reply

    @pytest.mark.parametrize("performed", [True, False])
    def test_without_an_answer(self, *, performed: bool) -> None:
        """A request without an answer is made again only where the run has not started again."""
        with rigged() as rig:
            run = self.failed_run(rig)
            rig.github.faults = [Fault("POST", "rerun-failed-jobs$", cut=True, performed=performed)]
            rig.deliver("/rerun-failed-ci")
            assert [run] == rig.github.reruns
            assert "🔁 started again" in rig.reply

    def test_the_whole_run(self) -> None:
        """Where GitHub refuses to run the failed jobs again, the whole run is."""
        with rigged() as rig:
            run = self.failed_run(rig)
            rig.github.faults = [
                Fault("POST", "rerun-failed-jobs$", 403, message="This workflow run cannot be retried")
            ]
            rig.deliver("/rerun-failed-ci")
            assert [run] == rig.github.reruns
            assert 1 == sum(call.path.endswith("/rerun") for call in rig.github.calls)


class TestRefusedByGitHub:
    @pytest.mark.parametrize("status", [404, 422, 403, 401])
    def test_half_way(self, status: int) -> None:
        """The second dispatch is refused: the first runs, and the reply says what was not started and why."""
        with rigged() as rig:
            rig.github.faults = [Fault("POST", "dispatches$", status, message="Unexpected inputs", skip=1)]
            assert deliver(rig)
            assert 1 == len(rig.github.dispatches)
            assert (
                f"⛔ not started: POST /repos/{NAME}/actions/workflows/rerun-test.yml/dispatches: {status} "
                in rig.reply
            )
            assert "✅ done" in rig.reply

    def test_no_way_to_reply(self) -> None:
        """Without a reply nothing is dispatched, and the delivery fails."""
        with rigged() as rig:
            rig.github.faults = [Fault("POST", "comments$", 403, message="Resource not accessible", times=9)]
            with pytest.raises(GitHubError, match="403 Resource not accessible"):
                rig.deliver(TEXT)
            assert [] == rig.github.dispatches

    def test_down_half_way(self) -> None:
        """GitHub is down from the second dispatch on, for longer than the budget: the reserve is for the answer."""
        with rigged() as rig:
            rig.github.faults = [Fault("POST", "dispatches$", 429, {"Retry-After": "60"}, times=1000, skip=1)]
            assert not deliver(rig)
            assert "cut off: POST" in rig.reply
            assert "about to start: GitHub does not answer" in rig.reply
            rig.github.faults.clear()
            assert deliver(rig)
            check_all_done(rig, "down half way")

    def test_the_reply_is_deleted(self) -> None:
        """Somebody deletes the reply while the work goes on: it is written again, and still all is done once."""
        for at in range(CALLS.index("POST /repos/example/kvshard/issues/41/comments") + 1, len(CALLS)):
            with rigged() as rig:
                handler, _ = hooked(rig, at, rig.github.comments.clear)
                handler.handle(event(TEXT))
                if rig.github.replies:
                    assert LINES == rig.commands
                    assert 3 == rig.reply.count("🚀")


class TestSlow:
    @pytest.mark.parametrize("path", ["comments$", "dispatches$", "labels$"])
    def test_post(self, path: str) -> None:
        """A POST that is carried out but answered too late is not carried out again."""
        with rigged(timeout_s=0.3) as rig:
            rig.github.faults = [Fault("POST", path, slow_s=0.8)]
            assert deliver(rig)
            check_all_done(rig, path)

    def test_get(self) -> None:
        """A GET that is too slow is made again."""
        with rigged(timeout_s=0.3) as rig:
            rig.github.faults = [Fault("GET", "pulls/41$", slow_s=0.8)]
            assert deliver(rig)
            check_all_done(rig, "pull")


def test_the_token_is_sent_and_never_seen() -> None:
    """Every call carries the token; no reply, no error holds it, though GitHub's message does."""
    with rigged() as rig:
        rig.github.faults = [Fault("POST", "dispatches$", 422, message=f"bad {TOKEN} here")]
        deliver(rig)
        assert {f"Bearer {TOKEN}"} == {headers.get("Authorization") for headers in rig.github.headers}
        assert "bad *** here" in rig.reply
        assert TOKEN not in "".join(row["body"] for row in rig.github.comments.values())

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ci.github import (
    Client,
    ForbiddenError,
    GitHubError,
    InvalidError,
    NotFoundError,
    Repository,
    UnavailableError,
    UnsureError,
)
from ci.register import register_cpu_ci
from tests.comment_rig import PULL, Rig, sample_github
from tests.fake_github import NAME, Fault, serving

register_cpu_ci(est_time=10, stage="commit")

WHERE = f"/repos/{NAME}/pulls/{PULL}"


@pytest.fixture
def rig() -> Iterator[Rig]:
    with serving(sample_github()) as github:
        yield Rig(github)


def slept(rig: Rig, fault: Fault) -> float:
    """Seconds of pauses until the call succeeds."""
    rig.github.faults = [fault]
    assert 200 == rig.client().call("GET", WHERE).status
    return rig.clock.slept_s


class TestRetry:
    def test_retry_after(self, rig: Rig) -> None:
        """It waits as long as Retry-After says."""
        assert 42.0 == slept(rig, Fault("GET", "pulls", 429, {"Retry-After": "42"}))

    def test_reset(self, rig: Rig) -> None:
        """It waits until X-RateLimit-Reset, where nothing remains."""
        at = int(rig.clock.now().timestamp()) + 90
        assert 91.0 == slept(
            rig, Fault("GET", "pulls", 403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(at)})
        )

    def test_secondary(self, rig: Rig) -> None:
        """A rate limit that says nothing of its end is waited for a minute."""
        assert 60.0 == slept(rig, Fault("GET", "pulls", 403, message="You have exceeded a secondary rate limit"))

    @pytest.mark.parametrize(
        "fault",
        [
            Fault("GET", "pulls", 500, times=3),
            Fault("GET", "pulls", cut=True, times=3),
            Fault("GET", "pulls", 408, times=3),
        ],
    )
    def test_again_and_again(self, rig: Rig, fault: Fault) -> None:
        """5xx, 408 and broken connections are tried again with growing pauses."""
        assert 8.0 == slept(rig, fault)

    def test_budget(self, rig: Rig) -> None:
        """It ends within the time budget, and does not wait for what it cannot see."""
        rig.github.faults = [Fault("GET", "pulls", 429, {"Retry-After": "100000"})]
        with pytest.raises(UnavailableError, match="429"):
            rig.client().call("GET", WHERE)
        assert 0.0 == rig.clock.slept_s
        rig.github.faults = [Fault("GET", "pulls", 502, times=1000)]
        with pytest.raises(UnavailableError, match="502"):
            rig.client().call("GET", WHERE)
        assert 250 < rig.clock.slept_s <= 300

    def test_reserve(self, rig: Rig) -> None:
        """After the budget is spent, the reserve is for one more answer, once."""
        client = rig.client()
        rig.clock.sleep(301)
        with pytest.raises(UnavailableError):
            client.call("GET", WHERE)
        client.open_reserve()
        assert 200 == client.call("GET", WHERE).status
        rig.clock.sleep(61)
        client.open_reserve()
        with pytest.raises(UnavailableError):
            client.call("GET", WHERE)


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (404, NotFoundError),
            (422, InvalidError),
            (403, ForbiddenError),
            (401, ForbiddenError),
            (400, GitHubError),
            (301, GitHubError),
        ],
    )
    def test_kinds(self, rig: Rig, status: int, kind: type[GitHubError]) -> None:
        """Each has a class of its own, names the call, and is not tried again."""
        rig.github.faults = [Fault("GET", "pulls", status, {"Location": "http://127.0.0.1:9/"}, message="why\nnot")]
        with pytest.raises(kind, match=f"^GET {WHERE}: {status} why not$") as error:
            rig.client().call("GET", WHERE)
        assert status == error.value.status
        assert 1 == len(rig.github.calls)

    @pytest.mark.parametrize("fault", [Fault("POST", "labels", 502), Fault("POST", "labels", cut=True)])
    def test_post(self, rig: Rig, fault: Fault) -> None:
        """A POST without an answer is not made again: it may have been carried out."""
        rig.github.faults = [fault]
        with pytest.raises(UnsureError):
            rig.client().call("POST", f"/repos/{NAME}/issues/{PULL}/labels", {"labels": ["a"]})
        assert 1 == len(rig.github.calls)

    def test_nobody_there(self) -> None:
        """A server that is not there is told within the budget."""
        with pytest.raises(UnavailableError, match="no answer"):
            Client("t", "http://127.0.0.1:9", budget_s=1.5, sleep=lambda _: None).call("GET", "/x")

    @pytest.mark.parametrize("api", ["http://api.example.com", "ftp://x", "http://127.0.0.1.example.com"])
    def test_no_plain_http(self, api: str) -> None:
        """A token goes over https, or stays on this machine."""
        with pytest.raises(ValueError, match="https only"):
            Client("token", api)


def test_pages(rig: Rig) -> None:
    """Lists are read to their end."""
    rig.github.files = [{"filename": f"f{number}"} for number in range(250)]
    assert 250 == len(Repository(rig.client(), NAME).changed(PULL))


def test_no_list(rig: Rig) -> None:
    """An answer that is no list is an error, not an empty list."""
    rig.github.faults = [Fault("GET", "files", 200, body={"message": "odd"})]
    with pytest.raises(GitHubError, match="no list"):
        Repository(rig.client(), NAME).changed(PULL)

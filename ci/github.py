"""A small client of the GitHub REST API: urllib, a time budget, errors that say whether something may have happened.

A call that can be repeated (GET, PATCH, PUT, DELETE) is repeated after 5xx, timeouts and broken connections. A POST is
repeated only after a refusal (rate limit), since one without an answer may have been carried out: it raises `Unsure`.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from typing import Any, NamedTuple, Protocol

API = "https://api.github.com"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANSWER_BYTES_MAX = 20_000_000
PAGE = 100
PAGES_MAX = 30  # 3000 changed files are the most that GitHub lists
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 20.0)
REFUSED_FOR_NOW = (403, 429)
REPEATABLE = frozenset({"GET", "PATCH", "PUT", "DELETE"})


class GitHubError(Exception):
    """A call that did not succeed; the message names method, path and status, never a token."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotFoundError(GitHubError):
    """404: it is not there, or the token may not see it."""


class InvalidError(GitHubError):
    """422: the request is well formed and refused for what it says."""


class ForbiddenError(GitHubError):
    """401 or 403: the token does not suffice."""


class UnavailableError(GitHubError):
    """No success within the time budget; nothing has happened."""


class UnsureError(GitHubError):
    """A POST without an answer: it may have been carried out. Look before doing it again."""


class Answer(NamedTuple):
    """What came back."""

    status: int
    body: Any


class Caller(Protocol):
    """What makes calls: the client below, or something that plays a recorded event."""

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """One call; raises `GitHubError`."""
        ...


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: urllib would carry the token to wherever it leads."""

    def redirect_request(self, *args: Any) -> None:
        """Follow none."""


class Client:
    """Calls with a token, within `budget_s` seconds in all; `reserve_s` more are kept for the last answer."""

    def __init__(
        self,
        token: str = "",
        api: str = API,
        *,
        budget_s: float = 300.0,
        reserve_s: float = 60.0,
        timeout_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parts = urllib.parse.urlsplit(api)
        if parts.scheme != "https" and parts.hostname not in LOOPBACK:
            raise ValueError(f"{api}: the API is reached over https only; a token would be readable on the way")
        proxies: dict[str, str] | None = {} if parts.hostname in LOOPBACK else None
        self._opener = urllib.request.build_opener(NoRedirect, urllib.request.ProxyHandler(proxies))
        self._token, self._api, self._timeout_s, self._reserve_s = token, api.rstrip("/"), timeout_s, reserve_s
        self._clock, self._wall, self._sleep = clock, wall, sleep
        self._deadline = clock() + budget_s

    def open_reserve(self) -> None:
        """From now on the reserve may be spent too; a second time changes nothing."""
        self._deadline = max(self._deadline, self._clock()) + self._reserve_s
        self._reserve_s = 0.0

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """One call, repeated where that is safe; raises `GitHubError`."""
        what = f"{method} {path.partition('?')[0]}"
        for attempt in range(1000):
            failure, wait = self._attempt(what, method, path, body)
            if isinstance(failure, Answer):
                return failure
            pause = PAUSES_S[min(attempt, len(PAUSES_S) - 1)] if wait is None else wait
            left = self._deadline - self._clock()
            if pause >= left:
                raise UnavailableError(f"{what}: {failure}; no time is left to try again ({left:.0f} s)")
            self._sleep(pause)
        raise UnavailableError(f"{what}: too many attempts")

    def _attempt(
        self, what: str, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[Answer | str, float | None]:
        """The answer, or why to try again and after how many seconds (None: the usual pause)."""
        left = self._deadline - self._clock()
        if left <= 0:
            raise UnavailableError(f"{what}: the time budget is spent")
        request = urllib.request.Request(f"{self._api}{path}", method=method)  # noqa: S310 - https or loopback, see above
        request.add_header("Accept", "application/vnd.github+json")
        request.add_header("X-GitHub-Api-Version", "2022-11-28")
        request.add_header("User-Agent", "kvshard-ci")
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=min(self._timeout_s, left)) as response:
                return Answer(response.status, decoded(response.read(ANSWER_BYTES_MAX))), None
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(what, method, error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"no answer ({type(error).__name__})"
            if method not in REPEATABLE:
                raise UnsureError(f"{what}: {why}") from None
            return why, None

    def _refused(self, what: str, method: str, error: urllib.error.HTTPError) -> tuple[str, float | None]:
        """Why to try again and when; raises where that is of no use."""
        status, headers = error.code, error.headers
        message = self._said(error)
        why = f"{status} {message}".strip()
        if status in REFUSED_FOR_NOW and (wait := self._rate_limit(headers, message)) is not None:
            return why, wait
        if status >= 500 or status == 408:
            if method not in REPEATABLE:
                raise UnsureError(f"{what}: {why}", status)
            return why, None
        kinds = {404: NotFoundError, 422: InvalidError, 401: ForbiddenError, 403: ForbiddenError}
        raise kinds.get(status, GitHubError)(f"{what}: {why}", status)

    def _rate_limit(self, headers: Message, message: str) -> float | None:
        """Seconds until the limit is lifted; None when this is no rate limit."""
        if (after := headers.get("Retry-After", "")).isdigit():
            return float(after)
        reset = headers.get("X-RateLimit-Reset", "")
        if headers.get("X-RateLimit-Remaining") == "0" and reset.isdigit():
            return max(1.0, float(reset) - self._wall() + 1.0)
        return 60.0 if "rate limit" in message.lower() else None  # GitHub asks for a minute where it says nothing

    def _said(self, error: urllib.error.HTTPError) -> str:
        """The reason that GitHub gives, in one short line without the token."""
        try:
            body = decoded(error.read(100_000))
        except (OSError, http.client.HTTPException, ValueError):
            return ""
        said = str(body.get("message", "")) if isinstance(body, dict) else ""
        if self._token:
            said = said.replace(self._token, "***")
        return " ".join(said.split())[:200]


def decoded(data: bytes) -> Any:
    """The JSON of an answer; None of an empty one. Raises `ValueError`."""
    return json.loads(data) if data.strip() else None


def query(**values: str | int) -> str:
    """A query string."""
    return "?" + urllib.parse.urlencode(values)


class Repository:
    """The calls that the project makes on one repository, `owner/name`."""

    def __init__(self, caller: Caller, name: str) -> None:
        self.name = name
        self._caller = caller
        self._base = f"/repos/{urllib.parse.quote(name)}"

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._caller.call(method, f"{self._base}{path}", body).body

    def _pages(self, path: str, key: str = "", **values: str | int) -> Iterator[dict[str, Any]]:
        for page in range(1, PAGES_MAX + 1):
            body = self._call("GET", path + query(**values, per_page=PAGE, page=page))
            rows = body.get(key) if key and isinstance(body, dict) else body
            if not isinstance(rows, list):
                raise GitHubError(f"GET {path}: the answer is no list")
            yield from rows
            if len(rows) < PAGE:
                return

    def pull(self, number: int) -> dict[str, Any]:
        """A pull request."""
        return dict(self._call("GET", f"/pulls/{number}"))

    def changed(self, number: int) -> list[dict[str, Any]]:
        """The changed files: `filename`, `status` and for a rename `changes`."""
        return list(self._pages(f"/pulls/{number}/files"))

    def permission(self, login: str) -> str:
        """What the user may do here; "none" for a stranger."""
        try:
            body = self._call("GET", f"/collaborators/{urllib.parse.quote(login, safe='')}/permission")
        except NotFoundError:
            return "none"
        return str(body.get("permission", "none"))

    def comments(self, number: int, since: str) -> list[dict[str, Any]]:
        """Comments of a pull request that were written or changed since a time (ISO 8601)."""
        return list(self._pages(f"/issues/{number}/comments", since=since))

    def comment(self, identity: int) -> dict[str, Any]:
        """One comment."""
        return dict(self._call("GET", f"/issues/comments/{identity}"))

    def write_comment(self, number: int, body: str) -> dict[str, Any]:
        """A new comment."""
        return dict(self._call("POST", f"/issues/{number}/comments", {"body": body}))

    def change_comment(self, identity: int, body: str) -> None:
        """Another text for a comment."""
        self._call("PATCH", f"/issues/comments/{identity}", {"body": body})

    def delete_comment(self, identity: int) -> None:
        """Take a comment away; one that is gone already is no error."""
        try:
            self._call("DELETE", f"/issues/comments/{identity}")
        except NotFoundError:
            return

    def add_labels(self, number: int, labels: list[str]) -> None:
        """Labels on a pull request, beside those that it has."""
        self._call("POST", f"/issues/{number}/labels", {"labels": labels})

    def dispatch(self, workflow: str, ref: str, inputs: Mapping[str, str]) -> dict[str, Any]:
        """Start a workflow; what GitHub tells about the run, empty from a server that tells nothing."""
        body = {"ref": ref, "inputs": dict(inputs), "return_run_details": True}
        return self._call("POST", f"/actions/workflows/{workflow}/dispatches", body) or {}

    def runs_of(self, workflow: str, created: str) -> list[dict[str, Any]]:
        """Dispatched runs of a workflow, created within a range such as `>=2026-01-31T12:00:00Z`."""
        path = f"/actions/workflows/{workflow}/runs"
        return list(self._pages(path, "workflow_runs", event="workflow_dispatch", created=created))

    def runs_at(self, sha: str) -> list[dict[str, Any]]:
        """All runs on a commit, newest first."""
        return list(self._pages("/actions/runs", "workflow_runs", head_sha=sha))

    def run(self, identity: int) -> dict[str, Any]:
        """One run."""
        return dict(self._call("GET", f"/actions/runs/{identity}"))

    def rerun_failed(self, identity: int) -> None:
        """Run the failed jobs of a run again, or the whole run where GitHub refuses that."""
        try:
            self._call("POST", f"/actions/runs/{identity}/rerun-failed-jobs")
        except (ForbiddenError, InvalidError):
            self._call("POST", f"/actions/runs/{identity}/rerun")

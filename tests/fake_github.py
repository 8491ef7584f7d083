"""A GitHub of one repository on 127.0.0.1: real HTTP, real status codes, and failures by script."""

from __future__ import annotations

import http.server
import itertools
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

NAME = "example/kvshard"
BOT = "github-actions[bot]"
WORKFLOW = "rerun-test.yml"
START = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)


@dataclass
class Fault:
    """What goes wrong with the next `times` calls that match, after `skip` good ones."""

    method: str
    path: str  # a regular expression
    status: int = 0  # answer this instead of the truth
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    times: int = 1
    skip: int = 0
    performed: bool = False  # it is carried out all the same
    cut: bool = False  # the connection ends without an answer
    slow_s: float = 0.0
    body: Any = None  # instead of a message


class Call(NamedTuple):
    method: str
    path: str
    body: Any


class FakeGitHub:
    """The state of a repository, and what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.headers: list[Mapping[str, str]] = []
        self.comments: dict[int, dict[str, Any]] = {}
        self.runs: dict[int, dict[str, Any]] = {}
        self.dispatches: list[dict[str, Any]] = []
        self.reruns: list[int] = []
        self.labels: list[str] = []
        self.permissions: dict[str, str] = {}
        self.files: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.pulls: dict[int, dict[str, Any]] = {}
        self.tells_runs = True
        self.hidden_lists = 0  # so many lists of comments and runs do not show the newest yet
        self.now = START + timedelta(minutes=1)
        self.url = ""
        self._ids = itertools.count(5000)
        self._lock = threading.Lock()

    def stamp(self) -> str:
        return f"{self.now:%Y-%m-%dT%H:%M:%SZ}"

    def answer(self, method: str, target: str, body: Any) -> tuple[int, dict[str, str], Any] | None:
        """Status, headers and body; None ends the connection."""
        path, _, text = target.partition("?")
        with self._lock:
            self.calls.append(Call(method, target, body))
            fault = self._fault(method, path)
            if fault is None or fault.performed or fault.slow_s:
                status, result = self._truth(method, path, dict(urllib.parse.parse_qsl(text)), body)
        if fault is None:
            return status, {}, result
        if fault.slow_s:
            time.sleep(fault.slow_s)
        if fault.cut:
            return None
        if not fault.status:
            return status, {}, result
        return fault.status, fault.headers, fault.body if fault.body is not None else {"message": fault.message}

    def _fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.method == method and re.search(fault.path, path) and fault.times > 0:
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def _truth(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        where = path.removeprefix(f"/repos/{NAME}")
        routes: tuple[tuple[str, str, Callable[..., tuple[int, Any]]], ...] = (
            ("GET", r"/pulls/(\d+)", lambda number: self._one(self.pulls, number)),
            ("GET", r"/pulls/\d+/files", lambda: (200, paged(self.files, query))),
            ("GET", r"/collaborators/([\w-]+)/permission", self._permission),
            ("GET", r"/issues/(\d+)/comments", lambda number: self._comments(int(number), query)),
            ("POST", r"/issues/(\d+)/comments", lambda number: self._comment(int(number), body)),
            ("POST", r"/issues/\d+/labels", lambda: self._label(body)),
            ("GET", r"/issues/comments/(\d+)", lambda number: self._one(self.comments, number)),
            ("PATCH", r"/issues/comments/(\d+)", lambda number: self._change(number, body)),
            ("DELETE", r"/issues/comments/(\d+)", self._delete),
            ("POST", rf"/actions/workflows/{WORKFLOW}/dispatches", lambda: self._dispatch(body)),
            ("GET", rf"/actions/workflows/{WORKFLOW}/runs", lambda: self._dispatched(query)),
            ("GET", r"/actions/runs", lambda: self._at(query)),
            ("GET", r"/actions/runs/(\d+)", lambda number: self._one(self.runs, number)),
            ("POST", r"/actions/runs/(\d+)/(?:rerun|rerun-failed-jobs)", self._rerun),
        )
        for wanted, pattern, act in routes:
            found = re.fullmatch(pattern, where)
            if wanted == method and found:
                return act(*found.groups())
        return 404, {"message": "Not Found"}

    def _one(self, rows: Mapping[int, Any], number: str) -> tuple[int, Any]:
        return (200, rows[int(number)]) if int(number) in rows else (404, {"message": "Not Found"})

    def _permission(self, login: str) -> tuple[int, Any]:
        return (200, {"permission": self.permissions[login]}) if login in self.permissions else (404, {})

    def _comments(self, number: int, query: dict[str, str]) -> tuple[int, Any]:
        rows = [c for c in self.comments.values() if c["number"] == number and c["updated_at"] >= query["since"]]
        if self.hidden_lists > 0:
            self.hidden_lists -= 1
            rows = [row for row in rows if row["user"]["login"] != BOT]
        return 200, paged(rows, query)

    def _comment(self, number: int, body: Any) -> tuple[int, Any]:
        return 201, self.write(BOT, "Bot", body["body"], number)

    def write(self, login: str, kind: str, text: str, number: int = 41) -> dict[str, Any]:
        identity = next(self._ids)
        stamp = self.stamp()
        self.comments[identity] = {
            "id": identity,
            "number": number,
            "body": text,
            "user": {"login": login, "type": kind},
            "created_at": stamp,
            "updated_at": stamp,
        }
        return self.comments[identity]

    def _change(self, number: str, body: Any) -> tuple[int, Any]:
        status, row = self._one(self.comments, number)
        if status == 200:
            row.update(body=body["body"], updated_at=self.stamp())
        return status, row

    def _delete(self, number: str) -> tuple[int, Any]:
        return (204, None) if self.comments.pop(int(number), None) else (404, {"message": "Not Found"})

    def _label(self, body: Any) -> tuple[int, Any]:
        self.labels += [label for label in body["labels"] if label not in self.labels]
        return 200, [{"name": label} for label in self.labels]

    def _dispatch(self, body: Any) -> tuple[int, Any]:
        self.dispatches.append(body)
        run = self.run(f"rerun {body['inputs']['key']}", f".github/workflows/{WORKFLOW}", event="workflow_dispatch")
        if not self.tells_runs:
            return 204, None
        return 200, {"workflow_run_id": run["id"], "run_url": run["url"], "html_url": run["html_url"]}

    def run(self, title: str, path: str, *, event: str = "pull_request", **values: Any) -> dict[str, Any]:
        identity = next(self._ids)
        self.runs[identity] = {
            "id": identity,
            "name": title,
            "display_title": title,
            "path": path,
            "event": event,
            "status": "queued",
            "conclusion": None,
            "run_attempt": 1,
            "created_at": self.stamp(),
            "url": f"{self.url}/repos/{NAME}/actions/runs/{identity}",
            "html_url": f"https://github.example/{NAME}/actions/runs/{identity}",
            "head_sha": "",
            **values,
        }
        return self.runs[identity]

    def _dispatched(self, query: dict[str, str]) -> tuple[int, Any]:
        since = query["created"].removeprefix(">=")
        rows = [r for r in self.runs.values() if r["event"] == "workflow_dispatch" and r["created_at"] >= since]
        if self.hidden_lists > 0:
            self.hidden_lists -= 1
            rows = []
        return 200, {"total_count": len(rows), "workflow_runs": paged(rows, query)}

    def _at(self, query: dict[str, str]) -> tuple[int, Any]:
        rows = [run for run in self.runs.values() if run["head_sha"] == query["head_sha"]]
        return 200, {"total_count": len(rows), "workflow_runs": paged(rows, query)}

    def _rerun(self, number: str) -> tuple[int, Any]:
        self.reruns.append(int(number))
        self.runs[int(number)].update(run_attempt=self.runs[int(number)]["run_attempt"] + 1, status="queued")
        return 201, {}

    @property
    def replies(self) -> list[str]:
        """What the handler has written, without its hidden lines."""
        own = [row["body"] for row in self.comments.values() if row["user"]["login"] == BOT]
        return ["\n".join(line for line in text.split("\n") if not line.startswith("<!-- ")).strip() for text in own]


def paged(rows: list[Any], query: dict[str, str]) -> list[Any]:
    size, page = int(query.get("per_page", 30)), int(query.get("page", 1))
    return rows[size * (page - 1) : size * page]


@contextmanager
def serving(github: FakeGitHub) -> Iterator[FakeGitHub]:
    """The fake as a server on a free port."""

    class Face(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            github.headers.append(dict(self.headers))
            answer = github.answer(self.command, self.path, json.loads(data) if data else None)
            self.close_connection = True
            if answer is None:
                return
            status, headers, body = answer
            content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content)), "Connection": "close"}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                return  # the client has given up waiting

        do_GET = do_POST = do_PATCH = do_DELETE = respond  # noqa: N815 - the names that http.server calls

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Face)
    github.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield github
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A server by its URL, with a limit on the time of everything: whole answers, and streams that can be left."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from harness.usage import UserError

Json = dict[str, Any]
WHY_CHARACTERS_MAX = 300
READ_BYTES = 1 << 16


class LostError(Exception):
    """No answer, or not all of it: what was asked is perhaps done."""


class LeftError(Exception):
    """The client itself has left."""


class Told(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether it is what was asked for."""
        return 200 <= self.status < 300

    @property
    def json(self) -> Any:
        """The body. Raises `LostError` when it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise LostError(f"HTTP {self.status} with a body that is no JSON: {self.body[:80]!r}") from error

    @property
    def why(self) -> str:
        """What a refusal says."""
        text = self.body.decode(errors="replace")
        with suppress(ValueError):
            text = reason_of(json.loads(text)) or text
        return f"HTTP {self.status}: {text.strip()[:WHY_CHARACTERS_MAX]}"


def reason_of(answer: Any) -> str:
    """The message of an error object, "" when it is none."""
    error = answer.get("error", answer.get("message", "")) if isinstance(answer, dict) else ""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "")


class Exchange:
    """One request with its answer. `leave` may be called from another thread, at any time."""

    def __init__(self, url: str, method: str, path: str, body: Json | None, seconds: float) -> None:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        self._where, self._target = f"{url}{path}", parts.path.rstrip("/") + path
        self._method, self._body = method, None if body is None else json.dumps(body).encode()
        self._seconds, self._end = seconds, time.monotonic() + seconds
        self._left = threading.Event()
        self._answer: http.client.HTTPResponse | None = None
        self._socket: socket.socket | None = None  # the connection forgets its own before the answer is read
        self.status = 0

    def ask(self) -> None:
        """Sends the request. Raises `LostError`, `LeftError`."""
        headers = {"Content-Type": "application/json"} if self._body is not None else {}
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            self._connection.request(self._method, self._target, self._body, headers)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error

    def whole(self) -> Told:
        """The answer. Raises `LostError`, `LeftError`."""
        body = b"".join(self._pieces())
        return Told(self.status, body)

    def events(self) -> Iterator[Json]:
        """The events of a stream, or an answer that is none, as one. Raises `LostError`, `LeftError`."""
        rest = b""
        for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                said = line.strip().removeprefix(b"data:").strip()
                if line.startswith(b"data:") and said != b"[DONE]":
                    yield Told(self.status, said).json
        if rest.strip():
            yield Told(self.status, rest).json

    def start(self) -> int:
        """Waits for the status. Raises `LostError`, `LeftError`."""
        if self._answer is None:
            self._limit()
            try:
                self._answer = self._connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise self._failed(error) from error
            self.status = self._answer.status
        return self.status

    def leave(self) -> None:
        """Closes the connection, as a client that is gone."""
        self._left.set()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the connection."""
        if self._answer is not None:
            self._answer.close()
        self._connection.close()

    def _pieces(self) -> Iterator[bytes]:
        self.start()
        while self._answer is not None:
            self._limit()
            try:
                piece = self._answer.read1(READ_BYTES)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._failed(error) from error
            if not piece:
                break
            yield piece
        if self._left.is_set():
            raise LeftError
        if self._answer is not None and self._answer.length:
            raise LostError(f"{self._where} ended {self._answer.length} bytes early")

    def _limit(self) -> None:
        """What is left of the time, for the next read."""
        if self._socket is not None:
            self._socket.settimeout(max(0.01, self._end - time.monotonic()))

    def _failed(self, error: Exception) -> Exception:
        if self._left.is_set():
            return LeftError()
        if isinstance(error, TimeoutError):
            return LostError(f"{self._where} did not answer within {self._seconds:g} s")
        return LostError(f"{self._where} is lost: {type(error).__name__}: {error}")


class Client:
    """A server. `seconds` is the time that one answer may take."""

    def __init__(self, url: str, seconds: float) -> None:
        parts = urlsplit(url)
        try:
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise UserError(f"{url!r} is no URL of a server; expected http://host:port")
        self.url, self.seconds = url.rstrip("/"), seconds

    @property
    def host(self) -> str:
        """Its name without the port."""
        return urlsplit(self.url).hostname or ""

    def exchange(self, path: str, body: Json | None, method: str = "POST") -> Exchange:
        """A request that is not asked yet."""
        return Exchange(self.url, method, path, body, self.seconds)

    def get(self, path: str) -> Told:
        """An answer to GET. Raises `LostError`."""
        return self._told(self.exchange(path, None, "GET"))

    def post(self, path: str, body: Json) -> Told:
        """An answer to POST. Raises `LostError`."""
        return self._told(self.exchange(path, body))

    @staticmethod
    def _told(exchange: Exchange) -> Told:
        try:
            exchange.ask()
            return exchange.whole()
        finally:
            exchange.close()

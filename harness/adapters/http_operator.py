"""The processes behind URLs, where a `kvshard up` runs them: they end and start again through its control."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from harness.adapters.http_client import Client
from harness.launch.control import LIST, ControlError, Running, tell
from harness.usage import UserError

READY = "ready"
POLL_SECONDS = 0.05
CONNECT_SECONDS = 2.0
VERBS = {"worker": "kill", "rank": "kill-rank"}


class Operator:
    """`down` are the URLs of those that were ended and not started again."""

    def __init__(self, log_dir: Path, clients: Sequence[Client]) -> None:
        """Raises `UserError` when nothing is controlled there, or not the workers behind these."""
        self._log_dir, self._clients = log_dir, clients
        self.down: set[str] = set()
        named = {each.url: each.name for each in self._workers()}
        for client in clients:
            if client.url not in named:
                known = ", ".join(named)
                raise UserError(f"operate={log_dir}: no worker there answers at {client.url}; there is: {known}")
        self._names = {client.url: named[client.url] for client in clients}

    def kill(self, client: Client, what: str, seconds: float) -> str:
        """Ends the worker or one rank of it. "" once the worker is gone, or why it is not after so many seconds."""
        self.down.add(client.url)
        try:
            tell(self._log_dir, VERBS[what], self._names[client.url])
        except ControlError as error:
            return str(error)
        end = time.monotonic() + seconds
        while _listens(client.url):
            if time.monotonic() > end:
                return f"{client.url} is there {seconds:g} s after the end of its {what}"
            time.sleep(POLL_SECONDS)
        return ""

    def restart(self, clients: Sequence[Client]) -> None:
        """Starts them at the same time, and returns once all are healthy. Raises `ControlError`."""
        with ThreadPoolExecutor(max(1, len(clients))) as pool:
            list(pool.map(lambda client: tell(self._log_dir, "restart", self._names[client.url]), clients))
        self.down -= {client.url for client in clients}

    def revive(self) -> None:
        """Starts what was left down, as by a case that failed half-way. Raises `UserError`."""
        states = {each.url: each.state for each in self._workers()}
        left = [client for client in self._clients if states[client.url] != READY]
        try:
            self.restart(left)
        except ControlError as error:
            raise UserError(f"a worker that was ended does not come back: {error}") from error
        self.down.clear()

    def _workers(self) -> Sequence[Running]:
        return tell(self._log_dir, LIST)


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), timeout=CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # too busy to take a connection is not gone
    return True

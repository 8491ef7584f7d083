"""Readiness of a server: its health URL answers 200."""

from __future__ import annotations

import http.client
import threading
import time

ANSWER_SECONDS = 5.0  # a health check that generates a token takes its time
FIRST_SECONDS, LONGEST_SECONDS = 0.05, 1.0  # between two asks; a server that loads for minutes is asked once a second
NO_ANSWER_SECONDS = 0.3  # from then on the silence is worth more than the answer before it
READY = 200


def ask(host: str, port: int, path: str, seconds: float = ANSWER_SECONDS) -> tuple[bool, str]:
    """Whether the server is ready, and what it said or why it could not be asked."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)  # no proxy of the environment comes between
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        status = connection.getresponse().status
        return status == READY, f"HTTP {status}"
    except (OSError, http.client.HTTPException) as error:
        return False, " ".join(f"{type(error).__name__} {error}".split())
    finally:
        connection.close()


class Probe:
    """Asks a server in a thread of its own until it is ready, so that one that hangs delays nobody else."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self._where = (host, port, path)
        self._stop = threading.Event()
        self._last = "not asked yet"
        self._asked = 0.0  # when the question went out that is not answered yet
        self.ready = False
        self._thread = threading.Thread(target=self._ask, name=f"probe-{port}", daemon=True)
        self._thread.start()

    @property
    def last(self) -> str:
        """What was seen last."""
        waited = time.monotonic() - self._asked
        return f"no answer for {waited:.1f} s" if self._asked and waited > NO_ANSWER_SECONDS else self._last

    def stop(self) -> None:
        """Asks no more."""
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        pause = FIRST_SECONDS
        while not self.ready and not self._stop.wait(pause):
            self._asked = time.monotonic()
            self.ready, self._last = ask(*self._where)
            self._asked = 0.0
            pause = min(pause * 1.5, LONGEST_SECONDS)

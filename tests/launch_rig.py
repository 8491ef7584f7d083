"""Small servers for the tests of `harness.launch`, and a way to find what is left of them."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent

KINDS = ("child", "clean", "setsid", "bare", "orphan")  # of what a worker starts

# Its words: unready, hangs, dies (at once), dies-later (when asked for /die), stubborn (ignores SIGTERM), and the kinds
# of child that it leaves: child, clean (clean environment), setsid, bare (both), orphan (setsid, and its parent ended).
SERVER = """
import http.server, os, signal, subprocess, sys, time
port, tag, *words = sys.argv[1:]
print("words", *words, flush=True)
if "dies" in words:
    print(*(f"line {n}" for n in range(50)), sep="\\n", flush=True)
    sys.exit(7)
def term(*_):
    print("term", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in words else term)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
sleep = [sys.executable, "-S", "-E", "-c", code, tag]
orphan = f"import subprocess; subprocess.Popen({sleep!r})"
starts = {
    "child": lambda: subprocess.Popen(sleep),
    "clean": lambda: subprocess.Popen(sleep, env={}),
    "setsid": lambda: subprocess.Popen(sleep, start_new_session=True),
    "bare": lambda: subprocess.Popen(sleep, start_new_session=True, env={}),
    "orphan": lambda: subprocess.run([sys.executable, "-S", "-c", orphan, tag], start_new_session=True),
}
children = [starts[word]() for word in words if word in starts]
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def do_GET(self):
        if self.path == "/die":
            os._exit(9)
        time.sleep(60 if "hangs" in words else 0)
        self.send_response(503 if "unready" in words else 200)
        self.end_headers()
        self.wfile.write(repr(os.environ.get("WORD")).encode())
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


class Rig:
    """A folder with the server, and a word that every process of the test carries as an argument."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tag = f"tag-{uuid.uuid4().hex}"
        self.log_dir = folder / "logs"
        (folder / "server.py").write_text(SERVER, encoding="utf-8")

    def worker(self, name: str, *words: str, **keys: Any) -> dict[str, Any]:
        """A worker that runs the server."""
        if {"stubborn", *KINDS} & set(words):  # these ignore SIGTERM, so the whole time is spent
            keys = {"stop_seconds": 0.3, **keys}
        command = ["{python}", "-S", str(self.folder / "server.py"), "{port}", self.tag, *words]
        return {"name": name, "command": command, **keys}

    def document(self, *workers: dict[str, Any], entry: str = "") -> dict[str, Any]:
        """A topology of these; the last one is the entry."""
        defaults = {"ready_seconds": 20, "stop_seconds": 10}
        return {"defaults": defaults, "worker": list(workers), "entry": {"worker": entry or workers[-1]["name"]}}

    def file(self, *workers: dict[str, Any], name: str = "set.toml") -> Path:
        """The same as a file."""
        lines = ["[defaults]", "ready_seconds = 20", "stop_seconds = 10"]
        for worker in workers:
            lines += ["[[worker]]", *(f"{key} = {toml(value)}" for key, value in worker.items())]
        path = self.folder / name
        path.write_text("\n".join([*lines, "[entry]", f'worker = "{workers[-1]["name"]}"', ""]), encoding="utf-8")
        return path

    def processes(self) -> list[int]:
        """The living processes of this test, children of any depth and session too."""
        return sorted(process.pid for process in psutil.process_iter() if self.tag in words_of(process))


def toml(value: Any) -> str:
    """A TOML value: strings, numbers and lists of strings are the same in JSON and Python, but for the quotes."""
    if isinstance(value, list):
        return f"[{', '.join(toml(one) for one in value)}]"
    return f"'{value}'" if isinstance(value, str) else str(value)


def words_of(process: psutil.Process) -> list[str]:
    """The command line of a living process; [] for a zombie."""
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def guardians_of(pid: int) -> list[int]:
    """The living guardians of that process."""
    found = [(process.pid, words_of(process)) for process in psutil.process_iter()]
    return [one for one, words in found if words[1:3] == ["-m", "harness.launch.guard"] and words[-1] == str(pid)]


def until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it came to hold in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


def environment() -> dict[str, str]:
    """Of a command in a fresh process, from any folder."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def kvshard(*words: str) -> list[str]:
    """The command line of `kvshard`."""
    return [sys.executable, "-m", "harness.cli", *words]

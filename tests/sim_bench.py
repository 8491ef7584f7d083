"""Streams and host threads by hand: the least that the order check needs to watch torch operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from harness.sim.access import Operations
from harness.sim.clock import Clock, Clocks
from harness.sim.order import OrderCheck


def site() -> str:
    """The nearest line of a test file."""
    frame = sys._getframe(1)
    while "test_" not in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


class Bench(TorchDispatchMode):
    """One host thread, streams by name; operations run at once and go to the current stream."""

    def __init__(self, find: Callable[[], str] = site) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no annotations
        self.find = find
        self.clocks = Clocks()
        self.operations = Operations()
        self.check = OrderCheck(self.clocks)
        self.host = self.clocks.line("host")
        self.lines: dict[str, int] = {}
        self.current = self.line("main")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        accesses = self.operations.accesses(func, args, kwargs or {}, result)
        if accesses:
            self.check.ran(str(func), self.find(), self.clocks.issue(self.current, self.host), accesses)
        return result

    def line(self, name: str) -> int:
        if name not in self.lines:
            self.lines[name] = self.clocks.line(f"stream {name}")
        return self.lines[name]

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self.current = self.current, self.line(name)
        yield
        self.current = before

    def record(self, name: str) -> Clock:
        return self.clocks.now(self.line(name), self.host)

    def wait(self, name: str, other: str | Clock) -> None:
        clock = self.record(other) if isinstance(other, str) else other
        self.clocks.join(self.line(name), clock, self.find())

    def synchronize(self, name: str) -> None:
        self.clocks.join(self.host, self.record(name), self.find())

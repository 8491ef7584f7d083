"""Engines that are always wrong, around one that is right. A suite that lets one live is blind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import msgspec

from harness import types as t
from harness.adapter import Engine, Session
from harness.views import RankView, Snapshot

T = TypeVar("T")
_KINDS = ("reply", "value")  # fields that say which struct it is


class Garbled:
    """Every number that it tells is wrong, each time by another amount; texts are wrong as well."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self._off = count(1)

    def apply(self, op: t.AnyOp) -> t.AnyReply:
        """The reply with wrong values."""
        reply = self._inner.apply(op)
        if isinstance(reply, t.Refused):
            return t.Ok(empty(op)) if not isinstance(op, t.Together) else reply
        return self._wrong(reply)

    def snapshot(self) -> Snapshot:
        """The snapshot with wrong values, for the ranks that there are."""
        return self._wrong(self._inner.snapshot())

    def close(self) -> None:
        """Ends the session."""
        self._inner.close()

    def _wrong(self, told: T) -> T:
        return msgspec.convert(self._garbled(msgspec.to_builtins(told)), type(told))

    def _garbled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: each if key in _KINDS and isinstance(each, str) else self._garbled(each)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._garbled(each) for each in value]
        if isinstance(value, int):
            off = next(self._off)
            return max(0, value + (1 + off % 7) * (1 if off % 3 else -1))
        return f"{value}{next(self._off)}" if isinstance(value, str) else value


class Hollow:
    """Says yes to everything, and has nothing to show but what a fresh session shows."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self._fresh = inner.snapshot()

    def apply(self, op: t.AnyOp) -> t.AnyReply:
        """The emptiest value that the op may have."""
        if isinstance(op, t.Together):
            return t.Replies(tuple(self.apply(each) for each in op.ops))
        return t.Ok(empty(op))

    def snapshot(self) -> Snapshot:
        """That of the fresh session."""
        return self._fresh

    def close(self) -> None:
        """Ends the session."""
        self._inner.close()


class Liar:
    """Claims everything, takes no op and shows nothing."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner

    def apply(self, op: t.AnyOp) -> t.AnyReply:
        """Never takes it."""
        return t.Unsupported(f"{t.op_name(op)} is not implemented")

    def snapshot(self) -> Snapshot:
        """One rank of which nothing can be seen."""
        return Snapshot((RankView(rank=0),))

    def close(self) -> None:
        """Ends the session."""
        self._inner.close()


def empty(op: t.AnyOp) -> t.AnyValue:
    """The emptiest value that the op may have."""
    return _EMPTY.get(type(op), lambda _: t.Done())(op)


_EMPTY: Mapping[type, Callable[[Any], t.AnyValue]] = {
    t.Open: lambda _: t.Opened(0),
    t.Extend: lambda op: t.Extended(0, op.count, ()),
    t.Finish: lambda _: t.Finished(0),
    t.Evict: lambda op: t.Evicted(op.tokens),
    t.Flush: lambda _: t.Evicted(0),
    t.Receive: lambda _: t.Received({}),
    t.Locate: lambda op: t.Located(tuple(t.Place(0, 0, 0) for _ in op.locs), 1),
}


@dataclass(frozen=True, slots=True)
class Canary:
    """An engine whose sessions are put into wrong ones. With `all_see` no case may pass it, else not all may."""

    does: str
    around: Callable[[Session], Session]
    all_see: bool

    def engine(self, inner: Engine) -> Engine:
        """The canary around an engine that is right."""
        return _Around(inner, self.around)


@dataclass(frozen=True, slots=True)
class _Around:
    inner: Engine
    around: Callable[[Session], Session]

    def describe(self) -> t.Manifest:
        return self.inner.describe()

    def open(self, config: t.Config) -> Session:
        return self.around(self.inner.open(config))


CANARIES: Mapping[str, Canary] = {
    "canary.garbled": Canary("Whatever it tells or shows is wrong.", Garbled, all_see=False),
    "canary.liar": Canary("It claims everything, takes no op and shows nothing.", Liar, all_see=True),
    "canary.hollow": Canary("It says yes to everything and does nothing.", Hollow, all_see=False),
}

"""The contract: two objects, five methods, plain values. Whoever implements it can be judged by every suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from harness.types import AnyOp, AnyReply, Config, Manifest, Op, Unsupported, op_name
from harness.views import Snapshot


@runtime_checkable
class Session(Protocol):
    """One running engine with its own state. Two sessions of one process never disturb each other."""

    def apply(self, op: AnyOp) -> AnyReply:
        """Carry out one op. The only way to act."""
        ...

    def snapshot(self) -> Snapshot:
        """What can be seen now. The only way to look; changes nothing."""
        ...

    def close(self) -> None:
        """Release everything; safe to call twice and in any state."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Something that opens sessions."""

    def describe(self) -> Manifest:
        """Identity and claims; cheap, starts nothing."""
        ...

    def open(self, config: Config) -> Session:
        """A fresh session; raises `ConfigError` for a config outside the manifest's axes."""
        ...


class ConfigError(ValueError):
    """A session cannot be opened with this config; the message names the field, its value and what is possible."""


class EngineFault(Exception):  # noqa: N818  # a finding about the engine, not an error of ours
    """The engine itself was caught in a fault that no reply can express, such as ranks that disagree.

    Counts against the engine, as any exception out of `apply` does; `claim` is the sentence that the fault breaks,
    `expected` what should have been seen, and `why`.
    """

    def __init__(
        self, claim: str, seen: str, expected: str = "ranks that act as one", why: str = "they share one cache"
    ) -> None:
        super().__init__(f"{claim} Seen: {seen}")
        self.claim = claim
        self.seen = seen
        self.expected = expected
        self.why = why


class OpSession:
    """Helper for adapters: `apply` calls the class's `do_<op>`; an op without one is `Unsupported`."""

    def apply(self, op: AnyOp) -> AnyReply:
        """Calls `do_<op>`."""
        handler: Callable[[Op], AnyReply] | None = getattr(self, f"do_{op_name(op)}", None)
        if handler is None:
            return Unsupported(f"{type(self).__name__} has no do_{op_name(op)}")
        return handler(op)

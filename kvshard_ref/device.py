"""Streams and events: the part of torch.cuda's interface that the reference uses, and the same for a CPU.

The reference takes a device module: `torch.cuda` on a GPU, `HostDevice` on a CPU, a simulated one in tests.
`torch.cpu` will not do: it keeps one current stream for the whole process, which rank threads would share.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class DeviceModule(Protocol):
    """What the reference asks of `torch.cuda`; streams are opaque, as other modules bring their own."""

    def Stream(self) -> Any:  # noqa: N802 - torch.cuda's name
        """A new stream."""

    def Event(self) -> Any:  # noqa: N802 - torch.cuda's name
        """A new event."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Work issued inside the context goes to the stream."""

    def current_stream(self) -> Any:
        """The stream that work goes to now."""

    def synchronize(self) -> None:
        """Wait for all work."""


class HostEvent:
    """An event of a device where all work is done when it is issued."""

    def record(self, stream: HostStream | None = None) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work before the event is done."""
        return True


class HostStream:
    """A stream of a device where all work is done when it is issued."""

    def wait_stream(self, stream: HostStream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: HostEvent) -> None:
        """Nothing to wait for."""


class HostDevice:
    """A device module for a CPU: work is done in the order in which it is issued."""

    Stream = HostStream
    Event = HostEvent

    def __init__(self) -> None:
        self._stream = HostStream()

    def stream(self, stream: HostStream) -> AbstractContextManager[Any]:
        """A context without effect."""
        return nullcontext()

    def current_stream(self) -> HostStream:
        """The only stream."""
        return self._stream

    def synchronize(self) -> None:
        """Nothing to wait for."""


def device_module_of(device: torch.device) -> DeviceModule:
    """The module whose streams order work on `device`."""
    module: DeviceModule = HostDevice() if device.type == "cpu" else torch.get_device_module(device)
    return module

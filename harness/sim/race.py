"""What a simulated device finds, told as a story: who, where, on which stream, and which wait is missing."""

from __future__ import annotations

from typing import NamedTuple


class SimFinding(AssertionError):  # noqa: N818 - a finding about the program under test, not an error of ours
    """Base of all findings of a simulated device about the program that runs on it."""


class Deadlock(SimFinding):
    """A collective lacks a peer: real ranks would hang."""


class UnexpectedSync(SimFinding):
    """The host waits for the device at a place that was not expected."""


class UnknownOp(TypeError):  # noqa: N818 - the same
    """An operation whose reads and writes are not known; the message says how to declare them."""


class Touch(NamedTuple):
    """One operation that touched memory."""

    name: str
    """The operation, such as "aten.index_select.out"."""
    site: str
    """Its call site, "file.py:line in function"."""
    line: str
    """Name of the stream or host thread it ran on."""
    write: bool
    host: bool = False
    """Whether the line is a host thread."""

    def __str__(self) -> str:
        return f"{'write' if self.write else 'read'} by {self.name} on {self.line!r} at {self.site}"


class Race(SimFinding):
    """Two operations touch the same cells, at least one writes, and no wait orders them."""

    def __init__(self, earlier: Touch, later: Touch, story: str) -> None:
        self.earlier = earlier
        self.later = later
        super().__init__(story)


class StaleLifetime(SimFinding):
    """Memory was given back to its stream while work of another stream on it may be pending."""

    def __init__(self, use: Touch, story: str) -> None:
        self.use = use
        super().__init__(story)


class Known(NamedTuple):
    """What the later line knew of the earlier one when it ran."""

    covered: Touch | None
    """The last operation of the earlier line that is ordered before; None for none."""
    wait: str
    """Call site of the last wait of the later line for the earlier one; "" when there was none."""


def race(earlier: Touch, later: Touch, memory: str, known: Known) -> Race:
    """The finding that `later` touched `memory` without being ordered after `earlier`."""
    effect = {
        (True, False): "the read may see the rows as they were before that write",
        (False, True): "the write may replace rows that are still to be read",
        (True, True): "either write may be the one that stays",
    }[earlier.write, later.write]
    story = (
        f"race: {_kind(later)} not ordered after {_kind(earlier)}\n"
        f"  memory    {memory}\n"
        f"  earlier   {earlier}\n"
        f"  later     {later}\n"
        f"  missing   {_missing(earlier, later)}\n"
        f"  known     {_known(earlier, later, known)}\n"
        f"  effect    {effect}"
    )
    return Race(earlier, later, story)


def stale(use: Touch, home: str, memory: str, freed: str) -> StaleLifetime:
    """The finding that `memory` of stream `home` was freed, at site `freed`, while `use` may be pending."""
    story = (
        f"freed too early: memory of {home!r} was given back while {use.line!r} may still use it\n"
        f"  memory    {memory}\n"
        f"  last use  {use}\n"
        f"  freed     at {freed}\n"
        f"  missing   the stream {home!r} does not wait for {use.line!r} after that use: keep a reference until it "
        f"does, or call tensor.record_stream(<{use.line}>) before the last reference goes\n"
        f"  effect    {home!r} may get the same memory for its next tensor and write it under that use"
    )
    return StaleLifetime(use, story)


def _kind(touch: Touch) -> str:
    return f"{'write' if touch.write else 'read'} of {touch.line!r}"


def _missing(earlier: Touch, later: Touch) -> str:
    between = f"between {earlier.site} and {later.site}"
    if earlier.host and later.host:
        return f"nothing orders the two threads {between}: they need a collective or a lock"
    if later.host:
        return (
            f"nothing makes the host wait for {earlier.line!r} {between}: a stream.synchronize(), or an event recorded "
            "after the first and event.synchronize()"
        )
    if earlier.host:
        return f"nothing tells {later.line!r} that the other host thread is done {between}"
    return (
        f"nothing makes {later.line!r} wait for {earlier.line!r} {between}: a wait_stream, or an event recorded after "
        "the first and wait_event before the second"
    )


def _known(earlier: Touch, later: Touch, known: Known) -> str:
    if known.covered is None:
        late = f"; its wait at {known.wait} came before any work there" if known.wait else ""
        return f"{later.line!r} never waited for anything on {earlier.line!r}{late}"
    how = f"by its wait at {known.wait}" if known.wait else "through a host or another stream"
    return (
        f"{later.line!r} is ordered, {how}, after {known.covered.name} on {earlier.line!r} at {known.covered.site}, "
        "not after what came later there"
    )

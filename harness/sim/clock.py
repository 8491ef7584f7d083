r"""Vector clocks of streams and host threads: what is ordered before what.

A *line* is one stream or one host thread; what it does is in order. Each of its operations has a tick, 1, 2, ... Of
every other line a line knows the last tick that is ordered before its next operation::

    stream 1   1 ---- 2 ---- 3 ---------- 4
                       \ event              knows (stream 2: 0)
    stream 2   1 -------+ wait -- 2
                                    knows (stream 1: 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

Ticks: TypeAlias = tuple[int, ...]
"""Per line its last tick that is known; lines made later are left out, and unknown."""

LINE_BITS = 12  # a tick and its line share one integer in the shadow cells
LINES_MAX = 1 << LINE_BITS


class Clock(NamedTuple):
    """What is ordered before a point of a line: its own ticks up to `tick`, and `seen` of the others."""

    line: int
    tick: int
    seen: Ticks
    """The entry of `line` itself is unused."""

    def knows(self, line: int, tick: int) -> bool:
        """Whether operation `tick` of `line` is ordered before, or is, this point."""
        return tick <= self.known(line)

    def known(self, line: int) -> int:
        """The last tick of `line` that is ordered before this point."""
        if line == self.line:
            return self.tick
        return self.seen[line] if line < len(self.seen) else 0


class Clocks:
    """The clocks of all lines of a simulation.

    `waits[waiting][awaited]` is the call site of the last wait of one line for another, as far as sites were given.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.waits: list[dict[int, str]] = []
        self._ticks: list[int] = []
        self._seen: list[Ticks] = []
        self._hosts: list[int | None] = []  # per line the thread that issued last
        self._joined: list[tuple[int, Ticks]] = []  # per line the state of that thread when it was joined last

    def line(self, name: str) -> int:
        """A new line, that knows nothing. `name` is for messages, such as "rank 0 stream 1"."""
        if len(self.names) == LINES_MAX:
            raise ValueError(
                f"Clocks.line({name!r}): there are {LINES_MAX} streams and host threads already; "
                "make streams once and use them again, or start a new simulation"
            )
        self.names.append(name)
        self.waits.append({})
        self._ticks.append(0)
        self._seen.append(())
        self._hosts.append(None)
        self._joined.append((0, ()))
        return len(self.names) - 1

    def issue(self, line: int, host: int) -> Clock:
        """The clock of an operation that thread `host` puts on stream `line`: after all the host did before it."""
        self._follow(line, host)
        self._ticks[line] += 1
        return Clock(line, self._ticks[line], self._seen[line])

    def host_op(self, host: int) -> Clock:
        """The clock of an access by the host thread itself."""
        self._ticks[host] += 1
        return Clock(host, self._ticks[host], self._seen[host])

    def now(self, line: int, host: int | None = None) -> Clock:
        """All that is on the line so far; `host`, if given, is the thread that records it, and is known too."""
        if host is not None:
            self._follow(line, host)
        return Clock(line, self._ticks[line], self._seen[line])

    def join(self, line: int, clock: Clock, site: str = "") -> None:
        """What the line does from now on is ordered after `clock`; `site` is where it was told to wait."""
        if site:
            self.waits[line][clock.line] = site
        self._seen[line] = _merged(self._seen[line], clock)

    def meet(self, lines: Sequence[int], hosts: Sequence[int]) -> list[Clock]:
        """A collective: the clocks of its parts, one per participant; part r is what `lines[r]` does, issued by host r.

        Each part is ordered after all that any participant did before, and not after the others' parts: a rank that has
        left the collective knows that the others came, not that they have left.
        """
        for line, host in zip(lines, hosts, strict=True):
            self._follow(line, host)
        before = [self.now(line) for line in lines]
        for line in lines:
            for clock in before:
                self.join(line, clock)
            self._ticks[line] += 1
        return [self.now(line) for line in lines]

    def host_of(self, line: int) -> int | None:
        """The thread that issued last on a stream; None before that, and for a thread itself."""
        return self._hosts[line]

    def _follow(self, line: int, host: int) -> None:
        tick, seen = self._ticks[host], self._seen[host]
        joined = self._joined[line]
        if self._hosts[line] == host and joined[0] == tick and joined[1] is seen:
            return
        self._hosts[line], self._joined[line] = host, (tick, seen)
        self._seen[line] = _merged(self._seen[line], Clock(host, tick, seen))


def _merged(own: Ticks, clock: Clock) -> Ticks:
    """The later of both, line by line; `own` itself when it knows all of `clock`."""
    other = list(clock.seen)
    other.extend([0] * (clock.line + 1 - len(other)))
    other[clock.line] = clock.tick
    merged = tuple(map(max, zip_longest(own, other, fillvalue=0)))
    return own if merged == own else merged

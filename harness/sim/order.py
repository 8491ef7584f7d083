"""The order check: every access must be ordered after the last write of its cells, every write after all reads too.

Happens-before does not depend on the order in which work runs here: a missing wait is seen in one run, even when the
rows come out right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from harness.sim import race
from harness.sim.access import Access
from harness.sim.cells import Ints, extent
from harness.sim.clock import LINE_BITS, LINES_MAX, Clock, Clocks, Ticks
from harness.sim.lifetime import freed_too_early
from harness.sim.race import Known, StaleLifetime, Touch, UnknownOp
from harness.sim.shadow import Selection, Shadow, shadow_of
from harness.sim.sites import Sites

ALWAYS = 1 << 62  # a line does everything in order


class OrderCheck:
    """Watches all accesses of one simulation.

    `lifetimes` also finds memory that is given back while another stream may use it. That follows Python's references,
    so leave it out where deferred work keeps tensors alive.
    """

    def __init__(self, clocks: Clocks, *, lifetimes: bool = True) -> None:
        self.clocks = clocks
        self.lifetimes = lifetimes
        self._stale: list[StaleLifetime] = []  # found when memory was freed, raised at the next call
        self._ops: dict[int, tuple[str, str]] = {}  # name and site, by tick and line
        self._sites = Sites()
        self._known: dict[int, tuple[Ticks, Ints]] = {}

    def ran(self, name: str, site: str, clock: Clock, accesses: Sequence[Access]) -> None:
        """An operation ran at `clock`: check its accesses, then remember them.

        Raises Race when one is not ordered after what it must follow, StaleLifetime for memory freed too early before.
        """
        if self._stale:
            self.settle()
        line, tick, _ = clock
        code = tick << LINE_BITS | line
        self._ops[code] = (name, site)
        for access in accesses:
            tensor, cells, write, fresh = access
            if tensor.layout is not torch.strided:
                raise UnknownOp(
                    f"{name} at {site}: a tensor of layout {tensor.layout}, expected torch.strided; its memory is not "
                    "modelled, use plain tensors in the simulation"
                )
            shadow = shadow_of(self, tensor, (line, tick), fresh=fresh)
            where = shadow.select(cells or extent(tensor))
            if not shadow.settled(clock, write=write):
                self._check(shadow, where, clock, access)
            if write:
                shadow.wrote(where, line, tick, code)
            else:
                shadow.read(where, line, tick)

    def record_stream(self, tensor: Tensor, line: int) -> None:
        """The memory is not given back before the stream's work of the moment it is freed at is done."""
        shadow = Shadow.on(tensor.untyped_storage())
        if shadow is not None:
            shadow.recorded.add(line)

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Drop what is known of a storage, as if it came from outside."""
        shadow = Shadow.on(storage)
        if shadow is not None:
            shadow.drop(storage)

    def settle(self) -> None:
        """Raise the first finding about a lifetime that was not raised yet."""
        if self._stale:
            raise self._stale.pop(0)

    def freed(self, shadow: Shadow) -> None:
        """The last reference to a storage goes now."""
        found = freed_too_early(shadow, self.clocks, self._touch, self._sites.here) if self.lifetimes else None
        if found is not None:
            self._stale.append(found)

    def _touch(self, line: int, tick: int, write: bool) -> Touch:  # noqa: FBT001 - a field of the result
        name, site = self._ops.get(tick << LINE_BITS | line, (f"operation {tick}", "?"))
        return Touch(name, site, self.clocks.names[line], write, self.clocks.host_of(line) is None)

    def _check(self, shadow: Shadow, where: Selection, clock: Clock, access: Access) -> None:
        """Raise Race if a cell's last write, or for a write its last read on another line, is not known to `clock`."""
        known = self._known_by(clock)
        codes = shadow.last_writers(where)
        late = (codes >> LINE_BITS) > known[codes & (LINES_MAX - 1)]
        if late.any():
            code = int(codes[late][0])
            earlier = (code & (LINES_MAX - 1), code >> LINE_BITS, True)
        elif access.write:
            for line in shadow.last_read:
                ticks = shadow.last_reads(line, where)
                late = ticks > known[line]
                if late.any():
                    earlier = (line, int(ticks[late][0]), False)
                    break
            else:
                return
        else:
            return
        raise self._race(shadow.describe(access.tensor, where, late), earlier, clock, write=access.write)

    def _race(self, memory: str, earlier: tuple[int, int, bool], clock: Clock, *, write: bool) -> race.Race:
        line = earlier[0]
        known = clock.known(line)
        covered = self._touch(line, known, True) if known else None
        wait = self.clocks.waits[clock.line].get(line, "")
        return race.race(
            self._touch(*earlier), self._touch(clock.line, clock.tick, write), memory, Known(covered, wait)
        )

    def _known_by(self, clock: Clock) -> Ints:
        """Per line the last tick ordered before `clock`, as an array."""
        cached = self._known.get(clock.line)
        if cached is not None and cached[0] is clock.seen and len(cached[1]) == len(self.clocks.names):
            return cached[1]
        known = np.zeros(len(self.clocks.names), np.int64)
        known[: len(clock.seen)] = clock.seen
        known[clock.line] = ALWAYS
        self._known[clock.line] = (clock.seen, known)
        return known

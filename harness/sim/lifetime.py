"""Memory that goes back to its stream while another stream may still use it.

The caching allocator of a GPU hands freed memory to the next allocation of the same stream, at once. Uses of other
streams must be ordered before that: by a wait, or by `record_stream`.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.sim.clock import Clocks
from harness.sim.race import StaleLifetime, Touch, stale
from harness.sim.shadow import Shadow


def freed_too_early(
    shadow: Shadow, clocks: Clocks, touch: Callable[[int, int, bool], Touch], here: Callable[[], str]
) -> StaleLifetime | None:
    """The finding about a storage whose last reference goes now, at call site `here()`; None when it may go.

    Its next owner is issued by the host, so what that thread waited for counts as well.
    """
    home = shadow.home
    host = None if home is None else clocks.host_of(home)
    if home is None or host is None:
        return None  # not of this simulation, or host memory, which is not handed on by a stream
    for uses, write in ((shadow.last_write, True), (shadow.last_read, False)):
        for line, tick in uses.items():
            if line == home or line in shadow.recorded:
                continue
            if clocks.now(home).knows(line, tick) or clocks.now(host).knows(line, tick):
                continue
            made = touch(*shadow.made, True)
            memory = f"a storage of {shadow.nbytes} bytes, allocated by {made.name} at {made.site}"
            return stale(touch(line, tick, write), clocks.names[home], memory, here())
    return None

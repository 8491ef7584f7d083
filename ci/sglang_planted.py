"""sglang's server with a fault in its real code: `SGLANG_PLANTED=no_load_wait python -m ci.sglang_planted FLAGS`.

The scheduler is a process of its own, which imports this module again before it starts, and so gets the fault as well.
Both faults need SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES to show surely: they read pages that are still on their way.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any


def no_load_wait() -> None:
    """A forward does not wait for the layers that the host tier brings back."""

    def waited(*_: Any) -> None:
        """Not at all."""

    importlib.import_module("sglang.srt.managers.cache_controller").LayerDoneCounter.wait_until = waited


def early_send() -> None:
    """A prefill worker sends a cached prefix at once, also what the host tier has yet to bring back."""

    def sent(self: Any, req: Any, **_: bool) -> None:
        if not req.pending_bootstrap and req.prefix_len > req.start_send_idx:
            self.send_kv_chunk(req, last_chunk=False, end_idx=req.prefix_len)

    prefill = importlib.import_module("sglang.srt.disaggregation.prefill")
    prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk = sent


FAULTS = {"no_load_wait": no_load_wait, "early_send": early_send}

planted = os.environ.get("SGLANG_PLANTED", "")
if planted not in FAULTS:
    sys.exit(f"SGLANG_PLANTED={planted!r}; expected {' or '.join(FAULTS)}")
FAULTS[planted]()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")

"""Each wait and event of the reference, deleted: what orders the work of its streams."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="deleted.gather-waits-for-compute",
        does="Deleted, one wait: gather waits for compute.",
        kind="order",
        like="systematic",
        breaks=("reads.every",),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.prefetch",
                "self._stream.wait_stream(self._device_module.current_stream())",
                "",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.gather-waits-for-restore",
        does="Deleted, one wait: gather waits for restore.",
        kind="order",
        like="systematic",
        breaks=("tiers.restored_rows", "tiers.rows_change", "I12"),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.prefetch",
                """
if self._loads:
    self._stream.wait_event(self._loads[layer])
""",
                "",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.gather-records-ready",
        does="Deleted, one event: gather records ready.",
        kind="order",
        like="systematic",
        breaks=("reads.every",),
        changes=(Edit("kvshard_ref.gather:PrefixGather.prefetch", "self._ready[slot].record(self._stream)", ""),),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.attention-waits-for-gather",
        does="Deleted, one wait: attention waits for gather.",
        kind="order",
        like="systematic",
        breaks=("reads.every",),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.read",
                """
if block:
    self._device_module.current_stream().wait_event(self._ready[layer % SLOTS])
""",
                "",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.end-waits-for-unread-layer",
        does="Deleted, one wait: end waits for unread layer.",
        kind="order",
        like="systematic",
        breaks=("I10",),
        changes=(
            Edit(
                "kvshard_ref.gather:PrefixGather.end",
                """
if block:
    # the gather of the unread layer must not run into the next batch's use of its slot
    self._device_module.current_stream().wait_event(self._ready[unread % SLOTS])
""",
                "",
            ),
        ),
        tests=("tests/test_gather_order.py",),
    ),
    Fault(
        id="deleted.backup-waits-for-compute",
        does="Deleted, one wait: backup waits for compute.",
        kind="order",
        like="systematic",
        breaks=("tiers.host_conserved", "tiers.restored", "I10"),
        changes=(Edit("kvshard_ref.host_pool:HostPool.backup", "stream.wait_stream(compute)", ""),),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.backup-records-done",
        does="Deleted, one event: backup records done.",
        kind="order",
        like="systematic",
        breaks=("tiers.host_conserved", "tiers.restored", "I10"),
        changes=(Edit("kvshard_ref.host_pool:HostPool.backup", "done.record(stream)", ""),),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.restore-waits-for-compute",
        does="Deleted, one wait: restore waits for compute.",
        kind="order",
        like="systematic",
        breaks=("tiers.restored_rows", "tiers.rows_change", "I12"),
        changes=(Edit("kvshard_ref.host_pool:HostPool.restore", "stream.wait_stream(compute)", ""),),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.restore-records-layer",
        does="Deleted, one event: restore records layer.",
        kind="order",
        like="systematic",
        breaks=("tiers.restored_rows", "tiers.rows_change", "I12"),
        changes=(Edit("kvshard_ref.host_pool:HostPool.restore", "ready[-1].record(stream)", ""),),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.compute-waits-for-spill",
        does="Deleted, one wait: compute waits for spill.",
        kind="order",
        like="systematic",
        breaks=("tiers.restored_rows", "tiers.rows_change", "I12"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._copy",
                """
if self.spec.host_policy == "write_back":  # pages evicted meanwhile are written by the next forward
    self._device_module.current_stream().wait_event(events["backup"])
""",
                "",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.drain-waits",
        does="Deleted, one wait: drain waits.",
        kind="order",
        like="systematic",
        breaks=("tiers.host_conserved", "tiers.restored", "I10"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._drain",
                """
for event in self._copied:
    event.synchronize()
""",
                "",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.restore-events-reach-gather",
        does="Deleted, one event: restore events reach gather.",
        kind="order",
        like="systematic",
        breaks=("tiers.restored_rows", "tiers.rows_change", "I12"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._forward",
                "its = [loads[min(layer, len(loads) - 1)] for layer in range(runner.pool.layers)] if loads else []",
                "its = []",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.settle-waits",
        does="Deleted, one wait: settle waits.",
        kind="order",
        like="systematic",
        breaks=("tiers.settled_is_acknowledged",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.settle",
                """
self._device_module.synchronize()
self.progress()
""",
                "self.progress()",
            ),
        ),
    ),
    Fault(
        id="deleted.send-waits-for-rows",
        does="Deleted, one event: send waits for rows.",
        kind="order",
        like="systematic",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.advance",
                "while self._queue and self._queue[0][1].query():",
                "while self._queue:",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.done-waits-for-writes",
        does="Deleted, one wait: done waits for writes.",
        kind="order",
        like="systematic",
        breaks=("transfer.received_rows",),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.advance", "and not self._queue and not self._tickets", "and not self._queue"
            ),
        ),
    ),
    Fault(
        id="deleted.done-waits-for-rows",
        does="Deleted, one wait: done waits for rows.",
        kind="order",
        like="systematic",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.advance",
                "and not self._queue and not self._tickets",
                "and not self._tickets",
            ),
        ),
        engine="ref?device=adversary",
    ),
    Fault(
        id="deleted.decode-settles-before-peers-write",
        does="Deleted, one wait: decode settles before peers write.",
        kind="order",
        like="systematic",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.__init__",
                "self._device_module.synchronize()  # the pools' first values are written",
                "",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.release-waits-for-reads",
        does="Deleted, one wait: release waits for reads.",
        kind="order",
        like="systematic",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.decode:DecodeWorker.release",
                """
slot = self.slot(room)
self._device_module.synchronize()
""",
                "slot = self.slot(room)",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="deleted.close-waits",
        does="Deleted, one wait: close waits.",
        kind="order",
        like="systematic",
        breaks=("mirror.same_collectives", "mirror."),
        changes=(Edit("kvshard_ref.worker:PrefillWorker.close", "self._device_module.synchronize()", ""),),
        engine="ref?device=order",
    ),
)

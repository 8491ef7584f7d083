"""Faults modelled on known bugs: a wait, an event or an acknowledgement that is missing or comes too early."""

from __future__ import annotations

from harness.fault import Edit, Fault

ORDERED = "ref?device=order"  # where streams run out of order
WAIT_FOR_RESTORE = """
if self._loads:
    self._stream.wait_event(self._loads[layer])
"""
RESTORED = """
ready.append(self._device_module.Event())
ready[-1].record(stream)
"""

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="host.restore-ignores-compute",
        does="Pages are restored without a wait for the compute stream, whose last forward may still use them.",
        kind="order",
        like="B22",
        breaks=("I10",),
        changes=(Edit("kvshard_ref.host_pool:HostPool.restore", old="stream.wait_stream(compute)"),),
        engine=ORDERED,
    ),
    Fault(
        id="host.backup-ignores-compute",
        does="Pages are copied to the host without a wait for the compute stream, which may still write them.",
        kind="order",
        like="B24",
        breaks=("I10",),
        changes=(Edit("kvshard_ref.host_pool:HostPool.backup", old="stream.wait_stream(compute)"),),
        engine=ORDERED,
    ),
    Fault(
        id="gather.index-before-restore",
        does="The gather of page-major components does not wait for the restore of their layer; the others do.",
        kind="order",
        like="B23",
        breaks=("I10", "I12"),
        changes=(
            Edit("kvshard_ref.gather:PrefixGather.prefetch", old=WAIT_FOR_RESTORE),
            Edit(
                "kvshard_ref.gather:PrefixGather.prefetch",
                old="for component in self.pool.components:",
                new="""
for component in sorted(self.pool.components, key=lambda each: each.scales == 0):
    if self._loads and not component.scales:
        self._stream.wait_event(self._loads[layer])
""",
            ),
        ),
        engine=ORDERED,
    ),
    Fault(
        id="gather.restore-unawaited",
        does="The gather reads pool rows that are still being restored from the host.",
        kind="order",
        like="facts 10-14",
        breaks=("I10", "I12"),
        changes=(Edit("kvshard_ref.gather:PrefixGather.prefetch", old=WAIT_FOR_RESTORE),),
        engine=ORDERED,
    ),
    Fault(
        id="host.counter-before-copy",
        does="The event of a restored layer is recorded before the layer's rows are copied.",
        kind="order",
        like="B34",
        breaks=("I10", "I12"),
        changes=(
            Edit("kvshard_ref.host_pool:HostPool.restore", old=RESTORED),
            Edit(
                "kvshard_ref.host_pool:HostPool.restore",
                old="for rows in self.rows:",
                new="""
for rows in self.rows:
    ready.append(self._device_module.Event())
    ready[-1].record(stream)
""",
            ),
        ),
        engine=ORDERED,
    ),
    Fault(
        id="worker.acknowledged-when-issued",
        does="Copies between the tiers are acknowledged as soon as they are issued, so their pages are used again.",
        kind="order",
        like="B34",
        breaks=("I10", "I11"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.progress",
                old="for at, event in enumerate(self._copied) if not event.query()",
                new="for at, event in enumerate(self._copied) if at < 0",
            ),
        ),
        engine=ORDERED,
    ),
    Fault(
        id="sender.writes-before-rows",
        does="The pages of a chunk are sent when its forward is launched, not when its event says that they are there.",
        kind="order",
        like="B27",
        breaks=("I10", "I16"),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.advance",
                old="while self._queue and self._queue[0][1].query():",
                new="while self._queue:",
            ),
        ),
        level="both",
        engine=ORDERED,
    ),
    Fault(
        id="sender.done-after-posting",
        does="A rank says that it is done when its last write has begun, not when all have landed.",
        kind="transfer",
        like="B28",
        breaks=("I16", "I10"),
        changes=(
            Edit(
                "kvshard_ref.sender:Sending.advance",
                old="self.finished = self.concluded and not self._queue and not self._tickets",
                new="self.finished = self.concluded and not self._queue",
            ),
        ),
        level="both",
    ),
    Fault(
        id="worker.early-send-unordered",
        does="A cached prefix is sent at once, also while its rows are on their way from the host or being computed.",
        kind="order",
        like="facts 10-15",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.send",
                old="ready.record(self._device_module.current_stream())",
                new="""
request = self.cache.request(name)
early = request.computed == request.cached
ready.record(self._device_module.Stream() if early else self._device_module.current_stream())
""",
            ),
        ),
        level="both",
        engine="ref?device=order",
    ),
    Fault(
        id="worker.drain-waits-for-last-copy",
        does="A drain waits for the newest copy alone; an older one is on the other stream.",
        kind="order",
        like="systematic",
        breaks=("tiers.pages_outlive",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._drain",
                "for event in self._copied:",
                "for event in self._copied[-1:]:",
            ),
        ),
        engine="ref?device=order",
    ),
)

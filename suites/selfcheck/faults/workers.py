"""Faults in how a worker puts its parts together: acknowledgements, waits, exports."""

from __future__ import annotations

from harness.fault import Edit, Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="exports.released-by-own-end",
        does="A rank releases a sent request when its own part is over; the others may still read their pages.",
        kind="transfer",
        like="B21",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports.poll",
                "agreed = self._group.minimum(finished) if finished else []",
                "agreed = finished",
            ),
        ),
    ),
    Fault(
        id="exports.refused-send-holds",
        does=("A send that is refused leaves the request marked as read by a transfer, so its end releases nothing."),
        kind="transfer",
        like="B11",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports.send",
                'self._refuse(part.why if part else "")',
                """
request.sending = True
self._refuse(part.why if part else "")
""",
            ),
        ),
    ),
    Fault(
        id="worker.single-copy-acknowledged-alone",
        does="With one copy in flight a rank acknowledges it by its own event, without asking the others.",
        kind="tiers",
        like="B15",
        breaks=("I07", "I08"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.progress",
                "self._acknowledge(self.group.minimum([done])[0])",
                """
self._acknowledge(done if len(self._copied) == 1 else self.group.minimum([done])[0])
""",
            ),
        ),
    ),
    Fault(
        id="worker.restores-before-backups",
        does=(
            "Planned restores run before planned backups, so pages spilled for them are overwritten before the copy."
        ),
        kind="tiers",
        like="B24",
        breaks=("I10", "I12"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._copy",
                """
if backups:
    events["backup"] = self.host.backup(backups)
    if self.spec.host_policy == "write_back":  # pages evicted meanwhile are written by the next forward
        self._device_module.current_stream().wait_event(events["backup"])
if restores:
    self._loads = self.host.restore(restores)
    events["restore"] = self._loads[-1]
""",
                """
if restores:
    self._loads = self.host.restore(restores)
    events["restore"] = self._loads[-1]
if backups:
    events["backup"] = self.host.backup(backups)
    if self.spec.host_policy == "write_back":  # pages evicted meanwhile are written by the next forward
        self._device_module.current_stream().wait_event(events["backup"])
""",
            ),
        ),
    ),
    Fault(
        id="worker.spill-unwaited-beside-restore",
        does=(
            "With write_back nobody waits for spilled pages when the same round also brings pages back, "
            "into the same ones."
        ),
        kind="order",
        like="B24",
        breaks=("I10", "I12"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._copy",
                'self.spec.host_policy == "write_back"',
                'self.spec.host_policy == "write_back" and not restores',
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="worker.second-send-has-old-event",
        does=("The event behind a request's rows is recorded at its first send only; later chunks are sent at once."),
        kind="order",
        like="B27",
        breaks=("I10", "I16"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.send",
                """
ready = self._device_module.Event()
ready.record(self._device_module.current_stream())
""",
                """
events = self.__dict__.setdefault("_ready", {})
if name not in events:
    events[name] = self._device_module.Event()
    events[name].record(self._device_module.current_stream())
ready = events[name]
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="worker.first-restore-of-batch-awaited",
        does="Two requests of a batch are restored one by one, and the gather waits for the first one's events.",
        kind="order",
        like="B22",
        breaks=("tiers.restored", "tiers.draft"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._copy",
                """
self._loads = self.host.restore(restores)
events["restore"] = self._loads[-1]
""",
                """
every = [self.host.restore([copy]) for copy in restores]
self._loads = every[0]
events["restore"] = every[-1][-1]
""",
            ),
        ),
        engine="ref?device=order",
    ),
    Fault(
        id="worker.one-event-for-many-copies",
        does="A round of several backups is acknowledged as one copy; the rest stays in flight and pinned.",
        kind="tiers",
        like="B15",
        breaks=("I04", "I06", "I09"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker._copy",
                "self._copied.extend(events[copy.kind] for copy in planned)",
                "self._copied.extend(events.values())",
            ),
        ),
    ),
    Fault(
        id="worker.settle-acknowledges-first",
        does="Settle looks for complete copies before it waits for them.",
        kind="tiers",
        like="systematic",
        breaks=("I04", "I06"),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.settle",
                """
self._device_module.synchronize()
self.progress()
""",
                """
self.progress()
self._device_module.synchronize()
""",
            ),
        ),
    ),
    Fault(
        id="exports.collective-when-own-finished",
        does="A rank takes part in the agreement on finished transfers only when one of its own has finished.",
        kind="transfer",
        like="B15",
        breaks=("transfer.",),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports.poll",
                "self._group.minimum(finished) if finished else []",
                "self._group.minimum(finished) if any(finished) else [0] * len(finished)",
            ),
        ),
    ),
    Fault(
        id="worker.refused-abort-stops-transfer",
        does="An abort of a request that has ended is refused, but has stopped its transfer.",
        kind="transfer",
        like="systematic",
        breaks=("transfer.all_ranks",),
        changes=(
            Edit(
                "kvshard_ref.worker:PrefillWorker.abort",
                """
self.cache.abort(name)
self.exports.leave(name, aborted=True)
""",
                """
self.exports.leave(name, aborted=True)
self.cache.abort(name)
""",
            ),
        ),
    ),
    Fault(
        id="worker.finish-leaves-transfer",
        does="Finish does not abort a transfer whose last chunk is unsent; it waits for ever.",
        kind="tiers",
        like="B49",
        breaks=("transfer.both", "transfer.idle"),
        changes=(Edit("kvshard_ref.worker:PrefillWorker.finish", "self.exports.leave(name, aborted=False)", ""),),
    ),
    Fault(
        id="exports.finish-leaves-open-transfer",
        does="A request that finishes before its last chunk was sent leaves its transfer waiting for ever.",
        kind="transfer",
        like="B47",
        breaks=("transfer.both", "transfer.idle"),
        changes=(
            Edit(
                "kvshard_ref.exports:Exports.leave",
                "if sending and (aborted or not sending.concluded):",
                "if sending and aborted:",
            ),
        ),
    ),
    Fault(
        id="exports.ended-request-kept",
        does="A request that has ended is kept for good when its transfer ends after it.",
        kind="transfer",
        like="B47",
        breaks=("transfer.both",),
        changes=(Edit("kvshard_ref.exports:Exports.poll", "self._cache.sent(name)", "pass"),),
    ),
)

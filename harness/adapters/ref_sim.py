"""The ranks of the reference on simulated devices: in an order of an adversary's choice, or checked for order.

`adversary` defers work and runs it as the config's schedule says; `order` runs work at once and demands of every access
that a wait orders it (see docs/simulated_devices.md).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from harness import types as t
from harness.adapter import EngineFault
from harness.adapters.ref_decode import DecodeSide, RefDecode, rank_name, sends
from harness.adapters.ref_processes import IN_TIME
from harness.adapters.ref_rank import PEER, RefRank
from harness.adapters.ref_rows import RowCodec
from harness.adapters.ref_threads import RankThreads
from harness.adapters.ref_ways import Ways
from harness.lockstep import CollectiveMismatch, Lockstep, LockstepGroup, RankStuck
from harness.sim.defer import Shapes
from harness.sim.device import SimDevice, Simulation
from harness.sim.group import SimGroup
from harness.sim.late import LateSimDevice
from harness.sim.race import Deadlock, SimFinding, UnexpectedSync
from harness.transports.memory import Network, Place

OP_SECONDS = 60.0  # of one op on all ranks; the slowest ones take a second
DEVICES = ("host", "adversary", "order")

ORDERED = "A read follows the last write of its rows and an overwrite all their reads, by waits, whatever runs first."
NO_DEADLOCK = "Every collective finds all its ranks."
NO_HIDDEN_WAIT = "The host waits for its device only where it says so."
# Where the reference or its adapter may wait for a device, as in fnmatch.
EXPECTED_SYNCS = (
    "*ref_rows.py:* in RowCodec.*",  # the harness looks at rows
    "*worker.py:* in PrefillWorker.settle",
    "*worker.py:* in PrefillWorker._drain",
    "*worker.py:* in PrefillWorker.close",
    "*memory.py:* in Network.lose",
    "*decode.py:* in DecodeWorker.*",
)


class SimPlace(Place):
    """An end on a simulated device: it copies on a stream of its own, and its messages carry what its host knows."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._stream = device.Stream()

    def stamp(self) -> Any:
        clocks = self._device.simulation.clocks
        return None if clocks is None else clocks.now(self._device.host)

    def know(self, stamp: Any) -> None:
        self._device.know(stamp)

    def copy(self, work: Callable[[], None]) -> Any:
        with self._device.stream(self._stream):
            work()
            return self._stream.record_event()


class Peek(RowCodec):
    """Looks at rows without being part of the program: where work runs at once, that needs no wait of the host.

    A host that waits for what attention read would know that the chunk is written, and hide who does not wait for it.
    """

    def __init__(self, device: SimDevice) -> None:
        super().__init__(str(device.device))
        self._quiet = device.simulation.quiet

    def decode(self, reads: dict[str, torch.Tensor]) -> t.Rows:
        """See RowCodec."""
        with self._quiet:
            return super().decode(reads)


class SimRanks(RankThreads):
    """The ranks of one session, each a thread with a simulated device; work stays pending from op to op."""

    def __init__(
        self,
        config: t.Config,
        ways: Ways,
        device: str,
        lockstep: Lockstep,
        *,
        shapes: Shapes,
        network: Network | None,
        give_back: Callable[[Lockstep], None],
    ) -> None:
        super().__init__(lockstep, give_back)
        adversary = device == "adversary"
        self._simulation = Simulation(
            config.shards + bool(network),  # the last one is the decode worker's
            config.schedule if adversary else None,
            order=not adversary,
            expected_syncs=EXPECTED_SYNCS,
            shapes=shapes,
        )

        def started(rank: int, group: LockstepGroup) -> RefRank:
            sim = self._simulation.devices[rank]
            module = LateSimDevice(sim)
            at = str(sim.device)
            codec = RowCodec(at) if adversary else Peek(sim)
            connect = partial(network.end, rank_name(rank), SimPlace(sim)) if network and sends(config, rank) else None
            return RefRank(config, SimGroup(sim, group), ways, at, device_module=module, codec=codec, transport=connect)

        self.decode: DecodeSide | None = None
        if network:
            own = self._simulation.devices[-1]
            with own.active():
                end = network.end(PEER, SimPlace(own))
                at = str(own.device)
                decode = RefDecode(config, end, RowCodec(at) if adversary else Peek(own), at, own)
            self.decode = DecodeSide(decode, own.active)
        self._ranks = self._run(started)

    def apply(self, op: t.AnyOp) -> list[t.AnyReply]:
        replies = self._run(lambda rank, _: self._ranks[rank].apply(op))
        if isinstance(op, t.Restart) and self._simulation.order is not None:
            gc.collect()  # the memory of a worker that is gone is given back now, and not once its work may have ended
        return replies

    def _run(self, program: Callable[[int, LockstepGroup], t.T]) -> list[t.T]:
        """`program` on every rank with its device active. Raises `EngineFault` for what the simulation finds."""
        lockstep = self._lockstep

        def job(rank: int, group: LockstepGroup) -> t.T:
            with self._simulation.devices[rank].active():
                return program(rank, group)

        try:
            return lockstep.run(job, OP_SECONDS)
        except SimFinding as finding:
            raise _fault(finding) from finding
        except CollectiveMismatch as mismatch:
            if isinstance(mismatch.__cause__, SimFinding):
                raise _fault(mismatch.__cause__) from mismatch
            raise EngineFault(NO_DEADLOCK, str(mismatch)) from mismatch
        except RankStuck as stuck:
            raise EngineFault(IN_TIME, str(stuck)) from stuck


def _fault(finding: SimFinding) -> EngineFault:
    told = {
        Deadlock: (NO_DEADLOCK, "every rank at every collective", "one that is missing leaves the others waiting"),
        UnexpectedSync: (NO_HIDDEN_WAIT, "no wait of the host there", "it would hide what lacks a wait, and cost time"),
    }
    claim, expected, why = told.get(
        type(finding),
        (ORDERED, "a wait between the two", "a device may run them in either order, or both at the same time"),
    )
    return EngineFault(claim, str(finding), expected, why)

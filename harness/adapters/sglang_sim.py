"""The ranks of sglang on simulated devices: in an order of an adversary's choice, or checked for order.

`adversary` defers work and runs it as the config's schedule says; `order` runs work at once and demands of every access
that a wait orders it (see docs/simulated_devices.md). The streams are sglang's own: its scheduler's, its forward's,
that of its gathers, and two of its copies between tiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from harness import types as t
from harness.adapter import EngineFault
from harness.adapters.ref_decode import DecodeSide, rank_name
from harness.adapters.ref_rank import PEER
from harness.adapters.ref_rows import RowCodec
from harness.adapters.ref_sim import NO_DEADLOCK, NO_HIDDEN_WAIT, ORDERED, Peek, SimPlace
from harness.adapters.sglang_forward import TwoStreams
from harness.adapters.sglang_memory import AT, HostMemory
from harness.adapters.sglang_stage import Place
from harness.adapters.sglang_standins import RankDevices
from harness.adapters.sglang_wire import StandInDecode
from harness.lockstep import CollectiveMismatch, LockstepGroup
from harness.sim.clock import Clock
from harness.sim.defer import Shapes
from harness.sim.device import SimDevice, SimEvent, SimStream, Simulation
from harness.sim.group import SimGroup
from harness.sim.late import polls_of
from harness.sim.race import Deadlock, SimFinding, UnexpectedSync
from harness.transports.memory import Network

# Call sites that take the address of a tensor, and nothing through it: keys of the pools' memos, tables for kernels.
POINTERS = ("*page_interleave_pool.py:*", "*memory_pool.py:*", "*common.py:* in make_kernel_ptr_table*")

# Where the host waits for its device on a GPU, too, as in fnmatch: what has a size that only the device knows, a copy
# that is acknowledged, and the result of a forward.
EXPECTED_SYNCS = (
    "*page_interleave.py:* in PageInterleavePoolAllocator.free",
    "*page_interleave_pool.py:* in PageInterleaveKVPoolMixin.begin_shard_extend",
    "*page_interleave_pool.py:* in PageInterleaveKVPoolMixin._get_write_plan",
    "*page_interleave_pool.py:* in _PageInterleaveIndexKeyCache.write_targets",
    "*unified_radix_cache.py:* in UnifiedRadixCache.writing_check",
    "*unified_radix_cache.py:* in UnifiedRadixCache.loading_check",
    "*l2_transfer.py:* in L2TransferEngine._submission",  # after an error, a finding of the device for one
    "*sglang_forward.py:* in TwoStreams.*",
    "*sglang_sim.py:* in SimModule.synchronize",
    "*mem_cache/common.py:* in kv_to_page_indices",  # a sender is told its pages
    "*memory.py:* in Network.lose",
    "*decode.py:* in DecodeWorker.*",
)
# Where the harness looks at rows and state: under an adversary a look is a wait.
LOOKS = ("*ref_rows.py:* in RowCodec.*", "*sglang_views.py:*")


class LateEvent(SimEvent):
    """An event that is late to say that its work is done, unless the host knows: else no copy were ever in flight."""

    def __init__(self, device: SimDevice, polls: int) -> None:
        super().__init__(device)
        self._late = polls

    def query(self) -> bool:
        """Whether the host may know that all work before the event is done."""
        if self.clock is not None and not self._known(self.clock) and self._late > 0:
            self._late -= 1
            return False
        return super().query()

    def elapsed_time(self, end: LateEvent) -> float:
        """Milliseconds from this event to `end`: none, for nothing is timed."""
        return 0.0

    def _known(self, clock: Clock) -> bool:
        clocks = self.device.simulation.clocks
        return clocks is None or clocks.now(self.device.host).knows(clock.line, clock.tick)


class SimModule:
    """A simulated device under the names of `torch.cuda` that sglang uses."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._events = 0
        self.Stream = device.Stream
        self.stream = device.stream

    def Event(self, *_: object, **__: object) -> LateEvent:  # noqa: N802  # torch.cuda's name
        """A new event; timing and blocking are taken and mean nothing."""
        self._events += 1
        return LateEvent(self._device, polls_of(self._device.rank, self._events))

    def current_stream(self, device: object = None) -> SimStream:
        """The stream that work goes to now."""
        return self._device.current_stream()

    def synchronize(self, device: object = None) -> None:
        """The host waits for all work of this rank."""
        self._device.synchronize()

    def keep(self, tensor: Tensor, stream: SimStream) -> None:
        """The tensor's memory is not given back before the stream's work on it is done."""
        tensor.record_stream(stream)  # type: ignore[arg-type]  # in the place of torch's own


class SimStage:
    """The places of one session's ranks on simulated devices; work stays pending from op to op."""

    def __init__(self, config: t.Config, device: str, shapes: Shapes, network: Network | None = None) -> None:
        self._adversary = device == "adversary"
        self.devices = RankDevices()
        self._network = network
        self.simulation = Simulation(
            config.shards + bool(network),  # the last one is the decode worker's
            config.schedule if self._adversary else None,
            order=not self._adversary,
            expected_syncs=EXPECTED_SYNCS + (LOOKS if self._adversary else ()),
            pointers=POINTERS,
            shapes=shapes,
        )

    def place(self, group: LockstepGroup) -> Place:
        """See Stage."""
        device = self.simulation.devices[group.rank]
        module = SimModule(device)
        codec = RowCodec(AT) if self._adversary else Peek(device)
        connect = None
        if self._network is not None:
            connect = partial(self._network.end, rank_name(group.rank), SimPlace(device))
        return Place(module, self.devices, SimGroup(device, group), TwoStreams(module), codec, AT, connect)

    def decode(self, config: t.Config, attention: str) -> DecodeSide | None:
        """See Stage."""
        if self._network is None:
            return None
        own = self.simulation.devices[-1]
        with own.active():
            codec = RowCodec(AT) if self._adversary else Peek(own)
            end = self._network.end(PEER, SimPlace(own))
            return DecodeSide(StandInDecode(config, attention, end, codec, AT, own), own.active)

    @contextmanager
    def work(self, rank: int) -> Iterator[None]:
        """See Stage."""
        with self.simulation.devices[rank].active(), HostMemory(self.simulation):
            yield

    @contextmanager
    def look(self, rank: int) -> Iterator[None]:
        """See Stage. Where all work is done when it is issued a look is no part of the program."""
        if not self._adversary:
            yield
            return
        with self.work(rank):
            yield

    def fault(self, error: Exception) -> EngineFault | None:
        """See Stage."""
        if isinstance(error, CollectiveMismatch) and isinstance(error.__cause__, SimFinding):
            error = error.__cause__
        if not isinstance(error, SimFinding):
            return None
        claim, expected, why = TOLD.get(type(error), RACE)
        return EngineFault(claim, str(error), expected, why)


RACE = (ORDERED, "a wait between the two", "a device may run them in either order, or both at the same time")
TOLD: dict[type[SimFinding], tuple[str, str, str]] = {
    Deadlock: (NO_DEADLOCK, "every rank at every collective", "one that is missing leaves the others waiting"),
    UnexpectedSync: (NO_HIDDEN_WAIT, "no wait of the host there", "it would hide what lacks a wait, and cost time"),
}

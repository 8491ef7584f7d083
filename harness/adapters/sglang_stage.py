"""Where the ranks of a session run: on lazy devices, or on simulated ones (`harness.adapters.sglang_sim`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from harness import types as t
from harness.adapter import EngineFault
from harness.adapters.ref_decode import DecodeSide, rank_name
from harness.adapters.ref_rank import PEER
from harness.adapters.ref_rows import RowCodec
from harness.adapters.sglang_device import LazyDevice
from harness.adapters.sglang_forward import Forwards, OneStream
from harness.adapters.sglang_hub import Gathering, LazyGroup
from harness.adapters.sglang_standins import RankDevices
from harness.adapters.sglang_wire import Connect, StandInDecode
from harness.lockstep import LockstepGroup
from harness.transports.memory import Network


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: its device, the devices of all ranks, and its end of the shard group."""

    device: Any
    devices: RankDevices
    group: Gathering
    forwards: Forwards
    codec: RowCodec
    at: str = "cpu"
    """The device's name, for tensors."""
    connect: Connect | None = None
    """A new end of the network to the decode worker, in a session that has one."""


class Stage(Protocol):
    """The places of one session's ranks."""

    devices: RankDevices

    def place(self, group: LockstepGroup) -> Place:
        """Of the rank with this end of the shard group."""
        ...

    def decode(self, config: t.Config, attention: str) -> DecodeSide | None:
        """The decode worker, if the session has one."""
        ...

    def work(self, rank: int) -> AbstractContextManager[None]:
        """Entered around all that a rank does, in its thread."""
        ...

    def look(self, rank: int) -> AbstractContextManager[None]:
        """Entered around a look at a rank's state, in any thread."""
        ...

    def fault(self, error: Exception) -> EngineFault | None:
        """What an error says about the engine; None if nothing."""
        ...


class LazyStage:
    """Work of the first stream is done when it is issued, that of the others when somebody waits for it."""

    def __init__(self, network: Network | None = None) -> None:
        self.devices = RankDevices()
        self._network = network
        self._codec = RowCodec()

    def place(self, group: LockstepGroup) -> Place:
        """See Stage."""
        device = LazyDevice(group.rank)
        connect = partial(self._network.end, rank_name(group.rank)) if self._network else None
        return Place(device, self.devices, LazyGroup(device, group), OneStream(device), self._codec, connect=connect)

    def decode(self, config: t.Config, attention: str) -> DecodeSide | None:
        """See Stage."""
        if self._network is None:
            return None
        return DecodeSide(StandInDecode(config, attention, self._network.end(PEER), RowCodec()))

    def work(self, rank: int) -> AbstractContextManager[None]:
        """See Stage."""
        return nullcontext()

    def look(self, rank: int) -> AbstractContextManager[None]:
        """See Stage."""
        return nullcontext()

    def fault(self, error: Exception) -> EngineFault | None:
        """It finds nothing by itself."""
        return None

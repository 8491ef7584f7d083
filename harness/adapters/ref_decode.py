"""The decode worker of the reference behind the contract's values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from tempfile import TemporaryDirectory

from harness import types as t
from harness import views as v
from harness.adapters.ref_rank import CALLERS_FAULT, spec_of
from harness.adapters.ref_rows import RowCodec
from harness.adapters.ref_ways import Ways
from harness.transports.losable import Losable
from kvshard_ref.decode import DecodeWorker
from kvshard_ref.device import DeviceModule
from kvshard_ref.errors import RefusedError
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.transport import PeerLostError, Transport

PAUSE_SECONDS = 0.02
DECODE_RANK = -1  # in the op Lose
DECODE_OPS = (t.Reserve, t.Receive, t.Release)


def rank_name(rank: int) -> str:
    """Of a prefill rank's end."""
    return f"prefill {rank}"


def sends(config: t.Config, rank: int) -> bool:
    """Whether a prefill rank sends: all that own pages, one of those that have the same ones."""
    return bool(config.decode_pages) and (config.layout == "sharded" or rank == 0)


class RefDecode:
    """One decode worker, unsharded, with a page size of its own if the config says so."""

    def __init__(
        self,
        config: t.Config,
        transport: Transport,
        codec: RowCodec,
        device: str = "cpu",
        device_module: DeviceModule | None = None,
    ) -> None:
        placement = Placement(1, config.decode_page_size or config.page_size)
        pools = [
            ShardPool(0, placement, config.decode_pages, layers, components, device)
            for layers, components in spec_of(config, Ways()).models
        ]
        self.transport = Losable(transport)
        self._codec = codec
        ranks = [rank_name(rank) for rank in range(config.shards) if sends(config, rank)]
        self._worker = DecodeWorker(pools, self.transport, ranks, device_module)

    def connect(self) -> None:
        """Say hello to ranks that are new; one that cannot be reached is found lost later."""
        try:
            self._worker.connect()
        except PeerLostError:
            return

    def apply(self, op: t.Reserve | t.Receive | t.Release) -> t.AnyReply:
        """Carry out one op of the decode side."""
        try:
            return t.Ok(self._do(op))
        except (RefusedError, *CALLERS_FAULT) as error:
            return t.Refused(str(error))

    def poll(self) -> None:
        """Hear what has arrived."""
        self._worker.poll()

    @property
    def moving(self) -> bool:
        """Whether a rank has not answered the hello, or may still write to a room."""
        answered = len(self._worker.link.refusals) == len(self._worker.ranks)
        return not answered or any(slot.state in {"waiting", "aborting"} for slot in self._worker.slots.values())

    def view(self) -> v.DecodeView:
        """Everything that the decode worker can show."""
        (free,) = self._worker.allocator.free_pages()
        rooms = {
            room: v.RoomView(state=slot.state, tokens=slot.tokens, pages=tuple(slot.pages))
            for room, slot in self._worker.slots.items()
        }
        return v.DecodeView(free=tuple(free), rooms=rooms)

    def _do(self, op: t.Reserve | t.Receive | t.Release) -> t.AnyValue:
        if isinstance(op, t.Receive):
            return t.Received(self._codec.decode(self._worker.rows(op.room)))
        if isinstance(op, t.Reserve):
            self._worker.reserve(op.room, op.tokens)
        else:
            self._worker.release(op.room)
        return t.Done()


class DecodeSide:
    """The decode worker as a session drives it, within the `scope` of its device, if that needs one."""

    def __init__(
        self,
        decode: RefDecode,
        scope: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        folder: TemporaryDirectory[str] | None = None,
    ) -> None:
        """`folder`: the addresses of the ends of a real network, which needs a moment between two looks."""
        self._decode = decode
        self._scope = scope
        self._folder = folder
        self.pause_seconds = PAUSE_SECONDS + decode.transport.settle_seconds / 4 if folder else 0.0

    @property
    def moving(self) -> bool:
        """Whether anything is under way at the decode worker."""
        return self._decode.moving

    def connect(self) -> None:
        """Say hello to new ranks."""
        with self._scope():
            self._decode.connect()

    def apply(self, op: t.Reserve | t.Receive | t.Release) -> t.AnyReply:
        """Carry out one op, after a look at what has arrived."""
        with self._scope():
            self._decode.poll()
            return self._decode.apply(op)

    def lose(self) -> t.AnyReply:
        """The connection of the decode worker is gone."""
        with self._scope():
            self._decode.transport.close()
            self._decode.poll()
        return t.Ok(t.Done())

    def poll(self) -> None:
        """Hear what has arrived."""
        with self._scope():
            self._decode.poll()

    def view(self) -> v.DecodeView:
        """Everything that the decode worker can show."""
        return self._decode.view()

    def close(self) -> None:
        """End the connection."""
        with self._scope():
            self._decode.transport.close()
        if self._folder is not None:
            self._folder.cleanup()

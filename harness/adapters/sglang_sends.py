"""P/D transfer of one rank: sglang's own scheduler and sender choose what is sent, and a wire of ours carries it.

sglang's, as released: when a prefix is sent early and behind which event, where a chunk ends, which pages it has, which
of them this rank owns and where they go, what is skipped, what concludes, and the pages of the indexer's state.
Stood in for: bootstrap, polls, and the worker of a transfer backend, which copies what it is handed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from harness import types as t
from harness.adapters.ref_rank import PEER
from harness.adapters.sglang_core import Core
from harness.adapters.sglang_held import Held
from harness.adapters.sglang_install import Parts
from harness.adapters.sglang_stage import Place
from harness.adapters.sglang_wire import INDEX, Chosen, Rooms, SentPages
from harness.transports.losable import Losable
from kvshard_ref.errors import RefusedError
from kvshard_ref.sender import Sending


class Now:
    """An event that has happened."""

    def query(self) -> bool:
        """Yes."""
        return True


@dataclass(slots=True)
class Manager:
    """In the place of a backend's manager, for one request: what a sender asks it, and the queue of its worker."""

    parts: Parts
    part: Sending
    sent: Sequence[SentPages]  # of all models
    kv_shard_rank: int
    kv_shard_size: int
    sender_trace_module: None = None
    deferred_bootstrap: None = None
    is_dummy_cp_rank: bool = False
    enable_all_cp_ranks_for_transfer: bool = True
    _dcp_pack_max_tokens: None = None

    def update_status(self, room: int, status: object) -> None:
        """Polls are stood in for."""

    def prepare_send_state_indices(self, indices: Sequence[Any] | None) -> Sequence[Any] | None:
        """As its own does without a relayout."""
        return indices

    def add_transfer_request(
        self,
        room: int,
        pages: Sequence[int],
        positions: Any,
        last: bool,  # noqa: FBT001  # as sglang calls it
        *,
        state_indices: Sequence[Any] | None = None,
        wait_event: Any = None,
        **_: object,
    ) -> None:
        """Queue the copies: own local pages to those of the decode worker's pages that are at these positions."""
        components = [component.name for pages in self.sent for component in pages.components]
        states = [name for name in components if name.endswith(INDEX.name)]
        rows = [name for name in components if name not in states]
        dst = np.asarray(self.part.dst, dtype=np.int64)
        try:
            self._queue(pages, dst[positions], rows, wait_event)
            for indices in state_indices or ():
                prepare = self.parts.MooncakeManager._prepare_sharded_dsa_indices  # noqa: SLF001  # what is judged
                own, to = prepare(self, indices, dst)
                self._queue(own, to, states, wait_event)
        except (RuntimeError, IndexError, ValueError) as error:  # in a worker of sglang it fails the room
            self.part.abort(str(error))
        self.part.concluded = self.part.concluded or last

    def _queue(self, pages: Sequence[int], dst: Sequence[int], components: Sequence[str], ready: Any) -> None:
        logical = [int(page) * self.kv_shard_size + self.kv_shard_rank for page in pages]
        copies = Chosen(list(zip(logical, map(int, dst), strict=True)), components)
        if copies:
            self.part._queue.append((copies, ready or Now()))  # noqa: SLF001  # its own `send` would choose the pages


@dataclass(slots=True)
class Outgoing:
    """In the place of sglang's request, as far as its sending looks at it."""

    rid: str
    room: int
    part: Sending
    disagg_kv_sender: Any
    origin_input_ids: Sequence[int]
    start_send_idx: int = 0
    disagg_decode_prefix_len: int = 0
    prefix_len: int = 0
    host_hit_length: int = 0
    extend_end: int = 0
    pending_bootstrap: bool = False
    early_send_prefix_end: None = None
    kv: SimpleNamespace = field(default_factory=SimpleNamespace)


class Sends:
    """The requests of one rank that are on their way to rooms. All ranks make the same calls."""

    def __init__(self, parts: Parts, core: Core, config: t.Config, attention: str, place: Place) -> None:
        if place.connect is None:
            raise ValueError("a rank without a network cannot send")
        self._parts = parts
        self._core = core
        self._place = place
        self._pages = [SentPages(model, config, attention, place.group.rank) for model in core.models]
        self._transport = Losable(place.connect())
        self._rooms = Rooms(self._pages, self._transport)
        self._live: dict[str, Outgoing] = {}
        self._scheduler = parts.PrefillScheduler()
        states = [parts.StateType.DSA] if "index" in config.components else []
        queue = SimpleNamespace(kv_manager=SimpleNamespace(kv_args=SimpleNamespace(state_types=states)))
        vars(self._scheduler).update(
            enable_overlap=True,
            enable_staging=False,
            forward_stream=place.forwards.stream,
            kv_checksum_computer=None,
            token_to_kv_pool_allocator=core.allocator,
            disagg_metadata_buffers=SimpleNamespace(set_buf=lambda _: None),
            disagg_prefill_bootstrap_queue=queue,
            disagg_prefill_pending_chunk_rids=set(),
        )

    @property
    def rooms(self) -> Mapping[str, int]:
        """By request the room that it is on its way to."""
        return {name: outgoing.room for name, outgoing in self._live.items()}

    @property
    def sent_bytes(self) -> int:
        """Of this rank, so far."""
        return self._rooms.link.sent_bytes

    def send(self, held: Held, room: int) -> None:
        """Send what has rows. Raises RefusedError, on all ranks, when one does not know the room or it does not fit."""
        name = str(held.req.rid)
        if name not in self._live:
            page = self._core.config.page_size
            self._live[name] = self._started(name, held, room, -(-held.tokens // page))
        outgoing = self._live[name]
        if outgoing.room != room:
            raise RefusedError(f"request {name!r} is sent to room {outgoing.room} already, not to {room}")
        outgoing.part.started = True
        if outgoing.part.concluded:
            return
        outgoing.prefix_len, outgoing.host_hit_length = held.cached, held.from_host
        outgoing.extend_end = held.computed
        if held.admitted:
            self._place.forwards.land(held.forward)  # a chunk is sent when the result of its forward is there
            outgoing.kv = held.req.kv
            self._scheduler.req_to_token_pool = self._core.table
            self._scheduler.send_kv_chunk(outgoing, last_chunk=not held.left)
        else:
            locs = self._core.tree.prefix_device_indices(held.req)[: held.cached - held.from_host]
            outgoing.kv = SimpleNamespace(req_pool_idx=0)
            self._scheduler.req_to_token_pool = SimpleNamespace(req_to_token=locs.unsqueeze(0))
            with mock.patch.object(torch.cuda, "Event", self._place.device.Event):
                host = self._core.host
                self._scheduler.maybe_send_cached_prefix_chunk(outgoing, allow_send=not (host and host.load_waits))

    def leave(self, name: str, *, aborted: bool) -> bool:
        """The request ends; whether its pages must stay until the transfer has ended, too."""
        outgoing = self._live.get(name)
        if outgoing is None:
            return False
        if aborted or not outgoing.part.concluded:
            why = "aborted" if aborted else "its last chunk unsent"
            outgoing.part.abort(f"request {name!r} ended, {why}")
        return True

    def poll(self) -> list[str]:
        """Move all transfers on; the requests that every rank has finished with."""
        self._rooms.poll()
        finished = [int(outgoing.part.finished) for outgoing in self._live.values()]
        agreed = self._place.group.minimum(finished) if finished else []
        ended = [name for name, done in zip(self._live, agreed, strict=True) if done]
        for name in ended:
            del self._live[name]
        return ended

    def lose(self) -> None:
        """This rank's connection is gone."""
        self._transport.close()

    def _started(self, name: str, held: Held, room: int, pages: int) -> Outgoing:
        part = self._rooms.find(PEER, room, pages)
        if not self._place.group.minimum([int(not part.why)])[0]:
            raise RefusedError(part.why or "another rank refuses it")
        size = self._core.config.shards
        manager = Manager(self._parts, part, self._pages, self._place.group.rank, size)
        sender = _sender_class(self._parts)(manager, "", room)
        sender.init(pages)
        return Outgoing(name, room, part, sender, held.req.origin_input_ids)


def _sender_class(parts: Parts) -> Any:
    """The sender of sglang without a backend's own part, which is to tell of failures."""
    return type("Sender", (parts.CommonSender,), {"failure_exception": lambda _: None})

"""The embedded reference as an engine: N ranks in one process, or N processes over Gloo or NCCL.

Address: `ref`, with options such as `ref?shards=4&group=gloo`; an option narrows what the engine can be opened with.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from harness import types as t
from harness import views as v
from harness.adapter import ConfigError, EngineFault
from harness.adapters.late import LateDevice
from harness.adapters.ref_decode import DECODE_OPS, DECODE_RANK, DecodeSide, RefDecode, rank_name, sends
from harness.adapters.ref_process import TRANSPORTS
from harness.adapters.ref_processes import IN_TIME, RankProcesses
from harness.adapters.ref_rank import PEER, RefRank, spec_of
from harness.adapters.ref_rows import COMPONENTS, RowCodec
from harness.adapters.ref_sim import DEVICES, SimRanks
from harness.adapters.ref_threads import RankThreads
from harness.adapters.ref_ways import Ways
from harness.capabilities import OF_SERVERS, PROMISE_SENTENCES, SNAPSHOT_SENTENCES
from harness.lockstep import CollectiveMismatch, Lockstep, RankStuck
from harness.sim.defer import Shapes
from harness.transports.memory import Faults, Landing, Network
from kvshard_ref.host_tier import POLICIES
from kvshard_ref.plan import PADDINGS
from kvshard_ref.spec import LAYOUTS
from kvshard_ref.split import SPLITS

SAME_COLLECTIVES = "All ranks run the same collectives, with the same shapes, in the same order."
PAGES_STAY = "A page that is being sent keeps its rows until the write has landed."
SAME_ANSWER = "All ranks give the same answer to an op."

OP_SECONDS = 10.0  # of one op on all ranks; the slowest ones take a tenth of a second
GROUPS = ("lockstep", "gloo", "nccl")
SHARDS = (1, 2, 3, 4, 8)
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)
LAYERS_MAX = 8
QUIET_ROUNDS = 5  # without a change, after which nothing is under way
LOOKS = 12  # of the decode worker in a round: each is a tick of a simulated network, on which a write takes up to 40


class Ranks(Protocol):
    """The ranks of one session, wherever they run."""

    def apply(self, op: t.AnyOp) -> list[t.AnyReply]: ...
    def view(self) -> list[v.RankView]: ...
    def close(self) -> None: ...


class LockstepRanks(RankThreads):
    """The ranks of one session as threads of this process that take turns."""

    def __init__(
        self,
        config: t.Config,
        ways: Ways,
        lockstep: Lockstep,
        network: Network | None,
        give_back: Callable[[Lockstep], None],
    ) -> None:
        super().__init__(lockstep, give_back)
        codec = RowCodec()
        self._ranks = [
            RefRank(
                config,
                group,
                ways,
                device_module=LateDevice(rank),
                codec=codec,
                transport=partial(network.end, rank_name(rank)) if network and sends(config, rank) else None,
            )
            for rank, group in enumerate(lockstep.groups)
        ]

    def apply(self, op: t.AnyOp) -> list[t.AnyReply]:
        lockstep = self._lockstep
        try:
            return lockstep.run(lambda rank, _: self._ranks[rank].apply(op), OP_SECONDS)
        except CollectiveMismatch as mismatch:
            raise EngineFault(SAME_COLLECTIVES, str(mismatch)) from mismatch
        except RankStuck as stuck:
            raise EngineFault(IN_TIME, str(stuck)) from stuck


class RefSession:
    """One session of the reference: an op goes to every rank, and the ranks must agree, or to the decode worker."""

    def __init__(self, ranks: Ranks, decode: DecodeSide | None = None, network: Network | None = None) -> None:
        self._ranks = ranks
        self._decode = decode
        self._network = network
        if decode is not None:
            decode.connect()
            self._settle(t.Settle())

    def apply(self, op: t.AnyOp) -> t.AnyReply:
        """Raises `EngineFault` when the ranks disagree, or a page changed while it was sent."""
        reply = self._apply(op)
        if self._network is not None and self._network.changed:
            raise _changed(self._network.changed[0])
        return reply

    def _apply(self, op: t.AnyOp) -> t.AnyReply:
        if self._decode is None:
            if isinstance(op, (*DECODE_OPS, t.Send, t.Lose)):
                return t.Refused(f"{t.op_name(op)} without a decode worker; open the session with decode_pages")
            return merged(self._ranks.apply(op))
        if isinstance(op, DECODE_OPS):
            return self._decode.apply(op)
        if isinstance(op, t.Lose) and op.rank == DECODE_RANK:
            return self._decode.lose()
        if isinstance(op, t.Settle):
            reply = self._settle(op)
        else:
            reply = merged(self._ranks.apply(op), whose_reason=isinstance(op, t.Send))
        self._decode.poll()
        if isinstance(op, t.Restart):
            self._decode.connect()
            self._settle(t.Settle())
        return reply

    def snapshot(self) -> v.Snapshot:
        return v.Snapshot(tuple(self._ranks.view()), self._decode.view() if self._decode else None)

    def close(self) -> None:
        self._ranks.close()
        if self._decode is not None:
            self._decode.close()

    def _settle(self, op: t.Settle) -> t.AnyReply:
        """Until nothing moves any more, or nothing has changed for some rounds: a room may wait for a later op."""
        reply, quiet, before = merged(self._ranks.apply(op)), 0, self.snapshot()
        while self._decode is not None and quiet < QUIET_ROUNDS and (self._decode.moving or _sending(before)):
            time.sleep(self._decode.pause_seconds)
            for _ in range(LOOKS):
                self._decode.poll()
            reply, now = merged(self._ranks.apply(op)), self.snapshot()
            quiet = quiet + 1 if now == before else 0
            before = now
        return reply


def _sending(snapshot: v.Snapshot) -> bool:
    return any(request.room is not None for rank in snapshot.ranks for request in (rank.requests or {}).values())


def merged(replies: Sequence[t.AnyReply], *, whose_reason: bool = False) -> t.AnyReply:
    """One reply from those of all ranks, reads put together in rank order. Raises `EngineFault` when they differ.

    With `whose_reason` the ranks may refuse for different reasons: one knows why, the others that another does.
    """
    first = replies[0]
    reasons = [reply.why for reply in replies if isinstance(reply, t.Refused)]
    if whose_reason and len(reasons) == len(replies):
        return t.Refused("; ".join(dict.fromkeys(reasons)))
    if isinstance(first, t.Replies):
        columns = [reply.replies if isinstance(reply, t.Replies) else (reply,) for reply in replies]
        if len({len(column) for column in columns}) > 1:
            raise EngineFault(SAME_ANSWER, _differing(replies))
        return t.Replies(tuple(merged(row) for row in zip(*columns, strict=True)))
    if any(_without_reads(reply) != _without_reads(first) for reply in replies):
        raise EngineFault(SAME_ANSWER, _differing(replies))
    if isinstance(first, t.Ok) and isinstance(first.value, t.Extended):
        reads = tuple(read for reply in replies for read in _reads(reply))
        return t.Ok(t.Extended(first.value.start, first.value.end, reads))
    return first


def _changed(landing: Landing) -> EngineFault:
    return EngineFault(
        PAGES_STAY,
        f"page {landing.src} of {landing.region!r} at {landing.writer!r} was another when a write from it landed",
        "the rows that it had when the write began",
        "rows are sent as they are when they are read, also for a transfer that was given up meanwhile",
    )


def _reads(reply: t.AnyReply) -> tuple[t.Rows, ...]:
    return reply.value.reads if isinstance(reply, t.Ok) and isinstance(reply.value, t.Extended) else ()


def _without_reads(reply: t.AnyReply) -> t.AnyReply:
    if isinstance(reply, t.Ok) and isinstance(reply.value, t.Extended):
        return t.Ok(t.Extended(reply.value.start, reply.value.end, ()))
    return reply


def _differing(replies: Sequence[t.AnyReply]) -> str:
    return "; ".join(f"rank {rank}: {_without_reads(reply)}" for rank, reply in enumerate(replies))


class RefEngine:
    """Opens sessions of the reference. `options` come from the address and are all optional."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        given = dict(options or {})
        self._group = _choice(given, "group", GROUPS, "lockstep")
        split = _choice(given, "split", SPLITS, "interleave")
        self._ways = Ways(_choice(given, "padding", PADDINGS, "tight"), split)
        self._transport = _choice(given, "transport", tuple(TRANSPORTS), "tcp")
        self._device = _choice(given, "device", DEVICES, "host")
        if self._device != "host" and self._group != "lockstep":
            raise ConfigError(f"device={self._device} with group={self._group}; simulated devices need group=lockstep")
        layout = _choice(given, "layout", LAYOUTS, "")
        self._axes = t.Axes(
            shards=_numbers(given, "shards", SHARDS),
            page_sizes=_numbers(given, "page_size", PAGE_SIZES),
            layouts=(layout,) if layout else LAYOUTS,
            components=tuple(COMPONENTS),
            layers_max=_numbers(given, "layers", (LAYERS_MAX,), range(1, LAYERS_MAX + 1))[0],
            host_policies=POLICIES,
            decode=True,
            networks=self._group == "lockstep",
            schedules=self._device == "adversary",
        )
        if given:
            known = "group, transport, device, padding, split, layout, shards, page_size, layers"
            raise ConfigError(f"option {next(iter(given))!r} of engine ref; expected {known}")
        self._idle: dict[int, list[Lockstep]] = {}
        self._shapes = Shapes()  # of tensors, which every simulation works out anew otherwise
        self._processes: dict[int, RankProcesses] = {}

    def describe(self) -> t.Manifest:
        return t.Manifest(
            name="kvshard-ref",
            version="0.1.0",
            ops=tuple(name for op in t.OPS if (name := t.op_name(op)) not in OF_SERVERS),
            shows=tuple(name for name in SNAPSHOT_SENTENCES if name not in OF_SERVERS),
            promises=tuple(name for name in PROMISE_SENTENCES if name not in OF_SERVERS and self._keeps(name)),
            axes=self._axes,
        )

    def _keeps(self, promise: str) -> bool:
        """Whether its options leave it this promise."""
        return promise != "batches_what_fits" or self._ways.padding == "tight"

    def open(self, config: t.Config) -> RefSession:
        """Raises `ConfigError` for a config outside the axes."""
        self._check(config)
        if self._group == "lockstep":
            idle = self._idle.setdefault(config.shards, [])
            lockstep = idle.pop() if idle else Lockstep(config.shards)
            network = Network(Faults(**msgspec.structs.asdict(config.network))) if config.decode_pages else None
            if self._device != "host":
                sim = SimRanks(
                    config,
                    self._ways,
                    self._device,
                    lockstep,
                    shapes=self._shapes,
                    network=network,
                    give_back=idle.append,
                )
                return RefSession(sim, sim.decode)
            ranks: Ranks = LockstepRanks(config, self._ways, lockstep, network, idle.append)
            decode = DecodeSide(RefDecode(config, network.end(PEER), RowCodec())) if network else None
            return RefSession(ranks, decode, network)
        spec_of(config, self._ways)  # a config error is cheapest to tell here
        processes = self._processes.get(config.shards)
        if processes is None or not processes.alive:
            processes = self._processes[config.shards] = RankProcesses(config.shards, self._group)
        if not config.decode_pages:
            return RefSession(processes.session(config, self._ways))
        return self._with_decode(processes, config)

    def _with_decode(self, processes: RankProcesses, config: t.Config) -> RefSession:
        """Ranks in processes of their own, the decode worker in this one."""
        with ExitStack() as undo:  # when anything below raises
            folder = tempfile.TemporaryDirectory(prefix="kvshard-")  # where the ends find each other
            undo.callback(folder.cleanup)
            ranks = processes.session(config, self._ways, folder.name, self._transport)
            undo.callback(ranks.close)
            end = TRANSPORTS[self._transport](PEER, Path(folder.name))
            undo.callback(end.close)
            session = RefSession(ranks, DecodeSide(RefDecode(config, end, RowCodec()), folder=folder))
            undo.pop_all()
        return session

    def close(self) -> None:
        """Ends all threads and processes; safe to call twice."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
        for processes in self._processes.values():
            processes.close()
        self._processes.clear()

    def _check(self, config: t.Config) -> None:
        axes = self._axes
        for field, value, possible in (
            ("shards", config.shards, axes.shards),
            ("page_size", config.page_size, axes.page_sizes),
            ("layout", config.layout, axes.layouts),
            ("layers", config.layers, range(1, axes.layers_max + 1)),
            ("host_policy", config.host_policy, axes.host_policies),
        ):
            if value not in possible:
                raise ConfigError(f"{field}={value!r}; the engine can be opened with {tuple(possible)}")


def _choice(options: dict[str, str], name: str, choices: Sequence[str], default: str) -> str:
    value = options.pop(name, default)
    if value not in choices and value != default:
        raise ConfigError(f"option {name}={value!r} of engine ref; expected one of {', '.join(choices)}")
    return value


def _numbers(
    options: dict[str, str], name: str, default: Sequence[int], possible: Sequence[int] | None = None
) -> tuple[int, ...]:
    value = options.pop(name, None)
    allowed = default if possible is None else possible
    if value is None:
        return tuple(default)
    if not value.isascii() or not value.isdigit() or int(value) not in allowed:
        raise ConfigError(f"option {name}={value!r} of engine ref; expected one of {', '.join(map(str, allowed))}")
    return (int(value),)

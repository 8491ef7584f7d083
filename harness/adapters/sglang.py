"""The real sglang components as an engine: N mirrored ranks in one process, on a CPU.

Address: `sglang`, with options such as `sglang?shards=4&attention=mla`. What is judged are sglang's own allocator,
tree, pools and admission; only devices, the communicator and the scheduler's loop around them are stood in for.

With `decode_pages` a session sends to a decode worker. sglang's own is the sender's side, as far as it chooses: what is
sent when, which pages, by which rank and to which position. Bootstrap, polls, the transport and the decode worker are
stood in for by the reference's (see `harness.adapters.sglang_wire`), so what the cases say about those is not sglang's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import msgspec

from harness import types as t
from harness import views as v
from harness.adapter import ConfigError, EngineFault
from harness.adapters.ref import SAME_COLLECTIVES, RefSession
from harness.adapters.ref_processes import IN_TIME
from harness.adapters.ref_sim import DEVICES
from harness.adapters.sglang_context import Contexts
from harness.adapters.sglang_host import HostTier
from harness.adapters.sglang_install import RELEASES, installed, parts
from harness.adapters.sglang_pools import ATTENTION
from harness.adapters.sglang_rank import Options, SglangRank
from harness.adapters.sglang_sim import SimStage
from harness.adapters.sglang_stage import LazyStage, Stage
from harness.adapters.sglang_standins import copies_on, put
from harness.lockstep import CollectiveMismatch, Lockstep, LockstepGroup, RankStuck
from harness.sim.defer import Shapes
from harness.sim.race import SimFinding
from harness.transports.memory import Faults, Network

OP_SECONDS = 60.0  # of one op on all ranks; the first one imports what sglang imports late
SHARDS = (2, 3, 4, 8)
LAYERS_MAX = 8
DRAFT_LAYERS = 1  # a pool that goes to the host behind its target's layers has one, and a sharded draft one pool
OPS = ("open", "extend", "finish", "abort", "evict", "flush", "restart", "settle", "locate", "together")
SENDING_OPS = ("reserve", "send", "receive", "release", "lose")
SHOWS = (
    *("capacity", "free", "requests", "nodes", "host_free", "moved", "tokens_max", "tokens_used", "collectives"),
    "buffers",  # but no plan of the bytes: it is made before the pools, of a whole server's settings
)
PROMISES = (
    "deterministic",
    "interleaved",
    "rotates",
    "balanced_seeding",
    "batches_what_fits",  # by the comments in its source, of what is gathered; it is a known failure
    "lazy_eviction",  # by the comments in its source; it is a known failure
    "admits_to_the_end",
    "keeps_finished",
    "copies_all",
    "refuses_misuse",
)
POLICIES = ("write_through", "write_through_selective", "write_back")


class SglangRanks:
    """The ranks of one session: an op goes to every rank, each a thread of this process in turn."""

    def __init__(self, contexts: Contexts, config: t.Config, options: Options, stage: Stage) -> None:
        self._parts = loaded = contexts.loaded
        self._stage = stage
        host = config.host_pages_per_rank
        settings = HostTier.settings(config.pages_per_rank, host, config.host_policy) if host else {}
        self._context = contexts.new(**settings)
        self._copies: Callable[[], AbstractContextManager[None]] = (
            partial(put, copies_on(stage.devices)) if host else nullcontext
        )
        self._lockstep = Lockstep(config.shards)
        self._ranks: list[SglangRank] = []

        def started(_: int, group: LockstepGroup) -> SglangRank:
            return SglangRank(loaded, config, options, stage.place(group))

        self._ranks = self._run(started)

    def __iter__(self) -> Iterator[SglangRank]:
        return iter(self._ranks)

    def apply(self, op: t.AnyOp) -> list[t.AnyReply]:
        """Raises `EngineFault` when sglang runs out of what it has accepted."""
        return self._run(lambda rank, _: self._ranks[rank].apply(op))

    def view(self) -> list[v.RankView]:
        with self._parts.use_context(self._context):
            return [self._seen(number) for number in range(len(self._ranks))]

    def _seen(self, rank: int) -> v.RankView:
        with self._stage.look(rank):
            return self._ranks[rank].view()

    def close(self) -> None:
        self._lockstep.close()
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()

    def _run(self, program: Callable[[int, LockstepGroup], t.T]) -> list[t.T]:
        """`program` on every rank. Raises `EngineFault` for what the devices or the collectives find."""

        def job(rank: int, group: LockstepGroup) -> t.T:
            with self._stage.work(rank):
                return program(rank, group)

        with self._running():
            try:
                return self._lockstep.run(job, OP_SECONDS)
            except (SimFinding, CollectiveMismatch, RankStuck) as error:
                raise self._stage.fault(error) or _fault(error) from error

    @contextmanager
    def _running(self) -> Iterator[None]:
        """This session's configuration and stand-ins are those of the process; entered here, and not in each rank."""
        with self._parts.use_context(self._context), self._copies():
            yield


class SglangSession(RefSession):
    """One session: the ranks must agree; beside them a decode worker, if the config asks for one."""

    def __init__(
        self, contexts: Contexts, config: t.Config, options: Options, stage: Stage, network: Network | None = None
    ) -> None:
        self._ranks: SglangRanks = SglangRanks(contexts, config, options, stage)
        super().__init__(self._ranks, stage.decode(config, options.attention), network)


class SglangEngine:
    """Opens sessions of sglang's components. `options` come from the address and are all optional."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._version = installed()
        given = dict(options or {})
        release = RELEASES[self._version]
        self._options = Options(
            attention=_choice(given, "attention", release.attention), tree=_choice(given, "tree", ("python", "rust"))
        )
        attention = ATTENTION[self._options.attention]
        # the rust core of these releases asserts at the first copy
        tiers = attention.host and release.host and self._options.tree == "python"
        host = _choice(given, "host", ("on", "off") if tiers else ("off",)) == "on"
        sends = _choice(given, "decode", ("on", "off") if release.sends else ("off",)) == "on"
        self._device = _choice(given, "device", DEVICES)
        self._contexts: Contexts | None = None  # it imports sglang
        self._shapes = Shapes()  # of tensors, which every simulation works out anew otherwise
        self._axes = t.Axes(
            shards=_number(given, "shards", SHARDS),
            page_sizes=_number(given, "page_size", attention.page_sizes),
            components=tuple(name for name in attention.components if release.draft or not name.startswith("draft")),
            layers_max=LAYERS_MAX,
            draft_layers_max=DRAFT_LAYERS,
            host_policies=POLICIES if host else (),
            decode=sends,
            networks=sends,
            schedules=self._device == "adversary",
        )
        if given:
            known = "shards, page_size, attention, tree, host, decode, device"
            raise ConfigError(f"option {next(iter(given))!r} of engine sglang; expected {known}")

    def describe(self) -> t.Manifest:
        shows = SHOWS if self._options.tree == "python" else tuple(name for name in SHOWS if name != "nodes")
        sends = self._axes.decode
        return t.Manifest(
            name="sglang",
            version=self._version,
            ops=OPS + SENDING_OPS if sends else OPS,
            shows=(*shows, "decode") if sends else shows,
            promises=PROMISES,
            axes=self._axes,
        )

    def open(self, config: t.Config) -> SglangSession:
        """Raises `ConfigError` for a config outside the axes, `UserError` when sglang cannot be imported."""
        components = self._axes.components
        for field, value, possible in (
            ("shards", config.shards, self._axes.shards),
            ("page_size", config.page_size, self._axes.page_sizes),
            ("layout", config.layout, self._axes.layouts),
            ("components", config.components, [components[:some] for some in range(1, len(components) + 1)]),
            ("layers", config.layers, range(1, LAYERS_MAX + 1)),
            ("draft_layers", config.draft_layers if "draft" in config.components else DRAFT_LAYERS, (DRAFT_LAYERS,)),
            ("decode_pages", config.decode_pages if not self._axes.decode else 0, (0,)),
        ):
            if value not in possible:
                raise ConfigError(f"{field}={value!r}; the engine can be opened with {tuple(possible)}")
        if config.host_pages_per_rank and config.host_policy not in self._axes.host_policies:
            policies = self._axes.host_policies or "no host tier"
            raise ConfigError(f"host_policy={config.host_policy!r}; the engine can be opened with {policies}")
        network = Network(Faults(**msgspec.structs.asdict(config.network))) if config.decode_pages else None
        stage: Stage = LazyStage(network)
        if self._device != "host":
            stage = SimStage(config, self._device, self._shapes, network)
        if self._contexts is None:
            self._contexts = Contexts(parts())
        return SglangSession(self._contexts, config, self._options, stage, network)


def _fault(error: Exception) -> EngineFault:
    return EngineFault(IN_TIME if isinstance(error, RankStuck) else SAME_COLLECTIVES, str(error))


def _choice(options: dict[str, str], name: str, choices: tuple[str, ...]) -> str:
    """One of the choices; the first is the default."""
    value = options.pop(name, choices[0])
    if value not in choices:
        raise ConfigError(f"option {name}={value!r} of engine sglang; expected one of {', '.join(choices)}")
    return value


def _number(options: dict[str, str], name: str, choices: tuple[int, ...]) -> tuple[int, ...]:
    value = options.pop(name, None)
    if value is None:
        return choices
    if value not in map(str, choices):
        raise ConfigError(f"option {name}={value!r} of engine sglang; expected one of {', '.join(map(str, choices))}")
    return (int(value),)

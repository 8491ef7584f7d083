"""Which sessions a case opens: small ones, with every axis that the engine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from harness.sim.schedule import Schedule, named, schedules
from harness.trial import NoConfig
from harness.types import Axes, Config, NetworkPlan

ConfigsOf = Callable[[Axes], st.SearchStrategy[Config]]

SHARDS = (2, 3, 4, 1, 8)  # in the order that shrinking prefers
PAGE_SIZES = (2, 4, 1, 16, 64)
MOSTLY_SHARDED = ("sharded", "sharded", "sharded", "replicated")
ROOMY = (8,)  # contexts whose prefixes the scratch holds: no batch is refused for it
STREAMS = 6  # of a rank, that schedules tell apart: default, gathers of two models, backup, restore, transfer
POSITIONS = 2000  # operations of all ranks within which a schedule changes its mode
TOKENS_MAX = 1024  # of one pool: keeps pages of 64 tokens cheap


def within(wanted: Sequence[int], has: Sequence[int], axis: str) -> list[int]:
    """The wanted values that the engine can be opened with. Raises `NoConfig` when there is none."""
    values = [value for value in wanted if value in has]
    if not values:
        raise NoConfig(f"the engine has {axis} {tuple(has)}, the case needs one of {tuple(wanted)}")
    return values


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a case asks of its configs; the engine's axes narrow it further.

    A context is as long as the pool, or one of `context_parts` of it; the scratch holds `scratch_contexts` of them.
    """

    shards: Sequence[int] = SHARDS
    page_sizes: Sequence[int] = PAGE_SIZES
    layouts: Sequence[str] = MOSTLY_SHARDED
    pages_max: int = 8
    layers_max: int = 3
    scratch_contexts: Sequence[int] = (2, 1, 8)
    context_parts: Sequence[int] = (1, 1, 2)
    host_parts: Sequence[int] = (0, 2, 1, 4)
    """Host pages per rank, as multiples of half the device's; 0 without a host tier."""
    host_policies: Sequence[str] = ("write_through", "write_back", "write_through_selective")
    drafts: bool = False
    """Whether the case needs a component of a draft."""
    decode_parts: Sequence[int] = (0, 0, 2, 1)
    """Pages of the decode worker, as multiples of half the prefill pool's; 0 without one."""
    slow_writes: bool = False  # many a write ends after all that is said about it
    misfit: bool = False
    """Whether the decode worker has another page size than the prefill worker."""

    def within(self, axes: Axes) -> Bounds:
        """These bounds as far as the engine goes. Raises `NoConfig` when an axis has nothing left."""
        if axes.fixed is not None:
            raise NoConfig(
                "the engine is a server that runs, the case opens sessions of its own sizes: try --suite e2e"
            )
        layouts = [layout for layout in self.layouts if layout in axes.layouts]
        if not layouts:
            raise NoConfig(f"the engine has layouts {axes.layouts}, the case needs one of {tuple(self.layouts)}")
        if not axes.decode and 0 not in self.decode_parts:
            raise NoConfig("the engine has no decode worker, the case needs one")
        policies = [policy for policy in self.host_policies if policy in axes.host_policies]
        if not policies and 0 not in self.host_parts:
            raise NoConfig(
                f"the engine has host policies {axes.host_policies}, the case needs one of {self.host_policies}"
            )
        if self.drafts and not any(component.startswith("draft") for component in axes.components):
            raise NoConfig(f"the engine has components {axes.components}, the case needs those of a draft")
        return replace(
            self,
            host_policies=policies,
            host_parts=self.host_parts if policies else (0,),
            decode_parts=self.decode_parts if axes.decode else (0,),
            shards=within(self.shards, axes.shards, "shards"),
            page_sizes=within(self.page_sizes, axes.page_sizes, "page sizes"),
            layouts=layouts,
            layers_max=min(self.layers_max, axes.layers_max),
        )


@st.composite
def _configs(draw: st.DrawFn, bounds: Bounds, axes: Axes) -> Config:
    components = axes.components
    # most of what a big group shows, a small one shows sooner, and one rank shows least
    ranks = draw(st.sampled_from([few for few in bounds.shards for _ in range(3 if 1 < few <= 4 else 1)]))
    page = draw(st.sampled_from(bounds.page_sizes))
    layout = draw(st.sampled_from(bounds.layouts))
    most = max(2, min(bounds.pages_max, TOKENS_MAX // (page * ranks)))
    per_rank = draw(st.integers(2, most))
    total = per_rank * (ranks if layout == "sharded" else 1)
    decode_part = draw(st.sampled_from(bounds.decode_parts))
    host_part = draw(st.sampled_from(bounds.host_parts))
    least = next((at for at, name in enumerate(components, 1) if name.startswith("draft")), 1) if bounds.drafts else 1
    context_pages = max(1, total // draw(st.sampled_from(bounds.context_parts)) + draw(st.sampled_from((0, 0, 2, -1))))
    return Config(
        shards=ranks,
        page_size=page,
        pages_per_rank=per_rank,
        layout=layout,
        layers=draw(st.integers(1, bounds.layers_max)),
        components=components[: draw(st.integers(least, len(components)))],
        draft_layers=draw(st.integers(1, axes.draft_layers_max)),
        host_pages_per_rank=-(-per_rank * host_part // 2),
        host_policy=draw(st.sampled_from(bounds.host_policies)) if host_part else "write_through",
        chunk_tokens=draw(st.sampled_from((4, 2, 8, 1))) * page + draw(st.sampled_from((0, 0, page // 2))),
        context_tokens=context_pages * page,
        scratch_contexts=draw(st.sampled_from(bounds.scratch_contexts)),
        decode_pages=-(-total * decode_part // 2),
        decode_page_size=draw(st.sampled_from([size for size in PAGE_SIZES if size != page])) if bounds.misfit else 0,
        network=draw(_slow if bounds.slow_writes else _networks) if decode_part and axes.networks else NetworkPlan(),
        schedule=draw(_schedules(ranks)) if axes.schedules else (),
    )


def _ticks(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, most), min_size=1, max_size=5).map(tuple)


# A question and its answer must arrive within the rounds that an adapter waits for: 6 + 6 ticks. A write may
# take longer than what is said about it, and an echo may come when all is over: an op is a tick for each rank and more.
_networks = st.builds(
    NetworkPlan,
    write_ticks=st.one_of(_ticks(9), _ticks(40), st.lists(st.sampled_from((0, 40)), min_size=2, max_size=4).map(tuple)),
    message_ticks=_ticks(6),
    repeat_ticks=st.one_of(_ticks(4), _ticks(40)),
    torn=st.booleans(),
)

_slow = st.builds(
    NetworkPlan,
    write_ticks=st.lists(st.sampled_from((40, 0)), min_size=2, max_size=5).map(tuple),
    message_ticks=_ticks(2),
    torn=st.booleans(),
)


def _schedules(ranks: int) -> st.SearchStrategy[Schedule]:
    """What a simulated device runs when: one mode throughout, or a few changes of mode."""
    throughout = st.sampled_from(list(named(STREAMS).values()))
    return st.one_of(throughout, schedules(STREAMS, ranks, POSITIONS))


def configs(bounds: Bounds | None = None) -> ConfigsOf:
    """Configs within these bounds and the engine's axes; raises `NoConfig` (the case is skipped) when none is left."""
    asked = bounds or Bounds()
    return lambda axes: _configs(asked.within(axes), axes)


any_config = configs()
sharded = configs(Bounds(layouts=("sharded",)))

"""Which sessions a case opens: small ones, with every axis that the engine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from harness.trial import NoConfig
from harness.types import Axes, Config

ConfigsOf = Callable[[Axes], st.SearchStrategy[Config]]

SHARDS = (2, 3, 4, 1, 8)  # in the order that shrinking prefers
PAGE_SIZES = (2, 4, 1, 16, 64)
TOKENS_MAX = 1024  # of one pool: keeps pages of 64 tokens cheap


def within(wanted: Sequence[int], has: Sequence[int], axis: str) -> list[int]:
    """The wanted values that the engine can be opened with. Raises `NoConfig` when there is none."""
    values = [value for value in wanted if value in has]
    if not values:
        raise NoConfig(f"the engine has {axis} {tuple(has)}, the case needs one of {tuple(wanted)}")
    return values


@st.composite
def _configs(
    draw: st.DrawFn,
    *,
    axes: Axes,
    shards: Sequence[int],
    page_sizes: Sequence[int],
    layouts: Sequence[str],
    pages_max: int,
    layers_max: int,
    roomy_scratch: bool,
) -> Config:
    # most of what a big group shows, a small one shows sooner
    ranks = draw(st.sampled_from([few for few in shards for _ in range(1 if few > 4 else 3)]))
    page = draw(st.sampled_from(page_sizes))
    layout = draw(st.sampled_from(layouts))
    most = max(2, min(pages_max, TOKENS_MAX // (page * ranks)))
    per_rank = draw(st.integers(2, most))
    total = per_rank * (ranks if layout == "sharded" else 1)
    components = draw(st.integers(1, len(axes.components)))
    chunk_pages = draw(st.sampled_from((4, 2, 8, 1)))
    context_pages = draw(st.sampled_from((total, total + 2, max(1, total // 2))))
    return Config(
        shards=ranks,
        page_size=page,
        pages_per_rank=per_rank,
        layout=layout,
        layers=draw(st.integers(1, min(layers_max, axes.layers_max))),
        components=axes.components[:components],
        chunk_tokens=chunk_pages * page,
        context_tokens=context_pages * page,
        scratch_contexts=8 if roomy_scratch else draw(st.sampled_from((2, 1, 8))),
    )


def configs(
    *,
    shards: Sequence[int] = SHARDS,
    page_sizes: Sequence[int] = PAGE_SIZES,
    layouts: Sequence[str] = ("sharded", "replicated"),
    pages_max: int = 8,
    layers_max: int = 3,
    roomy_scratch: bool = False,
) -> ConfigsOf:
    """Configs within these bounds and the engine's axes; raises `NoConfig` (the case is skipped) when none is left."""

    def of(axes: Axes) -> st.SearchStrategy[Config]:
        kinds = [layout for layout in layouts if layout in axes.layouts]
        if not kinds:
            raise NoConfig(f"the engine has layouts {axes.layouts}, the case needs one of {tuple(layouts)}")
        return _configs(
            axes=axes,
            shards=within(shards, axes.shards, "shards"),
            page_sizes=within(page_sizes, axes.page_sizes, "page sizes"),
            layouts=kinds,
            pages_max=pages_max,
            layers_max=layers_max,
            roomy_scratch=roomy_scratch,
        )

    return of


any_config = configs()
sharded = configs(layouts=("sharded",))

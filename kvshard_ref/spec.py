"""WorkerSpec: the shape of a prefill worker, equal on all its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from kvshard_ref.checks import at_least, one_of
from kvshard_ref.components import Component
from kvshard_ref.errors import GeometryError
from kvshard_ref.host_tier import POLICIES
from kvshard_ref.placement import Placement
from kvshard_ref.plan import PADDINGS
from kvshard_ref.scratch import ScratchSize
from kvshard_ref.split import SPLITS

LAYOUTS = ("sharded", "replicated")


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """An MTP draft: its own layers and components in the target's layout, so that one page id serves both.

    `placement` and `pages_per_rank` are the target's unless given; given ones must be equal to the target's.
    """

    layers: int
    components: tuple[Component, ...]
    placement: Placement | None = None
    pages_per_rank: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Shape of a prefill worker, equal on all its ranks.

    layout "sharded": the ranks hold one copy of the cache between them. "replicated": every rank holds a whole copy,
    by the same code with one shard per rank. Either way the ranks compute each chunk together.
    """

    ranks: int
    page_size: int
    pages_per_rank: int
    layers: int
    components: tuple[Component, ...]
    chunk_tokens: int
    context_tokens: int
    scratch_contexts: int = 8
    layout: str = "sharded"
    padding: str = "tight"
    split: str = "interleave"
    draft: DraftSpec | None = None
    host_pages_per_rank: int = 0
    """Pages of the host tier on each rank; 0 without one."""
    host_policy: str = "write_through"
    ahead_tokens: int = 0
    """Tokens after a page that its rows depend on: 1 for an MTP draft, whose row of a token knows the next token."""

    def __post_init__(self) -> None:
        one_of("WorkerSpec: layout", self.layout, LAYOUTS)
        one_of("WorkerSpec: split", self.split, SPLITS)
        one_of("WorkerSpec: padding", self.padding, PADDINGS)
        one_of("WorkerSpec: host_policy", self.host_policy, POLICIES)
        at_least(1, "WorkerSpec", ranks=self.ranks)
        at_least(0, "WorkerSpec", host_pages_per_rank=self.host_pages_per_rank, ahead_tokens=self.ahead_tokens)
        if self.draft is not None:
            self._check_draft(self.draft)

    @property
    def placement(self) -> Placement:
        """The index space; a replicated worker's ranks each have their own, equal ones."""
        return Placement(self.ranks if self.layout == "sharded" else 1, self.page_size)

    @property
    def models(self) -> list[tuple[int, tuple[Component, ...]]]:
        """Layers and components of the target and, if there is one, of its draft."""
        draft = [] if self.draft is None else [(self.draft.layers, self.draft.components)]
        return [(self.layers, self.components), *draft]

    @property
    def component_layers(self) -> dict[Component, int]:
        """Every component of every model with its number of layers."""
        return {component: layers for layers, components in self.models for component in components}

    @property
    def scratch(self) -> ScratchSize:
        """Size of a scratch slot."""
        return ScratchSize.sized(self.placement, self.context_tokens, self.chunk_tokens, self.scratch_contexts)

    def _check_draft(self, draft: DraftSpec) -> None:
        """One page id addresses the rows of both models, so their layouts are one."""
        inherited = {"placement": self.placement, "pages_per_rank": self.pages_per_rank}
        for field, mine in inherited.items():
            its = getattr(draft, field)
            if its not in {None, mine}:
                raise GeometryError(
                    f"WorkerSpec: {field} of the draft is {its}, of the target {mine}; expected the target's layout, "
                    f"leave {field} of the draft out to inherit it"
                )
        shared = {c.name for c in self.components} & {c.name for c in draft.components}
        if shared:
            raise GeometryError(f"WorkerSpec: target and draft both have components {sorted(shared)}, expected none")

"""How a case about a server is written: a function that judges one step, and a decorator that says the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from harness.case import Case, Draw, Table, as_test, paragraphs
from harness.trial import NoConfig
from harness.types import AnyOp, AnyReply, Axes, Config, Generate, Generated, Manifest, Ok
from harness.views import Snapshot
from suites.e2e.story import Story
from suites.story import parts

EXAMPLES = 0.05  # of a budget's: a request takes as long as hundreds of ops of an engine in this process


@dataclass(frozen=True, slots=True)
class Step:
    """One op with its reply and the state around it. `story` is what was known *before* the op."""

    op: AnyOp
    reply: AnyReply
    before: Snapshot | None
    after: Snapshot | None
    story: Story
    seconds: float
    """That it took."""

    @property
    def first(self) -> Snapshot | None:
        """The state when the session began."""
        return self.story.first or self.before

    def parts(self) -> Iterator[tuple[AnyOp, AnyReply]]:
        """Every op with its own reply, those of a `Together` one by one."""
        return parts(self.op, self.reply)

    def answers(self) -> Iterator[tuple[Generate, Generated]]:
        """Every answer with what was asked."""
        for op, reply in self.parts():
            if isinstance(op, Generate) and isinstance(reply, Ok) and isinstance(reply.value, Generated):
                yield op, reply.value


Check = Callable[[Step], None]
Plan = Callable[[Draw, Table], None]
ConfigsOf = Callable[[Axes], st.SearchStrategy[Config]]


class StepWatch:
    """Judges each step with one check, then tells the story of it."""

    def __init__(self, check: Check, config: Config, manifest: Manifest) -> None:
        self.story = Story(config, manifest)
        self._check = check

    @property
    def seen(self) -> Counter[str]:
        """How often each event was met."""
        return self.story.seen

    def after(self, op: AnyOp, reply: AnyReply, before: Snapshot | None, after: Snapshot | None) -> None:
        """Judges one op."""
        self._check(Step(op, reply, before, after, self.story, time.monotonic() - self.story.looked_at))
        self.story.tell(op, reply, before)


def running(
    *, sharded: bool = False, pair: bool = False, host: bool = False, draft: bool = False, tokens_max: int = 0
) -> ConfigsOf:
    """The one config of a server that runs; `NoConfig` when it is not what the case is about.

    `tokens_max`: a case that fills the device is not for one that holds more.
    """

    def configs(axes: Axes) -> st.SearchStrategy[Config]:
        config = axes.fixed
        if config is None:
            raise NoConfig("the case asks a server that runs; this engine is opened with a config")
        tokens = config.pages_per_rank * config.page_size * (config.shards if config.layout == "sharded" else 1)
        lacking = (
            (sharded and (config.layout != "sharded" or config.shards < 2), "a sharded cache, it has a whole one"),
            (pair and not config.decode_pages, "a P/D pair, it is one worker"),
            (host and not config.host_pages_per_rank, "a host tier, it has none"),
            (draft and len(config.components) < 2, "a draft, it has none"),
            (bool(tokens_max) and not tokens, "to know how many tokens the device holds, it does not tell"),
            (bool(tokens_max) and tokens > tokens_max, f"a device of at most {tokens_max} tokens, it has {tokens}"),
        )
        for lacks, what in lacking:
            if lacks:
                raise NoConfig(f"the case needs of the server {what}")
        return st.just(config)

    return configs


def case(
    id: str,  # noqa: A002  # the field's name in every report
    *,
    invariants: tuple[str, ...],
    needs: tuple[str, ...],
    seen: Mapping[str, int],
    plan: Plan,
    configs: ConfigsOf | None = None,
    examples: float = EXAMPLES,
) -> Callable[[Check], Callable[[Any], None]]:
    """Makes a check a case. Its docstring has the claim as first sentence, then the kind of bug behind it."""

    def decorate(check: Check) -> Callable[[Any], None]:
        claim, reason = paragraphs(check.__doc__)
        made = Case(
            id=id,
            claim=claim,
            reason=reason,
            invariants=invariants,
            needs=("op.generate", *needs),
            seen=seen,
            watch=lambda config, manifest: StepWatch(check, config, manifest),
            configs=configs or running(),
            plan=plan,
            examples=examples,
            module=check.__module__,
        )
        return as_test(made, check)

    return decorate

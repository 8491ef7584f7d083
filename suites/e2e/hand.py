"""Plays requests on a table: prompts by a seeded generator, so that the simplest example is as telling as any other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from harness.case import Draw, Table
from harness.trial import NoConfig
from harness.types import AnyOp, AnyReply, Config, Flush, Generate, Generated, Ok, Service, Settle, Together
from suites.e2e.story import Story, Tokens

NEW_TOKENS = 6
FILL_MAX = 8  # more prompts at once would take long
SMOKE_STEPS = 10  # `steps_max` of the smallest budget


@dataclass(slots=True)
class Hand:
    """The moves that plans are made of."""

    draw: Draw
    table: Table
    seed: int = field(init=False)
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.seed = self.draw(st.integers(0, 1 << 16))
        self.random = random.Random(self.seed)

    @property
    def story(self) -> Story:
        """What has happened so far."""
        story: Story = self.table.watch.story
        return story

    @property
    def config(self) -> Config:
        """Of the server."""
        return self.table.config

    @property
    def service(self) -> Service:
        """The server as it describes itself."""
        return self.story.service

    @property
    def small(self) -> bool:
        """Whether little time is to be spent."""
        return self.table.steps_max <= SMOKE_STEPS

    def fresh(self, count: int) -> Tokens:
        """A prompt that nobody had before; a common first token would be chance."""
        first, end = self.service.token_ids
        return tuple(self.random.randrange(first, end) for _ in range(count))

    def fork(self, tokens: Tokens, at: int, count: int) -> Tokens:
        """The first `at` tokens of a prompt, then others; the first of them differs."""
        first, end = self.service.token_ids
        rest = list(self.fresh(count))
        if at < len(tokens) and rest[0] == tokens[at]:
            rest[0] = first + (rest[0] + 1 - first) % (end - first)
        return tokens[:at] + tuple(rest)

    def request(self, tokens: Tokens, **more: Any) -> Generate:
        """A request; drawn where the engine's draws repeat, else the likeliest tokens."""
        temperature = 1.0 if self.story.promises("seeded") else 0.0
        usual: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "seed": self.seed}
        return Generate(request=self.story.new_name(), tokens=tokens, **{**usual, **more})

    def ask(self, tokens: Tokens, **more: Any) -> Generated | None:
        """Plays a request; its answer."""
        return self.asked(self.request(tokens, **more))

    def asked(self, op: Generate) -> Generated | None:
        """Plays a request, and again with other seeds when it is the first whose answer differs."""
        flips = len(self.story.flips)
        reply = self.table.do(op)
        if len(self.story.flips) > flips:
            self._doubt(op.tokens)
        return reply.value if isinstance(reply, Ok) and isinstance(reply.value, Generated) else None

    def together(self, ops: Sequence[AnyOp]) -> AnyReply:
        """Plays ops at the same time."""
        flips = len(self.story.flips)
        reply = self.table.do(Together(tuple(ops)))
        if len(self.story.flips) > flips:
            self._doubt(self.story.flips[0].tokens)
        return reply

    def both(self, tokens: Tokens, **more: Any) -> Generated | None:
        """The control arm's answer, where there is one, then that of the judged arm."""
        if self.story.promises("control"):
            self.ask(tokens, arm="control", **more)
        return self.ask(tokens, **more)

    def settle(self) -> None:
        """Waits until all is done, where that can be seen."""
        if "settle" in self.table.manifest.ops:
            self.table.do(Settle())

    def flush(self) -> None:
        """Drops the cache, where that can be done."""
        if "flush" in self.table.manifest.ops:
            self.table.do(Flush())

    def long(self, chunks: float = 3.0) -> int:
        """A prompt's length of several chunks that ends on no boundary, as far as context and pool go."""
        pool = self.service.tokens_max or self.config.context_tokens
        most = min(self.config.context_tokens - 80, pool // 2)
        return max(2, min(int(self.config.chunk_tokens * chunks) + self.config.page_size // 2 + 1, most))

    def fill(self) -> None:
        """Prompts at the same time that need the whole device, as far as `FILL_MAX` of them do."""
        room, page = self.service.tokens_max or self.long(), self.config.page_size
        most = max(page, self.config.context_tokens - 80)
        count = min(FILL_MAX, -(-room // most))
        each = max(1, min(most, room // count) // page * page)  # whole pages, so that all fit at once
        self.together([self.request(self.fresh(each), max_new_tokens=1) for _ in range(count)])

    def flood(self, tokens: int) -> None:
        """Other prompts of so many tokens, one after the other."""
        each = min(self.config.context_tokens - 80, (self.service.tokens_max or tokens) // 2)
        while tokens > 0:
            count = max(1, min(each, tokens))
            self.ask(self.fresh(count), max_new_tokens=1)
            tokens -= count

    def _doubt(self, tokens: Tokens) -> None:
        for further in (1, 2):
            self.both(tokens, seed=self.seed + further)


def only_if(holds: object, why: str) -> None:
    """Raises `NoConfig`, which skips the case, unless the server is what the case needs."""
    if not holds:
        raise NoConfig(why)

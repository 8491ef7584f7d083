"""Prompts: fresh, forks of earlier ones, repeats; at and around page boundaries, tiny, longer than the pool."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.case import Draw
from harness.types import Config
from suites.story import Story

KINDS = ("fresh", "fork", "repeat")


def length(draw: Draw, page: int, pages_max: int) -> int:
    """A prompt length of at least one token, at and around page boundaries on purpose."""
    pages = draw(st.integers(0, max(0, pages_max)))
    over = draw(st.sampled_from(sorted({0, 1, page - 1, page // 2}, key=lambda value: (value != 0, value))))
    return max(1, pages * page + over)


def pool_pages(config: Config) -> int:
    """Pages that the group holds together."""
    return config.pages_per_rank * (config.shards if config.layout == "sharded" else 1)


def prompt(draw: Draw, story: Story, kinds: tuple[str, ...] = KINDS, pages_max: int | None = None) -> tuple[int, ...]:
    """A prompt that shares what its kind says with an earlier one."""
    config = story.config
    most = pool_pages(config) + 1 if pages_max is None else pages_max
    kind = draw(st.sampled_from(kinds)) if story.past else "fresh"
    if kind == "fresh":
        return story.new_tokens(length(draw, config.page_size, most))
    earlier = draw(st.sampled_from(story.past[-6:]))
    if kind == "repeat":
        return earlier
    page = config.page_size
    cut = draw(st.integers(0, len(earlier) // page)) * page + draw(st.sampled_from((0, 1, page - 1)))
    shared = earlier[: min(cut, len(earlier))]
    if draw(st.sampled_from((False, False, True))):  # differs in a page or less, and then goes on as the earlier one
        fresh = story.new_tokens(min(page, max(1, len(earlier) - len(shared))))
        return shared + fresh + earlier[len(shared) + len(fresh) :]
    return shared + story.new_tokens(length(draw, page, max(1, most - len(shared) // page - 1)))

"""What pages of findings say of sglang and no case of the suites judges: still so, or the page has to go."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from ci.register import register_cpu_ci
from harness import types as t
from harness.adapters.sglang import SglangEngine, SglangSession
from harness.fault import Edit, planted
from harness.smoke import stamps

register_cpu_ci(est_time=20, stage="commit", runner="ubuntu-sglang")

pytestmark = [
    pytest.mark.slow,  # sglang takes many seconds to import
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
CONFIG = t.Config(shards=2, page_size=2, pages_per_rank=8, layers=1, chunk_tokens=16, context_tokens=32)
PAGE = "docs/findings/sglang-split-renews-suffix.md"
SPLIT = "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore._split_node"
OLD = (1, 2, 3, 4, 5, 6, 7, 8)  # four pages, used first
YOUNG = (11, 12, 13, 14)  # two pages, used after them
Opener = Callable[[str], SglangSession]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens sessions on a core of the tree; they are closed at the end."""
    sessions: list[SglangSession] = []

    def make(tree: str) -> SglangSession:
        sessions.append(SglangEngine({"tree": tree, "host": "off"}).open(CONFIG))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def cache(session: SglangSession, name: str, tokens: tuple[int, ...]) -> None:
    """Compute a prompt in one chunk and keep it."""
    session.apply(t.Open(name, tokens))
    session.apply(t.Extend(name, len(tokens), stamps(tokens, CONFIG)))
    assert t.Ok(t.Finished(len(tokens))) == session.apply(t.Finish(name))


def match(session: SglangSession, name: str, tokens: tuple[int, ...]) -> int:
    """Cached tokens of a prompt that nobody computes."""
    reply = session.apply(t.Open(name, tokens))
    session.apply(t.Abort(name))
    assert isinstance(reply, t.Ok)
    assert isinstance(reply.value, t.Opened)
    return reply.value.cached


def left_of_both(session: SglangSession) -> tuple[int, int]:
    """Cached tokens of both chains, the young one first: a look at the old one would not change what is cached."""
    return match(session, "young again", (*YOUNG, 99)), match(session, "old again", (*OLD, 99))


@pytest.mark.parametrize("tree", ["python", "rust"])
def test_a_split_renews_the_suffix(opened: Opener, tree: str) -> None:
    """Two pages below a shorter match, used before all others, are evicted after a chain that was used later."""
    session = opened(tree)
    cache(session, "old", OLD)
    cache(session, "young", YOUNG)
    assert match(session, "shorter", (*OLD[:4], 99)) == 4
    session.apply(t.Evict(4))
    assert left_of_both(session) == (0, 8), f"the suffix does not outlive what was used later any more: remove {PAGE}"


@pytest.mark.parametrize("tree", ["python", "rust"])
def test_without_a_split_the_oldest_goes(opened: Opener, tree: str) -> None:
    """The same without the shorter match: the chain that was used first is evicted, and the younger one stays."""
    session = opened(tree)
    cache(session, "old", OLD)
    cache(session, "young", YOUNG)
    session.apply(t.Evict(4))
    assert left_of_both(session) == (4, 0)


def test_one_line_makes_the_difference(opened: Opener) -> None:
    """Without the new time in `_split_node` the suffix is evicted: what was used later stays, and the match does."""
    session = opened("python")
    with planted([Edit(SPLIT, "child.last_access_time = get_and_increase_time_counter()")]) as reached:
        cache(session, "old", OLD)
        cache(session, "young", YOUNG)
        match(session, "shorter", (*OLD[:4], 99))
        session.apply(t.Evict(4))
        assert left_of_both(session) == (4, 4)
    assert reached.times > 0

"""The oracle and the story that the cases judge by."""

from __future__ import annotations

from ci.register import register_cpu_ci
from harness.types import Config, Extend, Extended, Finish, Finished, Ok, Open, Opened
from harness.views import NodeView as Node
from harness.views import RankView, Snapshot
from suites.oracle import Oracle
from suites.story import Story, cached_entries, prefix_entries

register_cpu_ci(est_time=10, stage="commit")

TOKENS = (3, 1, 4, 1, 5, 9)


def test_a_stamp_stands_for_one_row() -> None:
    """Stamps differ by any earlier token, by layer, component and generation; equal prefixes agree."""
    oracle = Oracle({"kv": 2, "index": 2}, 2)
    rows = oracle.rows(TOKENS, 0, 6)
    other = oracle.rows((2, *TOKENS[1:]), 0, 6)
    stamps = [stamp for each in (rows, other) for layers in each.values() for row in layers for stamp in row]
    assert len(set(stamps)) == 2 * 2 * 2 * 6
    assert all(0 <= stamp < 2**63 for stamp in stamps)
    longer = oracle.rows((*TOKENS, 7), 2, 7)
    assert {name: tuple(row[:4] for row in layers) for name, layers in longer.items()} == {
        name: tuple(row[2:] for row in layers) for name, layers in rows.items()
    }
    oracle.forget()
    assert not set(oracle.rows(TOKENS, 0, 6)["kv"][0]) & set(rows["kv"][0])


def test_stamps_have_names() -> None:
    """A stamp that was handed out is told in words, one that was not has no owner."""
    oracle = Oracle({"kv": 1}, 2)
    stamp = oracle.rows(TOKENS, 2, 3)["kv"][0][0]
    assert list(oracle.owners_of(stamp)) == ["kv layer 0 position 2 of the prompt (3, 1, 4)"]
    assert list(oracle.owners_of(stamp + 1)) == []


def test_only_whole_computed_pages_can_be_hit() -> None:
    """The longest prefix that was computed counts in whole pages, and ends with a drop of the cache."""
    oracle = Oracle({"kv": 1}, 2)
    oracle.wrote(TOKENS, 5)
    assert [oracle.computed(TOKENS), oracle.computed((3, 1, 4, 8)), oracle.computed((3, 2))] == [4, 2, 0]
    oracle.forget()
    assert oracle.computed(TOKENS) == 0


def test_entries_tell_the_content_of_a_page() -> None:
    """A page in the tree has the entry that a request with its prefix makes of it, wherever nodes are cut."""
    trunk = Node(node=1, parent=None, start=0, tokens=(3, 1), pages=(7,), base=0, locks=0)
    leaf = Node(node=2, parent=1, start=1, tokens=(4, 1, 5, 9), pages=(4, 5), base=0, locks=0)
    whole = Node(node=3, parent=None, start=0, tokens=TOKENS, pages=(7, 4, 5), base=0, locks=0)
    split = cached_entries(RankView(rank=0, nodes=(trunk, leaf)))
    assert split == cached_entries(RankView(rank=0, nodes=(whole,))) == set(prefix_entries(TOKENS, (7, 4, 5), 2))
    assert set(prefix_entries((3, 2, 4, 1), (7, 4), 2)) & split == set()


def test_the_story_counts_what_was_met() -> None:
    """Hits, chunks, declined inserts, evictions and splits are events; an eviction forgets what was kept."""
    story = Story(Config(page_size=2, layers=1))
    page = Node(node=1, parent=None, start=0, tokens=(3, 1), pages=(7,), base=0, locks=1)
    empty, full = Snapshot((RankView(rank=0, nodes=()),)), Snapshot((RankView(rank=0, nodes=(page,)),))
    rows = story.oracle.rows(TOKENS, 0, 2)
    story.tell(Open("a", TOKENS), Ok(Opened(0)), empty, empty)
    story.tell(Extend("a", 2, rows), Ok(Extended(0, 2, ())), empty, full)
    story.tell(Open("b", TOKENS), Ok(Opened(2)), full, full)
    story.tell(Extend("b", 2, rows), Ok(Extended(2, 4, ())), full, full)
    story.tell(Finish("a"), Ok(Finished(0)), full, full)
    assert story.finished == {TOKENS[:2]: 0}
    story.tell(Finish("b"), Ok(Finished(4)), full, empty)
    assert story.finished == {TOKENS[:4]: 4}
    events = ("cold", "hit", "extended", "read a prefix", "finished", "declined", "evicted", "split", "raced")
    assert [story.seen[event] for event in events] == [1, 1, 2, 1, 2, 1, 1, 0, 0]

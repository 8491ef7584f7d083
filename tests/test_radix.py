from __future__ import annotations

import random

import pytest

from ci.register import register_cpu_ci
from kvshard_ref.errors import CyclicOrderError, GeometryError, UnbalancedLockError
from kvshard_ref.node import Node
from kvshard_ref.placement import Placement
from kvshard_ref.radix import Insert, RadixTree

register_cpu_ci(est_time=10, stage="commit")

N = 4


def tree(shards: int = N) -> RadixTree:
    return RadixTree(Placement(shards, 4))


def chain(base: int, count: int, local: int = 1, shards: int = N) -> list[int]:
    """Page ids of a chain; chains with different `local` ranges share none."""
    return [(local + position) * shards + (base + position) % shards for position in range(count)]


def evictable_sum(cached: RadixTree) -> int:
    return sum(cached.evictable_counts())


def cached_counts(cached: RadixTree) -> list[int]:
    owners = [page % N for node in cached.nodes() for page in node.pages]
    return [owners.count(owner) for owner in range(N)]


def state(cached: RadixTree) -> list[tuple[object, ...]]:
    nodes = [(node.id, node.keys, node.pages, node.base, node.locks, node.last_access) for node in cached.nodes()]
    return [*nodes, (cached.clock, cached.splits, cached.evictable_counts(), cached_counts(cached))]


def test_match_is_read_only_and_stops_at_the_first_difference() -> None:
    """Match returns the longest common prefix, also inside a node, and changes nothing."""
    cached = tree()
    pages = chain(2, 7)
    cached.insert("abcdefg", pages, 2)
    before = state(cached)
    found = cached.match("abcxyz")
    assert (3, pages[:3]) == (found.node_pages, found.pages)
    assert "abcdefg" == "".join(map(str, found.node.keys))
    assert pages[:2] == cached.match("abcdefg", pages_max=2).pages
    assert pages == cached.match("abcdefgh").pages
    assert (cached.root, 0, [], 0) == cached.match("xyz")
    assert (cached.root, 0, [], 0) == cached.match("abc", pages_max=0)
    assert before == state(cached)


def test_insert_splits_and_shares_the_prefix() -> None:
    """A second chain with the same base hangs below the split point; both halves keep base, locks and access time."""
    cached = tree()
    first = chain(1, 5)
    old = cached.insert("abcde", first, 1)
    handle = cached.lock(cached.match("abcde"))
    time = handle.last_access
    fresh = chain(1, 6, local=20)
    new = cached.insert("abcxyz", fresh, 1)
    assert (3, first[:3] + fresh[3:], False) == (new.matched_pages, new.pages, new.declined)
    upper, lower, leaf = cached.nodes()
    assert (lower, leaf) == (old.node, new.node)
    assert [1, 1, 1] == [node.base for node in (upper, lower, leaf)]
    assert [1, 1, 0] == [node.locks for node in (upper, lower, leaf)]
    assert (time, time + 1, time + 1) == (lower.last_access, upper.last_access, leaf.last_access)
    assert [first[:3], first[3:], fresh[3:]] == [node.pages for node in (upper, lower, leaf)]
    assert 1 == cached.splits


def test_insert_of_a_prefix_ends_on_a_node() -> None:
    """An insert that ends inside a node splits it, so that the returned node's path is exactly the inserted keys."""
    cached = tree()
    pages = chain(0, 4)
    cached.insert("abcd", pages, 0)
    done = cached.insert("ab", chain(0, 2, local=20), 0)
    assert done.node is not None
    assert (pages[:2], 2, pages[:2]) == (done.node.pages, done.matched_pages, done.pages)


CACHED = chain(0, 2)
FOREIGN = chain(1, 4, local=30)
SAME = chain(0, 4, local=30)


@pytest.mark.parametrize(
    ("keys", "pages", "base", "matched", "declined"),
    [
        pytest.param("abcd", FOREIGN, 1, 2, True, id="foreign tail behind an overlap of 8 tokens"),
        pytest.param("ab", FOREIGN[:2], 1, 2, True, id="full match under a foreign base"),
        pytest.param("axyz", FOREIGN, 1, 1, True, id="partly matched foreign node"),
        pytest.param("abcd", SAME, 0, 2, False, id="same base attaches"),
        pytest.param("abcd", SAME, 4, 2, False, id="same base, not reduced mod N"),
        pytest.param("ab", SAME[:2], 0, 2, False, id="full match under the same base"),
        pytest.param("xyzw", FOREIGN, 1, 0, False, id="unmatched never declines"),
        pytest.param("abcd", SAME, None, 2, False, id="base None never declines"),
        pytest.param("xyzw", FOREIGN, None, 0, False, id="base None on a new chain"),
    ],
)
def test_decline_rules(keys: str, pages: list[int], base: int | None, matched: int, declined: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """An insert is declined whole exactly when its deepest matched node has another rotation base."""
    cached = tree()
    target = cached.insert("ab", CACHED, 0).node
    before = state(cached)
    done = cached.insert(keys, pages, base)
    assert (declined, matched) == (done.declined, done.matched_pages)
    if declined:
        assert (target, []) == (done.node, done.pages)
        assert before == state(cached)
    else:
        assert CACHED[:matched] + pages[matched:] == done.pages == cached.match(keys).pages
        assert {0 if matched else 1} == {done.node.base if done.node else None}


def test_empty_keys_are_not_declined() -> None:
    """An insert without a whole page does nothing, before any rotation check."""
    cached = tree()
    cached.insert("ab", CACHED, 0)
    before = state(cached)
    assert Insert(None, 0, [], declined=False) == cached.insert("", [], 3)
    assert before == state(cached)


def test_unsharded_trees_never_decline() -> None:
    """At N=1 every base is the same, with or without None."""
    cached = tree(shards=1)
    cached.insert("ab", [1, 2], None)
    assert [1, 2, 7] == cached.insert("abc", [5, 6, 7], 0).pages
    assert [1, 2, 9] == cached.insert("abd", [5, 6, 9], None).pages


def test_locks_survive_a_split_by_another_insert() -> None:
    """Lock, split by another insert, unlock: all locks are zero and every cached page is evictable again."""
    cached = tree()
    cached.insert("abcdef", chain(3, 6), 3)
    handle = cached.lock(cached.match("abcdef"))
    assert 0 == evictable_sum(cached)
    cached.insert("abXY", chain(3, 4, local=20), 3)
    short = cached.lock(cached.match("abcd"))
    assert [2, 2, 1, 0] == [node.locks for node in cached.nodes()]
    assert 2 == evictable_sum(cached)
    cached.unlock(handle)
    assert [1, 1, 0, 0] == [node.locks for node in cached.nodes()]
    cached.unlock(short)
    assert [0, 0, 0, 0] == [node.locks for node in cached.nodes()]
    assert cached_counts(cached) == cached.evictable_counts()
    assert 8 == len(cached.evict([100]).pages)
    assert ([0] * N, [0] * N) == (cached_counts(cached), cached.evictable_counts())


def test_lock_protects_exactly_the_match() -> None:
    """Locking a match that ends inside a node protects the matched part only; eviction takes the rest."""
    cached = tree()
    pages = chain(0, 6)
    cached.insert("abcdef", pages, 0)
    match = cached.match("abcd")
    taken = cached.lockable_counts(match)
    before = cached.evictable_counts()
    cached.lock(match)
    assert taken == [was - now for was, now in zip(before, cached.evictable_counts(), strict=True)] == [1, 1, 1, 1]
    assert pages[4:] == cached.evict([100]).pages
    assert pages[:4] == cached.match("abcdef").pages


def test_lockable_counts_leave_out_what_is_locked() -> None:
    """Only pages that no other request protects are lost to eviction by a further lock."""
    cached = tree()
    cached.insert("abcdef", chain(2, 6), 2)
    cached.lock(cached.match("abc"))
    deeper = cached.match("abcde")
    assert [0, 1, 1, 0] == cached.lockable_counts(cached.match("abcde"))  # positions 3, 4 of base 2: classes 1, 2
    cached.lock(deeper)
    assert [0, 0, 0, 0] == cached.lockable_counts(cached.match("abcde"))


def test_root_needs_no_lock() -> None:
    """A match of nothing locks and unlocks the root, any number of times, without effect."""
    cached = tree()
    handle = cached.lock(cached.match("abc"))
    assert (cached.root, 0) == (handle, handle.locks)
    cached.unlock(handle)
    cached.unlock(handle)
    assert [] == cached.evict([1]).pages


def test_unbalanced_unlock_is_named() -> None:
    """Unlocking more often than locking is an error that shows the node and leaves the counts alone."""
    cached = tree()
    cached.insert("ab", CACHED, 0)
    handle = cached.lock(cached.match("ab"))
    cached.unlock(handle)
    before = state(cached)
    with pytest.raises(UnbalancedLockError, match=r"node 1 \(2 pages\) with 0 locks, expected at least 1"):
        cached.unlock(handle)
    assert before == state(cached)


def test_least_recently_used_leaf_goes_first() -> None:
    """Inserts and locks refresh a chain; eviction follows that order, leaf before parent."""
    cached = tree()
    one, two, three = (chain(0, 2, local=10 * step) for step in (1, 2, 3))
    for keys, pages in (("ab", one), ("cd", two), ("ef", three)):
        cached.insert(keys, pages, 0)
    tail = chain(0, 3, local=40)
    cached.insert("abX", tail, 0)  # refreshes "ab", and must go before it
    cached.unlock(cached.lock(cached.match("cd")))
    assert [three, tail[2:], one, two] == [cached.evict([1]).pages for _ in range(4)]
    assert [] == cached.evict([1]).pages


def test_eviction_takes_no_page_when_none_is_short() -> None:
    """A shortage of zero, or a negative one, evicts nothing."""
    cached = tree()
    cached.insert("ab", CACHED, 0)
    assert [] == cached.evict([0, 0, 0, -3]).pages
    assert CACHED == cached.match("ab").pages


def test_eviction_spares_leaves_without_a_short_class() -> None:
    """Only chains that hold a page of a short class go, least recently used first, and no more than needed."""
    cached = tree()
    singles = {step: chain(step % N, 1, local=step + 1) for step in range(8)}
    for step, pages in singles.items():
        cached.insert(f"{step}", pages, step % N)
    assert singles[2] == cached.evict([0, 0, 1, 0]).pages
    assert singles[3] + singles[6] + singles[7] == cached.evict([0, 0, 1, 2]).pages
    assert [] == cached.evict([0, 0, 0, 1]).pages
    assert [2, 2, 0, 0] == cached.evictable_counts()
    assert singles[0] + singles[1] + singles[4] + singles[5] == cached.evict([8]).pages


def test_eviction_reaches_a_short_class_through_its_children() -> None:
    """A leaf without the short class goes when its unlocked parent holds it, and stays when that parent is locked."""
    cached = tree()
    pages = chain(0, 2)
    cached.insert("a", pages[:1], 0)
    cached.insert("ab", pages, 0)
    other = chain(1, 1, local=9)
    cached.insert("x", other, 1)
    handle = cached.lock(cached.match("a"))
    assert [] == cached.evict([1, 0, 0, 0]).pages
    cached.unlock(handle)
    assert [pages[1], pages[0]] == cached.evict([1, 0, 0, 0]).pages
    assert other == cached.match("x").pages


def test_misuse_of_insert_is_named() -> None:
    """Unequal lengths and pages that do not go round the classes are refused, and the tree stays as it was."""
    cached = tree()
    cached.insert("ab", CACHED, 0)
    before = state(cached)
    with pytest.raises(GeometryError, match="2 keys with 1 pages, expected one page per key"):
        cached.insert("xy", [4], 0)
    with pytest.raises(CyclicOrderError, match=r"page 8 at position 1 .* base 0: owner 0, expected 1"):
        cached.insert("xy", [4, 8], 0)
    with pytest.raises(CyclicOrderError, match=r"page 33 at position 0 .* base 0: owner 1, expected 0"):
        cached.insert("abc", chain(1, 3, local=8), None)
    assert before == state(cached)


def oldest_leaf(cached: RadixTree) -> Node | None:
    """What LRU means, by looking at every node."""
    leaves = [node for node in cached.nodes() if not node.children and not node.locks]
    return min(leaves, key=lambda node: (node.last_access, node.id), default=None)


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_order_and_counts(seed: int) -> None:
    """Over random inserts, locks, unlocks and evictions the victim is the oldest leaf and the counts add up."""
    rng = random.Random(seed)
    cached = tree()
    handles: list[Node] = []
    evictions = 0
    for step in range(300):
        keys = "".join(rng.choices("ab", k=rng.randint(1, 8)))
        action = rng.choice(("insert", "insert", "lock", "unlock", "evict"))
        if action == "insert":
            base = ord(keys[0]) % N
            cached.insert(keys, chain(base, len(keys), local=10 * step + 1), base)
        elif action == "lock":
            handles.append(cached.lock(cached.match(keys)))
        elif action == "unlock" and handles:
            cached.unlock(handles.pop(rng.randrange(len(handles))))
        elif action == "evict":
            victim = oldest_leaf(cached)
            evictions += victim is not None
            assert (victim.pages if victim else []) == cached.evict([1]).pages
        for counts, nodes in (
            (cached_counts(cached), list(cached.nodes())),
            (cached.evictable_counts(), [node for node in cached.nodes() if not node.locks]),
        ):
            owners = [page % N for node in nodes for page in node.pages]
            assert [owners.count(owner) for owner in range(N)] == counts
    for handle in handles:
        cached.unlock(handle)
    assert cached_counts(cached) == cached.evictable_counts()
    assert evictions > 10

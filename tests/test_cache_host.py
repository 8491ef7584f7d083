"""What the host tier does with copies that are in flight."""

from __future__ import annotations

from ci.register import register_cpu_ci
from kvshard_ref.cache import PageCache
from kvshard_ref.placement import Placement

register_cpu_ci(est_time=10, stage="commit")

PS = 4


def served(cache: PageCache, name: str, keys: str) -> None:
    """A prompt of whole pages, computed and finished."""
    request = cache.open(name, keys, len(keys) * PS)
    cache.extend([(name, request.tokens - request.cached)])
    cache.finish(name)


def cached_keys(cache: PageCache) -> list[tuple[str, bool, bool]]:
    """Per node its keys, whether it is on the device, and whether it has a copy."""
    return [("".join(map(str, node.keys)), bool(node.pages), bool(node.slots)) for node in cache.tree.nodes()]


def test_a_copy_in_flight_is_not_dropped_with_its_parent() -> None:
    """A leaf that finds no room on the host stays while a copy below it is in flight, and only so long."""
    cache = PageCache(Placement(1, PS), 4, None, "tight", 1, "write_back")
    served(cache, "first", "a")
    served(cache, "second", "ab")
    host = cache.host
    assert host is not None

    assert 1 == len(cache.tree.evict([1], spill=host.back_up).pages)
    assert [("a", True, False), ("b", False, True)] == cached_keys(cache)

    assert ([], []) == cache.tree.evict([1], spill=host.back_up)
    assert [("a", True, False), ("b", False, True)] == cached_keys(cache)

    host.acknowledge(1)
    assert 1 == len(cache.tree.evict([1], spill=host.back_up).pages)
    assert [("a", False, True)] == cached_keys(cache)


def test_a_copy_in_flight_is_not_evicted_from_the_host() -> None:
    """A copy that not all ranks have acknowledged keeps its host pages, also when nobody holds the node."""
    cache = PageCache(Placement(1, PS), 4, None, "tight", 2, "write_through")
    served(cache, "first", "a")
    host = cache.host
    assert host is not None

    assert ([], []) == cache.tree.evict([1], "host")
    assert [("a", True, True)] == cached_keys(cache)

    host.acknowledge(1)
    assert 1 == len(cache.tree.evict([1], "host").slots)
    assert [("a", True, False)] == cached_keys(cache)


def test_an_eviction_waits_as_often_as_its_own_copies_are_in_the_way() -> None:
    """Three leaves in a chain and one host page: all that is asked for leaves, by a wait for each copy in turn."""
    cache = PageCache(Placement(1, PS), 4, None, "tight", 1, "write_back")
    served(cache, "first", "a")
    served(cache, "second", "ab")
    served(cache, "third", "abc")
    host = cache.host
    assert host is not None
    waits: list[int] = []

    def drain() -> None:
        waits.append(len(host.in_flight))
        host.take_planned()
        host.acknowledge(len(host.in_flight))

    host.drain = drain
    assert 3 * PS == cache.evict(3 * PS)
    assert [1, 1] == waits
    assert [0] == cache.tree.evictable_counts()


def test_copies_that_can_go_are_those_that_nobody_holds_or_continues() -> None:
    """A locked or pinned copy keeps the copies above it; what is left is what an eviction frees."""
    cache = PageCache(Placement(1, PS), 8, None, "tight", 8, "write_through")
    served(cache, "first", "a")
    served(cache, "second", "ab")
    served(cache, "other", "c")
    host = cache.host
    assert host is not None
    assert [0] == cache.tree.evictable_copies()

    host.acknowledge(1)  # "a" could go, but not from above "b"
    assert [0] == cache.tree.evictable_copies()

    host.acknowledge(1)  # "c" still is in flight
    assert [2] == cache.tree.evictable_copies()

    cache.open("holder", "abd", 3 * PS)
    assert [0] == cache.tree.evictable_copies()

    cache.abort("holder")
    host.acknowledge(1)
    assert [3] == cache.tree.evictable_copies()
    assert 3 == len(cache.tree.evict([9], "host").slots)


def test_no_copy_goes_for_one_that_cannot_be_made() -> None:
    """Where room for all of a node cannot be made, what is on the host stays."""
    cache = PageCache(Placement(1, PS), 4, None, "tight", 1, "write_through")
    served(cache, "first", "a")
    host = cache.host
    assert host is not None
    host.acknowledge(1)

    served(cache, "large", "bc")
    assert [("a", True, True), ("bc", True, False)] == cached_keys(cache)

    served(cache, "small", "d")
    assert [("a", True, False), ("bc", True, False), ("d", True, True)] == cached_keys(cache)

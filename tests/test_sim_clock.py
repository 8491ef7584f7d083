from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.sim.clock import LINES_MAX, Clock, Clocks

register_cpu_ci(est_time=10, stage="commit")

STREAMS = 3
HOSTS = 2
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), st.integers(0, STREAMS - 1), st.integers(0, HOSTS - 1)),
        st.tuples(st.just("host"), st.integers(0, HOSTS - 1), st.just(0)),
        st.tuples(st.just("record"), st.integers(0, STREAMS - 1), st.integers(0, HOSTS - 1)),
        st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, 9)),
        st.tuples(st.just("synchronize"), st.integers(0, HOSTS - 1), st.integers(0, 9)),
        st.tuples(st.just("meet"), st.permutations(range(STREAMS)), st.lists(st.integers(0, HOSTS - 1), min_size=2)),
    ),
    max_size=25,
)


class Graph:
    """The same order as nodes and edges, without clocks: a line is its last node, an edge is 'before'."""

    def __init__(self, lines: int) -> None:
        self.before: list[set[int]] = []  # per node all nodes before it
        self.last: list[set[int]] = [set() for _ in range(lines)]  # per line what its next node comes after
        self.hosts = range(STREAMS, lines)

    def add(self, line: int, *others: set[int]) -> int:
        after = set(self.last[line]).union(*others)
        node = len(self.before)
        self.before.append(after.union(*(self.before[other] for other in after)))
        self.last[line] = {node}
        return node


def play(steps: list[tuple[str, object, object]]) -> tuple[list[Clock], Graph]:
    clocks, graph = Clocks(), Graph(STREAMS + HOSTS)
    for line in range(STREAMS + HOSTS):
        clocks.line(f"line {line}")
    nodes: list[Clock] = []
    events: list[tuple[Clock, set[int]]] = []
    for kind, first, second in steps:
        if kind == "meet":
            assert isinstance(first, list)
            assert isinstance(second, list)
            pairs = list(zip(first, second, strict=False))
            lines, hosts = [line for line, _ in pairs], [STREAMS + host for _, host in pairs]
            before = set[int]().union(
                *(graph.last[line] | graph.last[host] for line, host in zip(lines, hosts, strict=True))
            )
            nodes.extend(clocks.meet(lines, hosts))
            for line in lines:
                graph.add(line, before)
            continue
        assert isinstance(first, int)
        assert isinstance(second, int)
        if kind == "issue":
            nodes.append(clocks.issue(first, STREAMS + second))
            graph.add(first, graph.last[STREAMS + second])
        elif kind == "host":
            nodes.append(clocks.host_op(STREAMS + first))
            graph.add(STREAMS + first)
        elif kind == "record":
            events.append((clocks.now(first, STREAMS + second), graph.last[first] | graph.last[STREAMS + second]))
            graph.last[first] = set(events[-1][1])  # the event itself waits for its host
        elif events:
            line = first if kind == "wait" else STREAMS + first
            clock, after = events[second % len(events)]
            clocks.join(line, clock)
            graph.last[line] = graph.last[line] | after
    return nodes, graph


@given(STEPS)
def test_clocks_know_what_is_reachable(steps: list[tuple[str, object, object]]) -> None:
    """For any program of streams, hosts, events and collectives: known is what the graph of program order reaches."""
    nodes, graph = play(steps)
    known = [
        {other for other, early in enumerate(nodes) if other != node and late.knows(early.line, early.tick)}
        for node, late in enumerate(nodes)
    ]
    assert graph.before == known


def test_a_wait_covers_what_was_there_at_the_record() -> None:
    """An event knows the work before its record only; a wait passes it on to all later work of the waiting stream."""
    clocks = Clocks()
    host, first, second = clocks.line("host"), clocks.line("first"), clocks.line("second")
    before = clocks.issue(first, host)
    event = clocks.now(first)
    after = clocks.issue(first, host)
    assert not clocks.issue(second, host).knows(first, before.tick)
    clocks.join(second, event, "here.py:1")
    late = clocks.issue(second, host)
    assert (True, False) == (late.knows(first, before.tick), late.knows(first, after.tick))
    assert {first: "here.py:1"} == clocks.waits[second]


def test_work_follows_what_its_host_waited_for() -> None:
    """When the host has waited for one stream, what it then issues on another comes after that."""
    clocks = Clocks()
    host, first, second = clocks.line("host"), clocks.line("first"), clocks.line("second")
    work = clocks.issue(first, host)
    early = clocks.issue(second, host)
    clocks.join(host, clocks.now(first))
    late = clocks.issue(second, host)
    assert (False, True) == (early.knows(first, work.tick), late.knows(first, work.tick))


def test_parts_of_a_collective() -> None:
    """After a collective every rank knows what all did before it, but not that the others have left it."""
    clocks = Clocks()
    hosts = [clocks.line("host 0"), clocks.line("host 1")]
    streams = [clocks.line("stream 0"), clocks.line("stream 1")]
    before = [clocks.issue(stream, host) for stream, host in zip(streams, hosts, strict=True)]
    parts = clocks.meet(streams, hosts)
    assert [True, True] == [
        part.knows(work.line, work.tick) for part, work in zip(parts, reversed(before), strict=True)
    ]
    after = clocks.issue(streams[0], hosts[0])
    assert (True, False) == (after.knows(streams[0], parts[0].tick), after.knows(streams[1], parts[1].tick))


def test_lines_are_limited() -> None:
    """The line too many is an error that says what to do."""
    clocks = Clocks()
    for index in range(LINES_MAX):
        clocks.line(f"stream {index}")
    with pytest.raises(ValueError, match=r"line\('one more'\): there are 4096 streams .* already; make streams once"):
        clocks.line("one more")

"""Random programs of streams, and a search in the graph of their order: an oracle without clocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from harness.sim.clock import Clock
from harness.sim.race import Race
from tests.sim_bench import Bench

STREAMS = ("main", "side", "third")
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda t: t,
    "upper rows": lambda t: t[:2],
    "lower rows": lambda t: t[2:],
    "one row": lambda t: t[3],
    "left columns": lambda t: t[:, :1],
    "every other": lambda t: t.view(-1)[::2],
}
STEPS = st.lists(
    st.one_of(
        *[
            st.tuples(st.just(kind), st.sampled_from(STREAMS), st.integers(0, 1), st.sampled_from(list(VIEWS)))
            for kind in ("read", "write", "copy", "rows")
        ],
        st.tuples(st.just("record"), st.sampled_from(STREAMS), st.just(0), st.just("")),
        st.tuples(st.just("wait"), st.sampled_from(STREAMS), st.integers(0, 5), st.just("")),
        st.tuples(st.just("wait_stream"), st.sampled_from(STREAMS), st.integers(0, 2), st.just("")),
        st.tuples(st.just("synchronize"), st.sampled_from(STREAMS), st.just(0), st.just("")),
    ),
    max_size=22,
)
Step = tuple[str, str, int, str]
ROWS = [0, 2]


class Oracle:
    """Program order and event edges as an explicit graph; all pairs of accesses are compared, element by element."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []
        self.touched: list[dict[tuple[int, int], bool]] = []  # (tensor, element) -> is it written
        self.last: dict[str, set[int]] = {name: set() for name in (*STREAMS, "host")}

    def record(self, stream: str) -> set[int]:
        """What an event on the stream stands for; it is recorded by the host."""
        self.last[stream] = self.last[stream] | self.last["host"]
        return set(self.last[stream])

    def access(self, stream: str, touched: dict[tuple[int, int], bool]) -> set[int]:
        """The earlier accesses that race with this one."""
        after = self.last[stream] | self.last["host"]
        ordered = after.union(*(self.before[node] for node in after))
        node = len(self.before)
        self.before.append(ordered)
        self.touched.append(touched)
        self.last[stream] = after | {node}
        return {
            other
            for other in range(node)
            if other not in ordered
            and any(touched[cell] or self.touched[other][cell] for cell in touched.keys() & self.touched[other].keys())
        }


def apply(step: Step, tensors: list[Tensor]) -> None:
    """The operation of an access."""
    kind, _, number, view = step
    target, source = VIEWS[view](tensors[number]), VIEWS[view](tensors[1 - number])
    if kind == "read":
        torch.ops.aten.equal.default(target, target)
    elif kind == "write":
        target.fill_(1)
    elif kind == "copy":
        target.copy_(source)
    else:
        tensors[number].index_fill_(0, torch.tensor(ROWS), 2)


def touched(step: Step) -> dict[tuple[int, int], bool]:
    """The elements of an access, and whether it writes them."""
    kind, _, number, view = step
    numbers = torch.arange(8).reshape(4, 2)
    if kind == "rows":
        return {(number, cell): True for cell in numbers[ROWS].flatten().tolist()}
    cells = VIEWS[view](numbers).flatten().tolist()
    found = {(number, cell): kind != "read" for cell in cells}
    return found | {(1 - number, cell): False for cell in cells if kind == "copy"}


def replay(steps: list[Step]) -> tuple[int, set[int], Race | None]:
    """The number of accesses until one races by the oracle, those it races with, and what the check said then."""
    bench, oracle = Bench(lambda: f"access {len(oracle.before) - 1}"), Oracle()
    tensors = [torch.zeros(4, 2), torch.zeros(4, 2)]
    events: list[tuple[Clock, set[int]]] = []
    for step in steps:
        kind, stream, number, _ = step
        if kind == "record":
            events.append((bench.record(stream), oracle.record(stream)))
        elif kind == "wait":
            for clock, after in events[number : number + 1]:
                bench.wait(stream, clock)
                oracle.last[stream] |= after
        elif kind == "wait_stream":
            bench.wait(stream, STREAMS[number])
            oracle.last[stream] |= oracle.record(STREAMS[number])
        elif kind == "synchronize":
            bench.synchronize(stream)
            oracle.last["host"] |= oracle.record(stream)
        else:
            racing = oracle.access(stream, touched(step))
            try:
                with bench, bench.on(stream):
                    apply(step, tensors)
            except Race as race:
                return len(oracle.before), racing, race
            if racing:
                return len(oracle.before), racing, None
    return len(oracle.before), set(), None

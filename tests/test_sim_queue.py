from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.sim.queue import Entry, FailedLater, Lane, Meeting, Queue
from harness.sim.race import Deadlock, SimFinding, UnknownOp
from harness.sim.schedule import HOLD, IN_ORDER, LAZY, Schedule, only, schedules, without

register_cpu_ci(est_time=10, stage="commit")


class Log:
    """A queue whose work writes down its name; work that may run at once does."""

    def __init__(self, schedule: Schedule = IN_ORDER, lanes: tuple[int, ...] = (0, 0)) -> None:
        self.queue = Queue(schedule)
        self.lanes = [self.queue.lane(rank) for rank in lanes]
        self.ran: list[str] = []

    def issue(self, name: str, lane: int = 0) -> Entry | None:
        if self.queue.ready(self.lanes[lane]):
            self.ran.append(name)
            return None
        return self.queue.put(self.lanes[lane], name, f"site of {name}", lambda: self.ran.append(name))

    def wait(self, lane: int, other: int) -> None:
        self.queue.wait(self.lanes[lane], self.lanes[other].tail, "here")

    def meet(self, name: str, *lanes: int) -> None:
        if self.queue.ready(*(self.lanes[lane] for lane in lanes)):
            self.ran.append(name)
            return
        meeting = Meeting(name, len(lanes), lambda: self.ran.append(name))
        for lane in lanes:
            self.queue.join(meeting, self.lanes[lane], f"site of {name}")


class TestForce:
    def test_minimal(self) -> None:
        """A host that waits runs what it waits for and the ancestors of that, and nothing else."""
        log = Log(LAZY, (0, 0, 0))
        log.issue("a0", 0)
        log.issue("b0", 1)
        log.wait(1, 0)
        log.issue("b1", 1)
        log.issue("a1", 0)
        log.issue("c0", 2)
        log.issue("b2", 1)
        wanted = log.lanes[1].pending[2]
        assert ("b1", []) == (wanted.name, log.ran)
        log.queue.force(wanted)
        assert ["b0", "a0", "b1"] == log.ran
        assert 3 == log.queue.pending

    def test_done(self) -> None:
        """What is done, or never was anything, needs no run."""
        log = Log()
        log.issue("a")
        log.queue.force(None)
        log.queue.force(log.lanes[0].tail)
        assert ["a"] == log.ran

    def test_wait_for_work_that_is_done(self) -> None:
        """A wait for what has run leaves nothing behind."""
        log = Log(((0, HOLD), (1, 0)))
        log.issue("a", 0)
        log.issue("b", 0)
        log.wait(1, 0)
        assert ([], ["a", "b"]) == (list(log.lanes[1].pending), log.ran)

    def test_finish(self) -> None:
        """All that is left runs in issue order."""
        log = Log(LAZY)
        for name, lane in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
            log.issue(name, lane)
        log.queue.finish()
        assert ["a", "b", "c", "d"] == log.ran


class TestModes:
    @staticmethod
    def program(schedule: Schedule) -> list[str]:
        """Two lanes of two ranks each; lane 1 of each rank waits for the first piece of lane 0."""
        log = Log(schedule, (0, 0, 1, 1))
        for rank in range(2):
            compute, gather = 2 * rank, 2 * rank + 1
            log.issue(f"{rank}c0", compute)
            log.wait(gather, compute)
            log.issue(f"{rank}c1", compute)
            log.issue(f"{rank}g0", gather)
            log.issue(f"{rank}c2", compute)
        return log.ran

    def test_in_order(self) -> None:
        """Everything runs when it is issued."""
        assert ["0c0", "0c1", "0g0", "0c2", "1c0", "1c1", "1g0", "1c2"] == self.program(IN_ORDER)

    def test_lazy(self) -> None:
        """Nothing runs unless somebody waits."""
        assert [] == self.program(LAZY)

    def test_only(self) -> None:
        """The stream runs at once, and of the others only what it waits for."""
        assert ["0c0", "0g0", "1c0", "1g0"] == self.program(((0, only(1)),))
        assert ["0c0", "0c1", "0c2", "1c0", "1c1", "1c2"] == self.program(((0, only(0)),))

    def test_only_of_one_rank(self) -> None:
        """A stream of one rank alone."""
        assert ["1c0", "1g0"] == self.program(((0, only(1, 1)),))

    def test_without(self) -> None:
        """The stream stays behind, and what waits for it."""
        assert ["0c0", "0c1", "0c2", "1c0", "1c1", "1c2"] == self.program(((0, without(1)),))
        assert [] == self.program(((0, without(0)),))
        assert ["0c0", "0c1", "0g0", "0c2"] == self.program(((0, without(0, 1)),))

    def test_change(self) -> None:
        """A change of mode lets what it frees run before the operation of its position."""
        assert ["0c0", "0c1", "0g0", "0c2", "1c0", "1c1", "1g0", "1c2"] == self.program(((0, HOLD), (3, 0)))
        assert ["0c0", "0g0"] == self.program(((0, HOLD), (3, only(1)), (4, HOLD)))


class TestMeetings:
    def test_both_heads(self) -> None:
        """A collective runs once, after what is before it on every rank's lane."""
        log = Log(LAZY, (0, 1))
        log.issue("a", 0)
        log.issue("b", 1)
        log.meet("all", 0, 1)
        log.issue("c", 1)
        log.queue.force(log.lanes[0].tail)
        assert ["a", "b", "all"] == log.ran

    def test_only_brings_the_peers(self) -> None:
        """A stream that runs ahead takes the other ranks' parts of its collectives along."""
        log = Log(((0, only(0, 0)),), (0, 1))
        log.issue("b", 1)
        log.meet("all", 0, 1)
        assert ["b", "all"] == log.ran

    def test_without_keeps_it_back(self) -> None:
        """A stream that stays behind keeps the collectives it is part of."""
        log = Log(((0, without(0, 1)),), (0, 1))
        log.meet("all", 0, 1)
        log.issue("a", 0)
        assert [] == log.ran

    def test_deadlock(self) -> None:
        """A peer that never comes is named, with the site of those that came; nothing hangs before a host waits."""
        log = Log(LAZY, (0, 1, 2))
        meeting = Meeting("all_gather", 3, lambda: None)
        log.queue.join(meeting, log.lanes[0], "gather.py:7 in prefetch")
        log.issue("a", 0)
        log.queue.polled()
        with pytest.raises(Deadlock, match=r"all_gather.*rank 0 at gather.py:7 in prefetch: ranks \[1, 2\] of 3 never"):
            log.queue.force(log.lanes[0].tail)

    @pytest.mark.parametrize("schedule", [IN_ORDER, ((0, only(0)),), ((0, without(1)),)])
    def test_deadlock_in_all_modes(self, schedule: Schedule) -> None:
        """Other lanes go on past a collective that lacks a peer, and the end finds it."""
        log = Log(schedule, (0, 1))
        log.queue.join(Meeting("all_gather", 2, lambda: None), log.lanes[0], "here")
        log.issue("a", 0)
        log.issue("b", 1)
        with pytest.raises(Deadlock, match=r"ranks \[1\] of 2 never issued it"):
            log.queue.finish()
        assert ["b"] == log.ran

    def test_circle(self) -> None:
        """Two collectives in opposite order on two ranks wait for each other."""
        log = Log(LAZY, (0, 1))
        first, second = (Meeting(name, 2, lambda: None) for name in ("first", "second"))
        for lane, order in ((0, (first, second)), (1, (second, first))):
            for meeting in order:
                log.queue.join(meeting, log.lanes[lane], f"rank {lane}")
        with pytest.raises(Deadlock, match=r"second .* waits for first .* waits for second .*: a circle"):
            log.queue.force(log.lanes[0].tail)


class TestErrors:
    @staticmethod
    def failing(error: Exception) -> Queue:
        def work() -> None:
            raise error

        log = Log(LAZY)
        log.queue.put(log.lanes[0], "index_select", "a.py:3 in f", work)
        return log.queue

    def test_work_that_fails(self) -> None:
        """An exception of work that runs late is a finding that names the work, its stream and its site."""
        text = r"index_select on stream 0 of rank 0, issued at a.py:3 in f, failed when it ran: IndexError: 5"
        with pytest.raises(FailedLater, match=text) as caught:
            self.failing(IndexError(5)).finish()
        assert isinstance(caught.value, SimFinding)

    @pytest.mark.parametrize("error", [Deadlock("x"), UnknownOp("x")])
    def test_findings_pass(self, error: Exception) -> None:
        """Findings and harness errors come through as they are."""
        with pytest.raises(type(error), match=r"^x$"):
            self.failing(error).finish()


# ---- any program, any schedule

steps = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), st.integers(0, 3)),
        st.tuples(st.just("wait"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("meet"), st.integers(0, 1)),
        st.tuples(st.just("force"), st.integers(0, 3)),
        st.tuples(st.just("poll")),
    ),
    max_size=25,
)


def play(program: list[tuple[Any, ...]], schedule: Schedule) -> tuple[list[str], set[tuple[str, str]]]:
    """What ran in which order on 2 ranks of 2 lanes, and which pairs of pieces the program orders."""
    log = Log(schedule, (0, 0, 1, 1))
    before: list[list[str]] = [[] for _ in log.lanes]  # per lane what its next piece follows
    ordered: set[tuple[str, str]] = set()
    for number, (step, *lanes) in enumerate(program):
        name = f"{step} {number}"
        if step == "issue":
            log.issue(name, lanes[0])
            members = [lanes[0]]
        elif step == "meet":
            members = [lanes[0], lanes[0] + 2]
            log.meet(name, *members)
        else:
            members = []
        if step == "wait":
            log.wait(*lanes)
            before[lanes[0]] = [*before[lanes[0]], *before[lanes[1]]]
        elif step == "force":
            log.queue.force(log.lanes[lanes[0]].tail)
            assert set(before[lanes[0]]) <= set(log.ran)
        elif step == "poll":
            log.queue.polled()
        known = [earlier for member in members for earlier in before[member]]
        ordered |= {(earlier, name) for earlier in known}
        for member in members:
            before[member] = [*known, name]
    log.queue.finish()
    return log.ran, ordered


@settings(deadline=None)
@given(steps, schedules(streams=2, ranks=2, positions=25))
def test_every_schedule_keeps_the_order(program: list[tuple[Any, ...]], schedule: Schedule) -> None:
    """Under any schedule each piece runs once, after all that lanes, waits and collectives put before it."""
    ran, ordered = play(program, schedule)
    assert sorted(f"{step} {n}" for n, (step, *_) in enumerate(program) if step in {"issue", "meet"}) == sorted(ran)
    place = {name: at for at, name in enumerate(ran)}
    assert [] == [pair for pair in ordered if place[pair[0]] > place[pair[1]]]


@settings(deadline=None)
@given(steps, schedules(streams=2, ranks=2, positions=25))
def test_a_schedule_replays(program: list[tuple[Any, ...]], schedule: Schedule) -> None:
    """The same program under the same schedule runs in the same order."""
    assert play(program, schedule)[0] == play(program, schedule)[0]


@pytest.mark.parametrize("broken", ["wait", "_blocker"])
def test_the_check_sees_lost_waits(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A queue that loses waits or does not wait for peers does not pass the property above."""
    if broken == "wait":
        monkeypatch.setattr(Queue, "wait", lambda *_: None)
        program: list[tuple[Any, ...]] = [("issue", 0), ("wait", 1, 0), ("issue", 1), ("force", 1)]
    else:
        nothing: Callable[[Entry], Entry | None] = lambda _: None  # noqa: E731 - a name for the type checker
        monkeypatch.setattr("harness.sim.queue._blocker", nothing)
        program = [("issue", 2), ("meet", 0), ("force", 0)]
    with pytest.raises((AssertionError, IndexError)):
        test_every_schedule_keeps_the_order.hypothesis.inner_test(program, LAZY)  # type: ignore[attr-defined]  # Hypothesis adds it


def test_lanes_count_per_rank() -> None:
    """The stream of a schedule is the n-th that the rank made."""
    queue = Queue()
    lanes: list[Lane] = [queue.lane(rank) for rank in (0, 1, 1, 0)]
    assert [(0, 0), (1, 0), (1, 1), (0, 1)] == [(lane.rank, lane.index) for lane in lanes]

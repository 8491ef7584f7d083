"""Queue: work that was issued and has not run; runs it in any order that streams, waits and collectives allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

from harness.sim.race import Deadlock, SimFinding, UnknownOp
from harness.sim.schedule import IN_ORDER, Policy, Schedule, checked, mode_of


class FailedLater(SimFinding):
    """Work raised an exception when it ran, while other work was pending; often it reads poison as an index."""


class Entry:
    """A piece of work on a lane; `after` is what it waits for besides the entries before it."""

    __slots__ = ("after", "done", "lane", "meeting", "name", "seq", "site", "work")

    def __init__(self, lane: Lane, seq: int, name: str, site: str, work: Callable[[], None] | None) -> None:
        self.lane = lane
        self.seq = seq
        self.name = name
        self.site = site
        self.work = work
        self.after: Entry | None = None
        self.meeting: Meeting | None = None
        self.done = False


class Lane:
    """One stream of one rank: its pending entries, first in, first out. `tail` is the last one ever put."""

    __slots__ = ("index", "pending", "rank", "tail")

    def __init__(self, rank: int, index: int) -> None:
        self.rank = rank
        self.index = index
        self.pending: deque[Entry] = deque()
        self.tail: Entry | None = None


class Meeting:
    """A collective of `size` ranks: it runs once, when every rank's part is at the head of its lane."""

    __slots__ = ("name", "parts", "size", "work")

    def __init__(self, name: str, size: int, work: Callable[[], None]) -> None:
        self.name = name
        self.size = size
        self.work = work
        self.parts: dict[int, Entry] = {}


class Queue:
    """The pending work of all ranks, and the schedule that moves it on.

    `ready(lanes)` comes before each operation: True means that the operation may run at once, in the caller's hands;
    otherwise the caller puts it. Hosts wait with `force`. `guard` is entered around work that runs later.
    """

    def __init__(self, schedule: Schedule = IN_ORDER, guard: AbstractContextManager[object] | None = None) -> None:
        self.lanes: list[Lane] = []
        self.position = 0  # operations issued
        self.pending = 0
        self._changes = list(reversed(checked(schedule)))
        self._mode = mode_of(0)
        self._guarded = guard or nullcontext()
        self._seq = 0

    def lane(self, rank: int) -> Lane:
        """A new lane of a rank."""
        lane = Lane(rank, sum(other.rank == rank for other in self.lanes))
        self.lanes.append(lane)
        return lane

    def ready(self, *lanes: Lane) -> bool:
        """One operation comes to these lanes (several for a collective): whether the schedule runs it at once."""
        self._advance()
        policy = self._mode.policy
        if policy is Policy.HOLD:
            return False
        if policy is not Policy.ALL:
            concerned = any(self._mode.concerns(lane.rank, lane.index) for lane in lanes)
            if concerned is not (policy is Policy.ONLY):
                return False
        if not self.pending:
            return True
        if policy is Policy.ONLY:
            for lane in lanes:
                self._bring(lane.tail, must=False)
        else:
            self._drain()
        return all(lane.tail is None or lane.tail.done for lane in lanes)

    def put(self, lane: Lane, name: str, site: str, work: Callable[[], None] | None) -> Entry:
        """Append work to a lane."""
        entry = Entry(lane, self._seq, name, site, work)
        self._seq += 1
        lane.pending.append(entry)
        lane.tail = entry
        self.pending += 1
        return entry

    def wait(self, lane: Lane, entry: Entry | None, site: str = "") -> None:
        """What comes to the lane from now on waits for an entry."""
        if entry is not None and not entry.done and entry.lane is not lane:
            self.put(lane, "wait", site, None).after = entry

    def join(self, meeting: Meeting, lane: Lane, site: str) -> Entry:
        """One rank's part of a collective."""
        entry = self.put(lane, meeting.name, site, None)
        entry.meeting = meeting
        meeting.parts[lane.rank] = entry
        return entry

    def force(self, entry: Entry | None) -> None:
        """A host waits for an entry: run it and only what it waits for. Deadlock if that lacks a peer."""
        self._bring(entry, must=True)

    def polled(self) -> None:
        """A host looked and found nothing done: the schedule moves on by one position."""
        self._advance()
        if not self.pending:
            return
        if self._mode.policy is Policy.ONLY:
            self._lead()
        elif self._mode.policy is not Policy.HOLD:
            self._drain()

    def finish(self) -> None:
        """Run all that is left, in issue order."""
        self._mode = mode_of(0)
        self._changes = []
        self._drain()
        for lane in self.lanes:
            self.force(lane.tail)

    def entries(self) -> Iterator[Entry]:
        """All that is pending."""
        return chain.from_iterable(lane.pending for lane in self.lanes)

    # ---- the schedule

    def _advance(self) -> None:
        position = self.position
        self.position += 1
        if not self._changes or self._changes[-1][0] > position:
            return
        while self._changes and self._changes[-1][0] <= position:
            self._mode = mode_of(self._changes.pop()[1])
        if self._mode.policy is Policy.ONLY:
            self._lead()
        elif self._mode.policy is not Policy.HOLD:
            self._drain()

    def _lead(self) -> None:
        """The streams that run ahead catch up with what was issued."""
        for lane in self.lanes:
            if self._mode.concerns(lane.rank, lane.index):
                self._bring(lane.tail, must=False)

    def _drain(self) -> None:
        """Run in issue order whatever can run; in mode "without" the stream it is about stays behind."""
        if not self.pending:
            return
        stays = self._mode.concerns if self._mode.policy is Policy.WITHOUT else None
        lanes = [lane for lane in self.lanes if stays is None or not stays(lane.rank, lane.index)]
        with self._guarded:
            while True:
                heads = [lane.pending[0] for lane in lanes if lane.pending]
                entry = min(
                    (head for head in heads if self._free(head, lanes)), key=lambda head: head.seq, default=None
                )
                if entry is None:
                    return
                self._run(entry)

    @staticmethod
    def _free(head: Entry, lanes: Sequence[Lane]) -> bool:
        """Whether a head can run without other entries before it, on these lanes only."""
        meeting = head.meeting
        if meeting is None:
            return head.after is None or head.after.done
        parts = meeting.parts.values()
        return len(parts) == meeting.size and all(part.lane in lanes and part.lane.pending[0] is part for part in parts)

    # ---- running

    def _bring(self, entry: Entry | None, *, must: bool) -> None:
        """Run an entry and its ancestors; what lacks a peer is a Deadlock if it must run, and is left otherwise."""
        if entry is None or entry.done:
            return
        with self._guarded:
            path = [entry]
            while path:
                if path[-1].done:
                    path.pop()
                    continue
                head = path[-1].lane.pending[0]
                meeting = head.meeting
                if meeting is not None and len(meeting.parts) < meeting.size:
                    if must:
                        raise Deadlock(_lacking(meeting, entry))
                    return
                blocker = _blocker(head)
                if blocker is None:
                    self._run(head)
                elif blocker in path:
                    raise Deadlock(_circle([*path[path.index(blocker) :], blocker]))
                else:
                    path.append(blocker)

    def _run(self, head: Entry) -> None:
        meeting = head.meeting
        parts = [head] if meeting is None else list(meeting.parts.values())
        for part in parts:
            part.lane.pending.popleft()
            part.done = True
            part.after = None
        self.pending -= len(parts)
        work, head.work = (head.work if meeting is None else meeting.work), None
        if work is None:
            return
        try:
            work()
        except (SimFinding, UnknownOp):
            raise
        except Exception as error:
            raise failed(head.name, head.lane, head.site, error) from error


def _blocker(head: Entry) -> Entry | None:
    """An entry that must run before this head of a lane."""
    if head.after is not None and not head.after.done:
        return head.after
    if head.meeting is not None:
        # a part that is not at the head of its lane waits for the entry before it: the lane's head stands for it
        for part in head.meeting.parts.values():
            first = part.lane.pending[0]
            if first is not part:
                return first
    return None


def failed(name: str, lane: Lane, site: str, error: Exception) -> FailedLater:
    """The finding about work that raised."""
    return FailedLater(
        f"{name} on stream {lane.index} of rank {lane.rank}, issued at {site}, failed when it ran: "
        f"{type(error).__name__}: {error}; its shapes were right when it was issued, so look for a missing wait before "
        "what it reads"
    )


def _lacking(meeting: Meeting, entry: Entry) -> str:
    sites = ", ".join(f"rank {rank} at {part.site}" for rank, part in sorted(meeting.parts.items()))
    missing = sorted({*range(meeting.size)} - {*meeting.parts})
    return (
        f"collective {meeting.name}, issued by {sites}: ranks {missing} of {meeting.size} never issued it, and "
        f"{entry.name}, issued at {entry.site}, waits for it; real ranks would hang here. Make every rank issue it"
    )


def _circle(path: Sequence[Entry]) -> str:
    steps = " waits for ".join(
        f"{entry.name} (rank {entry.lane.rank}, stream {entry.lane.index}, {entry.site})" for entry in path
    )
    return f"{steps}: a circle, real ranks would hang here. Issue the collectives in the same order on every rank"

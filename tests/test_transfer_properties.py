from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.transports.memory import Faults
from kvshard_ref.errors import RefusedError
from tests.transfer_rig import INDEX, KV, LAYERS, Request, Rig

register_cpu_ci(est_time=15, stage="commit")

ROOMS = 2
STEPS_MAX = 150
SOURCE_PAGES = 6
"""Per rank."""


@dataclass(frozen=True)
class Job:
    """A request: its length, its chunk ends, the ticks from a chunk to its rows."""

    tokens: int
    ends: tuple[int, ...]
    ready: int
    room: int
    linger: int
    """Steps from complete to release."""


@dataclass(frozen=True)
class Act:
    """What goes wrong, and at which step."""

    step: int
    kind: str
    target: int


@dataclass(frozen=True)
class Scenario:
    ranks: int
    ps: int
    has_index: bool
    decode_pages: int
    jobs: tuple[Job, ...]
    shuffle: tuple[int, ...]
    faults: Faults
    acts: tuple[Act, ...]


ticks = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(tuple)


@st.composite
def scenarios(draw: st.DrawFn, acts_max: int) -> Scenario:
    ranks, ps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    jobs = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 5 * ps))
        ends = draw(st.lists(st.integers(1, tokens), max_size=3))
        jobs.append(
            Job(
                tokens,
                tuple(sorted(ends)),
                draw(st.integers(0, 4)),
                draw(st.integers(1, ROOMS)),
                draw(st.integers(0, 3)),
            )
        )
    pages = range(ranks, ranks * (SOURCE_PAGES + 1))
    kinds = st.sampled_from(["abort room", "abort request", "fail rank", "lose rank", "lose decode"])
    acts = draw(st.lists(st.builds(Act, st.integers(0, 25), kinds, st.integers(0, 3)), max_size=acts_max))
    faults = Faults(draw(ticks), draw(ticks), draw(ticks), draw(st.booleans()))
    return Scenario(
        ranks,
        ps,
        draw(st.booleans()),
        draw(st.integers(5, 12)),
        tuple(jobs),
        tuple(draw(st.permutations(pages))),
        faults,
        tuple(acts),
    )


class Run:
    """Plays a scenario: jobs wait for a free room and for pages on both sides; everybody polls until all is over."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        components = (KV, INDEX) if scenario.has_index else (KV,)
        self.rig = Rig(scenario.ranks, scenario.ps, components, scenario.faults, scenario.decode_pages, SOURCE_PAGES)
        self.todo = list(enumerate(scenario.jobs, start=1))
        self.requests: dict[int, Request] = {}
        self.job: dict[int, Job] = dict(self.todo)
        self.open: dict[int, Request] = {}
        """By room, until D has released it."""
        self.rejected: set[int] = set()
        self.completed_at: dict[int, int] = {}
        self.outcome: dict[int, str] = {}
        """By request: complete, failed, or lost with D."""
        self.blame: set[int] = set()
        """Requests that somebody gave up."""

    def play(self) -> None:
        for step in range(STEPS_MAX):
            for act in self.scenario.acts:
                if act.step == step:
                    self.act(act)
            self.reserve()
            self.source()
            self.decode(step)
            self.rig.step()
            if not (self.todo or self.open) and all(r.freed for r in self.requests.values()):
                return

    def act(self, act: Act) -> None:
        rig, ranks = self.rig, self.scenario.ranks
        room = act.target % ROOMS + 1
        request = self.open.get(room)
        if act.kind == "lose decode":
            rig.lose("d")
        elif act.kind == "lose rank":
            rig.lose(rig.names[act.target % ranks])
        elif request and "d" not in rig.dead:
            self.blame.add(request.id)
            if act.kind == "abort room":
                state = rig.state(room)
                if state == "complete":
                    assert rig.expected(request) == rig.rows(request)
                if state in {"complete", "failed"}:
                    self.close(room, state)
                rig.decode.release(room)
            elif act.kind == "abort request":
                self.rejected.add(request.id)
                for sending in request.sendings.values():
                    sending.abort("the scheduler gave up")
            elif act.target % ranks in request.sendings:
                request.sendings[act.target % ranks].abort("this rank gave up")

    def reserve(self) -> None:
        for number, job in list(self.todo):
            used = set(self.rig.source.pinned)
            free = [page for page in self.scenario.shuffle if page not in used]
            count = -(-job.tokens // self.scenario.ps)
            if self.rig.dead:
                self.todo.remove((number, job))
                continue
            if len(free) < count or job.room in self.open:
                continue
            try:
                generation = self.rig.decode.reserve(job.room, job.tokens)
            except RefusedError:
                continue
            request = self.rig.request(number, free[:count], job.tokens, job.ends, job.room, job.ready)
            request.generation = generation
            self.todo.remove((number, job))
            self.requests[number] = self.open[job.room] = request

    def source(self) -> None:
        rig = self.rig
        for request in self.requests.values():
            if request.freed:
                continue
            ended = self.outcome.get(request.id) or rig.dead
            if not request.sendings and not rig.start(request) and not ended:
                continue
            if request.id in self.rejected:
                for sending in request.sendings.values():
                    sending.abort("rejected")
            if request.sendings and request.chunk < len(request.ends):
                rig.send(request)
            if all(request.sendings[rank].finished for rank in rig.alive() if request.sendings):
                rig.source.free(request)

    def decode(self, step: int) -> None:
        for room, request in list(self.open.items()):
            if "d" in self.rig.dead:
                self.close(room, "lost")
                continue
            state = self.rig.state(room)
            if (
                state == "complete"
                and step >= self.completed_at.setdefault(request.id, step) + self.job[request.id].linger
            ):
                assert self.rig.expected(request) == self.rig.rows(request)
                self.rig.decode.release(room)
                self.close(room, "complete")
            elif state == "failed":
                self.rig.decode.release(room)
                self.close(room, "failed")

    def close(self, room: int, outcome: str) -> None:
        self.outcome[self.open.pop(room).id] = outcome

    def check(self) -> None:
        rig = self.rig
        assert [] == self.todo
        assert {} == self.open, "a room never ended"
        assert [] == [r.id for r in self.requests.values() if not r.freed], "a transfer never ended at the source"
        assert {} == rig.source.pinned
        if "d" not in rig.dead:
            assert 0 == rig.used()
        for request in self.requests.values():
            self.check_request(request)

    def check_request(self, request: Request) -> None:
        rig, outcome = self.rig, self.outcome[request.id]
        words = {rank: sending.word for rank, sending in request.sendings.items()}
        if outcome == "complete":
            assert dict.fromkeys(range(self.scenario.ranks), "done") == words
            pages = len(request.pages)
            times = rig.landings[request.room, request.generation]
            assert Counter(times.keys()) == times, "a page was written twice"
            assert pages * LAYERS * len(rig.components) == len(times)
        elif not rig.dead and request.id not in self.blame:
            raise AssertionError(f"request {request.id} failed for no reason: {words}")
        elif outcome == "failed" and not rig.dead:
            given_up = set(words.values()) - {"done"}
            assert given_up or request.id in self.blame


@settings(max_examples=150, deadline=None)
@given(scenarios(acts_max=0))
def test_everything_arrives(scenario: Scenario) -> None:
    """Whatever the pages, chunks, delays, orders and repeated messages: every room completes, bit for bit."""
    run = Run(scenario)
    run.play()
    run.check()
    assert {"complete"} == set(run.outcome.values())
    sent = sum(sender.link.sent_bytes for sender in run.rig.source.senders)
    assert sum(len(request.pages) for request in run.requests.values()) * run.rig.page_bytes() == sent


@settings(max_examples=300, deadline=None)
@given(scenarios(acts_max=4))
def test_everything_ends(scenario: Scenario) -> None:
    """Aborts and losses of any side at any moment: a room is complete and right, or failed on all sides; pages return.

    No page is written after it was freed, at either end.
    """
    run = Run(scenario)
    run.play()
    run.check()

"""The threads of a shard group's ranks within one process, and the baton they pass: one runs at any time.

Order of a run with N ranks, in rounds. In a round every rank runs, in rank order, until its next collective or its end:

    round n:   [rank 0 runs) [rank 1 runs) ... [rank N-1 runs)  collective n happens, or the run ends

So a run is deterministic, and what every rank brings to the n-th collective is known before it happens.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
UNWIND_SECONDS = 2.0  # for a stuck rank to come out of what it does


class CollectiveMismatch(Exception):  # noqa: N818 - a finding about the program under test, not an error of ours
    """The ranks of a shard group did not make the same n-th collective; real ranks would hang or mix up rows.

    `index` counts the collectives of the run from 0; `sides` says for every rank what it did and where.
    When a rank raised instead of joining, its exception is the `__cause__`.
    """

    def __init__(self, index: int, sides: Sequence[str]) -> None:
        self.index = index
        self.sides = list(sides)
        lines = [f"  ranks {_names(self.sides, side)}: {side}" for side in dict.fromkeys(self.sides)]
        super().__init__(
            f"collective #{index} of the run differs within the shard group of {len(self.sides)} ranks; real ranks "
            "would hang here\n" + "\n".join(lines) + "\n"
            "Make every rank issue the same collectives with the same shapes and dtypes, also one with nothing to do."
        )


class LockstepMisuseError(ValueError):
    """A collective or a run that no shard group could perform: wrong shape, overlap, thread or moment."""


class RankStuck(Exception):  # noqa: N818 - a finding about the program under test, not an error of ours
    """A rank neither ended nor came to its next collective in time; the message says where it was."""


class _Released(BaseException):
    """Unwinds a rank whose run is over; no `except Exception` of a program may keep it."""


class Post(NamedTuple):
    """What one rank brings to a collective; all ranks must bring the same kind and signature.

    `complete` gets the payloads of all ranks, in rank order, once per collective.
    """

    kind: str
    signature: tuple[object, ...]
    payload: Any
    complete: Callable[[list[Any]], Any]
    site: tuple[str, int]

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(map(str, self.signature))} at {_place(*self.site)}"


class Ring:
    """The threads, the batons, and the state of the run; whoever holds a baton may touch the state."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.threads: list[threading.Thread] = []
        self.batons = [threading.Lock() for _ in range(size)]
        for baton in self.batons:
            baton.acquire()
        self.busy = threading.Lock()
        self.closed = False
        self.abandoned = False  # a rank is stuck outside of Python and keeps its thread
        self._start(None)

    def _start(self, job: Callable[[int], Any] | None) -> None:
        self.job = job
        self.done = threading.Event()
        if job is None:
            self.done.set()
        self.broken = False  # the run is over, ranks that wait unwind
        self.verdict: BaseException | None = None
        self.count = 0  # collectives completed
        self.running = 0  # the rank that holds the baton
        self.posts: list[Post | None] = [None] * self.size
        self.outcome: Any = None
        self.ended = [False] * self.size
        self.results: list[Any] = [None] * self.size
        self.errors: list[BaseException | None] = [None] * self.size

    # ---- the caller's thread

    def run(self, job: Callable[[int], T], seconds_max: float | None = None) -> list[T]:
        """Run `job(rank)` on every rank's thread; return the results in rank order, or raise the verdict."""
        if threading.current_thread() in self.threads or not self.busy.acquire(blocking=False):
            msg = "run() while a run of this Lockstep is active: wait for it, or use another Lockstep object"
            raise LockstepMisuseError(msg)
        try:
            if self.closed:
                msg = "run() after close(), or after two interrupts: this Lockstep is at its end; make a new one"
                raise LockstepMisuseError(msg)
            if not self.threads:
                self._start_threads()
            self._start(job)
            try:
                self.batons[0].release()
                if not self.done.wait(seconds_max):
                    self._unstick(seconds_max)
            except RankStuck:
                raise
            except BaseException:  # an interrupt of the caller: unwind the ranks first
                self.broken = self.closed = True
                self.done.wait()
                self.closed = False  # a second interrupt skips this, and only close() is left
                raise
            error, results = self._verdict(), self.results
            self._start(None)  # keep no tensors and no tracebacks alive
            if error is not None:
                raise error
            return results
        finally:
            self.busy.release()

    def _unstick(self, seconds: float | None) -> None:
        """Raise in the thread of the rank that runs, so that all ranks unwind; a rank that cannot is left behind."""
        thread = self.threads[self.running]
        frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - the only way to see another thread
        place = _place(frame.f_code.co_filename, frame.f_lineno) if frame else "?"
        stuck = RankStuck(f"rank {self.running} of {self.size} still runs after {seconds} s, at {place}")
        self.broken, self.verdict = True, stuck
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Released))
        if not self.done.wait(UNWIND_SECONDS):
            self.closed = self.abandoned = True
            raise stuck

    def close(self) -> None:
        """Release ranks that still run, wait for them, end the threads."""
        if self.abandoned:
            return
        if threading.current_thread() in self.threads:
            msg = "close() called by a rank of this Lockstep: call it outside run()"
            raise LockstepMisuseError(msg)
        self.broken = True
        with self.busy:
            self.done.wait()
            self.closed = True
            self.job = None
            threads, self.threads = self.threads, []
            for baton in self.batons[: len(threads)]:
                baton.release()
            for thread in threads:
                thread.join()

    def _start_threads(self) -> None:
        # One intra-op thread per rank: rows are small, and N pools of threads cost more than they give. torch keeps the
        # number per thread, but the latest one set is also the default of threads to come: when all ranks have theirs,
        # the caller's is put back.
        intraop, ready = torch.get_num_threads(), threading.Barrier(self.size + 1)
        for rank in range(self.size):
            name = f"lockstep rank {rank}"
            self.threads.append(threading.Thread(target=self._serve, args=(rank, ready), name=name, daemon=True))
            self.threads[rank].start()
        ready.wait()
        torch.set_num_threads(intraop)

    def _verdict(self) -> BaseException | None:
        """What run() raises: the finding of a round, else the exception of the lowest rank."""
        verdict = self._raised() if self.verdict is None else self.verdict
        if verdict is None and self.broken:
            return LockstepMisuseError("run() was cut short: close() was called while it was active")
        return verdict

    def _raised(self) -> BaseException | None:
        return next((error for error in self.errors if error is not None), None)

    # ---- the rank threads

    def _serve(self, rank: int, ready: threading.Barrier) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # torch reads the default at its first use in a thread, so use it now
        ready.wait()
        while True:
            self.batons[rank].acquire()
            if self.job is None:
                return
            try:
                if not self.broken:
                    self.results[rank] = self.job(rank)
            except _Released:
                pass
            except BaseException as error:  # noqa: BLE001 - it is raised again by run()
                self.errors[rank] = error
            self.ended[rank] = True
            self._hand_on(rank)

    def meet(self, rank: int, post: Post) -> Any:
        """Wait until all ranks have brought a matching post; return what `complete` made of them."""
        if rank >= len(self.threads) or threading.current_thread() is not self.threads[rank]:
            msg = (
                f"{post}: the group of rank {rank} was used by thread {threading.current_thread().name!r}; "
                "call collectives only within Lockstep.run(), each rank on its own group"
            )
            raise LockstepMisuseError(msg)
        if self.broken:
            raise _Released
        self.posts[rank] = post
        self._hand_on(rank)
        self.batons[rank].acquire()
        if self.broken:
            raise _Released
        return self.outcome

    def _hand_on(self, rank: int) -> None:
        """Rank stopped: ranks [0, rank] of this round are through, the first of [rank+1, N) still alive runs next."""
        following = self._alive(rank + 1)
        if following is None:
            self._end_round()
            following = self._alive(0)
        if following is None:
            self.done.set()
        else:
            self.running = following
            self.batons[following].release()

    def _alive(self, first: int) -> int | None:
        for rank in range(first, self.size):
            if not self.ended[rank]:
                return rank
        return None

    def _end_round(self) -> None:
        """Every rank has stopped: in a collective, by an end, or by an exception."""
        if self.broken or all(self.ended):
            return
        first = self.posts[0]
        if first is None or any(
            post is None or post.kind != first.kind or post.signature != first.signature for post in self.posts
        ):
            self._break()
            return
        try:
            self.outcome = first.complete([post.payload for post in self.posts if post is not None])
        except BaseException as error:  # noqa: BLE001 - it is raised again by run()
            self.broken, self.verdict = True, error
            error.add_note(f"in collective #{self.count} of the run: {first}")
        self.count += 1
        self.posts = [None] * self.size

    def _break(self) -> None:
        self.broken = True
        raised = self._raised()
        if raised is not None and not isinstance(raised, Exception):
            self.verdict = raised  # a skip or an interrupt is no finding
            return
        self.verdict = CollectiveMismatch(self.count, [self._side(rank) for rank in range(self.size)])
        self.verdict.__cause__ = raised

    def _side(self, rank: int) -> str:
        error, post = self.errors[rank], self.posts[rank]
        if error is not None:
            return f"raised {type(error).__name__}: {error} at {_origin(error)}"
        return str(post) if post is not None else f"ended its program after {self.count} collectives"


def _names(sides: list[str], side: str) -> str:
    return ", ".join(str(rank) for rank, other in enumerate(sides) if other == side)


def _origin(error: BaseException) -> str:
    """File and line that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "?" if trace is None else _place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def _place(file: str, line: int) -> str:
    path, here = Path(file), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"

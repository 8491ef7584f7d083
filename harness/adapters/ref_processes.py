"""The ranks of the reference as real processes: one process per rank, Gloo on CPUs, NCCL on GPUs.

The parent holds the rendezvous (a TCP store on a port that the system chose and that it keeps) and one pipe per rank.
A rank whose pipe ends, as the parent closed it or died, ends as well. Every rank has another hash seed, on purpose.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from typing import IO

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it in __all__

from harness import types as t
from harness import views as v
from harness.adapter import EngineFault
from harness.adapters.ref_ways import Ways

ANSWER_SECONDS = 20.0
START_SECONDS = 120.0
IN_TIME = "Every rank answers every op in time."


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Parent to rank: open a session, apply an op, show yourself, or close a session."""

    verb: str
    session: int = 0
    config: t.Config | None = None
    ways: Ways = Ways()
    book: str = ""  # folder of the addresses of all ends; "" without a decode worker
    transport: str = "tcp"
    op: t.AnyOp | None = None


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Rank to parent; `error` is an exception of the rank."""

    reply: t.AnyReply | None = None
    view: v.RankView | None = None
    error: str | None = None


def send(pipe: IO[bytes], message: Ask | Answer) -> None:
    """One message: 8 bytes of length, then MessagePack."""
    body = msgspec.msgpack.encode(message)
    pipe.write(len(body).to_bytes(8, "little") + body)
    pipe.flush()


class RankProcesses:
    """N processes that serve sessions one after the other or side by side, until closed."""

    def __init__(self, ranks: int, backend: str) -> None:
        self._ranks = ranks
        self._backend = backend
        self._sessions = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._children = [self._started(rank) for rank in range(ranks)]
        self._buffers = [bytearray() for _ in range(ranks)]
        try:
            self._answers(START_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether every rank still runs."""
        return bool(self._children) and all(child.poll() is None for child in self._children)

    def session(self, config: t.Config, ways: Ways, book: str = "", transport: str = "tcp") -> ProcessRanks:
        """Opens a session on all ranks; their ends to a decode worker find each other through the folder `book`."""
        self._sessions += 1
        self.ask(Ask("open", self._sessions, config=config, ways=ways, book=book, transport=transport))
        return ProcessRanks(self, self._sessions)

    def ask(self, message: Ask) -> list[Answer]:
        """Sends to all ranks and waits for all answers. Raises `EngineFault` when one is late, dead or raised."""
        if not self.alive:
            raise EngineFault(IN_TIME, f"ranks {self._dead()} of {self._ranks} have ended")
        for child in self._children:
            assert child.stdin is not None  # noqa: S101  # it was opened as a pipe
            try:
                send(child.stdin, message)
            except BrokenPipeError as error:
                self.close()
                raise EngineFault(IN_TIME, f"the pipe of a rank is closed at {message.verb}") from error
        answers = self._answers(ANSWER_SECONDS)
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                raise RuntimeError(f"rank {rank}: {answer.error}")
        return answers

    def close(self) -> None:
        """Ends all ranks; a rank that hangs in a collective is killed."""
        for child in self._children:
            if child.stdin is not None:
                child.stdin.close()
        deadline = time.monotonic() + 2.0
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        self._children = []

    def _started(self, rank: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(rank + 1),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        arguments = [str(rank), str(self._ranks), self._backend, str(self._store.port)]
        return subprocess.Popen(
            [sys.executable, "-m", "harness.adapters.ref_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )

    def _answers(self, seconds: float) -> list[Answer]:
        """One answer of every rank."""
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for rank, child in enumerate(self._children):
                assert child.stdout is not None  # noqa: S101  # it was opened as a pipe
                selector.register(child.stdout, selectors.EVENT_READ, rank)
            while len(found) < self._ranks:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    late = [rank for rank in range(self._ranks) if rank not in found]
                    self.close()
                    raise EngineFault(
                        IN_TIME, f"no answer of ranks {late} within {seconds:.0f} s; they wait for a peer or loop"
                    )
                for key, _ in events:
                    answer = self._read(key.data, key.fileobj)  # type: ignore[arg-type]  # registered above
                    if answer is not None:
                        found[key.data] = answer
                        selector.unregister(key.fileobj)
        return [found[rank] for rank in range(self._ranks)]

    def _read(self, rank: int, pipe: IO[bytes]) -> Answer | None:
        """The rank's answer once it is complete. Raises `EngineFault` when the rank has ended."""
        buffer = self._buffers[rank]
        data = os.read(pipe.fileno(), 1 << 20)
        if not data:
            code = self._children[rank].wait()
            self.close()
            raise EngineFault(IN_TIME, f"rank {rank} ended with code {code} instead of an answer")
        buffer += data
        if len(buffer) < 8 or len(buffer) < 8 + int.from_bytes(buffer[:8], "little"):
            return None
        answer = msgspec.msgpack.decode(bytes(buffer[8:]), type=Answer)
        buffer.clear()
        return answer

    def _dead(self) -> list[int]:
        return [rank for rank, child in enumerate(self._children) if child.poll() is not None]


class ProcessRanks:
    """One session on the processes."""

    def __init__(self, processes: RankProcesses, session: int) -> None:
        self._processes = processes
        self._session = session
        self._closed = False

    def apply(self, op: t.AnyOp) -> list[t.AnyReply]:
        answers = self._processes.ask(Ask("apply", self._session, op=op))
        return [answer.reply for answer in answers if answer.reply is not None]

    def view(self) -> list[v.RankView]:
        answers = self._processes.ask(Ask("view", self._session))
        return [answer.view for answer in answers if answer.view is not None]

    def close(self) -> None:
        if not self._closed and self._processes.alive:
            self._processes.ask(Ask("close", self._session))
        self._closed = True

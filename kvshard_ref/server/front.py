"""RanksBackend: the face's side of the ranks: their processes, what is asked of them, and what they tell."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvshard_ref.server.api import ABORT, Ask, Info, Logprob, RefusedAsk, Stats, Step
from kvshard_ref.server.frames import HEAD_BYTES, Message, framed
from kvshard_ref.server.settings import Settings

START_SECONDS = 120.0
ANSWER_SECONDS = 30.0
BOOK_SECONDS = 5.0
FLUSH_POLL_SECONDS = 0.05
ENTRY = ".json"


class RanksBackend:
    """A Backend. `program`: the command line of a rank process."""

    info: Info

    def __init__(self, settings: Settings, program: Sequence[str]) -> None:
        self.settings = settings
        self.weights = ""  # fingerprint of the model's
        self.failed = asyncio.Event()
        """A rank is gone: nothing works any more."""
        self._program = program
        self._children: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._asks: dict[str, asyncio.Queue[Step]] = {}
        self._answers: dict[tuple[int, int], asyncio.Future[Any]] = {}  # by rank and number
        self._ready: dict[int, asyncio.Future[Message]] = {}
        self._number = 0
        self._broken = ""
        self._closing = False
        self._foreign: set[str] = set()  # entries of peers in the book
        self._book = Path(tempfile.mkdtemp(prefix="kvshard-book-"))  # where the ends of transfers find each other

    async def start(self) -> None:
        """Start the ranks; they are ready afterwards. Raises RuntimeError when one ends before."""
        loop = asyncio.get_running_loop()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(self.settings.ranks):
            self._ready[rank] = loop.create_future()
            child = await asyncio.create_subprocess_exec(
                *self._program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=1 << 26,
            )
            self._children.append(child)
            self._readers.append(asyncio.create_task(self._read(rank, child)))
            await self._tell(rank, {"settings": self.settings.encoded(), "rank": rank, "book": str(self._book)})
        async with asyncio.timeout(START_SECONDS):
            told = [await self._ready[rank] for rank in range(self.settings.ranks)]
        self.weights = str(told[0]["weights"])
        self.info = self._info(told[0])

    async def close(self) -> None:
        """End the ranks."""
        self._closing = True
        for child in self._children:
            if child.stdin is not None:
                child.stdin.close()
        for child in self._children:
            try:
                async with asyncio.timeout(3.0):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)
        shutil.rmtree(self._book, ignore_errors=True)

    async def generate(self, ask: Ask) -> AsyncIterator[Step]:
        """See Backend."""
        if self._broken:
            raise RefusedAsk(self._broken, 503)
        if ask.rid in self._asks:
            raise RefusedAsk(f"rid {ask.rid!r} is in use, expected another one")
        self._check_size(ask)
        message: Message = {"kind": "ask", "ask": asdict(ask)}
        if self.settings.disaggregation_mode == "decode":
            message["ranks"] = await self._meet(ask.source)
        steps = self._asks[ask.rid] = asyncio.Queue()
        over = False
        try:
            await self._tell(0, message)
            while not over:
                step = await steps.get()
                over = bool(step.finished)
                yield step
        finally:
            del self._asks[ask.rid]
            if not over and not self._broken:
                await self._tell(0, {"kind": "abort", "rid": ask.rid})

    async def abort(self, rid: str) -> None:
        """See Backend."""
        for name in [name for name in self._asks if name.startswith(rid)]:
            await self._tell(0, {"kind": "abort", "rid": name})

    async def flush(self, wait_seconds: float) -> str:
        """See Backend."""
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_seconds
        while True:
            why = "requests are in flight" if self._asks else str(await self._asked(0, {"kind": "flush"}))
            if not why or loop.time() >= end:
                return why
            await asyncio.sleep(FLUSH_POLL_SECONDS)

    async def stats(self) -> Sequence[Stats]:
        """See Backend."""
        self._number += 1
        number, ranks = self._number, range(self.settings.ranks)
        waits = [self._expect(rank, number) for rank in ranks]
        await self._tell(0, {"kind": "stats", "number": number})
        async with asyncio.timeout(ANSWER_SECONDS):
            return [Stats(**body) for body in await asyncio.gather(*waits)]

    def broken(self) -> str:
        """See Backend."""
        return self._broken

    def met(self, theirs: dict[str, str]) -> Message:
        """The addresses of this worker's ends, after those of a peer's are noted: a file's content by its name."""
        for name, content in theirs.items():
            if Path(name).name != name or not name.endswith(ENTRY):
                raise RefusedAsk(f"book entry {name!r}: expected a plain file name that ends with {ENTRY}")
            fresh = self._book / f"{name}.new"
            fresh.write_text(content)
            fresh.replace(self._book / name)
        self._foreign |= theirs.keys()
        mine = [
            path for path in sorted(self._book.iterdir()) if path.suffix == ENTRY and path.name not in self._foreign
        ]
        return {"weights": self.weights, "book": {path.name: path.read_text() for path in mine}}

    async def _meet(self, source: str) -> list[str]:
        """Exchange addresses with a prefill worker. Returns the names of its ranks. Raises RefusedAsk."""
        url = f"http://{source}/book"
        try:
            answer = await asyncio.to_thread(_post, url, self.met({})["book"])
        except (OSError, ValueError) as error:
            why = f"no prefill worker at bootstrap {source}: {error}"
            raise RefusedAsk(why, 502) from error
        if answer["weights"] != self.weights:
            why = f"the prefill worker at {source} has other weights: start both with the same model"
            raise RefusedAsk(why, 500)
        self.met(answer["book"])
        return sorted(urllib.parse.unquote(name.removesuffix(ENTRY)) for name in answer["book"])

    def _check_size(self, ask: Ask) -> None:
        if self.settings.disaggregation_mode == "prefill":
            return  # the ranks refuse it, and tell the decode worker
        needs = len(ask.tokens) + ask.max_new_tokens
        room = self.info.max_total_num_tokens - self.settings.drafts
        if needs > room:
            raise RefusedAsk(
                f"prompt and answer are {needs} tokens, expected at most {room}, all that the worker holds"
            )

    def _info(self, told: Message) -> Info:
        settings = self.settings
        path = Path(settings.model_path)
        model = {
            "model_path": settings.served_model_name or str(path),
            "vocab_size": told["vocab_size"],
            "context_length": settings.context_length,
            "parameters": told["parameters"],
            "layers": told["layers"],
        }
        total, own = int(told["max_total_num_tokens"]), int(told["token_capacity"])
        return Info(asdict(settings), model, settings.disaggregation_mode, total, own, version=_version())

    async def _asked(self, rank: int, message: Message) -> Any:
        self._number += 1
        wait = self._expect(rank, self._number)
        await self._tell(rank, {**message, "number": self._number})
        async with asyncio.timeout(ANSWER_SECONDS):
            return await wait

    def _expect(self, rank: int, number: int) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[rank, number] = future
        return future

    async def _tell(self, rank: int, message: Message) -> None:
        pipe = self._children[rank].stdin
        if pipe is None or self._broken:
            return
        try:
            pipe.write(framed(message))
            await pipe.drain()
        except (BrokenPipeError, ConnectionResetError):
            return  # its reader says so

    async def _read(self, rank: int, child: asyncio.subprocess.Process) -> None:
        """What a rank tells, until it ends."""
        assert child.stdout is not None  # noqa: S101  # it was opened as a pipe
        try:
            while True:
                head = await child.stdout.readexactly(HEAD_BYTES)
                body = await child.stdout.readexactly(int.from_bytes(head, "little"))
                await self._told(rank, json.loads(body))
        except asyncio.IncompleteReadError:
            self._lost(rank, await child.wait())

    async def _told(self, rank: int, message: Message) -> None:
        if message["kind"] == "store":
            for other in range(1, self.settings.ranks):
                await self._tell(other, message)
        elif message["kind"] == "ready":
            self._ready[rank].set_result(message["info"])
        elif message["kind"] == "answer":
            future = self._answers.pop((rank, message["number"]), None)
            if future is not None and not future.done():
                future.set_result(message["body"])
        elif message["kind"] == "steps":
            for fields in message["steps"]:
                if fields["rid"] in self._asks:
                    self._asks[fields["rid"]].put_nowait(_step(fields))

    def _lost(self, rank: int, code: int) -> None:
        """A rank is gone: every ask ends with an error, and no other begins."""
        if self._closing or self._broken:
            return
        self._broken = f"rank {rank} of the worker ended with code {code}"
        for rid, steps in self._asks.items():
            steps.put_nowait(Step(rid, finished=ABORT, error=self._broken, status=500))
        for future in [*self._answers.values(), *self._ready.values()]:
            if not future.done():
                future.set_exception(RuntimeError(self._broken))
        for child in self._children:
            if child.returncode is None:
                child.kill()
        self.failed.set()


def rank_program(module: str) -> list[str]:
    """The command line that runs a module as a rank."""
    return [sys.executable, "-m", module]


def _version() -> str:
    try:
        return version("kvshard")
    except PackageNotFoundError:
        return "source"


def _step(fields: dict[str, Any]) -> Step:
    for name in ("logprobs", "input_logprobs"):
        fields[name] = tuple(
            Logprob(each["token"], each["value"], tuple((value, token) for value, token in each["top"]))
            for each in fields[name]
        )
    return Step(**{**fields, "tokens": tuple(fields["tokens"])})


def _post(url: str, book: dict[str, str]) -> Message:
    request = urllib.request.Request(url, json.dumps(book).encode(), {"Content-Type": "application/json"})  # noqa: S310  # http, as built
    with urllib.request.urlopen(request, timeout=BOOK_SECONDS) as answer:  # noqa: S310  # as above
        message: Message = json.loads(answer.read())
        return message

"""Prefiller: one prefill rank's scheduler: asks in, chunks through the worker, first tokens and sent pages out.

Every rank makes the same calls, and decides alike from the same state; nothing here looks at a clock.

    waiting --open--> live, chunk by chunk --last chunk--> computed --sent, or handed over--> gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvshard_ref.errors import RefusedError
from kvshard_ref.sender import Sending
from kvshard_ref.server.api import ABORT, LENGTH, STOP, Ask, Logprob, Step
from kvshard_ref.server.compute import Batch, ServedModel
from kvshard_ref.server.sampling import logprobs, pick
from kvshard_ref.worker import Chunk, PrefillWorker

LIVE_MAX = 64
GIVEN_UP = "the transfer was given up by another rank"


@dataclass(slots=True, eq=False)
class Job:
    """One ask between its opening and its end."""

    ask: Ask
    cached_device: int
    cached_host: int
    computed: int
    first: int = -1
    """The token after the prompt, once it is computed."""
    first_logprobs: list[Logprob] = field(default_factory=list)
    input_logprobs: list[Logprob] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens to compute."""
        return len(self.ask.tokens) - self.computed

    @property
    def cached(self) -> int:
        """Tokens found in the cache."""
        return self.cached_device + self.cached_host

    def answered(self) -> Step:
        """The last step of a worker that generates one token at most."""
        if self.ask.max_new_tokens == 0:
            return self.step(finished=LENGTH)
        finished = STOP if self.first in self.ask.stop_tokens else LENGTH
        return self.step(tokens=(self.first,), logprobs=tuple(self.first_logprobs), finished=finished)

    def step(self, **more: object) -> Step:
        """What is known so far, and `more` fields of Step."""
        its = {"input_logprobs": tuple(self.input_logprobs)}
        fields = {**its, "cached_device": self.cached_device, "cached_host": self.cached_host, **more}
        return Step(rid=self.ask.rid, **fields)  # type: ignore[arg-type]  # fields of Step, by name


class Prefiller:
    """`hand_over(job)` takes a computed prompt on a plain worker, and says whether it could; None: it is sent away."""

    def __init__(
        self, worker: PrefillWorker, model: ServedModel, hand_over: Callable[[Job], bool] | None = None
    ) -> None:
        self.worker = worker
        self.waiting: deque[Ask] = deque()
        self.jobs: dict[str, Job] = {}
        self.counters = {"prompt_tokens_total": 0, "cached_tokens_device": 0, "cached_tokens_host": 0}
        self.computed = False  # the last step ran a batch
        self._model = model
        self._hand_over = hand_over
        self._sent: dict[str, Job] = {}  # all is on its way, not all has arrived
        self._parts: dict[str, Sending | None] = {}  # of those that are on their way, this rank's part
        model.next_token = self._sample

    @property
    def busy(self) -> bool:
        """Whether a step can get anything done."""
        return bool(self.waiting or self.jobs or self._sent or self.worker.exports.live)

    def tokens_of(self, rid: str) -> Sequence[int]:
        """An ask's prompt."""
        return self.jobs[rid].ask.tokens

    def abort(self, rid: str, why: str = "", status: int = 200) -> list[Step]:
        """End an ask at any point."""
        step = Step(rid=rid, finished=ABORT, error=why, status=status)
        if rid in self.jobs:
            job = self.jobs.pop(rid)
            self.worker.abort(rid)
            return [job.step(finished=ABORT, error=why, status=status)]
        if self._sent.pop(rid, None):  # its pages go on being read until the ranks have stopped
            return [step]
        ended = [ask for ask in self.waiting if ask.rid == rid]
        for ask in ended:
            self._decline(ask, why or f"request {rid!r} was aborted")
            self.waiting.remove(ask)
        return [step] if ended else []

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """Open, compute one batch, send, end. Returns what is new."""
        self.worker.progress()
        steps = self._open()
        batch = self._batch()
        self.computed = bool(batch)
        if batch:
            self._forward(batch)
        for job in list(self.jobs.values()):
            if job.left == 0:
                steps += self._end(job)
            elif job.ask.room is not None and job.computed > job.cached:
                self._send(job)  # what is computed goes on its way while the rest is computed
        return steps + self._arrived()

    def unheard(self) -> list[str]:
        """Asks that no decode worker has made room for, as far as this rank knows."""
        rooms = self._rooms()
        asks = [ask for ask in self.waiting if ask.room not in rooms]
        asks += [job.ask for job in self.jobs.values() if job.left == 0]
        return [ask.rid for ask in asks if ask.room is not None]

    def _decline(self, ask: Ask, why: str) -> None:
        """Tell the decode worker, if it has made room, that nothing will come."""
        sender = self.worker.exports.sender
        for each in sender.sendings if sender else ():
            if each.use[1] == ask.room and not each.started:
                each.abort(why)

    def _rooms(self) -> set[int]:
        sender = self.worker.exports.sender
        return {each.use[1] for each in sender.sendings if not each.started} if sender else set()

    def _called_for(self) -> deque[Ask]:
        """Of the waiting asks those that all ranks know a room for, or that need none; in order.

        A prompt that is computed before has pages for which another one may wait that the decode worker takes first.
        """
        if all(ask.room is None for ask in self.waiting):
            return deque(self.waiting)
        rooms, sends = self._rooms(), self.worker.exports.sender is not None
        known = [int(ask.room is None or not sends or ask.room in rooms) for ask in self.waiting]
        agreed = self.worker.group.minimum(known)
        return deque(ask for ask, flag in zip(self.waiting, agreed, strict=True) if flag)

    def _open(self) -> list[Step]:
        """As many waiting asks as can be locked now; one that never can is refused."""
        steps: list[Step] = []
        called_for = self._called_for()
        while called_for and len(self.jobs) < LIVE_MAX:
            ask = called_for[0]
            # the first one comes from the hidden state of the token before it
            hit_max = max(0, ask.logprob_start - 1) if ask.logprob_start >= 0 else None
            try:
                cached = self.worker.open(ask.rid, ask.tokens, hit_max)
            except RefusedError as refusal:
                if self.jobs or self._sent:
                    break
                self._decline(ask, refusal.why)
                steps.append(Step(rid=ask.rid, finished=ABORT, error=refusal.why, status=400))
            else:
                host = len(self.worker.cache.requests[ask.rid].slots) * self.worker.spec.page_size
                self.jobs[ask.rid] = Job(ask, cached - host, host, computed=cached)
                self._count(self.jobs[ask.rid], 1)
            self.waiting.remove(called_for.popleft())
        return steps

    def _count(self, job: Job, times: int) -> None:
        self.counters["prompt_tokens_total"] += times * len(job.ask.tokens)
        self.counters["cached_tokens_device"] += times * job.cached_device
        self.counters["cached_tokens_host"] += times * job.cached_host

    def _batch(self) -> list[Chunk]:
        """The next chunk of each job, oldest first, as far as the chunk budget and the pages reach."""
        room, ps = self.worker.spec.chunk_tokens, self.worker.spec.page_size
        chunks: list[Chunk] = []
        unfit = 0
        for job in self.jobs.values():
            count = job.left if job.left <= room else room // ps * ps
            if count <= 0:
                continue
            wants = [*((chunk.name, chunk.count) for chunk in chunks), (job.ask.rid, count)]
            if self.worker.cache.review(wants)[-1] is None:
                chunks.append(Chunk(job.ask.rid, count))
                room -= count
            else:
                unfit += 1
        if unfit and not chunks and not self._sent:
            self._give_back()
        return chunks

    def _give_back(self) -> None:
        """Open requests lock each other's pages: the youngest that has begun nothing waits again."""
        idle = [job for job in self.jobs.values() if job.left and not self.worker.cache.requests[job.ask.rid].admitted]
        if len(self.jobs) > 1 and idle:
            job = self.jobs.pop(idle[-1].ask.rid)
            self.worker.abort(job.ask.rid)
            self.waiting.appendleft(job.ask)
            self._count(job, -1)

    def _forward(self, chunks: list[Chunk]) -> None:
        replies = self.worker.extend(chunks)
        done = [chunk for chunk, reply in zip(chunks, replies, strict=True) if not isinstance(reply, RefusedError)]
        for chunk in done:
            self.jobs[chunk.name].computed += chunk.count
        if done and len(self.worker.runners) == 1 and self._model.batch is not None:
            self._sample(self._model.batch)

    def _sample(self, batch: Batch) -> list[int]:
        """Per request the token after its prompt, when this chunk is the last one; -1 else. Notes log probabilities."""
        tokens = []
        for extent, hidden in zip(batch.extents, batch.hidden, strict=True):
            job = self.jobs[extent.request.name]
            ask, prompt = job.ask, job.ask.tokens
            begin = max(extent.start, ask.logprob_start - 1 if ask.logprob_start > 0 else 0)
            if ask.logprob_start >= 0 and begin < extent.end:
                if ask.logprob_start == 0 == extent.start:
                    job.input_logprobs.append(Logprob(prompt[0], None))
                following = prompt[begin + 1 : extent.end + 1]
                logits = self._model.model.logits(hidden[:, begin - extent.start :])[0, : len(following)]
                job.input_logprobs += logprobs(following, logits, ask.top_logprobs) if following else []
            if extent.end < len(prompt):
                tokens.append(-1)
                continue
            logits = self._model.model.logits(hidden[:, -1:])[0]
            job.first = pick(ask, extent.end - 1, logits[0])
            job.first_logprobs = logprobs([job.first], logits, ask.top_logprobs) if ask.logprobs else []
            tokens.append(job.first)
        return tokens

    def _end(self, job: Job) -> list[Step]:
        """Hand a computed prompt over, or send the rest of it, if that can be done now."""
        rid = job.ask.rid
        wants_more = self._hand_over is not None and job.ask.max_new_tokens > 0
        if job.ask.room is not None:
            if self._send(job):
                self.worker.finish(rid)
                self._sent[rid] = self.jobs.pop(rid)
            return []
        if wants_more and self._hand_over is not None and not self._hand_over(job):
            return []
        self.worker.finish(rid)
        del self.jobs[rid]
        return [job.step()] if wants_more else [job.answered()]

    def _send(self, job: Job) -> bool:
        """Whether the decode worker has made room; asked again at the next step."""
        room = job.ask.room or 0
        sender = self.worker.exports.sender
        known = [each for each in sender.sendings if each.use[1] == room] if sender else []
        part = known[-1] if known else None
        try:
            self.worker.send(job.ask.rid, part.use[0] if part else "", room)
        except RefusedError:
            return False
        # decode may have given it up: then it is over already, and not live any more
        self._parts[job.ask.rid] = self.worker.exports.live.get(job.ask.rid, (room, part))[1]
        return True

    def _arrived(self) -> list[Step]:
        """Of the prompts on their way those that all ranks have finished with: sent, or given up by one of them."""
        over = [rid for rid in self._parts if rid not in self.worker.exports.live]
        parts = [self._parts.pop(rid) for rid in over]
        whys = [part.why if part else "" for part in parts]
        well = self.worker.group.minimum([int(not why) for why in whys]) if over else []
        steps: list[Step] = []
        for rid, why, good in zip(over, whys, well, strict=True):
            if rid in self.jobs:  # more was to be sent
                steps += self.abort(rid, why or GIVEN_UP, 500)
            elif rid in self._sent:
                job = self._sent.pop(rid)
                failed = job.step(finished=ABORT, error=why or GIVEN_UP, status=500)
                steps.append(job.answered() if good else failed)
        return steps

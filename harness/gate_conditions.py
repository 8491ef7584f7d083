"""The conditions that one task is run on, and the evidence that a condition really held.

A cold cache is one that was flushed. A restored one was filled by other prompts until what was asked before is on the
host alone. What came from where is told by each answer, or by the counters of the workers.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.adapters.http_client import Client, LostError
from harness.adapters.http_info import TOKEN_IDS, Info, read
from harness.adapters.http_metrics import ranks_of
from harness.gate_ask import Asker, Endpoint, Question, Reply, endpoint
from harness.gate_runner import FAILED_IN_A_ROW, LOOK_SECONDS, sample_of
from harness.gate_tasks import Task
from harness.samples import Sample, Samples
from harness.usage import UserError

FLUSHES = ("/flush_cache", "/reset_prefix_cache")
LOOK_AT_SERVER_SECONDS = 0.05
PRESSURE_OF_DEVICE = 4  # a pressure prompt takes at most this part of the device
RUNNING = "num_running_reqs"
MET_OFTEN = 5


class Place(NamedTuple):
    """A server that is asked, and the workers behind it whose caches are flushed and whose counters are read."""

    asked: Endpoint
    info: Info
    workers: tuple[Client, ...]

    @property
    def url(self) -> str:
        """Its address."""
        return self.asked.client.url

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.info.number("page_size", "block_size") or 1


class Evidence(NamedTuple):
    """What was seen of a run."""

    items: int
    device: int  # items with a page from there, by their answers
    host: int
    device_tokens: float | None  # by the workers' counters; None: they have none
    host_tokens: float | None
    in_flight_max: int  # requests, by the client
    running_max: int | None  # by the server; None: not seen, see `_most`
    restored: float | None = None  # of the prompts' tokens that were not on the device, the share from the host


class Run(NamedTuple):
    """A task on one condition."""

    samples: Samples
    seen: Evidence


def place(url: str, model: str | None, timeout: float, workers: Sequence[str] = (), *, is_chat: bool = False) -> Place:
    """A server that answers. Raises `UserError`."""
    asked = endpoint(url, model, timeout, is_chat=is_chat)
    info = read(Client(asked.client.url, timeout))
    clients = tuple(Client(each, timeout) for each in workers) or (asked.client,)
    if workers:  # the cache is theirs
        info = read(clients[0])
    return Place(asked._replace(is_native=bool(info.args) and not is_chat), info, clients)


def flush(where: Place) -> None:
    """Drops the caches. Raises `UserError` where that cannot be done."""
    for client in where.workers:
        why = ""
        for path in FLUSHES:
            try:
                told = client.post(path, {})
            except LostError as error:
                raise UserError(f"{client.url}: its cache is to be dropped: {error}; is the server up?") from error
            if told.ok:
                break
            why = why or told.why
        else:
            raise UserError(
                f"{client.url} does not drop its cache by {' or '.join(FLUSHES)} ({why}), so nothing would be cold; "
                "end other requests, or name the workers behind a router with --workers"
            )


def evaluate(task: Task, where: Place, name: str, concurrency: int, *, is_watched: bool = False) -> Run:
    """Asks every item once. Raises `UserError` when the server is gone."""
    before = _tokens(where)
    questions = [
        Question(at, 0, where.asked.body(item.prompt, task.generation, 0)) for at, item in enumerate(task.items)
    ]
    with _watched(where, is_on=is_watched) as running, Asker(where.asked, questions, concurrency) as asker:
        replies = _replies(asker, len(questions), max(FAILED_IN_A_ROW, concurrency), where.url)
    after = _tokens(where)
    answers: dict[str, dict[int, Sample]] = {
        sample.item: {0: sample} for sample in (sample_of(task, reply) for reply in replies)
    }
    grown = [None if a is None or b is None else a - b for a, b in zip(after, before, strict=True)]
    seen = Evidence(
        items=len(replies),
        device=sum((reply.cached_device or 0) >= where.page for reply in replies),
        host=sum((reply.cached_host or 0) >= where.page for reply in replies),
        device_tokens=grown[0],
        host_tokens=grown[1],
        in_flight_max=asker.in_flight_max,
        running_max=_most(running),
        restored=_restored(replies),
    )
    return Run(Samples(name=name, client="kvshard", answers=answers), seen)


def _restored(replies: Sequence[Reply]) -> float | None:
    """Prompts that share a context find on the device what the first one brought back: items alone say too little."""
    told = [
        (reply.cached_host, reply.prompt_tokens - reply.cached_device)
        for reply in replies
        if reply.prompt_tokens is not None and reply.cached_device is not None and reply.cached_host is not None
    ]
    absent = sum(tokens for _, tokens in told)
    return sum(host for host, _ in told) / absent if absent else None


def _most(running: Sequence[int]) -> int | None:
    """The most that were met running; one at a time is believed when it was met often, since looks are few."""
    met = [each for each in running if each]
    return max(met) if met and (max(met) > 1 or len(met) >= MET_OFTEN) else None


def _replies(asker: Asker, count: int, in_a_row_max: int, url: str) -> list[Reply]:
    replies: list[Reply] = []
    in_a_row = 0
    while len(replies) < count:
        reply = asker.next(LOOK_SECONDS)
        if reply is None:
            continue
        replies.append(reply)
        in_a_row = in_a_row + 1 if reply.error is not None else 0
        if in_a_row >= in_a_row_max:
            raise UserError(f"{url}: {in_a_row:,} requests in a row failed, the last one: {reply.error}; is it well?")
    return replies


def press(where: Place, times: float, concurrency: int) -> int:
    """Fills the device with other prompts, so that what was there is evicted; returns their tokens.

    Raises `UserError` when the size of the device is not told, or a prompt fails.
    """
    most = where.info.number("max_total_num_tokens", "max_total_tokens")
    if most is None:
        raise UserError(
            f"{where.workers[0].url} does not tell max_total_num_tokens, so it is not known what fills its device; "
            "leave --restored out"
        )
    context = where.info.number("context_length", "max_model_len") or most
    size = max(where.page + 1, min(context - 2, most // PRESSURE_OF_DEVICE))
    size -= (size - 1) % where.page  # whole pages, and the one token that no cache has
    count = -int(-times * most // (size - 1)) if size > 1 else 0
    vocab = where.info.number("vocab_size")
    ids = range(TOKEN_IDS[0], vocab - 8 if vocab and vocab > TOKEN_IDS[0] + 100 else TOKEN_IDS[1])
    draw = random.Random(most)
    questions = []
    for at in range(count):
        tokens = draw.choices(ids, k=size)
        if where.asked.is_native:
            params = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            questions.append(Question(at, 0, {"input_ids": tokens, "sampling_params": params}))
        else:
            questions.append(Question(at, 0, {"model": where.asked.model, "prompt": tokens, "max_tokens": 1}))
    asked = where.asked._replace(is_chat=False)
    with Asker(asked, questions, concurrency) as asker:
        replies = _replies(asker, count, max(FAILED_IN_A_ROW, concurrency), where.url)
    lost = [reply.error for reply in replies if reply.error is not None and not reply.error.startswith("empty answer")]
    if lost:
        raise UserError(f"{where.url}: {len(lost):,} of {count:,} prompts that fill its device failed: {lost[0]}")
    return count * size


def _tokens(where: Place) -> tuple[float | None, float | None]:
    """Cached tokens of device and host so far, by the counters of the workers, whose ranks count alike."""
    found: list[float | None] = []
    ranks = [each for client in where.workers for each in _counters(client)]
    for tier in ("device", "host"):
        values = [each[name] for each in ranks if (name := f"cached_tokens_{tier}_total") in each]
        found.append(max(values) if values else None)
    return found[0], found[1]


def _counters(client: Client) -> list[dict[str, float]]:
    try:
        told = client.get("/metrics")
        return list(ranks_of(told.body.decode()).values()) if told.ok else []
    except (LostError, ValueError):
        return []


@contextlib.contextmanager
def _watched(where: Place, *, is_on: bool) -> Iterator[list[int]]:
    """How many requests the workers say are running, looked at now and then."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_AT_SERVER_SECONDS):
            for client in where.workers:
                seen.extend(int(each[RUNNING]) for each in _counters(client) if RUNNING in each)

    thread = threading.Thread(target=look, daemon=True)
    if is_on:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        if is_on:
            thread.join()

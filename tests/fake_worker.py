"""The state of a fake worker: a cache of two tiers, transfers, counters; right or with a planted fault.

A row is its token, so that what attention would read is a tuple of tokens, and an answer is a hash of them.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Tokens = tuple[int, ...]
PAGE, CHUNK, CONTEXT, VOCAB = 8, 32, 512, 260
RANKS, RANK_PAGES, DECODE_PAGES = 2, 32, 512
PAGE_BYTES = 100.0
PROMISED_PART = 60  # % of the pool that is kept from other prompts
TOKEN_SECONDS = 0.003
CHUNK_SECONDS = 0.01
TIERS = ("device", "host")
COUNTERS = (
    *("generation_tokens_total", "cached_tokens_device_total", "cached_tokens_host_total", "kv_transfer_bytes_total"),
    *("hicache_backup_tokens_total", "hicache_backup_bytes_total", "load_back_bytes_total", "load_back_tokens_total"),
)
ALONE_MAX = 24  # requests before a crowd
ASKS, FACT_MAX = ord("\n"), 12
MOMENT = 0.3  # seconds


def number(*parts: object) -> int:
    """A hash."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "little")


def drawn(rows: Tokens, seed: int) -> int:
    """The token after these rows."""
    known = found(rows) if ASKS in rows[-FACT_MAX:] else None
    return known if known is not None else 16 + number(rows, seed) % (VOCAB - 30)


def found(rows: Tokens) -> int | None:
    """The next token of the value that a question at the end of the rows asks for, if the rows before have it."""
    text = bytes(row % 256 for row in rows).decode("latin-1")
    asked = re.search(r"\n\?([a-z]{3}=)([a-z]*)$", text)
    fact = asked and re.search(asked[1] + asked[2] + "([a-z;])", text[: asked.start()])
    return ord(fact[1]) if fact else None


def score(rows: Tokens, token: int) -> float:
    """Its log probability."""
    return -1.0 - number(rows, token) % 4000 / 1000


class GoneError(Exception):
    """The client has left, or has aborted the request."""


class LateError(Exception):
    """The other half never came, or has died."""


@dataclass
class World:
    """What the workers of a test share. `faults` are names; see the tests for what each is."""

    faults: frozenset[str] = frozenset()
    wait_seconds: float = 3.0  # more than a loaded machine needs to start 64 threads
    sharded: bool = True
    host: bool = True
    draft: bool = True
    rooms: dict[int, list[Any]] = field(
        default_factory=dict
    )  # rows once sent, whether decode has them, some from the host
    leases: dict[str, Any] = field(default_factory=dict)  # rows that wait for a decode half, by what is handed over
    lock: threading.RLock = field(default_factory=threading.RLock)
    unseen: set[object] = field(default_factory=set)  # requests whose client has left when nobody looked
    lives: Counter[str] = field(default_factory=Counter)  # by role: how often its worker has died or come back

    def has(self, fault: str) -> bool:
        return fault in self.faults


class Worker:
    """One server's state. `role` is "prefill", "decode" or "null"."""

    def __init__(self, world: World, role: str) -> None:
        self.world, self.role = world, role
        self.ranks = RANKS if role == "prefill" and world.sharded else 1
        self.rank_pages = RANK_PAGES if role == "prefill" else DECODE_PAGES
        self.live: dict[str, threading.Event] = {}  # by rid: whether it was aborted
        self.tiers: dict[str, OrderedDict[Tokens, Tokens]] = {tier: OrderedDict() for tier in TIERS}
        names = COUNTERS[:1] if role == "decode" else COUNTERS
        self.counters = [dict.fromkeys(names, 0.0) for _ in range(self.ranks)]
        self.leaked = 0
        self.promised = 0  # tokens that ended prompts still keep from others
        self.deepest = 0
        self.asked = 0
        self.dies = False

    @property
    def crowd(self) -> int:
        """Requests beyond those that a case asks alone first. How many run at a time is up to the machine."""
        return max(0, self.asked - ALONE_MAX)

    @property
    def pages(self) -> int:
        """Of all ranks."""
        return self.rank_pages * self.ranks

    def told(self) -> dict[str, Any]:
        """/server_info."""
        prefill, total = self.role == "prefill", self.pages * PAGE
        return {
            "disaggregation_mode": self.role,
            "disaggregation_bootstrap_port": 1,
            "disaggregation_timeout": self.world.wait_seconds,
            "attn_cp_size": self.ranks,
            "tp_size": 1,
            "enable_kv_cache_sharding": prefill and self.world.sharded,
            "page_size": PAGE,
            "chunked_prefill_size": CHUNK,
            "context_length": CONTEXT,
            "enable_hierarchical_cache": prefill and self.world.host,
            "hicache_write_policy": "write_through",
            "speculative_algorithm": "EAGLE" if self.world.draft else "",
            "dtype": "float32",
            "max_total_num_tokens": total // self.ranks if self.world.has("tells one rank's capacity") else total,
            "internal_states": [{"memory_usage": {"token_capacity": self.rank_pages * PAGE}}],
            "version": "1",
        }

    def metrics(self) -> str:
        """/metrics."""
        lines = ["# TYPE fake_total counter"]
        with self.world.lock:
            cached, busy = len(self.tiers["device"]) * PAGE, len(self.live)
            used = self.leaked * PAGE
            levels = {
                "max_total_num_tokens": self.pages * PAGE,
                "num_used_tokens": used,
                "kv_available_tokens": self.pages * PAGE - cached - used,
                "num_running_reqs": busy,
                "decode_free_pages": self.pages - self.leaked,
                "hicache_host_total_tokens": 8 * self.pages * PAGE,
            }
            for rank, counters in enumerate(self.counters):
                for name, value in {**levels, **counters}.items():
                    lines.append(f'fake:{name}{{tp_rank="{rank}"}} {value}')
        return "\n".join(lines) + "\n"

    def count(self, name: str, value: float, rank: int | None = None) -> None:
        """Counts on one rank or on all."""
        for at, counters in enumerate(self.counters):
            if rank in {None, at}:
                counters[name] += value

    def flush(self) -> bool:
        """Whether the cache was dropped."""
        with self.world.lock:
            if self.live and not self.world.has("flushes in flight"):
                return False
            if not self.world.has("keeps the cache at a flush"):
                for tier in self.tiers.values():
                    tier.clear()
            return True

    @contextmanager
    def alive(self, rid: str) -> Iterator[threading.Event]:
        """A request from its beginning to its end."""
        aborted = threading.Event()
        with self.world.lock:
            self.live[rid] = aborted
            self.deepest = len(self.live)
            self.asked += 1
        try:
            yield aborted
        except GoneError:
            leaks = {"prefill": "leaks pages of ended prompts", "decode": "leaks pages of ended answers"}
            with self.world.lock:
                self.leaked += self.world.has(leaks.get(self.role, ""))
                if self.role == "prefill" and self.world.has("keeps what ended prompts were promised"):
                    self.promised = (PROMISED_PART * self.pages * PAGE) // 100
            raise
        finally:
            with self.world.lock:
                del self.live[rid]

    def prefilled(self, tokens: Tokens, scored_from: int, check: Any, salt: str = "") -> tuple[Tokens, dict[str, int]]:
        """Rows of a prompt, and how many of its tokens were cached by tier."""
        world = self.world
        with world.lock:
            rows, cached = self._matched(tokens, scored_from, salt)
        for _ in range(len(rows), len(tokens), CHUNK):
            time.sleep(CHUNK_SECONDS)
            check()
        whole = rows + tokens[len(rows) :]
        if len(tokens) > CHUNK and world.has("swaps pages of later chunks") and self.role == "prefill":
            whole = whole[:CHUNK] + whole[CHUNK + PAGE :] + whole[CHUNK : CHUNK + PAGE]
        if world.has("mixes a batch") and self.role == "prefill" and self.in_company():
            whole = (len(self.live), *whole[1:])
        with world.lock:
            self._keep(tokens, whole, salt)
        return whole, cached

    def in_company(self) -> bool:
        """Whether another request is there, now or in a moment: a slow machine starts them one by one."""
        end = time.monotonic() + MOMENT
        while len(self.live) < 2 and time.monotonic() < end:
            time.sleep(0.002)
        return len(self.live) > 1

    def _key(self, tokens: Tokens, salt: str) -> Tokens:
        """What a page is found by."""
        salt = salt[:4] if self.world.has("compares salts in part") else salt
        salt = f"{salt}{self.asked}" if salt and self.world.has("salts every request") else salt
        return (number(salt), *tokens) if salt and not self.world.has("ignores salts") else tokens

    def _matched(self, tokens: Tokens, scored_from: int, salt: str) -> tuple[Tokens, dict[str, int]]:
        world, rows, cached = self.world, [], dict.fromkeys(TIERS, 0)
        most = len(tokens) - 1 if scored_from < 0 else max(0, scored_from - 1)
        most = 0 if world.has("never hits") else most
        for end in range(PAGE, most + 1, PAGE):
            key = self._key(tokens[:end], salt)
            tier = next((name for name in TIERS if key in self.tiers[name]), "")
            if not tier or (tier == "host" and (not world.host or world.has("forgets the host"))):
                break
            page = self.tiers[tier][key]
            self.tiers[tier].move_to_end(key)
            rows.append((*page[1:], page[0]) if tier == "host" and world.has("rotates rows on the host") else page)
            cached[tier] += PAGE
            if tier == "host":
                one = world.has("one rank brings all back")
                self.count("load_back_tokens_total", PAGE * (2 if world.has("counts what comes back twice") else 1))
                self.count("load_back_bytes_total", PAGE_BYTES, 0 if one else self._owner(end))
        if len(rows) > 1 and world.has("swaps cached pages"):
            rows[0], rows[1] = rows[1], rows[0]
        twice = 2 if world.has("counts hits twice") else 1
        for tier, count in cached.items():
            self.count(f"cached_tokens_{tier}_total", count * twice)
        return tuple(token for page in rows for token in page), cached

    def _keep(self, tokens: Tokens, rows: Tokens, salt: str) -> None:
        ends = range(PAGE, len(tokens) + 1, PAGE)
        device, host = (self.tiers[tier] for tier in TIERS)
        for end in ends:
            key = self._key(tokens[:end], salt)
            if key not in device and key not in host and self.world.host:
                host[key] = rows[end - PAGE : end]
                self.count("hicache_backup_tokens_total", PAGE)
                all_ranks = self.world.has("every rank copies all")
                self.count("hicache_backup_bytes_total", PAGE_BYTES, None if all_ranks else self._owner(end))
            device[key] = rows[end - PAGE : end]
        while len(device) > self.pages:
            key, _ = device.popitem(last=False)
            if self.world.has("finds evicted pages"):
                host[key] = next(reversed(device.values()))  # with the rows of who has the page now

    def _owner(self, end: int) -> int:
        return (end // PAGE - 1) % self.ranks

    def send(self, room: int, rows: Tokens, check: Any, *, from_host: bool) -> None:
        """Hands rows to decode, and waits until it has them."""
        for page in range(-(-len(rows) // PAGE)):
            rank = 0 if self.world.has("one rank sends all") else page % self.ranks
            self.count("kv_transfer_bytes_total", PAGE_BYTES, None if self.world.has("every rank sends all") else rank)
        slot = self.world.rooms.setdefault(room, [None, False, False])
        slot[0], slot[2] = rows, from_host
        self.wait(lambda: slot[1], check)

    def receive(self, room: Any, check: Any) -> Tokens:
        """Waits for the rows of a room."""
        slot = self.world.rooms.setdefault(room, [None, False, False])
        try:
            self.wait(lambda: slot[0] is not None, check)
        except LateError:
            if not self.world.has("reads what has not come"):
                raise
            slot[0] = ()
        slot[1] = True
        rows: Tokens = slot[0]
        return rows

    def wait(self, holds: Any, check: Any) -> None:
        """Until it holds; `LateError` when it does not in time."""
        seconds = 60.0 if self.world.has("waits for ever") else self.world.wait_seconds
        end, lives = time.monotonic() + seconds, self.world.lives.copy()
        while not holds():
            check()
            has_died = lives != self.world.lives or any(count % 2 for count in lives.values())
            has_died = has_died or (any(lives.values()) and self.world.has("knows one process of its peer"))
            if time.monotonic() > end or (has_died and not self.world.has("waits for ever")):
                self.leaked += self.world.has("leaks pages of orphans")
                what = "has died" if has_died else f"did not come within {seconds:g} s"
                raise LateError(f"the other half {what}")
            time.sleep(0.002)


@dataclass
class Answer:
    """One answer on its way."""

    rows: Tokens = ()
    cached: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    scores: list[list[Any]] = field(default_factory=list)
    tokens: list[list[Any]] = field(default_factory=list)
    depth: int = 0
    streams: bool = False

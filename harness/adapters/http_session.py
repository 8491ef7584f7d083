"""A session on servers: ops become requests, replies are what came of them, the snapshot is what /metrics shows."""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from harness.adapter import OpSession
from harness.adapters.http_calls import Call, Leg
from harness.adapters.http_client import Client, Json, LostError, Told
from harness.adapters.http_dialects import Dialect
from harness.adapters.http_info import role_levels
from harness.adapters.http_metrics import ranks_of
from harness.adapters.http_operator import VERBS, Operator
from harness.launch.control import ControlError
from harness.types import (
    Abort,
    AnyOp,
    AnyReply,
    Done,
    Flush,
    Generate,
    Kill,
    Manifest,
    Ok,
    Refused,
    Replies,
    Restart,
    Settle,
    Together,
    Unknown,
    Unsupported,
)
from harness.views import RankView, Snapshot

POLL_SECONDS = 0.05
KNOWN_SECONDS = 0.05  # from the moment that a request is sent until a server has read it, as an abort must find it
FIRST_TOKENS = 16  # decide which of several prefill workers gets a prompt


@dataclass(frozen=True, slots=True)
class Route:
    """Which servers get a request. `ports`: of the prefill workers' bootstraps."""

    prefill: Sequence[Client]
    ports: Sequence[int]
    serving: Sequence[Client]
    control: Sequence[Client]
    through: Sequence[Client] = ()

    def legs(self, op: Generate, dialect: Dialect) -> list[Leg]:
        """The requests of one op, the one that gives the answer last."""
        if op.arm == "control":
            return [Leg(client, "") for client in self.control]
        if self.through and not op.half:
            return [Leg(self.through[0], "")]
        if not self.prefill:
            return [Leg(self.serving[0], "")]
        # the same start at the same worker, as a router that knows what is cached
        place = zlib.crc32(repr(op.tokens[:FIRST_TOKENS]).encode())
        at = place % len(self.prefill)
        first, last = self.prefill[at], self.serving[place % len(self.serving)]
        more = dialect.halves(first.host, self.ports[at])
        halves = [Leg(first, "prefill", more[0]), Leg(last, "decode", more[1])]
        return [leg for leg in halves if op.half in {"", leg.role}]

    @property
    def judged(self) -> list[tuple[str, Client]]:
        """Role and server of all but the control arm."""
        role = "decode" if self.prefill else ""
        return [*(("prefill", client) for client in self.prefill), *((role, client) for client in self.serving)]

    @property
    def flushing(self) -> list[Client]:
        """In this order: a request of a pair is in flight at the decode worker all the time, so it refuses first."""
        return [*self.serving, *self.prefill]


class HttpSession(OpSession):
    """Begins on a cache that was flushed. Raises `LostError` or ValueError when that cannot be done.

    A worker that was ended is left out: it is asked nothing, and its ranks show no counter, until it is back.
    """

    def __init__(
        self,
        route: Route,
        dialect: Dialect,
        manifest: Manifest,
        settle_seconds: float,
        operator: Operator | None = None,
    ) -> None:
        self._route, self._dialect, self._manifest = route, dialect, manifest
        self._settle_seconds, self._operator = settle_seconds, operator
        self._ranks: dict[str, int] = {}  # by URL, as they were shown last
        if operator is not None:
            operator.revive()
        self._mark = secrets.token_hex(6)  # of this session's request ids
        self._handed: dict[str, Json] = {}  # by request, from a prefill half that was asked alone
        if "settle" in manifest.ops:
            self._settled([client for _, client in route.judged])
        for client in [*route.flushing, *route.control] if "flush" in manifest.ops else []:
            told = client.post(f"/flush_cache?timeout={self._settle_seconds:g}", {})
            if not told.ok:
                raise ValueError(f"{client.url} does not drop its cache before a session: {told.why}")

    def do_generate(self, op: Generate) -> AnyReply:
        return self._played([op])[0]

    def do_together(self, op: Together) -> AnyReply:
        return Replies(tuple(self._played(op.ops)))

    def do_abort(self, op: Abort) -> AnyReply:
        if not self._dialect.aborts:
            return Unsupported(f"dialect {self._dialect.name} has no way to end a request by its id")
        there = self._there([client for _, client in self._route.judged])
        return self._all_told([(client, "/abort_request", self._rid(op.request)) for client in there])

    def do_flush(self, op: Flush) -> AnyReply:
        return self._all_told([(client, "/flush_cache", "") for client in self._there(self._route.flushing)])

    def do_settle(self, op: Settle) -> AnyReply:
        try:
            self._settled(self._there([client for _, client in self._route.judged]))
        except (LostError, ValueError) as error:
            return Unknown(str(error))
        return Ok(Done())

    def do_kill(self, op: Kill) -> AnyReply:
        clients = [client for role, client in self._route.judged if role == op.role]
        if self._operator is None:
            return Unsupported("nobody can end these processes: give operate=LOG_DIR")
        if not clients or op.what not in VERBS:
            return Refused(f"no {op.what} of role {op.role!r}")
        whys = [self._operator.kill(client, op.what, self._settle_seconds) for client in clients]
        return Unknown("; ".join(filter(None, whys))) if any(whys) else Ok(Done())

    def do_restart(self, op: Restart) -> AnyReply:
        clients = [client for role, client in self._route.judged if op.role in {"", role}]
        if self._operator is None:
            return Unsupported("nobody can restart these processes: give operate=LOG_DIR")
        if not clients:
            return Refused(f"no worker of role {op.role!r}")
        try:
            self._operator.restart(clients)
        except ControlError as error:
            return Unknown(str(error))
        return Ok(Done())

    def snapshot(self) -> Snapshot:
        """Every rank's counters, those of decode workers behind those of prefill workers."""
        views: list[RankView] = []
        for role, client in self._route.judged if "counters" in self._manifest.shows else []:
            is_there = bool(self._there([client]))
            shown = list(_counters(client).values()) if is_there else [{}] * self._ranks.get(client.url, 1)
            self._ranks[client.url] = len(shown)
            for counters in shown:
                views.append(_view(len(views), role, counters))
        return Snapshot(tuple(views) or (RankView(rank=0),))

    def close(self) -> None:
        """Nothing is under way between two ops."""

    def _there(self, clients: Sequence[Client]) -> list[Client]:
        """Without those that were ended."""
        down = self._operator.down if self._operator is not None else set()
        return [client for client in clients if client.url not in down]

    def _played(self, ops: Sequence[AnyOp]) -> list[AnyReply]:
        """Replies in order. Ops beside a `Generate` are told in `Abort`, `Kill` and `Together` when they come."""
        replies: dict[int, AnyReply] = {}
        others = [each for each in ops if not isinstance(each, Generate)]
        calls: dict[int, Call] = {}
        for at, op in enumerate(ops):
            if isinstance(op, Generate):
                if op.arm == "control" and not self._route.control:
                    replies[at] = Unsupported("there is no control arm: give control=URL")
                    continue
                if op.salt and "salts" not in self._manifest.promises:
                    replies[at] = Unsupported("nobody has promised that salts are heeded")
                    continue
                legs = self._route.legs(op, self._dialect)
                if op.half == "decode":
                    legs[-1].more = {**legs[-1].more, **self._handed.get(op.request, {})}
                calls[at] = Call(op, self._rid(op.request), legs, self._dialect, watched=bool(others))
        for call in calls.values():
            call.start()
        for at, op in enumerate(ops):
            if at in calls or at in replies:
                continue
            self._await(op, [call for place, call in calls.items() if place < at])
            replies[at] = self.apply(op) if not isinstance(op, Together) else Unsupported("a Together in a Together")
        for at, call in calls.items():
            replies[at] = call.result()
            if call.op.half == "prefill":
                self._handed[call.op.request] = call.answering.told.handed
        return [replies[at] for at in range(len(ops))]

    def _await(self, op: AnyOp, calls: Sequence[Call]) -> None:
        if isinstance(op, Abort):
            for call in calls:
                if call.op.request == op.request:
                    call.wait_for(op.after_tokens, self._settle_seconds)
                    time.sleep(KNOWN_SECONDS if op.after_tokens == 0 else 0)
        elif isinstance(op, Flush | Kill):
            after = op.after_tokens if isinstance(op, Kill) else 1
            for call in calls:
                call.wait_for(after, self._settle_seconds)
            time.sleep(KNOWN_SECONDS if after == 0 else 0)

    def _rid(self, request: str) -> str:
        return f"{self._mark}-{quote(request, safe='')}-"  # its end keeps r1 from being a prefix of r10

    def _all_told(self, asked: Sequence[tuple[Client, str, str]]) -> AnyReply:
        """Tells all servers in turn; the first that refuses is the last that is told."""
        for client, path, rid in asked:
            try:
                told: Told = client.post(path, {"rid": rid} if rid else {})
            except LostError as error:
                return Unknown(str(error))
            if told.status >= 500:
                return Unknown(f"{client.url}{path}: {told.why}")
            if not told.ok:
                return Refused(f"{client.url}{path}: {told.why}")
        return Ok(Done())

    def _settled(self, clients: Sequence[Client]) -> None:
        """Until nothing is under way and no counter moves. Raises ValueError when that does not come in time."""
        end = time.monotonic() + self._settle_seconds
        before: list[dict[int, dict[str, float]]] = []
        while True:
            now = [_counters(client) for client in clients]
            busy = [f"{client.url} {name} = {value:g}" for client, name, value in _busy(clients, now)]
            if now == before and not busy:
                return
            if time.monotonic() > end:
                what = ", ".join(busy) or "counters that go on growing"
                raise ValueError(f"still under way after {self._settle_seconds:g} s: {what}")
            before = now
            time.sleep(POLL_SECONDS)


def _busy(clients: Sequence[Client], now: Sequence[dict[int, dict[str, float]]]) -> Iterator[tuple[Client, str, float]]:
    for client, counters in zip(clients, now, strict=True):
        yield from ((client, name, value) for name, value in role_levels(counters).items() if value)


def _counters(client: Client) -> dict[int, dict[str, float]]:
    """Raises `LostError`."""
    told = client.get("/metrics")
    if not told.ok:
        raise LostError(f"{client.url}/metrics: {told.why}")
    return ranks_of(told.body.decode())


def _view(rank: int, role: str, counters: dict[str, float]) -> RankView:
    most, used = counters.get("max_total_num_tokens"), counters.get("num_used_tokens")
    return RankView(
        rank=rank,
        role=role,
        counters=counters,
        tokens_max=None if most is None else int(most),
        tokens_used=None if used is None else int(used),
    )

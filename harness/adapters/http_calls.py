"""One `Generate` under way: the requests that it is made of, who follows them, and what came of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.adapters.http_client import Client, Exchange, LeftError, LostError
from harness.adapters.http_dialects import Dialect, Told
from harness.types import AnyReply, Generate, Ok, Refused, Unknown

GATEWAY = frozenset({502, 504})  # told by one that stands between: what became of the request it does not know


@dataclass(slots=True, eq=False)
class Leg:
    """One request of a call; of a pair, one half of it. `more` goes into its body."""

    client: Client
    role: str  # "prefill", "decode", or "" where one server does all
    more: Mapping[str, object] = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    lost: str = ""  # why there is no answer
    left: bool = False
    ended: bool = False
    exchange: Exchange | None = None


class Call:
    """A `Generate` on its way. `watched`: somebody wants to know how far the answer is."""

    def __init__(self, op: Generate, rid: str, legs: Sequence[Leg], dialect: Dialect, *, watched: bool) -> None:
        self.op, self.rid, self.legs, self.dialect = op, rid, legs, dialect
        self._stream = watched or op.leave_after >= 0
        self._change = threading.Condition()
        self._asked = 0
        self._gone = threading.Event()
        self._in_turn = dialect.hands_over and len(legs) > 1
        groups = [tuple(legs)] if self._in_turn else [(leg,) for leg in legs]
        self._threads = [threading.Thread(target=self._follow, args=group, daemon=True) for group in groups]

    @property
    def answering(self) -> Leg:
        """Whose answer is the answer."""
        return self.legs[-1]

    def start(self) -> None:
        """Sends all requests, each followed by a thread of its own."""
        for thread in self._threads:
            thread.start()

    def wait_for(self, tokens: int, seconds: float) -> None:
        """Until the answer has so many tokens or is over; with 0, until all is sent."""
        end = time.monotonic() + seconds

        def is_so() -> bool:
            far = self.answering.told.count >= tokens and (tokens > 0 or self._asked >= len(self._threads))
            return far or all(leg.ended for leg in self.legs)

        with self._change:
            self._change.wait_for(is_so, max(0.0, end - time.monotonic()))

    def leave(self) -> None:
        """The client is gone."""
        self._gone.set()
        for leg in self.legs:
            if leg.exchange is not None:
                leg.exchange.leave()

    def result(self) -> AnyReply:
        """Waits for all legs; what they came to."""
        if self.op.leave_after >= 0:
            self.wait_for(self.op.leave_after, self.answering.client.seconds)
            self.leave()
        for thread in self._threads:
            thread.join()
        leg = self.answering
        if leg.told.error:
            # the other half's own error is the cause, when it has one
            told = [f"HTTP {each.told.status}: {each.told.error}" for each in self.legs if each.told.error]
            why = "; ".join(dict.fromkeys(told))
            return Unknown(why) if not leg.role and leg.told.status in GATEWAY else Refused(why)
        if leg.left:
            leg.told.finish = leg.told.finish or "left"
        elif leg.lost or not leg.told.finish:
            return Unknown(leg.lost or f"{leg.client.url} ended the answer without a reason")
        return Ok(leg.told.generated(**self._prefilled()))

    def _prefilled(self) -> dict[str, object]:
        """What only the prefill worker of a pair knows. It told nothing when its client was gone before."""
        if len(self.legs) == 1:
            return {}
        told = self.legs[0].told
        scores = None if told.input_logprobs is None else tuple(told.input_logprobs)
        known = {name: told.more.get(name) for name in ("cached_tokens", "cached_device", "cached_host")}
        return {"first": told.tokens[0] if told.tokens else None, "input_logprobs": scores, **known}

    def _follow(self, *legs: Leg) -> None:
        """One request after the other, each with what the one before has handed over, as long as none fails."""
        before: Leg | None = None
        for leg in legs:
            if before is not None:
                leg.more = {**leg.more, **before.told.handed}
                leg.left = before.left or self._gone.is_set()
                leg.lost, leg.told.error, leg.told.status = before.lost, before.told.error, before.told.status
            if leg.left or leg.lost or leg.told.error:
                self._tell(lambda leg=leg: setattr(leg, "ended", True))  # type: ignore[misc]  # a default binds it
            else:
                self._one(leg)
            before = leg

    def _one(self, leg: Leg) -> None:
        stream = self._stream and leg is self.answering
        salt = {self.dialect.salt: self.op.salt} if self.op.salt else {}
        body = {**self.dialect.body(self.op, self.rid, stream=stream), **salt, **leg.more}
        leg.exchange = leg.client.exchange(self.dialect.path, body)
        if self._gone.is_set():
            leg.exchange.leave()
        try:
            leg.exchange.ask()
            self._tell(lambda: setattr(self, "_asked", self._asked + 1))
            self._take(leg, leg.exchange)
        except LeftError:
            leg.left = True
        except (LostError, KeyError, TypeError, IndexError, AttributeError) as error:  # the last four: another's JSON
            leg.lost = str(error) if isinstance(error, LostError) else f"an answer that reads {error!r}"
        finally:
            leg.exchange.close()
            self._tell(lambda: setattr(leg, "ended", True))

    def _take(self, leg: Leg, exchange: Exchange) -> None:
        for event in exchange.events():
            self._tell(lambda event=event: self.dialect.add(leg.told, event))  # type: ignore[misc]  # a default binds it
        if exchange.status >= 400:
            leg.told.error, leg.told.status = leg.told.error or "no reason given", exchange.status

    def _tell(self, change: Callable[[], object]) -> None:
        with self._change:
            change()
            self._change.notify_all()

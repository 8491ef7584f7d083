"""The servers of a token gate: addresses as of `kvshard run`, asked with token ids, prompt scores in both dialects."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.adapter import ConfigError, Session
from harness.adapters.http import HttpEngine
from harness.adapters.http_client import Client, Json, LostError
from harness.adapters.http_dialects import OpenAI, Told, refused
from harness.connect import connect
from harness.types import Generate, Generated, Manifest, Ok, Replies, Settle, Together
from harness.usage import UserError

PRESSURE_OF_DEVICE = 4  # a prompt that evicts takes at most this part of the device
PAGE_DEFAULT = 64  # tokens, where a server tells no page: only a grid to look at


class EchoOpenAI(OpenAI):
    """/v1/completions with `echo`: the prompt's log probabilities come in front of those of the answer."""

    def body(self, op: Generate, rid: str, *, stream: bool) -> Json:
        """The JSON that asks."""
        return super().body(op, rid, stream=stream) | ({"echo": True} if op.logprob_start >= 0 else {})

    def add(self, told: Told, answer: Json) -> None:
        """Takes in a whole answer. Raises `LostError`."""
        if refused(told, answer):
            return
        choice, usage = answer["choices"][0], answer["usage"]
        scores = (choice.get("logprobs") or {}).get("token_logprobs")
        if scores is None:
            raise LostError("an answer without logprobs.token_logprobs")
        cut = len(scores) - usage["completion_tokens"]
        told.input_logprobs, told.logprobs = (scores[:cut] if cut else None), scores[cut:]
        told.text, told.tokens = choice.get("text"), choice.get("token_ids")
        told.finish = choice.get("finish_reason") or "stop"
        details = usage.get("prompt_tokens_details") or {}
        told.more = {"prompt_tokens": usage.get("prompt_tokens"), "cached_tokens": details.get("cached_tokens")}


@dataclass
class Server:
    """One arm. `client` is asked what only one server of a pair is asked, such as the tokens of a text."""

    address: str
    manifest: Manifest
    session: Session
    client: Client
    scores_from: bool  # whether the scores of a prompt may begin behind its first token
    concurrency: int  # requests in flight
    _number: Iterator[int] = field(default_factory=itertools.count)

    @property
    def page(self) -> int:
        """Tokens of a page."""
        fixed = self.manifest.axes.fixed
        return fixed.page_size if fixed is not None and fixed.page_size > 1 else PAGE_DEFAULT

    @property
    def tells_page(self) -> bool:
        """Whether the size of a page is its own word."""
        fixed = self.manifest.axes.fixed
        return fixed is not None and fixed.page_size > 1

    def op(self, tokens: Sequence[int], new: int, start: int) -> Generate:
        """A greedy request."""
        name = f"t{next(self._number)}"
        return Generate(request=name, tokens=tuple(tokens), max_new_tokens=new, temperature=0.0, logprob_start=start)

    def ask(self, ops: Sequence[Generate]) -> list[Generated | str]:
        """An answer each, or why there is none."""
        found: list[Generated | str] = []
        for at in range(0, len(ops), self.concurrency):
            part = ops[at : at + self.concurrency]
            reply = self.session.apply(Together(tuple(part)))
            replies = reply.replies if isinstance(reply, Replies) else (reply,) * len(part)
            found += [
                each.value
                if isinstance(each, Ok) and isinstance(each.value, Generated)
                else str(getattr(each, "why", each))
                for each in replies
            ]
        return found

    def press(self, times: float) -> int:
        """Fills the device `times` with other prompts, so that what was there is on the host alone; their tokens.

        Raises `UserError` when the size of the device is not told, or a prompt fails.
        """
        service, fixed = self.manifest.service, self.manifest.axes.fixed
        if service is None or fixed is None or service.tokens_max is None:
            raise UserError(f"{self.address} does not tell the tokens of its device; leave --restored out")
        size = max(self.page, min(fixed.context_tokens - 2, service.tokens_max // PRESSURE_OF_DEVICE))
        size -= size % self.page
        draw, ids = random.Random(size), range(*service.token_ids)
        count = math.ceil(times * service.tokens_max / size)
        answers = self.ask([self.op(draw.choices(ids, k=size + 1), 1, -1) for _ in range(count)])
        lost = next((answer for answer in answers if isinstance(answer, str)), None)
        if lost is not None:
            raise UserError(f"{self.address}: a prompt that fills its device failed: {lost}")
        if "settle" in self.manifest.ops:  # copies to the host may be under way
            self.session.apply(Settle())
        return count * size


@contextlib.contextmanager
def opened(address: str, option: str, timeout: float, concurrency: int) -> Iterator[Server]:
    """A server whose cache was dropped, where that can be done. Raises `UserError`."""
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{option} {address!r}: expected the address of a server: http://host:port")
    has_time = "timeout=" in address
    joint = "&" if "?" in address else "?"
    engine = connect(address if has_time else f"{address}{joint}timeout={timeout:g}")
    if not isinstance(engine, HttpEngine):  # an address of a server is always one
        raise UserError(f"{option} {address!r}: is no server")
    if isinstance(engine.dialect, OpenAI):
        engine.dialect = EchoOpenAI()
    try:
        manifest = engine.describe()
        fixed = manifest.axes.fixed
        if fixed is None:
            raise UserError(f"{option} {address!r}: does not say what it is")
        session = engine.open(fixed)
    except UserError:
        raise
    except (LostError, ConfigError, ValueError) as error:
        raise UserError(f"{option} {address}: {error}; is the server idle and well?") from error
    client = (engine.prefill or engine.serving)[0]
    try:
        yield Server(address, manifest, session, client, not isinstance(engine.dialect, OpenAI), concurrency)
    finally:
        session.close()

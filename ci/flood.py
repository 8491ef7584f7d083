"""Tiny and long prompts at once on servers that may fail some: `python -m ci.flood ADDRESS [--errors SHARE]`.

Each round sends all its requests together: tiny prompts, half of them behind one shared page, and long ones, more than
the pool holds, of which some come again from earlier rounds, when they may be on the host alone. Every answer is
compared with the control arm's. An error that the server tells is counted by its text; `--errors` says up to which
share of the requests may have one, and then at least one must. At the end all is at rest, as before the first request.

Exit codes: 0 as said, 1 a wrong answer, a lost request, too many errors or something left behind, 2 errors were to
come and none did, 3 wrong usage or servers that do not answer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.adapter import Session
from harness.adapters.http_client import LostError
from harness.connect import connect
from harness.types import (
    AnyReply,
    Flush,
    Generate,
    Generated,
    Manifest,
    Ok,
    Refused,
    Replies,
    Service,
    Settle,
    Together,
)
from harness.usage import UserError
from harness.views import Snapshot
from suites.e2e.alike import within
from suites.e2e.rest import LEVELS
from suites.e2e.story import common

NAMES = re.compile(r"[0-9a-f]{8,}[-\w]*|0x[0-9a-f]+|\d+")  # of one request or room
NEW_TOKENS = 4
EXIT_AMISS, EXIT_NOT_SHOWN, EXIT_USAGE = 1, 2, 3
Tokens = tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """What came of the requests; `tokens` of prompts."""

    asked: int = 0
    tokens: int = 0
    cached: int = 0
    host: int = 0
    ends: Counter[str] = field(default_factory=Counter)  # right, flipped, wrong, error, lost
    texts: Counter[str] = field(default_factory=Counter)  # of errors and of what was lost
    wrong: list[str] = field(default_factory=list)

    def add(self, op: Generate, reply: AnyReply, control: Generated, service: Service) -> None:
        """One reply beside the control arm's answer."""
        self.asked += 1
        self.tokens += len(op.tokens)
        if not isinstance(reply, Ok) or not isinstance(reply.value, Generated):
            kind = "error" if isinstance(reply, Refused) else "lost"
            self._told(kind, getattr(reply, "why", str(reply)))
            return
        value = reply.value
        if value.finish != "length":
            self._told("error", f"ended as {value.finish!r}")
            return
        self.cached += value.cached_tokens or 0
        self.host += value.cached_host or 0
        end = judged(value, control, service)
        self.ends[end] += 1
        if end == "wrong":
            self.wrong.append(f"{op.request}, {len(op.tokens)} tokens: {value.tokens} beside {control.tokens}")

    def _told(self, kind: str, why: str) -> None:
        self.ends[kind] += 1
        self.texts[NAMES.sub("#", f"{kind}: {why}")[:160]] += 1


def judged(value: Generated, control: Generated, service: Service) -> str:
    """Whether it is the control arm's answer: right, flipped where other tokens follow a tie, or wrong."""
    mine, theirs = value.tokens or (), control.tokens or ()
    count = common(mine, theirs)
    pairs = zip((value.logprobs or ())[:count], (control.logprobs or ())[:count], strict=False)
    near = within([abs(a - b) for a, b in pairs], service.logprob_near, service.logprob_far)
    if not near or (count == 0 and mine != theirs):
        return "wrong"
    return "right" if mine == theirs else "flipped"


class Flood:
    """The rounds, in a session."""

    def __init__(self, session: Session, manifest: Manifest, seed: int, long_share: float) -> None:
        self.session, self.random, self.long_share = session, random.Random(seed), long_share
        config, service = manifest.axes.fixed, manifest.service
        if config is None or service is None or "control" not in manifest.promises:
            raise UserError("there is no control arm to compare with; give the address control=URL")
        self.service = service
        self.page = config.page_size
        self.longest = min(config.context_tokens - 80, (service.tokens_max or config.context_tokens) // 3)
        self.shared, self.earlier, self.names = self._fresh(self.page), list[Tokens](), 0
        self.known = dict[Tokens, Generated]()

    def round(self, count: int, tally: Tally) -> None:
        """So many requests together, after the control arm has answered each of their prompts."""
        prompts = [self._prompt() for _ in range(count)]
        fresh = [tokens for tokens in dict.fromkeys(prompts) if tokens not in self.known]
        for tokens, reply in zip(fresh, self._asked(fresh, "control")[1], strict=True):
            if not isinstance(reply, Ok) or not isinstance(reply.value, Generated):
                raise UserError(f"the control arm does not answer: {getattr(reply, 'why', reply)}")
            self.known[tokens] = reply.value
        for op, reply in zip(*self._asked(prompts, ""), strict=True):
            tally.add(op, reply, self.known[op.tokens], self.service)
        self.earlier += [tokens for tokens in prompts if len(tokens) > 2 * self.page]

    def rest(self) -> Snapshot:
        """Once all is settled and the cache is dropped."""
        for op in (Settle(), Flush()):
            reply = self.session.apply(op)
            if not isinstance(reply, Ok):
                raise UserError(f"not at rest: {getattr(reply, 'why', reply)}")
        return self.session.snapshot()

    def _asked(self, prompts: Sequence[Tokens], arm: str) -> tuple[list[Generate], list[AnyReply]]:
        ops = []
        for tokens in prompts:
            self.names += 1
            ops.append(Generate(request=f"f{self.names}", tokens=tokens, max_new_tokens=NEW_TOKENS, arm=arm))
        told = self.session.apply(Together(tuple(ops))) if ops else Replies(())
        return ops, list(told.replies) if isinstance(told, Replies) else [told] * len(ops)

    def _prompt(self) -> Tokens:
        draw = self.random
        if draw.random() >= self.long_share:
            tiny = self._fresh(draw.randrange(1, self.page))
            return self.shared + tiny[:3] if draw.random() < 0.5 else tiny
        if self.earlier and draw.random() < 0.5:
            return draw.choice(self.earlier)
        return self._fresh(draw.randrange(self.longest // 2, self.longest))

    def _fresh(self, count: int) -> Tokens:
        first, end = self.service.token_ids
        return tuple(self.random.randrange(first, end) for _ in range(count))


def left(before: Snapshot, after: Snapshot) -> list[str]:
    """The levels that are not what they were."""
    return [
        f"{name} of {new.role or 'server'} rank {new.rank} is {(new.counters or {}).get(name)}, was {value}"
        for old, new in zip(before.ranks, after.ranks, strict=True)
        for name, value in (old.counters or {}).items()
        if name in LEVELS and (new.counters or {}).get(name) != value
    ]


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser("python -m ci.flood", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("address", metavar="ADDRESS", help="of servers with a control arm, as for kvshard run")
    add("--rounds", type=int, default=6, metavar="N", help="(%(default)s)")
    add("--at-once", type=int, default=64, metavar="N", help="requests of a round (%(default)s)")
    add("--long", type=float, default=0.25, metavar="SHARE", help="of long prompts (%(default)s)")
    add("--errors", type=float, default=0.0, metavar="SHARE", help="of requests that may have an error (%(default)s)")
    add("--flips", type=float, default=0.02, metavar="SHARE", help="that may go on otherwise after a tie (%(default)s)")
    add("--seed", type=int, default=1, metavar="INT", help="of the prompts (%(default)s)")
    return parser


def main(words: list[str]) -> int:
    """The command; returns its exit code."""
    chosen, started, tally = arguments().parse_args(words), time.monotonic(), Tally()
    try:
        engine = connect(chosen.address)
        manifest = engine.describe()
        if manifest.axes.fixed is None:
            raise UserError(f"{chosen.address}: expected servers that run, such as http://127.0.0.1:30000?control=URL")
        flood = Flood(engine.open(manifest.axes.fixed), manifest, chosen.seed, chosen.long)
        before = flood.rest()
        for _ in range(chosen.rounds):
            flood.round(chosen.at_once, tally)
    except (UserError, LostError, ValueError) as error:
        sys.stderr.write(f"flood: {error}\n")
        return EXIT_USAGE
    amiss = tally.wrong + [text for text in tally.texts if text.startswith("lost")]
    try:
        amiss += left(before, flood.rest())
    except (UserError, LostError) as error:
        amiss.append(str(error))
    ends = tally.ends
    for kind, share in (("error", chosen.errors), ("flipped", chosen.flips)):
        if ends[kind] > share * tally.asked:
            amiss.append(f"{ends[kind]} {kind} of {tally.asked}, expected at most {share:g} of them")
    for text, count in tally.texts.most_common():
        sys.stdout.write(f"{count:5d}  {text}\n")
    counts = {name: ends[name] for name in ("right", "flipped", "wrong", "error", "lost")}
    told = {"asked": tally.asked, **counts, "prompt_tokens": tally.tokens, "cached": tally.cached, "host": tally.host}
    sys.stdout.write(json.dumps({**told, "seconds": round(time.monotonic() - started, 1), "amiss": amiss}) + "\n")
    if amiss:
        return EXIT_AMISS
    return EXIT_NOT_SHOWN if chosen.errors and not ends["error"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

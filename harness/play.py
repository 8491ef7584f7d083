"""A play: one session, one watch, and the ops as they happen. Plans, replays and shrinking all go through here."""

from __future__ import annotations

import traceback

from harness.adapter import Engine, EngineFault, Session
from harness.capabilities import missing
from harness.case import Case, ClaimError, Violation, Watch
from harness.types import AnyOp, AnyReply, Config, Manifest, Ok, Replies, Together, Unsupported, op_name
from harness.values import values_of
from harness.views import Snapshot

ANSWERS = "Every op of the contract gets a reply; the engine never raises."


class Play:
    """Applies ops to a fresh session and judges each one before the next."""

    def __init__(self, made: Case, engine: Engine, config: Config, steps_max: int = 20) -> None:
        self.case = made
        self.manifest: Manifest = engine.describe()
        self.config = config
        self.steps_max = steps_max
        self._needed = frozenset(need.removeprefix("snapshot.") for need in made.needs)
        self.watch: Watch = made.watch(config, self.manifest)
        self.ops: list[AnyOp] = []
        self.replies: list[AnyReply] = []
        self._session: Session = engine.open(config)
        try:
            self._now: Snapshot | None = self._look()
        except BaseException:
            self.close()
            raise

    def do(self, op: AnyOp) -> AnyReply:
        """Applies `op`. Raises `Violation` when a claim breaks, `ClaimError` when the adapter breaks its manifest."""
        self.ops.append(op)
        try:
            reply = self._session.apply(op)
            after = self._look()
        except EngineFault as fault:
            raise Violation(fault.seen, fault.expected, fault.why, claim=fault.claim) from fault
        except Violation:
            raise
        except Exception as exception:
            raise Violation(
                raised(exception), "a reply", f"{op_name(op)} is an op it declares", claim=ANSWERS
            ) from exception
        self.replies.append(reply)
        self._check_claims(op, reply)
        before, self._now = self._now, after
        self.watch.after(op, reply, before, after)
        return reply

    def close(self) -> None:
        """Ends the session."""
        self._session.close()

    def _look(self) -> Snapshot | None:
        if not self.case.looks:
            return None
        snapshot = self._session.snapshot()
        if "decode" in self._needed and self.config.decode_pages and snapshot.decode is None:
            raise ClaimError("decode is None", "a view of the decode worker", "the manifest shows it")
        for rank in snapshot.ranks:
            for name in self.manifest.shows:
                if name in self._needed and getattr(rank, name, snapshot) is None:
                    raise ClaimError(
                        f"{name} of rank {rank.rank} is None", "a value, or no such claim", "the manifest shows it"
                    )
        if not snapshot.ranks:
            raise ClaimError(
                "a snapshot without ranks", "a view of at least one rank", "the manifest shows fields of it"
            )
        return snapshot

    def _check_claims(self, op: AnyOp, reply: AnyReply) -> None:
        """Raises `ClaimError` for a declared op that is unsupported, and for a value that is not the op's."""
        if isinstance(op, Together) and isinstance(reply, Replies):
            if len(reply.replies) != len(op.ops):
                raise ClaimError(
                    f"{len(reply.replies)} replies to {len(op.ops)} ops", "one reply each", "they ran together"
                )
            for one, its in zip(op.ops, reply.replies, strict=True):
                self._check_claims(one, its)
        elif isinstance(reply, Unsupported):
            raise ClaimError(
                f"unsupported: {reply.why}", f"{op_name(op)} carried out or refused", "the manifest declares it"
            )
        elif isinstance(reply, Ok) and not isinstance(reply.value, values_of(op)):
            names = " or ".join(kind.__name__ for kind in values_of(op))
            raise ClaimError(
                f"{type(reply.value).__name__} in reply to {op_name(op)}", names, "each op has its own value"
            )


def lacks(made: Case, manifest: Manifest) -> list[str]:
    """What a case needs and an engine does not claim."""
    return missing(manifest, made.needs)


def raised(exception: Exception) -> str:
    """An exception as one line with the place that raised it."""
    frames = traceback.extract_tb(exception.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(exception).__name__}: {exception}{place}"

"""Exports: the requests of one prefill rank that are on their way to decode workers. All ranks make the same calls."""

from __future__ import annotations

from typing import Any

from kvshard_ref.cache import PageCache
from kvshard_ref.errors import RefusedError
from kvshard_ref.group import Group
from kvshard_ref.sender import KVSender, Sending


class Exports:
    """Starts together, once every rank knows the room; keeps a request's pages until every rank has finished with them.

    One rank's failure is everybody's: the decode worker tells the others to stop. A rank that has the same copy as
    another one has no sender.
    """

    def __init__(self, cache: PageCache, group: Group, sender: KVSender | None) -> None:
        self.sender = sender
        self._cache = cache
        self._group = group
        self.live: dict[str, tuple[int, Sending | None]] = {}  # by request its room and this rank's part

    def send(self, name: str, peer: str, room: int, ready: Any) -> None:
        """Send what has rows, once `ready` has happened, and has not been sent; all of the prompt concludes.

        What is on the host only has no rows yet. Raises RefusedError, on all ranks, when the room is not known to all,
        is another one than before, or was reserved for another number of pages, or when the peer does not fit.
        """
        request = self._cache.request(name)
        if name not in self.live:
            part = self.sender.find(peer, room, request.pages_total) if self.sender else None
            self._refuse(part.why if part else "")
            self.live[name], request.sending = (room, part), True
        started, part = self.live[name]
        if started != room:
            raise RefusedError(f"request {name!r} is sent to room {started} already, not to {room}")
        tokens = min(request.computed, len(request.pages) * self._cache.placement.page_size)
        if part:
            part.send(request.pages, tokens, ready, last=tokens == request.tokens)

    def leave(self, name: str, *, aborted: bool) -> None:
        """The request ends: a transfer that has not its last chunk can only be aborted."""
        _, sending = self.live.get(name, (0, None))
        if sending and (aborted or not sending.concluded):
            sending.abort(f"request {name!r} ended, {'aborted' if aborted else 'its last chunk unsent'}")

    def poll(self) -> None:
        """Move all transfers on; release what every rank has finished with."""
        if self.sender:
            self.sender.poll()
        finished = [int(part is None or part.finished) for _, part in self.live.values()]
        agreed = self._group.minimum(finished) if finished else []
        for name in [name for name, done in zip(self.live, agreed, strict=True) if done]:
            del self.live[name]
            self._cache.sent(name)

    def _refuse(self, why: str) -> None:
        """Raise RefusedError on all ranks if one has a reason."""
        if not self._group.minimum([int(not why)])[0]:
            raise RefusedError(why or "another rank refuses it")

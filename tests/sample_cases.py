"""Four small cases for the tests of the harness: pytest collects them only when it is given this file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from harness.case import Case, Draw, Table, Violation, as_test, paragraphs
from harness.types import AnyOp, AnyReply, Axes, Config, Extend, Extended, Finish, Finished, Ok, Open, Opened, Rows
from harness.views import Snapshot

Check = Callable[[AnyOp, AnyReply, Snapshot | None], None]


def stamps(tokens: tuple[int, ...], start: int, end: int, config: Config) -> Rows:
    """Distinct for every token, layer and component."""
    return {
        component: tuple(
            tuple(10_000 * tokens[at] + 100 * at + 10 * layer + number for at in range(start, end))
            for layer in range(config.layers)
        )
        for number, component in enumerate(config.components)
    }


class SampleWatch:
    """Counts what happens and lets a check judge it."""

    def __init__(self, check: Check) -> None:
        self.seen: Counter[str] = Counter()
        self._check = check

    def after(self, op: AnyOp, reply: AnyReply, before: Snapshot | None, after: Snapshot | None) -> None:
        if isinstance(reply, Ok):
            names = {Extended: "extended", Finished: "finished", Opened: "opened"}
            self.seen[names.get(type(reply.value), "other")] += 1
            if isinstance(reply.value, Opened) and reply.value.cached:
                self.seen["hit"] += 1
        self._check(op, reply, after)


def serve(draw: Draw, table: Table) -> None:
    """A few prompts, each opened, computed in one chunk and finished."""
    page = table.config.page_size
    for number in range(draw(st.integers(1, table.steps_max // 3))):
        tokens = (7,) * (page * draw(st.integers(1, 3)) + 1)
        opened = table.do(Open(f"r{number}", tokens))
        if not (isinstance(opened, Ok) and isinstance(opened.value, Opened)):
            continue
        cached = opened.value.cached
        rows = stamps(tokens, cached, len(tokens), table.config)
        table.do(Extend(f"r{number}", len(tokens) - cached, rows))
        table.do(Finish(f"r{number}"))


def configs(axes: Axes) -> st.SearchStrategy[Config]:
    return st.sampled_from(axes.page_sizes).map(lambda page: Config(page_size=page, shards=axes.shards[0]))


def sample(name: str, needs: tuple[str, ...], seen: Mapping[str, int]) -> Callable[[Check], Callable[[Any], None]]:
    """Makes a check a case."""

    def decorate(check: Check) -> Callable[[Any], None]:
        claim, reason = paragraphs(check.__doc__)
        made = Case(
            id=name,
            claim=claim,
            reason=reason,
            invariants=("I01",),
            needs=needs,
            seen=seen,
            watch=lambda config, manifest: SampleWatch(check),
            configs=configs,
            plan=serve,
            module=__name__,
        )
        return as_test(made, check)

    return decorate


SERVES = ("op.open", "op.extend", "op.finish")


@sample("sample.reads_what_was_written", needs=SERVES, seen={"extended": 3, "hit": 1})
def test_reads_what_was_written(op: AnyOp, reply: AnyReply, after: Snapshot | None) -> None:
    """A chunk reads distinct rows for distinct tokens.

    A gather that reads one row for all tokens.
    """
    if isinstance(reply, Ok) and isinstance(reply.value, Extended):
        rows = reply.value.reads[0]["kv"][0]
        if len(set(rows)) != len(rows):
            raise Violation(
                f"{len(set(rows))} distinct rows", f"{len(rows)} distinct rows", "every token has its own stamp"
            )


@sample("sample.free_pages_are_counted", needs=(*SERVES, "snapshot.free", "snapshot.capacity"), seen={"finished": 1})
def test_free_pages_are_counted(op: AnyOp, reply: AnyReply, after: Snapshot | None) -> None:
    """No more pages are free than there are.

    A page that is freed twice.
    """
    for rank in after.ranks if after else ():
        if rank.free and rank.capacity and len(rank.free[0]) > rank.capacity[0]:
            raise Violation(f"{len(rank.free[0])} free", f"at most {rank.capacity[0]}", "that is the pool")


@sample("sample.never_met", needs=SERVES, seen={"restored": 1})
def test_never_met(op: AnyOp, reply: AnyReply, after: Snapshot | None) -> None:
    """What never happens is not proven.

    A suite that passes because nothing happened.
    """


@sample("sample.needs_locate", needs=("op.locate",), seen={})
def test_needs_locate(op: AnyOp, reply: AnyReply, after: Snapshot | None) -> None:
    """Places are told.

    An engine that does not tell is skipped.
    """

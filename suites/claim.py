"""How a case is written here: a function that judges one step, and a decorator that says the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from harness.case import Case, Draw, Table, Violation, as_test, paragraphs
from harness.types import AnyOp, AnyReply, Config, Extend, Manifest, Ok
from harness.views import RankView, Snapshot
from suites.configs import ConfigsOf, any_config
from suites.story import Story, parts


@dataclass(frozen=True, slots=True)
class Step:
    """One op with its reply and the state around it. `story` is what was known *before* the op."""

    op: AnyOp
    reply: AnyReply
    before: Snapshot
    after: Snapshot
    story: Story
    config: Config
    manifest: Manifest

    def parts(self) -> Iterator[tuple[AnyOp, AnyReply]]:
        """Every op with its own reply, those of a `Together` one by one."""
        return parts(self.op, self.reply)

    def accepted_extends(self) -> list[Extend]:
        """The chunks that this step computed."""
        return [op for op, reply in self.parts() if isinstance(op, Extend) and isinstance(reply, Ok)]

    def classes(self, rank: RankView) -> dict[int, int]:
        """Page -> owner class of every allocatable page, read off the free lists of the fresh session."""
        first = (self.story.first or self.before).ranks[self.after.ranks.index(rank)]
        return {page: owner for owner, pages in enumerate(first.free or ()) for page in pages}


Check = Callable[[Step], None]
Plan = Callable[[Draw, Table], None]


class StepWatch:
    """Judges each step with one check, then tells the story of it."""

    def __init__(self, check: Check, config: Config, manifest: Manifest) -> None:
        self.story = Story(config)
        self._check = check
        self._config = config
        self._manifest = manifest
        self._now: Snapshot | None = None

    @property
    def seen(self) -> Counter[str]:
        """How often each event was met."""
        return self.story.seen

    def after(self, op: AnyOp, reply: AnyReply, before: Snapshot | None, after: Snapshot | None) -> None:
        """Judges one op."""
        blank = Snapshot(())
        step = Step(op, reply, before or blank, after or blank, self.story, self._config, self._manifest)
        self._check(step)
        self.story.tell(op, reply, before, after)
        self._now = after

    def owner_of_last_page(self, request: str) -> int | None:
        """The owner class of the last page that a live request holds, for biased plans; None when it cannot be seen."""
        if self._now is None or self.story.first is None:
            return None
        view = (self._now.ranks[0].requests or {}).get(request)
        if view is None or not view.pages:
            return None
        for owner, pages in enumerate(self.story.first.ranks[0].free or ()):
            if view.pages[-1] in pages:
                return owner
        return None


def case(
    id: str,  # noqa: A002  # the field's name in every report
    *,
    invariants: tuple[str, ...],
    needs: tuple[str, ...],
    seen: Mapping[str, int],
    seen_in_groups: Mapping[str, int] = MappingProxyType({}),
    plan: Plan,
    configs: ConfigsOf = any_config,
    examples: float = 1.0,
) -> Callable[[Check], Callable[[Any], None]]:
    """Makes a check a case. Its docstring has the claim as first sentence, then the kind of bug behind it."""

    def decorate(check: Check) -> Callable[[Any], None]:
        claim, reason = paragraphs(check.__doc__)
        made = Case(
            id=id,
            claim=claim,
            reason=reason,
            invariants=invariants,
            needs=needs,
            seen=seen,
            seen_in_groups=seen_in_groups,
            watch=lambda config, manifest: StepWatch(check, config, manifest),
            configs=configs,
            plan=plan,
            examples=examples,
            module=check.__module__,
        )
        return as_test(made, check)

    return decorate


def expect(actual: object, expected: object, what: str, why: str) -> None:
    """Raises `Violation` unless `actual == expected`; `what` names the value and where it was seen."""
    if actual != expected:
        raise Violation(f"{what} = {actual}", str(expected), why)


def require(holds: object, seen: str, expected: str, why: str) -> None:
    """Raises `Violation` unless `holds`."""
    if not holds:
        raise Violation(seen, expected, why)

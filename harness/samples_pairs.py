"""Two runs of samples, matched item by item and repeat by repeat; what cannot be judged is counted apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from harness.samples import Sample, Samples, SamplesError, State

NAMED_MAX = 5  # items that an error names


class InvalidRun(SamplesError):  # noqa: N818  # the name of the outcome
    """Too many requests failed or answers were cut off for the run to say anything about accuracy."""


class CutOff(InvalidRun):
    """Too many answers were cut off for a pass."""


class Unjudged(msgspec.Struct, frozen=True):
    """Samples of an arm that are not judged."""

    name: str
    samples: int
    errors: int
    truncated: int


class Matched(msgspec.Struct, frozen=True, kw_only=True):
    """What both arms answered. Lists are by item and of one length."""

    items: list[str]
    right_baseline: list[int]
    right_candidate: list[int]
    repeats: list[int]  # judged in both arms
    dropped: int  # items of which no repeat is judged in both arms
    only_baseline: int  # items left out because the other arm lacks them, which --common-only asks for
    only_candidate: int
    unjudged: tuple[Unjudged, Unjudged]
    truncated_lost: int  # answered by the baseline, cut off in the candidate
    truncated_gained: int

    @property
    def repeats_max(self) -> int:
        """Most repeats of an item."""
        return max(self.repeats, default=0)


def unjudged(samples: Samples) -> Unjudged:
    """Counts what cannot be judged."""
    return Unjudged(samples.name, len(samples.all), samples.count(State.ERROR), samples.count(State.TRUNCATED))


def require_valid(samples: Samples, share_max: float, cut_off_max: float | None = None) -> Unjudged:
    """Raises `InvalidRun` when more than this share failed or was cut off, which may have a limit of its own."""
    counts = unjudged(samples)
    cut = share_max if cut_off_max is None else cut_off_max
    for what, count, most, kind in (
        ("requests failed", counts.errors, share_max, InvalidRun),
        ("answers were cut off", counts.truncated, cut, CutOff),
    ):
        if count > most * counts.samples:
            raise kind(
                f"{counts.name}: {count:,} of {counts.samples:,} {what} ({100 * count / counts.samples:.1f} %); at "
                f"most {100 * share_max:g} % may, so nothing is said about accuracy. They are not wrong answers: "
                "find out why, run again, or allow more with --unjudged-max"
            )
    return counts


def matched(
    baseline: Samples,
    candidate: Samples,
    *,
    common_only: bool = False,
    share_max: float = 0.01,
    cut_off_max: float | None = None,
) -> Matched:
    """Pairs two runs. Raises `SamplesError` when items or repeats differ, `InvalidRun` as `require_valid`."""
    counts = (require_valid(baseline, share_max, cut_off_max), require_valid(candidate, share_max, cut_off_max))
    if baseline.filter != candidate.filter:
        raise SamplesError(
            f"{baseline.name} is scored by {baseline.filter}, {candidate.name} by {candidate.filter}: "
            "choose one with --filter"
        )
    first = {(item, repeat) for item, repeats in baseline.answers.items() for repeat in repeats}
    second = {(item, repeat) for item, repeats in candidate.answers.items() for repeat in repeats}
    if first != second and not common_only:
        raise SamplesError(_differing(baseline, candidate))
    both = [item for item in baseline.answers if item in candidate.answers]
    if not both:
        raise SamplesError(
            f"{baseline.name} and {candidate.name} have no item in common: were they asked the same questions?"
        )
    rows = {item: _judged(baseline.answers[item], candidate.answers[item]) for item in both}
    kept = [item for item in both if rows[item]]
    if not kept:
        raise SamplesError(f"{baseline.name} and {candidate.name}: no item was answered by both")
    cut = [
        (baseline.answers[item][repeat].state, candidate.answers[item][repeat].state) for item, repeat in first & second
    ]
    return Matched(
        items=kept,
        right_baseline=[sum(one.correct for one, _ in rows[item]) for item in kept],
        right_candidate=[sum(other.correct for _, other in rows[item]) for item in kept],
        repeats=[len(rows[item]) for item in kept],
        dropped=len(both) - len(kept),
        only_baseline=len(baseline.answers) - len(both),
        only_candidate=len(candidate.answers) - len(both),
        unjudged=counts,
        truncated_lost=cut.count((State.ANSWERED, State.TRUNCATED)),
        truncated_gained=cut.count((State.TRUNCATED, State.ANSWERED)),
    )


def _judged(baseline: dict[int, Sample], candidate: dict[int, Sample]) -> list[tuple[Sample, Sample]]:
    """The repeats that both arms answered: as many in each, so that the arms of an item can be exchanged."""
    pairs = [(baseline[repeat], candidate[repeat]) for repeat in baseline if repeat in candidate]
    return [pair for pair in pairs if {sample.state for sample in pair} == {State.ANSWERED}]


def _differing(baseline: Samples, candidate: Samples) -> str:
    arms = (baseline, candidate)
    only = [[item for item in one.answers if item not in other.answers] for one, other in (arms, arms[::-1])]
    step = "Run both on the same items, or compare only the common ones with --common-only"
    if any(only):
        told = [
            f"only {arm.name} has {len(items):,} ({_some(items)})"
            for arm, items in zip(arms, only, strict=True)
            if items
        ]
        sizes = " and ".join(f"{len(arm.answers):,}" for arm in arms)
        return f"the item sets differ: of {sizes} items {', '.join(told)}. {step}"
    uneven = [item for item in baseline.answers if baseline.answers[item].keys() != candidate.answers[item].keys()]
    counts = " and ".join(str(len(arm.answers[uneven[0]])) for arm in arms)
    return f"the repeats differ on {len(uneven):,} items ({_some(uneven)}; the first has {counts}). {step}"


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:NAMED_MAX]) + (", .." if len(items) > NAMED_MAX else "")


def runs(samples: Iterable[Samples], share_max: float = 0.01) -> tuple[list[str], list[list[bool]]]:
    """Items, and right or wrong per run and item: each repeat of each file is a run.

    Items that a run did not answer are left out. Raises `SamplesError` when the item sets differ.
    """
    columns: list[dict[str, Sample]] = []
    given = list(samples)
    for each in given:
        require_valid(each, share_max)
        if each.answers.keys() != given[0].answers.keys():
            raise SamplesError(_differing(given[0], each))
        columns += [
            {item: repeats[repeat] for item, repeats in each.answers.items() if repeat in repeats}
            for repeat in sorted({repeat for repeats in each.answers.values() for repeat in repeats})
        ]
    if len(columns) < 2:
        raise SamplesError(f"{given[0].name}: one run; expected two or more runs or repeats of the same engine")
    items = [
        item
        for item in given[0].answers
        if all(item in column and column[item].state is State.ANSWERED for column in columns)
    ]
    if not items:
        raise SamplesError("no item was answered in every run")
    return items, [[column[item].correct for item in items] for column in columns]

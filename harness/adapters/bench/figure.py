"""Figures: what was measured, over all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Figure(msgspec.Struct, frozen=True, tag=True):
    """An operation of the reference beside the raw one: seconds of every repeat."""

    name: str
    raw: str
    """What it is compared with."""
    bytes: int
    """That either moves in one repeat."""
    seconds: list[float]
    raw_seconds: list[float]
    clock: str = "device"
    """`device` for events of the device, `process` for the clock of the process."""

    @property
    def ratio(self) -> float:
        """Speed of the reference over speed of the raw operation, of the medians."""
        return statistics.median(self.raw_seconds) / statistics.median(self.seconds)

    def rates(self) -> list[tuple[float, float, float]]:
        """Lowest, median and highest GB/s of the reference and of the raw operation."""
        return [
            (self.bytes / max(each) / 1e9, self.bytes / statistics.median(each) / 1e9, self.bytes / min(each) / 1e9)
            for each in (self.seconds, self.raw_seconds)
        ]


class Overlap(msgspec.Struct, frozen=True, tag=True):
    """A gather beside the compute of the layer before it: seconds of the same layers apart and together."""

    name: str
    gather: list[float]
    compute: list[float]
    together: list[float]

    @property
    def hidden(self) -> float:
        """The share of the gather that costs no time, of the medians: below 0 when both together are slower."""
        gather, compute, together = (statistics.median(each) for each in (self.gather, self.compute, self.together))
        return 1 - (together - compute) / gather


class Check(msgspec.Struct, frozen=True, tag=True):
    """Whether fresh rows arrived bit by bit, after the timed runs."""

    name: str
    equal: bool


class Omitted(msgspec.Struct, frozen=True, tag=True):
    """What was not measured and why."""

    name: str
    why: str


AnyFinding = Figure | Overlap | Check | Omitted


def merged(ranks: Sequence[AnyFinding]) -> AnyFinding:
    """One finding of all ranks: a repeat takes as long as the slowest rank, and is right when all ranks are."""
    first = ranks[0]
    if isinstance(first, Figure):
        figures = [rank for rank in ranks if isinstance(rank, Figure)]
        return msgspec.structs.replace(
            first,
            seconds=_slowest([figure.seconds for figure in figures]),
            raw_seconds=_slowest([figure.raw_seconds for figure in figures]),
        )
    if isinstance(first, Overlap):
        overlaps = [rank for rank in ranks if isinstance(rank, Overlap)]
        return msgspec.structs.replace(
            first,
            gather=_slowest([overlap.gather for overlap in overlaps]),
            compute=_slowest([overlap.compute for overlap in overlaps]),
            together=_slowest([overlap.together for overlap in overlaps]),
        )
    if isinstance(first, Check):
        return Check(first.name, all(isinstance(rank, Check) and rank.equal for rank in ranks))
    return first


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(repeat) for repeat in zip(*ranks, strict=True)]

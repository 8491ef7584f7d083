"""A fault planted in front of an engine: asked by the cases that are about it, and how far its answers were off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from ci.planted_faults import FAULTS, NOTHING
from ci.planted_proxy import Proxy, Seen, served
from harness.adapters.http import DIALECTS
from harness.case import Case
from harness.connect import close, connect
from harness.result import CaseResult
from harness.trial import BUDGETS, Trial
from harness.types import Service, Verdict
from suites.e2e.alike import within

BUDGET = replace(BUDGETS["smoke"], shrink_seconds=0.0)  # that it fails is asked, not how little is needed
LOOSE = (0.05, 0.5)  # what a server gets that does not tell its type


class Distances(msgspec.Struct, frozen=True, kw_only=True):
    """How far answers to hits were from what they are compared with: the largest of an answer's log probabilities."""

    compared: int = 0
    other_token: int = 0  # of these the ones with another token
    least: float = 0.0
    middle: float = 0.0
    most: float = 0.0
    missed: int = 0  # that the tolerance takes for the same
    missed_loose: int = 0


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one fault in front of one engine."""

    engine: str
    fault: str
    near: float
    far: float
    planted: int  # how often it was there
    caught: tuple[str, ...] = ()  # cases that failed
    passed: tuple[str, ...] = ()
    skipped: int = 0  # cases that are not for this engine
    why: str = ""  # of what neither passed nor failed, or of a fault that was never there
    seen: str = ""  # by the first that failed
    distances: Distances = Distances()

    @property
    def applies(self) -> bool:
        """Whether any case about the fault is for this engine."""
        return bool(self.caught or self.passed or self.why)


def fates(
    engine: str, url: str, options: str, faults: Sequence[str], cases: Sequence[Case], seed: int
) -> Iterator[Fate]:
    """Judges one engine at `url`: first without a fault, which tells how far off each would be, then with them."""
    measured: Mapping[str, Distances] = {}
    for fault in faults:
        its, noted = _fate(engine, url, options, fault, cases, seed)
        measured = noted if fault == NOTHING else measured
        yield msgspec.structs.replace(its, distances=measured.get(fault, Distances()))


def _fate(
    engine: str, url: str, options: str, fault: str, cases: Sequence[Case], seed: int
) -> tuple[Fate, dict[str, Distances]]:
    planted, words = FAULTS[fault], dict(word.split("=", 1) for word in options.split("&"))
    bare = connect(f"{url}?{options}")
    manifest = bare.describe()
    close(bare)
    config, service = manifest.axes.fixed, manifest.service or Service(token_ids=(0, 1))
    measured = {name: its for name, its in FAULTS.items() if its.change and fault == NOTHING}
    page = config.page_size if config else 1
    asked = planted.asked(pair="hands_over" in manifest.promises)
    proxy = Proxy(url, words["control"], DIALECTS[words["dialect"]](), page, planted, measured)
    results = []
    with served(proxy) as front:
        for made in cases:
            if made.id in asked:
                judged = connect(f"{front}?{options}")
                try:
                    results.append(Trial(made, judged, front, BUDGET, seed).run()[0])
                finally:
                    close(judged)
    near, far = service.logprob_near, service.logprob_far
    noted = {name: distances(hits, near, far) for name, hits in proxy.notes.hits.items()}
    return _told(engine, fault, (near, far), proxy.notes.planted, results), noted


def _told(engine: str, fault: str, tolerance: tuple[float, float], planted: int, results: Sequence[CaseResult]) -> Fate:
    failing = [each for each in results if each.verdict is Verdict.FAIL]
    odd = [each for each in results if each.verdict in {Verdict.ERROR, Verdict.UNKNOWN}]
    skipped = sum(each.verdict is Verdict.SKIP for each in results)
    never = "it was never there" if fault != NOTHING and not planted and skipped < len(results) else ""
    return Fate(
        engine=engine,
        fault=fault,
        near=tolerance[0],
        far=tolerance[1],
        planted=planted,
        caught=tuple(each.case for each in failing),
        passed=tuple(each.case for each in results if each.verdict is Verdict.PASS),
        skipped=skipped,
        why="; ".join([*(f"{each.case} {each.verdict}: {each.why}" for each in odd), *filter(None, [never])]),
        seen=failing[0].failure.seen if failing and failing[0].failure else "",
    )


def distances(hits: Sequence[Seen], near: float, far: float) -> Distances:
    """What all hits come to. One with another token at once has no distance."""
    worst = sorted(max(hit.differences) for hit in hits if hit.differences)
    same = [hit for hit in hits if not hit.other_token]
    return Distances(
        compared=len(hits),
        other_token=len(hits) - len(same),
        least=worst[0] if worst else 0.0,
        middle=median(worst) if worst else 0.0,
        most=worst[-1] if worst else 0.0,
        missed=sum(within(hit.differences, near, far) for hit in same),
        missed_loose=sum(within(hit.differences, *LOOSE) for hit in same),
    )

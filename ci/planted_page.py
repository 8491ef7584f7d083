"""What became of planted faults, as a line each and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from ci.planted_faults import FAULTS, NOTHING, Planted
from ci.planted_trial import LOOSE, Fate

HEAD = (
    "engine",
    "planted",
    "hits",
    "distance: least, middle, most",
    "other token",
    "missed",
    "missed if loose",
    "cases",
)


def line(its: Fate) -> str:
    """One fault in front of one engine."""
    if not its.applies:
        return f"{its.engine} {its.fault}: no case about it is for this engine"
    by = f"caught by {', '.join(its.caught)}: {its.seen}" if its.caught else "caught by nothing"
    far = its.distances
    away = f"{far.compared} hits, {_distance(its)}, {far.other_token} with another token, {far.missed} within tolerance"
    passed = f"; passed {', '.join(its.passed)}" if its.passed else ""
    return f"{its.engine} {its.fault}: planted {its.planted} times; {away}; {by}{passed}" + (
        f"; {its.why}" if its.why else ""
    )


def page(told: Sequence[Fate], date: str) -> str:
    """All as Markdown."""
    tolerances = {its.engine: f"{its.near:g}, now and then {its.far:g}" for its in told}
    says = "; ".join(f"{engine} {tolerance}" for engine, tolerance in tolerances.items())
    rows = [_row(its) for its in told if its.applies]
    named = [(name, its) for name, its in FAULTS.items() if any(each.fault == name for each in told)]
    lines = [
        f"Tolerances: {says}; *loose* is {LOOSE[0]:g}, now and then {LOOSE[1]:g}. On {date}.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(f"- `{name}`: {its.does} Asked by {_names(its.cases)}{_more(its)}." for name, its in named),
    ]
    return "\n".join(lines) + "\n"


def _names(cases: Sequence[str]) -> str:
    return ", ".join(f"`{each}`" for each in cases)


def _more(its: Planted) -> str:
    return f"; before decode by {_names(its.handed_over)} too" if its.handed_over else ""


def _row(its: Fate) -> list[str]:
    far, asked = its.distances, len(its.caught) + len(its.passed)
    wanted = f"{asked} of {asked} pass" if its.fault == NOTHING and not its.caught else ""
    cases = wanted or f"{len(its.caught)} of {asked} fail" + (f"; not {', '.join(its.passed)}" if its.passed else "")
    where = [its.engine, f"`{its.fault}`"]
    if not far.compared:
        return [*where, *["-"] * 5, cases]
    counts = [f"{far.other_token}", f"{far.missed}", f"{far.missed_loose}"]
    return [*where, f"{far.compared}", _distance(its), *counts, cases]


def _distance(its: Fate) -> str:
    far = its.distances
    return f"{far.least:.1e}, {far.middle:.1e}, {far.most:.1e}"

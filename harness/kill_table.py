"""What selfchecks came to, as tables: which case kills which fault, how fast, with how short a counterexample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from harness.canary import CANARIES
from harness.fault import Fault, Variant
from harness.fault_files import Library
from harness.hunted import Hunted, Outcome
from harness.record import Header


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, variant or canary over all its seeds."""

    id: str
    group: str  # its kind; "variant", "canary"
    does: str
    like: str
    hunts: tuple[Hunted, ...]

    @property
    def outcome(self) -> str:
        """`killed 5/5`, or `passed 20/20`."""
        worst = next((each.outcome for each in self.hunts if not each.outcome.wanted), self.hunts[0].outcome)
        good = sum(each.outcome.wanted for each in self.hunts)
        return f"{worst} {good}/{len(self.hunts)}"

    @property
    def wanted(self) -> bool:
        """Whether it came to what it should with every seed."""
        return all(each.outcome.wanted for each in self.hunts)

    @property
    def case(self) -> str:
        """The case that kills it most often."""
        found = Counter(each.case for each in self.hunts if each.case)
        return found.most_common(1)[0][0] if found else ""

    @property
    def seconds_max(self) -> float:
        """Of the slowest seed, to the first counterexample."""
        return max((each.seconds for each in self.hunts), default=0.0)

    @property
    def ops(self) -> int | None:
        """Ops of the shortest counterexample, of those that were shrunk if one was."""
        return min((len(each.ops) for each in shrunk(self.hunts) or self.hunts if each.ops), default=None)


def shrunk(hunts: Iterable[Hunted]) -> list[Hunted]:
    """Those that shrank a counterexample: unit tests have none, and not every run takes the time."""
    return [each for each in hunts if each.ops and each.shrink_seconds is not None]


def rows(library: Library, done: Iterable[Hunted]) -> list[Row]:
    """One row each, in the order of the library."""
    by_id: dict[str, list[Hunted]] = {}
    for each in done:
        by_id.setdefault(each.id, []).append(each)
    known: dict[str, Fault | Variant] = {**library.variants, **library.faults}
    found = []
    for name in (*(name for name in CANARIES if name in by_id), *(name for name in known if name in by_id)):
        its = tuple(sorted(by_id[name], key=lambda each: each.seed))
        if name in CANARIES:
            found.append(Row(name, "canary", CANARIES[name].does, "", its))
            continue
        planted = known[name]
        kind, like = (planted.kind, planted.like) if isinstance(planted, Fault) else ("variant", "")
        found.append(Row(name, kind, planted.does, like, its))
    return found


def only_killers(done: Iterable[Hunted]) -> dict[str, tuple[int, list[str]]]:
    """Per case how many faults it kills and which nobody else does; meaningful where every case was tried."""
    killers: dict[str, set[str]] = {}
    for each in done:
        if each.outcome is Outcome.KILLED and each.id not in CANARIES:
            killers.setdefault(each.id, set()).update(each.killers)
    cases = sorted({case for its in killers.values() for case in its})
    alone: dict[str, list[str]] = {case: [] for case in cases}
    for fault, its in killers.items():
        if len(its) == 1:
            alone[next(iter(its))].append(fault)
    return {case: (sum(case in its for its in killers.values()), alone[case]) for case in cases}


def summary(library: Library, done: Sequence[Hunted]) -> list[str]:
    """Some lines: counts, times, lengths."""
    table = rows(library, done)
    faults = [row for row in table if row.id in library.faults]
    killed = [each for row in faults for each in row.hunts if each.outcome is Outcome.KILLED]
    variants = [row for row in table if row.id in library.variants]
    canaries = [row for row in table if row.id in CANARIES]
    lines = []
    if faults:
        dead = sum(row.wanted for row in faults)
        lines.append(f"{dead} of {len(faults)} faults killed with every seed, {len(killed)} of {_hunts(faults)} hunts")
    if killed:
        seconds = [each.seconds for each in killed]
        ops = [len(each.ops) for each in shrunk(killed)]
        raised, expected = sum(each.raised for each in killed), sum(each.expected for each in killed)
        lines.append(f"seconds to the first counterexample: median {median(seconds):.2f}, most {max(seconds):.1f}")
        if ops:
            lines.append(f"ops of the shortest counterexample: median {median(ops):g}, most {max(ops)}")
        lines.append(
            f"{expected} of {len(killed)} by a case of an invariant named ahead; {raised} because the engine raised"
        )
    if variants:
        lines.append(f"{sum(row.wanted for row in variants)} of {len(variants)} right variants pass with every seed")
    if canaries:
        lines.append(f"{sum(row.wanted for row in canaries)} of {len(canaries)} canaries seen failing")
    return lines


def markdown(header: Header, library: Library, done: Sequence[Hunted]) -> str:
    """The kill table as Markdown."""
    lines = [f"Engine {header.engine} {header.engine_version}, budget {header.budget}, first seed {header.seed}.", ""]
    lines += [f"- {line}" for line in summary(library, done)]
    table = rows(library, done)
    for group in dict.fromkeys(row.group for row in table):
        lines += ["", f"### {group}", "", "| fault | what it does | like | outcome | killed by | s | ops |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [
            f"| `{_cell(row.id)}` | {_cell(row.does)} | {_cell(row.like)} | {row.outcome} | {_cell(row.case)} "
            f"| {row.seconds_max:.1f} | {'' if row.ops is None else row.ops} |"
            for row in table
            if row.group == group
        ]
    if header.options.get("whole"):
        lines += ["", "### cases", "", "| case | kills | alone |", "|---|---|---|"]
        strength = only_killers(done)
        lines += [
            f"| `{_cell(case)}` | {count} | {_cell(', '.join(alone))} |" for case, (count, alone) in strength.items()
        ]
    return "\n".join(lines) + "\n"


def html(header: Header, library: Library, done: Sequence[Hunted]) -> str:
    """The kill table as a page that needs nothing else; with a cell per fault and case where all were tried."""
    table = rows(library, done)
    cases = sorted({case for row in table for each in row.hunts for case in each.killers})
    heads = "".join(f"<th class=case><span>{escape(case)}</span></th>" for case in cases)
    body = []
    for row in table:
        killers = Counter(case for each in row.hunts for case in each.killers)
        cells = "".join(f"<td class={'k' if killers[case] else 'n'}>{killers[case] or ''}</td>" for case in cases)
        ops = "" if row.ops is None else row.ops
        body.append(
            f"<tr class={'good' if row.wanted else 'bad'}><td title='{escape(row.does, quote=True)}'>{escape(row.id)}"
            f"<td>{escape(row.group)}<td>{escape(row.like)}<td>{row.outcome}<td>{escape(row.case)}"
            f"<td>{row.seconds_max:.1f}<td>{ops}{cells}</tr>"
        )
    told = "".join(f"<li>{escape(line)}" for line in summary(library, done))
    title = f"kvshard selfcheck: {escape(header.engine)} {escape(header.engine_version)}, budget {header.budget}"
    columns = "<th>fault<th>kind<th>like<th>outcome<th>killed by<th>s<th>ops"
    return _PAGE.format(title=title, told=told, heads=columns + heads, body="\n".join(body))


_PAGE = """<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 1em; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
td, th {{ border: 1px solid #ddd; padding: 2px 6px; white-space: nowrap; text-align: left; }}
th.case span {{ writing-mode: vertical-rl; font-weight: normal; }}
td.k {{ background: #2a7; color: #fff; text-align: center; }}
tr.bad td:first-child {{ background: #d33; color: #fff; }}
</style>
<h1>{title}</h1>
<ul>{told}</ul>
<table><thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody></table>
</html>
"""


def _hunts(table: Iterable[Row]) -> int:
    return sum(len(row.hunts) for row in table)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())

"""A matrix as one HTML page that needs nothing else: no script, no font, no address but those inside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from harness import matrix_table
from harness.matrix import Column, Matrix
from harness.matrix_table import Cell, Grid
from harness.render import safe
from harness.result import message
from harness.types import Verdict

NOT_RUN = "not run"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # text that got past the escaping could still do nothing


def page(found: Matrix) -> str:
    """The page. Text of engines and records is shown as it is written, whatever it is."""
    table = matrix_table.grid(found)
    title = _told(f"kvshard: {', '.join(column.title for column in found.columns)}")
    days = dict.fromkeys(column.record.header.started[:10] for column in found.columns if column.record is not None)
    facts = {**matrix_table.facts(found), "date": ", ".join(days) or "none", "exit code": str(found.exit_code)}
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        "</head>",
        "<body>",
        "<main>",
        "<h1>Engines beside each other</h1>",
        f"<p>{', '.join(f'{name} <b>{_told(value)}</b>' for name, value in facts.items())}</p>",
        *_engines(found, table),
        *_table(found, table),
        *_notes(table),
        *_counterexamples(found),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def _told(text: str) -> str:
    return escape(safe(text))


def _marked(note: int) -> str:
    """The link to a note, as it stands behind what the note is about."""
    return f' <a href="#note-{note}" aria-label="note {note}">[{note}]</a>' if note else ""


def _breakable(name: str, marks: str = "._") -> str:
    """A long name, which may be broken behind the marks between its words."""
    return re.sub(f"([{marks}])", r"\1<wbr>", _told(name))


def _engines(found: Matrix, table: Grid) -> Iterator[str]:
    yield "<details><summary>Seeds, times, commits and versions</summary>"
    yield "<dl>"
    for column, head in zip(found.columns, table.heads, strict=True):
        yield f"<dt>{_told(column.title)}{_marked(head)}</dt>"
        yield f"<dd>{_told(_origin(column))}</dd>"
    yield "</dl></details>"


def _origin(column: Column) -> str:
    """Where a column comes from, as its record has it."""
    if column.record is None:
        return "no record"
    head, foot = column.record.header, column.record.footer
    versions = ", ".join(f"{name} {version}" for name, version in head.versions.items())
    commit = f"commit {head.commit}" if head.commit else "no commit"
    return f"seed {head.seed} ({head.seed_origin}); {head.started}, {foot.seconds:.1f} s; {commit}; {versions}"


def _table(found: Matrix, table: Grid) -> Iterator[str]:
    rest = sum(not _plain(cells) for cells in table.rows.values())
    if 0 < rest < len(table.rows):
        told = f"only the {rest} of {len(table.rows)} cases that have another verdict than pass"
        yield f'<p><label><input type="checkbox" id="rest"> {told}</label></p>'
    yield '<div class="table" role="region" aria-labelledby="verdicts" tabindex="0">'
    yield f'<table data-cases="{len(table.rows)}">'
    engines = f"{len(found.columns)} engine{'s' * (len(found.columns) != 1)}"
    yield f'<caption id="verdicts">Verdicts of {engines}</caption>'
    heads = zip(found.columns, table.heads, strict=True)
    told = "".join(f'<th scope="col">{_breakable(column.title, "=")}{_marked(head)}</th>' for column, head in heads)
    yield f'<thead><tr><th scope="col">case</th>{told}</tr></thead>'
    yield "<tbody>"
    for case, cells in table.rows.items():
        plain = ' class="plain"' if _plain(cells) else ""
        head = f'<th scope="row"><code>{_breakable(case)}</code></th>'
        yield f"<tr{plain}>{head}{''.join(map(_cell, cells))}</tr>"
    yield "</tbody>"
    sums = "".join(f"<td>{_sum(column)}</td>" for column in found.columns)
    yield f'<tfoot><tr><th scope="row">all {len(table.rows)}</th>{sums}</tr></tfoot>'
    yield "</table>"
    yield "</div>"


def _plain(cells: Sequence[Cell]) -> bool:
    """Whether a row has nothing to look at; why an engine did not run it stands in the head."""
    return all(cell.verdict in (Verdict.PASS, None) for cell in cells)


def _cell(cell: Cell) -> str:
    return f"<td>{_verdict(cell.verdict)}{_marked(cell.note)}</td>"


def _sum(column: Column) -> str:
    return re.sub(r"\d+ (\w+)", r'<span class="\1">\g<0></span>', matrix_table.counts(column.record)) or NOT_RUN


def _verdict(verdict: Verdict | None) -> str:
    """A word, since not everybody tells the colours apart."""
    return f'<span class="{verdict or "none"}">{verdict or NOT_RUN}</span>'


def _notes(table: Grid) -> Iterator[str]:
    if table.notes:
        yield "<h2>Notes</h2>"
        yield "<ol>"
        yield from (f'<li id="note-{number}">{_told(note)}</li>' for number, note in enumerate(table.notes, 1))
        yield "</ol>"


def _counterexamples(found: Matrix) -> Iterator[str]:
    told = matrix_table.counterexamples(found)
    if told:
        yield "<h2>Counterexamples</h2>"
    for result in told:
        text = message(result.failure) if result.failure is not None else result.why
        yield f"<details><summary>{_verdict(result.verdict)} {_breakable(result.case)}</summary>"
        yield f"<pre>{_told(text)}</pre></details>"


# The table scrolls in a box of its own, in which heads and case names stay; the page itself never scrolls sideways.
STYLE = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --text: #1c2128; --dim: #59636e; --line: #d5dae0; --head: #f2f4f7; --mark: #fff3c4;
  --link: #0a58ca; --pass: #17702f; --fail: #a51d16; --fail-ground: #ffe5e2; --known: #7035b0; --unknown: #7d5100;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14181d; --text: #e3e8ee; --dim: #9aa5b1; --line: #343c46; --head: #1e242b; --mark: #4a3f10;
    --link: #7ab8ff; --pass: #62d084; --fail: #ffa39b; --fail-ground: #4a1b1b; --known: #cba6ff; --unknown: #e8b647;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 80rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.25rem; line-height: 1.25; margin: 0 0 0.5rem; }
h2 { font-size: 1.1rem; margin: 1.5rem 0 0.5rem; }
p { margin: 0.5rem 0; }
dl { margin: 0.75rem 0; font-size: 0.9rem; }
dt { font-weight: 600; }
dd { margin: 0 0 0.5rem; color: var(--dim); }
a { color: var(--link); }
code, pre { font-family: ui-monospace, monospace; font-size: 0.8125rem; }
.table { max-height: 85vh; max-width: max-content; overflow: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: separate; border-spacing: 0; font-size: 0.9rem; line-height: 1.35; }
caption { padding: 0.4rem 0.6rem; color: var(--dim); text-align: left; white-space: nowrap; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; background: var(--head); }
th:first-child { position: sticky; left: 0; z-index: 1; min-width: 10.5rem; border-right: 1px solid var(--line); }
tbody th { font-weight: 400; background: var(--ground); }
thead th { position: sticky; top: 0; z-index: 1; min-width: 6.5rem; max-width: 14rem; vertical-align: bottom; }
thead th:first-child { z-index: 2; }
tbody td { white-space: nowrap; }
tfoot th, tfoot td { position: sticky; bottom: 0; border-bottom: 0; border-top: 1px solid var(--line); }
tfoot td { background: var(--head); }
tfoot span { white-space: nowrap; }
tfoot th:first-child { z-index: 2; }
.pass { color: var(--pass); }
.skip, .none { color: var(--dim); }
.known { color: var(--known); }
.unknown { color: var(--unknown); }
.fail, .error { color: var(--fail); }
.fail, .error, .unknown { font-weight: 600; }
tbody .fail, tbody .error { margin-left: -0.3rem; padding: 0 0.3rem; background: var(--fail-ground); }
li { margin: 0.35rem 0; }
li:target { background: var(--mark); }
summary { cursor: pointer; padding: 0.2rem 0; }
pre { margin: 0.25rem 0 0.75rem; padding: 0.6rem; overflow-x: auto; background: var(--head); border-radius: 6px; }
body:has(#rest:checked) tbody .plain { display: none; }
"""

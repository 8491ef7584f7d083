"""Tables of a selfcheck: a row for each fault over its seeds, numbers that add up, and text that stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import msgspec

from ci.register import register_cpu_ci
from harness.fault import Edit, Fault, Variant
from harness.fault_files import Library
from harness.hunted import Hunted, Outcome
from harness.kill_table import html, markdown, only_killers, rows, summary
from harness.record import Header
from tests.test_record import sample

register_cpu_ci(est_time=10, stage="commit")

EDIT = (Edit("tests.fault_targets:total", "return result", "return 0"),)
ODD = "a|b <b>&'x'</b>\n\"{y}\""


def fault(name: str, kind: str = "order", does: str = "It is wrong.", like: str = "B01") -> Fault:
    return Fault(name, does, kind, like, ("I01",), EDIT)


LIBRARY = Library(
    {made.id: made for made in (fault("b.one"), fault("a.two", "tree"), fault("a.three"), fault("never.tried"))},
    {"v.right": Variant("v.right", "It is right.", EDIT)},
)


def hunt(name: str, outcome: Outcome = Outcome.KILLED, seed: int = 1, **others: Any) -> Hunted:
    return Hunted(id=name, seed=seed, outcome=outcome, **others)


DONE = (
    hunt("v.right", Outcome.PASSED, seconds=90.0),
    hunt(
        "a.two", seed=2, case="c.y", seconds=3.0, shrink_seconds=1, ops=("open", "extend", "finish"), killers=("c.y",)
    ),
    hunt("a.two", case="c.x", seconds=1.0, shrink_seconds=0.1, ops=("open", "extend"), killers=("c.x",), expected=True),
    hunt("a.two", seed=3, case="c.y", seconds=2.0, shrink_seconds=1, ops=("open",) * 7, killers=("c.y",), raised=True),
    hunt("b.one", case="c.x", seconds=0.5, shrink_seconds=0.1, ops=("open",), killers=("c.x",), expected=True),
    hunt("b.one", Outcome.SURVIVED, seed=2, why="none fails"),
    hunt("a.three", Outcome.IDLE, why="not run"),
    hunt("canary.liar", case="c.x", killers=("c.x", "c.z")),
)


def header(**options: str) -> Header:
    return msgspec.structs.replace(sample().header, options=options)


def test_rows() -> None:
    """One for each that was tried, canaries first, then variants and faults as they are written, over all seeds."""
    table = rows(LIBRARY, DONE)

    assert [
        ("canary.liar", "canary", "", "killed 1/1", True, "c.x", None),
        ("v.right", "variant", "", "passed 1/1", True, "", None),
        ("b.one", "order", "B01", "survived 1/2", False, "c.x", 1),
        ("a.two", "tree", "B01", "killed 3/3", True, "c.y", 2),
        ("a.three", "order", "B01", "idle 0/1", False, "", None),
    ] == [(row.id, row.group, row.like, row.outcome, row.wanted, row.case, row.ops) for row in table]
    assert [1, 2, 3] == [each.seed for each in table[3].hunts]
    assert [0.0, 90.0, 0.5, 3.0, 0.0] == [row.seconds_max for row in table]
    assert "It claims everything, takes no op and shows nothing." == table[0].does
    assert [] == rows(LIBRARY, [])


def test_the_numbers_add_up() -> None:
    """A fault is killed when every seed kills it; times and lengths are those of faults, lengths those of ops."""
    assert [
        "1 of 3 faults killed with every seed, 4 of 6 hunts",
        "seconds to the first counterexample: median 1.50, most 3.0",
        "ops of the shortest counterexample: median 2.5, most 7",
        "2 of 4 by a case of an invariant named ahead; 1 because the engine raised",
        "1 of 1 right variants pass with every seed",
        "1 of 1 canaries seen failing",
    ] == summary(LIBRARY, DONE)
    assert ["0 of 1 faults killed with every seed, 0 of 1 hunts"] == summary(LIBRARY, DONE[5:6])
    assert not [line for line in summary(LIBRARY, [hunt("b.one", case="test_x.py")]) if line.startswith("ops")]
    assert ["0 of 1 right variants pass with every seed"] == summary(LIBRARY, [hunt("v.right", Outcome.REFUSED)])
    assert [] == summary(LIBRARY, [])


def test_lengths_are_of_what_was_shrunk() -> None:
    """A counterexample that nobody shrank has no say in the lengths where another seed shrank one."""
    first = hunt("a.two", case="c.x", shrink_seconds=0.1, ops=("open",) * 4)
    second = hunt("a.two", seed=2, case="c.x", ops=("open",) * 3)

    assert [4, 3] == [rows(LIBRARY, done)[0].ops for done in ([first, second], [second])]
    assert "ops of the shortest counterexample: median 4, most 4" in summary(LIBRARY, [first, second])
    assert not [line for line in summary(LIBRARY, [second]) if line.startswith("ops")]


def test_which_case_kills_alone() -> None:
    """Per case how many faults it kills, with any seed, and those that no other kills; canaries do not count."""
    done = [
        hunt("a.two", killers=("c.x",)),
        hunt("a.two", seed=2, killers=("c.x", "c.y")),
        hunt("b.one", killers=("c.x",)),
        hunt("b.one", seed=2, killers=("c.x",)),
        hunt("a.three", killers=("c.y",)),
        hunt("canary.liar", killers=("c.z",)),
        hunt("v.right", Outcome.REFUSED, killers=("c.z",)),
    ]

    assert {"c.x": (2, ["b.one"]), "c.y": (2, ["a.three"])} == only_killers(done)
    assert {} == only_killers([])


def test_markdown() -> None:
    """A table for each kind; which case kills what alone only where every case was tried."""
    lines = markdown(header(), LIBRARY, DONE).splitlines()
    whole = markdown(header(whole="True"), LIBRARY, DONE).splitlines()

    assert "Engine mini 1.0, budget smoke, first seed 7." == lines[0]
    assert "- 1 of 1 canaries seen failing" in lines
    assert ["canary", "variant", "order", "tree"] == [line[4:] for line in lines if line.startswith("### ")]
    assert "| `a.two` | It is wrong. | B01 | killed 3/3 | c.y | 3.0 | 2 |" in lines
    assert "| `a.three` | It is wrong. | B01 | idle 0/1 |  | 0.0 |  |" in lines
    assert lines == whole[: len(lines)]
    assert ["", "### cases", "", "| case | kills | alone |"] == whole[len(lines) :][:4]
    assert ["| `c.x` | 2 | b.one |", "| `c.y` | 1 |  |"] == whole[-2:]


def odd() -> tuple[Library, list[Hunted]]:
    """All texts that come from elsewhere hold what would break a table or a page."""
    made = fault("odd|id", "order", does=ODD, like="<i>")
    return Library({made.id: made}), [hunt(made.id, case="t.py::x[a|b]<u>", killers=("t.py::x[a|b]<u>",))]


def test_markdown_stays_a_table() -> None:
    """Bars and line ends in texts do not add cells or lines."""
    lines = markdown(header(whole="True"), *odd()).splitlines()

    cells = {line: len(re.findall(r"(?<!\\)\|", line)) - 1 for line in lines if line.startswith("|")}
    assert {7, 3} == set(cells.values())
    assert any("a\\|b <b>&'x'</b> \"{y}\"" in line for line in cells)
    assert sum("t.py::x[a\\|b]<u>" in line for line in cells) == 2


class Tags(HTMLParser):
    """Which elements a page has, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.titles: list[str | None] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page() -> None:
    """A row for each fault with a cell for each case; what the summary says; nothing is loaded from elsewhere."""
    page = html(header(), LIBRARY, DONE)
    tags = Tags(page)

    assert 1 + 5 == tags.found.count("tr")
    assert 7 + 3 == tags.found.count("th")  # c.x, c.y, c.z
    assert 5 * (7 + 3) == tags.found.count("td")
    assert 3 == page.count("<tr class=good>")
    assert all(line in tags.text for line in summary(LIBRARY, DONE))
    assert "kvshard selfcheck: mini 1.0, budget smoke" in tags.text
    assert not re.search(r"https?:|<script|<link|\bsrc=", page)


def test_the_page_shows_text_as_it_is() -> None:
    """Text of faults, cases and engines is no markup."""
    page = html(msgspec.structs.replace(header(), engine="<em>{0}"), *odd())
    tags = Tags(page)

    assert not {"b", "i", "u", "em"} & set(tags.found)
    assert [ODD] == tags.titles
    assert all(text in tags.text for text in ("odd|id", "<i>", "t.py::x[a|b]<u>", "<em>{0} 1.0"))


def test_nothing_done_is_a_page_too() -> None:
    """Without a result there are no rows, and no error."""
    assert "Engine mini 1.0" in markdown(header(whole="True"), LIBRARY, [])
    assert 0 == Tags(html(header(), LIBRARY, [])).found.count("td")

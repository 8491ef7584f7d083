"""Engines beside each other as a page: it says what the table says, needs nothing else, and fits a phone."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from ci import page_check
from ci.page_check import Measured, PageError, measured, problems
from ci.register import register_cpu_ci
from harness import matrix, matrix_page, record
from harness.cli import main
from harness.matrix import Column, Matrix
from harness.result import CaseResult
from harness.types import Verdict
from tests.test_matrix import ASKED, CASES, FAIL, PASS, WHOLE, column, engine, made, run
from tests.test_record import FAILURE

register_cpu_ci(est_time=25, stage="commit")

ODD = "</td><script src='http://x/y.js'>\x1b\"&amp; url(x)"
VOID = ("meta", "wbr", "input")


class Page(HTMLParser):
    """The elements of a page, with their attributes and all text inside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.declared = ""
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert [] == self._open

    def handle_decl(self, decl: str) -> None:
        self.declared = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.found) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.found[self._open.pop()][0]

    def handle_data(self, data: str) -> None:
        for at in self._open:
            self.found[at][2].append(data)

    def texts(self, tag: str, **attributes: str) -> list[str]:
        return ["".join(text) for name, has, text in self.found if name == tag and attributes.items() <= has.items()]

    def values(self, attribute: str) -> list[str]:
        return [has[attribute] or "" for _, has, _ in self.found if attribute in has]


def table(page: Page) -> list[list[str]]:
    """The table, row by row."""
    lines: list[list[str]] = []
    for tag, _, text in page.found:
        if tag == "tr":
            lines.append([])
        elif tag in ("th", "td"):
            lines[-1].append("".join(text))
    return lines


class TestPage:
    def test_it_says_what_the_table_says(self) -> None:
        """Every case, verdict and note is there once, with the sums below."""
        page = Page(matrix_page.page(WHOLE))
        assert [
            ["case", "mini 1.0", "maxi 1.0", "none?a=b [1]"],
            ["a.one", "pass", "pass", "not run"],
            ["a.three", "skip [2]", "not run", "not run"],
            ["a.two", "skip [2]", "fail [3]", "not run"],
            ["all 3", "1 pass, 2 skip", "1 pass, 1 fail", "not run"],
        ] == table(page)
        assert [
            "none?a=b: not connected: no engine is named 'none'",
            "mini, skip: does not claim op.locate",
            "maxi, fail: 3",
        ] == page.texts("li")

    def test_where_it_comes_from(self) -> None:
        """What was asked, and of each engine seed, time, commit and versions, as the records have them."""
        page = Page(matrix_page.page(WHOLE))
        origin = "seed 7 (given); 2025-01-01T00:00:00+00:00, 1.5 s; no commit; python 3.11"
        told = "suite some, budget smoke, seed 7, kvshard 0.1.0, date 2025-01-01, exit code 3"
        assert told == page.texts("p")[0]
        assert ["mini 1.0", "maxi 1.0", "none?a=b [1]"] == page.texts("dt")
        assert [origin, origin, "no record"] == page.texts("dd")
        assert ["kvshard: mini 1.0, maxi 1.0, none?a=b"] == page.texts("title")

    def test_counterexamples_are_folded_away(self) -> None:
        """A failure stands below with all its parts, under its engine and case."""
        page = Page(matrix_page.page(WHOLE))
        assert "fail maxi 1.0: a.two" == page.texts("summary")[-1]
        assert FAILURE.replay in page.texts("pre")[0]

    def test_anchors_resolve(self) -> None:
        """Each number leads to its note, and no id is there twice."""
        page = Page(matrix_page.page(WHOLE))
        ids, links = page.values("id"), page.values("href")
        assert ["#note-1", "#note-1", "#note-2", "#note-2", "#note-3"] == sorted(links)
        assert {link.removeprefix("#") for link in links} | set(page.values("aria-labelledby")) <= set(ids)
        assert len(set(ids)) == len(ids)

    def test_readers_and_phones(self) -> None:
        """The language, the width, a caption and the scope of every head are told."""
        text = matrix_page.page(WHOLE)
        page = Page(text)
        heads = [has.get("scope") for tag, has, _ in page.found if tag == "th"]
        assert ("doctype html", ["en"]) == (page.declared, page.values("lang"))
        assert "width=device-width, initial-scale=1" in page.values("content")
        assert ["Verdicts of 3 engines"] == page.texts("caption")
        assert ["col"] * 4 + ["row"] * 4 == heads
        assert "@media (prefers-color-scheme: dark)" in text

    def test_it_needs_nothing_else(self) -> None:
        """Nothing is fetched and nothing runs: no script, no address, and a policy that would allow neither."""
        text = matrix_page.page(WHOLE)
        tags = {tag for tag, _, _ in Page(text).found}
        assert [] == [part for part in ("http:", "https:", "src=", "url(", "@import") if part in text]
        assert set() == tags & {"script", "link", "img", "iframe", "object", "base", "form"}
        assert "default-src 'none'" in Page(text).values("content")[1]

    def test_text_of_engines_is_only_text(self) -> None:
        """Whatever an engine, a case or a reason says is shown as it is and changes nothing around it."""
        results = (
            CaseResult(case=ODD, verdict=Verdict.FAIL, why=f"so {ODD}", failure=replace(FAILURE, seen=ODD, ops=(ODD,))),
            PASS,
        )
        found = made(*results, engine=ODD, engine_version=ODD, commit=ODD, seed_origin=ODD, started=ODD)
        odd = matrix.column_of(replace(found, header=replace(found.header, versions={ODD: ODD})), 0, ODD)
        asked = replace(ASKED, suite=ODD, keyword=ODD, budget=ODD)
        page = Page(matrix_page.page(Matrix(asked=asked, columns=(odd,))))
        plain = Page(matrix_page.page(Matrix(asked=replace(ASKED, keyword="a"), columns=(column("mini", FAIL, PASS),))))
        shown = ODD.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
        same = [tag for tag, _, _ in plain.found if tag != "wbr"]
        more = ["a", "a", "li"]  # of the note that says why the engine is not whole
        assert sorted([*same, *more]) == sorted(tag for tag, _, _ in page.found if tag != "wbr")
        assert [shown, shown] == [table(page)[1][0], page.texts("code")[0]]
        assert f"{shown} {shown} [1]" == table(page)[0][1]
        assert page.texts("pre")[0].count(shown) == 2
        assert [f"{shown}: {shown}", f"{shown}, fail: so {shown}"] == page.texts("li")

    def test_rows_with_nothing_to_look_at(self) -> None:
        """What passes where it ran can be hidden; where that would leave all or nothing, nobody is asked."""
        page = Page(matrix_page.page(WHOLE))
        alike = Matrix(asked=ASKED, columns=(column("mini", PASS),))
        assert [" only the 2 of 3 cases that have another verdict than pass"] == page.texts("label")
        assert ["a.onepasspassnot run"] == page.texts("tr", **{"class": "plain"})
        assert [] == Page(matrix_page.page(alike)).texts("label")

    def test_an_engine_without_any_case(self) -> None:
        """Where nothing ran, there is a table without rows, and the reason."""
        alone = Column(engine="none", record=None, exit_code=3, why="not connected")
        page = Page(matrix_page.page(Matrix(asked=ASKED, columns=(alone,))))
        assert [["case", "none [1]"], ["all 0", "not run"]] == table(page)
        assert ["none: not connected"] == page.texts("li")


class TestCommands:
    def test_of_records(self, tmp_path: Path) -> None:
        """`kvshard matrix --html` writes the page of all records."""
        paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        record.write(paths[0], made(PASS))
        record.write(paths[1], made(PASS, FAIL, engine="maxi"))
        main(["matrix", *map(str, paths), "--html", str(tmp_path / "m.html")])
        assert matrix_page.page(matrix.beside(paths)) == (tmp_path / "m.html").read_text()

    @pytest.mark.parametrize("engines", [["correct"], ["correct", "nosuch"]])
    def test_of_a_run(self, tmp_path: Path, engines: Sequence[str]) -> None:
        """`kvshard run --html` does so too; a run of one engine is a page of one column."""
        run(tmp_path, *map(engine, engines), "-k", "reads", "--record", "m.jsonl", "--html", "m.html")
        assert matrix_page.page(matrix.read(tmp_path / "m.jsonl")) == (tmp_path / "m.html").read_text()

    @pytest.mark.parametrize(
        ("words", "part"),
        [
            (
                ["run", engine("correct"), "--suite", CASES, "--html", "a.jsonl/m.html"],
                "--html a.jsonl/m.html: expected a file",
            ),
            (["run", engine("correct"), "--suite", CASES, "--html", "."], "--html .: expected a file; . is in the way"),
            (["matrix", "a.jsonl", "--html", "."], "--html .: expected a file; . is in the way"),
            (["matrix", "a.jsonl", "--html", "a.jsonl/m.html"], "a.jsonl is in the way"),
        ],
    )
    def test_a_wrong_path_is_one_line(
        self,
        tmp_path: Path,
        words: list[str],
        part: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A page that cannot be written is an error that names it."""
        monkeypatch.chdir(tmp_path)
        record.write(tmp_path / "a.jsonl", made(PASS))
        code = main(words)
        told = capsys.readouterr().err
        assert (3, 1) == (code, len(told.splitlines()))
        assert part in told


GOOD = Measured(
    width=360, height=740, inside=345, content=345, cases=3, rows=3, font=13.0, scrolled=80.0, first=168.0, away=0.0
)


class TestCheck:
    @pytest.mark.parametrize(
        ("seen", "wrong"),
        [
            (GOOD, []),
            (
                replace(GOOD, content=346),
                ["the page scrolls sideways: its content is 346 px wide, expected at most 345"],
            ),
            (replace(GOOD, rows=2), ["2 rows are seen of 3 cases, expected all of at least one"]),
            (replace(GOOD, rows=0, cases=0), ["0 rows are seen of 0 cases, expected all of at least one"]),
            (replace(GOOD, font=11.5), ["the smallest font has 11.5 px, expected at least 12"]),
            (replace(GOOD, first=300), ["the first column is 300 px wide, expected at most 0.6 of 360"]),
            (replace(GOOD, scrolled=0), ["the table does not scroll in a box of its own"]),
            (
                replace(GOOD, away=-80.0),
                ["the first column moved -80 px when the table was scrolled by 80, expected 0"],
            ),
        ],
    )
    def test_what_is_wrong_with_a_layout(self, seen: Measured, wrong: list[str]) -> None:
        """A page too wide, rows that are not seen, small letters and a column that does not stay are each told."""
        assert wrong == list(problems(seen))

    def test_without_chromium(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Where there is no browser, the code is 2 and the package is named."""
        assert 2 == page_check.main(["m.html", "--chromium", "/no/such/browser"])
        told = "no Chromium here, looked for /no/such/browser; Debian has it as the package chromium\n"
        assert told == capsys.readouterr().err

    def test_a_browser_that_says_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A browser that ends without a measurement proves nothing."""
        (tmp_path / "m.html").write_text("x")
        assert 1 == page_check.main([str(tmp_path / "m.html"), "--chromium", "true"])
        assert "measured nothing" in capsys.readouterr().err


@pytest.fixture(scope="module")
def chromium() -> str:
    found = page_check.browser()
    if found is None:
        pytest.skip("no Chromium on PATH: pages are not laid out")
    return found


def wide() -> str:
    """A page of many engines with long names and long reasons."""
    results = [replace(FAIL, case=f"a.{'long_name_' * 4}{each}", why="why" * 200) for each in range(40)]
    columns = [column(f"engine-{'x' * 30}-{each}", *results, PASS) for each in range(6)]
    return matrix_page.page(Matrix(asked=replace(ASKED, suite="folder/" * 30), columns=tuple(columns)))


class TestBrowser:
    @pytest.mark.parametrize("text", [matrix_page.page(WHOLE), wide()], ids=["small", "wide"])
    def test_a_page_is_well(self, tmp_path: Path, chromium: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        """A page of few and of many engines with long names fits a phone and a screen."""
        (tmp_path / "m.html").write_text(text)
        code = page_check.main([str(tmp_path / "m.html"), "--chromium", chromium])
        told = capsys.readouterr()
        assert (0, "") == (code, told.err)
        assert ["360x740", "1280x800"] == [line.split(":")[0] for line in told.out.splitlines()]

    @pytest.mark.parametrize(
        ("change", "wrong"),
        [
            (("overflow: auto", "overflow: visible"), "the page scrolls sideways"),
            (("th:first-child { position: sticky", "th:first-child { position: static"), "the first column moved"),
            (("font-size: 0.8125rem", "font-size: 11px"), "the smallest font has 11 px"),
            (('<tr class="plain">', '<tr style="display: none">'), "40 rows are seen of 41 cases"),
        ],
    )
    def test_a_broken_page_is_caught(self, chromium: str, change: tuple[str, str], wrong: str) -> None:
        """What is wrong with a page on a phone is seen, each by itself."""
        before, after = change
        text = wide()
        assert before in text
        phone = measured(text.replace(before, after), chromium)[0]
        assert wrong in " ".join(problems(phone))

    def test_no_table(self, chromium: str) -> None:
        """Another page is no page of a matrix."""
        with pytest.raises(PageError, match="cannot be measured"):
            measured("<p>x", chromium)

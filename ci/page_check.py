"""Does a page of `kvshard matrix --html` look right in a browser? `python -m ci.page_check FILE [--chromium PATH]`.

Chromium lays the page out as wide as a phone and as wide as a screen, and is asked what came of it. The page stands in
frames of those sizes and is measured from outside: small windows are made wider than they were asked for, and nothing
has to be added to the page. Exit code 0 when all is well, 1 with what is wrong, 2 without Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import msgspec

SIZES = ((360, 740), (1280, 800))  # a phone and a screen, in CSS pixels
NAMES = ("chromium", "chromium-browser", "google-chrome")
FONT_MIN = 12.0  # pixels
FIRST_MAX = 0.6  # of the width: what stays must leave room for what moves
SECONDS_MAX = 120.0
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000"),
)


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One layout. All lengths in CSS pixels."""

    width: int
    height: int
    inside: int  # width without a scroll bar
    content: int  # as wide as the content of the page is
    cases: int  # that the page says it has
    rows: int  # that are seen
    font: float  # the smallest one
    scrolled: float  # how far the table went to the left
    first: float  # width of its first column
    away: float  # how far the first column then is from where it was, in the row where it is most

    def __str__(self) -> str:
        sizes = f"content {self.content} of {self.inside} px, font from {self.font:g} px"
        moved = f"first column {self.first:.0f} px, moves {self.away:.0f} in {self.scrolled:.0f}"
        return f"{self.width}x{self.height}: {self.rows} of {self.cases} cases, {sizes}, {moved}"


class PageError(Exception):
    """There is nothing to judge; the message says why."""


def problems(seen: Measured) -> Iterator[str]:
    """What is wrong with a layout."""
    if seen.content > seen.inside:
        yield f"the page scrolls sideways: its content is {seen.content} px wide, expected at most {seen.inside}"
    if seen.rows != seen.cases or not seen.cases:
        yield f"{seen.rows} rows are seen of {seen.cases} cases, expected all of at least one"
    if seen.font < FONT_MIN:
        yield f"the smallest font has {seen.font:g} px, expected at least {FONT_MIN:g}"
    if seen.first > FIRST_MAX * seen.width:
        yield f"the first column is {seen.first:g} px wide, expected at most {FIRST_MAX:g} of {seen.width}"
    if seen.scrolled <= 0:
        yield "the table does not scroll in a box of its own"
    elif abs(seen.away) > 1:
        yield f"the first column moved {seen.away:g} px when the table was scrolled by {seen.scrolled:g}, expected 0"


def measured(page: str, chromium: str) -> list[Measured]:
    """What Chromium makes of a page, for each of the sizes. Raises `PageError`."""
    frames = [
        f'<iframe width="{width}" height="{height}" style="border:0" srcdoc="{escape(page)}"></iframe>'
        for width, height in SIZES
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Chromium may still write to its profile
        around = Path(folder) / "around.html"
        around.write_text(f"<!doctype html><meta charset=utf-8>{''.join(frames)}<script>{MEASURE}</script>\n")
        command = [chromium, *QUIET, f"--user-data-dir={folder}/profile", "--dump-dom", around.as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
        except subprocess.TimeoutExpired as error:
            raise PageError(f"{chromium} did not end within {SECONDS_MAX:g} s") from error
    told = _Told()
    told.feed(done.stdout)
    if told.text is None:
        last = " ".join(done.stderr.split())[-300:]
        raise PageError(f"{chromium} ended with {done.returncode} and measured nothing: {last}")
    try:
        return msgspec.json.decode(told.text, type=list[Measured])
    except msgspec.ValidationError as error:
        raise PageError(f"the page cannot be measured: {told.text}") from error


class _Told(HTMLParser):
    """Finds what `MEASURE` left at the body."""

    text: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.text = dict(attrs).get("data-measured")


# A table that has room enough does not scroll, so its box is made hardly wider than the first column: then it must.
MEASURE = """
function measure(frame) {
  const page = frame.contentDocument, root = page.documentElement, box = page.querySelector(".table");
  const firsts = [...box.querySelectorAll("tr > :first-child")];
  const lefts = () => firsts.map((cell) => cell.getBoundingClientRect().left);
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), fonts = [];
  while (texts.nextNode()) {
    const style = frame.contentWindow.getComputedStyle(texts.currentNode.parentElement);
    if (texts.currentNode.data.trim()) fonts.push(parseFloat(style.fontSize));
  }
  const rows = [...page.querySelectorAll("tbody tr")].filter((row) => row.getBoundingClientRect().height > 0);
  const found = {
    width: frame.clientWidth, height: frame.clientHeight, inside: root.clientWidth, content: root.scrollWidth,
    cases: Number(page.querySelector("table").dataset.cases), rows: rows.length, font: Math.min(...fonts),
    first: Math.max(...firsts.map((cell) => cell.getBoundingClientRect().width)),
  };
  if (box.scrollWidth <= box.clientWidth) {
    box.style.width = "1px";
    box.style.width = `${firsts[0].offsetWidth + 40}px`;
  }
  const before = lefts();
  box.scrollLeft = 1e6;
  const away = lefts().map((left, at) => left - before[at]);
  found.away = away.reduce((most, each) => (Math.abs(each) > Math.abs(most) ? each : most), 0);
  return { ...found, scrolled: box.scrollLeft };
}
addEventListener("load", () => {
  let told;
  try {
    told = JSON.stringify([...document.querySelectorAll("iframe")].map(measure));
  } catch (error) {
    told = JSON.stringify(String(error));
  }
  document.body.setAttribute("data-measured", told);
});
"""


def browser(asked: str | None = None) -> str | None:
    """The Chromium that is asked for, or the one that is here; None for none."""
    found = (shutil.which(name) for name in ((asked,) if asked else NAMES))
    return next((each for each in found if each), None)


def main(arguments: list[str]) -> int:
    """Measures and judges; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ci.page_check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="a page of `kvshard matrix --html`")
    parser.add_argument("--chromium", metavar="PATH", help=f"the browser (default: {', '.join(NAMES)} on PATH)")
    args = parser.parse_args(arguments)
    chromium = browser(args.chromium)
    if chromium is None:
        names = args.chromium or ", ".join(NAMES)
        print(f"no Chromium here, looked for {names}; Debian has it as the package chromium", file=sys.stderr)
        return 2
    try:
        layouts = measured(args.file.read_text(encoding="utf-8"), chromium)
    except (OSError, UnicodeDecodeError, PageError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 1
    wrong = [f"{seen.width}x{seen.height}: {each}" for seen in layouts for each in problems(seen)]
    print(*layouts, sep="\n")
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A run shown to people: lines on the terminal, annotations and the step summary of GitHub Actions."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ci.result import PASSING, FileResult, Verdict

ANNOTATIONS_MAX = 10  # of each level in a step; GitHub drops more
SUMMARY_BYTES_MAX = 1 << 20
_REASON_CHARACTERS = 500
_TOLD, _TOLD_IF_ANY = ("passed", "failed", "skipped"), ("xfailed", "deselected")  # of the counts


def line(result: FileResult) -> str:
    """One line for the terminal."""
    counts = result.attempts[-1].counts
    told = f"{counts.executed} tests" + (f", {counts.skipped} skipped" if counts.skipped else "")
    reason = f": {' '.join(result.reason.split())}" if result.reason else ""
    return f"{result.verdict:8} {result.seconds:8.1f} s  {result.file} ({told}){reason}"


def absent(left_out: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason for which files of the stage are left out. left_out: file -> why."""
    for why in sorted(set(left_out.values())):
        yield f"left out: {why}: {', '.join(file for file, its in left_out.items() if its == why)}"


def closing(results: Sequence[FileResult], left_out: Mapping[str, str]) -> Iterator[str]:
    """The last lines: what was left out, why tests were skipped, and how many there were of each outcome."""
    yield from absent(left_out)
    total: Counter[str] = Counter()
    skips: dict[str, list[str]] = {}
    for result in results:
        last = result.attempts[-1]
        total.update({name: getattr(last.counts, name) for name in (*_TOLD, *_TOLD_IF_ANY)})
        for reason, count in last.skips.items():
            skips.setdefault(" ".join(reason.split()), []).append(f"{result.file} ({count})")
    for reason, files in sorted(skips.items()):
        yield f"skipped: {reason}: {', '.join(files)}"
    told = [f"{total[name]} {name}" for name in (*_TOLD, *(name for name in _TOLD_IF_ANY if total[name]))]
    yield f"tests: {', '.join(told)}, in {len(results)} files"


def quoted_log(title: str, text: str, environment: Mapping[str, str]) -> str:
    """The end of a log. In GitHub Actions folded, and no workflow command: tests print anything."""
    if not _in_actions(environment):
        return f"{title}\n{text}"
    token = secrets.token_hex(16)
    return f"::group::{title}\n::stop-commands::{token}\n{text}\n::{token}::\n::endgroup::"


def workflow_annotations(results: Iterable[FileResult], environment: Mapping[str, str]) -> Iterator[str]:
    """Workflow commands that mark failed files as errors and flaky ones as warnings; none outside GitHub Actions."""
    if not _in_actions(environment):
        return
    levels = {"error": 0, "warning": 0}
    for result in results:
        level = "warning" if result.verdict is Verdict.FLAKY else "error"
        levels[level] += result.verdict is not Verdict.PASS
        if result.verdict is not Verdict.PASS and levels[level] <= ANNOTATIONS_MAX:
            title = _property(f"{result.verdict}: {result.file}")
            place = f"file={_property(result.file)},line={result.line},title={title}"
            yield f"::{level} {place}::{_data(result.reason[:_REASON_CHARACTERS])}"


def write_summary(
    title: str, results: Sequence[FileResult], not_run: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Appends a table to the file of GITHUB_STEP_SUMMARY, where there is one; what does not fit is cut off."""
    target = environment.get("GITHUB_STEP_SUMMARY")
    if not target:
        return
    text = markdown(title, results, not_run)
    with Path(target).open("ab") as file:
        room = max(0, SUMMARY_BYTES_MAX - file.tell())
        file.write(text.encode()[:room])


def markdown(title: str, results: Sequence[FileResult], not_run: Sequence[str]) -> str:
    """The table, failures first."""
    good = sum(1 for result in results if result.verdict in PASSING)
    lines = [f"### {_cell(title)}: {good} of {len(results) + len(not_run)} files passed", ""]
    lines += ["| verdict | file | tests | seconds | estimate | why |", "|---|---|---|---|---|---|"]
    order = [Verdict.FAIL, Verdict.TIMEOUT, Verdict.VACUOUS, Verdict.FLAKY, Verdict.PASS]
    for result in sorted(results, key=lambda result: order.index(result.verdict)):
        tests = result.attempts[-1].counts.executed
        numbers = f"{tests} | {result.seconds:.1f} | {result.est_time:g}"
        why = _cell(result.reason[:_REASON_CHARACTERS])
        lines.append(f"| {result.verdict} | {_cell(result.file)} | {numbers} | {why} |")
    lines += [f"| not run | {_cell(file)} | | | | an earlier file failed |" for file in not_run]
    return "\n".join(lines) + "\n\n"


def _in_actions(environment: Mapping[str, str]) -> bool:
    return environment.get("GITHUB_ACTIONS") == "true"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _cell(text: str) -> str:
    """Text that stays within its cell of a Markdown table, as text."""
    words = " ".join(text.split())
    for mark in "\\|`*_<>[]":
        words = words.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return words

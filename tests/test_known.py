"""Known failures: listed with a trace that must still fail; nothing else is excused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ci.register import register_cpu_ci
from harness.adapter import ConfigError, Engine
from harness.connect import connect
from harness.known import FOLDER, KnownFailures, known_failures
from harness.result import CaseResult
from harness.trace import read, write
from harness.types import Config, Verdict
from harness.usage import UserError
from tests import miniature
from tests.test_trial import FREE, READS, trial

register_cpu_ci(est_time=15, stage="commit")

ROOT = Path(__file__).parent.parent
VERSION = miniature.wrong().describe().version
ENTRY = {"case": READS.id, "versions": [VERSION], "seen": "1 distinct rows", "reason": "It mixes rows."}


def listed(tmp_path: Path, **changed: Any) -> tuple[KnownFailures, CaseResult]:
    """A file with one entry for what a wrong engine fails, and that failure."""
    result, trace = trial(READS, miniature.wrong())
    assert result.failure is not None
    assert trace is not None
    write(tmp_path / "found.jsonl", trace)
    (tmp_path / "page.md").write_text("# Why\n")
    entry = {**ENTRY, "finding": "page.md", "claim": result.failure.claim, "trace": "found.jsonl", **changed}
    lines = [f"{key} = {value!r}" for key, value in entry.items()]
    (tmp_path / "known.toml").write_text("\n".join(["[[known]]", *lines]))
    manifest = miniature.wrong().describe()
    return known_failures(manifest, tmp_path / "known.toml"), result


def judged(known: KnownFailures, result: CaseResult, engine: Engine) -> tuple[Verdict, str]:
    told = known.judged(result, READS, engine)
    return told.verdict, told.why


def test_a_failure_as_listed_is_known(tmp_path: Path) -> None:
    """A case that fails as its entry tells is known, with reason and page."""
    known, result = listed(tmp_path)

    verdict, why = judged(known, result, miniature.wrong())

    assert (Verdict.KNOWN, f"It mixes rows. See {tmp_path / 'page.md'}") == (verdict, why)


@pytest.mark.parametrize(
    "changed", [{"seen": "2 distinct rows"}, {"claim": "Another claim."}, {"versions": [VERSION + "0"]}]
)
def test_another_failure_is_none_of_it(tmp_path: Path, changed: dict[str, Any]) -> None:
    """A failure that tells something else, of another claim or another version fails as if nothing were listed."""
    known, result = listed(tmp_path, **changed)

    assert Verdict.FAIL == judged(known, result, miniature.wrong())[0]


def test_a_failure_that_was_not_met_must_still_fail(tmp_path: Path) -> None:
    """A pass by luck is known while the trace fails, and an error once it does not: the entry is outdated."""
    known, _ = listed(tmp_path)
    passed = CaseResult(case=READS.id, verdict=Verdict.PASS)

    lucky, _ = judged(known, passed, miniature.wrong())
    fixed, why = judged(known, passed, miniature.correct())

    assert (Verdict.KNOWN, Verdict.ERROR) == (lucky, fixed)
    assert why.startswith("fixed: ")
    assert why.endswith(f"remove the entry from {tmp_path / 'known.toml'}")


def test_other_cases_are_not_touched(tmp_path: Path) -> None:
    """A case that is not listed, a skip and an error stay what they are."""
    known, _ = listed(tmp_path)
    other = CaseResult(case=FREE.id, verdict=Verdict.PASS)
    skipped, broken = (CaseResult(case=READS.id, verdict=each) for each in (Verdict.SKIP, Verdict.ERROR))

    assert other == known.judged(other, FREE, miniature.wrong())
    assert (skipped, broken) == tuple(known.judged(each, READS, miniature.wrong()) for each in (skipped, broken))


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"reason": 5}, "Expected `str`, got `int`"),
        ({"note": "more"}, "unknown field `note`"),
        ({"trace": "lost.jsonl"}, "lost.jsonl"),
        ({"finding": "lost.md"}, "no page lost.md"),
        ({"case": FREE.id}, f"its trace is of {READS.id}"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, changed: dict[str, Any], part: str) -> None:
    """What is wrong with the file is one line that names it."""
    with pytest.raises(UserError) as raised:
        listed(tmp_path, **changed)

    assert part in str(raised.value)
    assert str(tmp_path / "known.toml") in str(raised.value)


def test_an_engine_without_a_file_has_none() -> None:
    """The reference has no known failures, and a file that is named must be there."""
    manifest = connect("ref").describe()

    assert {} == known_failures(manifest).entries
    with pytest.raises(UserError, match="No such file"):
        known_failures(manifest, FOLDER / "nosuch.toml")


def test_the_traces_of_the_project_are_whole() -> None:
    """Every listed trace is one of its case, of a listed version, ends in the claim, and has its page."""
    for path in sorted(FOLDER.glob("*.toml")):
        for version in ("0.5.22", "0.5.23"):
            manifest = msgspec.structs.replace(connect("ref").describe(), version=version)
            listing = known_failures(manifest, path)
            for entry in listing.entries.values():
                trace = read(path.parent / entry.trace)
                assert trace.footer is not None
                assert (entry.case, entry.claim) == (trace.header.case, trace.footer.claim)
                assert entry.seen in trace.footer.seen


class Narrow(miniature.Miniature):
    """Opens nothing that a trace asks for."""

    def open(self, config: Config) -> miniature.MiniatureSession:
        raise ConfigError(f"shards={config.shards}; the engine can be opened with (5,)")


def test_an_entry_is_not_about_other_configs(tmp_path: Path) -> None:
    """A pass of an engine that cannot be opened as the trace was stays a pass: its address narrows it."""
    known, _ = listed(tmp_path)
    passed = CaseResult(case=READS.id, verdict=Verdict.PASS)

    assert passed == known.judged(passed, READS, Narrow())


@pytest.mark.parametrize(("engine", "code", "verdict"), [("wrong", 0, "known"), ("correct", 3, "error")])
def test_a_run_with_known_failures(tmp_path: Path, engine: str, code: int, verdict: str) -> None:
    """A run with a known failure alone ends well; once it is fixed, the run fails and says so."""
    listed(tmp_path)
    words = ["run", f"py:tests.miniature:{engine}", "--suite", "tests.sample_cases", "-k", "reads", "--budget", "smoke"]
    words += ["--jobs", "0", "--known", str(tmp_path / "known.toml"), "--record", str(tmp_path / "record.jsonl")]
    words += ["--traces", str(tmp_path / "traces")]

    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *words], capture_output=True, text=True, cwd=ROOT, check=False
    )

    results = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert (code, [verdict]) == (done.returncode, [line["verdict"] for line in results if "verdict" in line]), done
    assert ("remove the entry from" in done.stdout) == (verdict == "error")
